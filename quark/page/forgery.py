"""Tells requests of the page itself from those that other pages have a browser make (CSRF)."""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

from quark.page.http_replies import RequestHeaders

CSRF_HEADER = b"quark-csrf"
"""The header that a request which changes something shows its token in."""

_PURPOSE = b"quark page: changes"


def derive_csrf(secret: str) -> str:
    """The token that belongs to a cookie: only who has the cookie, or was told, can know it."""
    return hmac.new(secret.encode("utf-8", "replace"), _PURPOSE, hashlib.sha256).hexdigest()


def find_foreign_origin(headers: RequestHeaders) -> str | None:
    """Why a request that changes something is not of this server's own page, or None.

    Browsers say with each POST where it comes from, and scripts cannot say otherwise; what is
    no browser has the service's own API.
    """
    site = headers.find(b"sec-fetch-site")
    if site not in (None, "same-origin"):
        return "only this server's own page may change something"
    origin = headers.find(b"origin")
    if origin is None or urlsplit(origin).netloc.lower() != (headers.find(b"host") or "").lower():
        return (
            "only this server's own page may change something, and this request says that it "
            f"comes from {origin!r:.80}; a proxy must pass on Host as browsers send it"
        )
    return None


def find_forgery(headers: RequestHeaders, csrf: str) -> str | None:
    """Why a request of the page's script is taken for one of another page, or None.

    Args:
        headers: Of the request.
        csrf: The token that its session has.
    """
    foreign = find_foreign_origin(headers)
    if foreign is not None:
        return foreign
    shown = headers.find(CSRF_HEADER) or ""
    if not hmac.compare_digest(shown.encode("latin-1", "replace"), csrf.encode()):
        return "the token of this session is missing or another one's: load the page again"
    return None
