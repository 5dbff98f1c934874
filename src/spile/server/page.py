"""Turns the chat page's file into the reply to `GET /`: its bytes, and headers that let it do what it needs and
nothing more.

The one script and the one style are allowed by their digests, so nothing that a model writes could run even if the
page took it for HTML, which it never does. It does not know the server.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Page:
    """The reply."""

    body: bytes
    headers: dict[str, str]


def load_page() -> Page:
    """Read the page. Touches disk."""
    body = (files("spile.server") / "page.html").read_bytes()
    policy = {
        "default-src": "'none'",
        "script-src": _digests(body, b"script"),
        "style-src": _digests(body, b"style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=()",
        "cache-control": "no-cache",
    }
    return Page(body, headers)


def _digests(body: bytes, tag: bytes) -> str:
    """Return what allows the elements of a kind that have their content in the page."""
    found = re.findall(rb"<" + tag + rb">(.*?)</" + tag + rb">", body, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)
