"""Turns what people write for a size ("630MB", "1.5GiB") into integer bytes, and back.

It does not know what a size is for. MB is 10**6 and MiB 2**20, everywhere.
"""

import re

from spile.errors import OptionError

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_LEAST_BUDGET_NBYTES = 1_000_000
_FEWEST_MEGABYTES = 50  # that a number without a unit is taken for
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(text: str, *, name: str = "size") -> int:
    """Read a size such as '630MB', '1.5 GiB' or '1000000' (bytes); `name` is the parameter it was given for.

    Raises: OptionError when it is no size, or rounds to no byte at all.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise OptionError(f"{name} {text!r} is no size: write a number and a unit, such as 630MB or 1.5GiB")
    whole, _, fraction = match[1].partition(".")
    nbytes: int = int(whole + fraction) * unit // 10 ** len(fraction)  # in integers: no 0.1 + 0.2
    if nbytes < 1 or nbytes >= 2**63:
        raise OptionError(f"{name} {text!r} is {nbytes:,} bytes: it must be at least 1 and below 2**63")
    return nbytes


def parse_budget(memory: int | str, *, name: str = "memory") -> int:
    """Read what a whole process may take: bytes, or a size. Below a megabyte another unit was meant.

    Raises: OptionError.
    """
    nbytes = parse_size(memory, name=name) if isinstance(memory, str) else memory
    if 0 < nbytes < _LEAST_BUDGET_NBYTES:
        number = str(memory).strip().rstrip("BbKk ")
        unit = "GB" if float(number) < _FEWEST_MEGABYTES else "MB"
        raise OptionError(
            f"{name} {str(memory)!r} is {format_size(nbytes)}, less than any process takes",
            f"Did you mean {number}{unit}?",
        )
    return nbytes


def format_size(nbytes: int) -> str:
    """Write bytes for people: '512 B', '786 kB', '630 MB', '5.31 GB' (three digits, powers of ten)."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value, unit = nbytes / 10**12, "TB"
    for exponent, smaller in ((3, "kB"), (6, "MB"), (9, "GB")):
        if nbytes / 10**exponent < 999.5:
            value, unit = nbytes / 10**exponent, smaller
            break
    digits = 0 if value >= 99.95 or unit == "kB" else 1 if value >= 9.995 or unit == "MB" else 2
    return f"{value:,.{digits}f} {unit}"
