"""Checks what the command line says of a server's names and keys, so that what could never match is told at the start.

It imports no part of the server. An origin is compared letter by letter with what a browser sends, which is always of
one form (scheme, host in small letters, a port unless it is the scheme's own); host names in small letters.
Source: https://html.spec.whatwg.org/multipage/browsers.html#ascii-serialisation-of-an-origin
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from spile.errors import OptionError, quote
from spile.files.whole import read_whole

_SCHEME_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_MOST_KEY_FILE_NBYTES = 1_000_000
_LONGEST_NAME = 256


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine itself, whatever a name server says."""
    if host.lower().rstrip(".") == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def hostname_of(host: str) -> str:
    """Return what a Host header names, in small letters and without its port; empty for what names nothing."""
    if "@" in host:
        return ""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:  # brackets that hold no address
        return ""


def checked_origin(given: str) -> str:
    """Return the origin of web pages that may call, as browsers send it.

    Raises: OptionError for what no browser sends, with the right form where it can be told.
    """
    if given in ("*", "null"):
        return given
    scheme, separator, rest = given.strip().partition("://")
    host_and_port = _authority(rest if separator else scheme)
    host = _canonical(hostname_of(host_and_port))
    if not separator:
        scheme = "http" if is_loopback(host) or _address(host) is not None else "https"
    scheme = scheme.lower()
    form = "an origin such as https://app.example or http://localhost:3000"
    if not host or not _SCHEME.fullmatch(scheme) or "*" in host:
        raise OptionError(f"--cors-origin is {quote(given)}: it must be {form}, or * for any")
    try:
        port = urlsplit(f"//{host_and_port}").port
    except ValueError:
        raise OptionError(
            f"--cors-origin is {quote(given)}: it must be {form}, and this is no port"
        ) from None
    shown = f"[{host}]" if ":" in host else host
    right = f"{scheme}://{shown}" + ("" if port in (None, _SCHEME_PORTS.get(scheme)) else f":{port}")
    if given != right:
        raise OptionError(
            f"--cors-origin is {quote(given)}, which no browser sends: it must be scheme, host and port alone",
            f"Give {right}.",
        )
    return given


def checked_host(given: str) -> str:
    """Return the name of a host that requests may name, in the form that they are compared in.

    Raises: OptionError for what no request names.
    """
    is_bracketed = given.startswith("[") and given.endswith("]")
    host = _canonical((given[1:-1] if is_bracketed else given).lower().rstrip("."))
    if _address(host) is not None or _HOST.fullmatch(host):
        return host
    inside = hostname_of(_authority(given.rpartition("://")[2]))
    inside = _canonical(inside)
    raise OptionError(
        f"--allowed-host is {quote(given)}: it must be the name of a host, without scheme, port and path",
        f"Give {inside}." if _HOST.fullmatch(inside) else "Give a name such as ai.example.org.",
    )


def check_listening(host: str) -> None:
    """Check what to listen on, as far as its form goes.

    Raises: OptionError.
    """
    if not host.strip():
        raise OptionError(
            "--host is empty", "Give 127.0.0.1 for this machine alone, or 0.0.0.0 for all networks."
        )
    name, separator, port = host.rpartition(":")
    if "://" in host or (separator and port.isdecimal() and ":" not in name):
        raise OptionError(
            f"--host is {quote(host)}: it must be an address or a name alone",
            f"Give --host {hostname_of(host.rpartition('://')[2].partition('/')[0]) or '127.0.0.1'}, and --port apart.",
        )


def check_model_id(name: str) -> None:
    """Check a name that clients call the model by.

    Raises: OptionError.
    """
    if not name.strip():
        raise OptionError("--model-id is empty")
    if name != name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise OptionError(
            f"--model-id is {quote(name)}: it must be up to {_LONGEST_NAME} letters that can be printed, "
            f"with no space at either end"
        )


def checked_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Return the keys of the command line and of a file, one a line; empty lines and those that begin with # are none.

    Raises: OptionError for a key that no client can send, a file that cannot be read or has none.
    """
    keys = [_checked_key(key, "--api-key") for key in given]
    if file is not None:
        found = [line.strip() for line in _read_keys(file).splitlines()]
        wanted = [(number, line) for number, line in enumerate(found, 1) if line and not line.startswith("#")]
        if not wanted:
            raise OptionError(f"--api-key-file {file} has no key", "Write one a line.")
        keys += [_checked_key(line, f"line {number} of --api-key-file {file}") for number, line in wanted]
    return tuple(dict.fromkeys(keys))


def _checked_key(key: str, where: str) -> str:
    """The key itself is never shown."""
    if not key.strip():
        raise OptionError(f"{where} is empty")
    if not all("!" <= letter <= "~" for letter in key):
        raise OptionError(
            f"{where} has a space, or a letter that is not ASCII: clients cannot send it",
            "Take letters, digits and signs alone, such as `openssl rand -hex 16` gives.",
        )
    return key


def _read_keys(file: Path) -> str:
    try:
        return read_whole(file.expanduser(), _MOST_KEY_FILE_NBYTES, OptionError).decode("utf-8-sig")
    except OSError as error:
        raise OptionError(f"--api-key-file {file} cannot be read: {error.strerror or error}") from error
    except OptionError as error:
        raise OptionError(f"--api-key-file: {error.message}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"--api-key-file {file} is not text") from error


def _authority(rest: str) -> str:
    """Return the host and port of what stands behind an address's scheme."""
    return re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _canonical(host: str) -> str:
    """Return a host as browsers write it: letters that are not ASCII in their ASCII form, addresses shortened."""
    address = _address(host)
    if address is not None:
        return str(address)
    try:
        return host if host.isascii() else host.encode("idna").decode()
    except UnicodeError:
        return ""
