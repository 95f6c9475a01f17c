"""The page on which somebody logs in with a key, and the bounds on trying keys."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from html import escape
from urllib.parse import urlsplit

_BURST = 10
_FILL_EVERY_S = 6.0
_MOST_ADDRESSES = 10_000
_PREFIX = 64
_MOST_NEXT = 8_000

_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">{head}<title>{title} · Quark</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="{static}style.css"></head>
<body><header class="top"><span class="brand">quark</span></header>
<main id="main" class="login">{body}</main></body></html>
"""
_FORM = """<h1>Log in</h1>
{said}<form method="post" action="login">
<input type="text" value="{workspace}" autocomplete="username" aria-label="Workspace" hidden>
<p><label for="key">Key of your workspace</label>
<input id="key" name="key" type="password" autocomplete="current-password" spellcheck="false"
required autofocus></p>
<input type="hidden" name="token" value="{token}">
<input type="hidden" name="next" value="{next}"><input type="hidden" name="in" value="{workspace}">
<p><button>Log in</button></p></form>
<p class="quiet">It is what <code>QUARK_USER_KEY</code> holds where you train, or what whoever runs
this server made for you (<code>quark keys create --scope read</code>). It lets you look for 12
hours in this browser, or until the key is revoked.</p>
<p class="quiet">Logged in already, and come here by a link? <a href="{next}">Go on</a>.</p>
"""


class LoginLimit:
    """Bounds how often an address may try keys that are none: ten at once, then ten a minute."""

    def __init__(self) -> None:
        self._free: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def find_wait_s(self, address: str) -> float:
        """0 where it may try now, or in how many seconds it may."""
        free = self._fill(_group(address))
        return 0.0 if free >= 1 else (1 - free) * _FILL_EVERY_S

    def note_failure(self, address: str) -> None:
        """Count a try that failed."""
        group = _group(address)
        self._free[group] = (self._fill(group) - 1, time.monotonic())
        self._free.move_to_end(group)
        while len(self._free) > _MOST_ADDRESSES:
            self._free.popitem(last=False)

    def _fill(self, group: str) -> float:
        moment = time.monotonic()
        free, at = self._free.get(group, (float(_BURST), moment))
        return min(float(_BURST), free + (moment - at) / _FILL_EVERY_S)


def _group(address: str) -> str:
    """An address, or of IPv6 what one customer has."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return address
    return str(ipaddress.ip_network((found, _PREFIX), strict=False))


def check_next(text: str) -> str:
    """Where to go after a login, from `/login` on: a page of this server, or the list of runs."""
    is_plain = text.isascii() and text.isprintable() and not set(text) & set('\\"<> ')
    if len(text) > _MOST_NEXT or not is_plain:
        return "./"
    parts = urlsplit(text)
    place = parts.path.removeprefix("./")
    is_page = place in ("", "compare", "sweeps") or place.startswith(("run/", "sweep/"))
    if parts.scheme or parts.netloc or not is_page or ".." in place or ":" in place:
        return "./"
    return f"./{place}" + (f"?{parts.query}" if parts.query else "")


def write_login(
    static: str,
    *,
    token: str,
    next_place: str,
    workspace: str = "",
    said: str = "",
    is_mistake: bool = False,
) -> bytes:
    """The form.

    Args:
        static: Address of the page's files.
        token: What its POST must show.
        next_place: Where to go then, as `check_next` gives it.
        workspace: Of which workspace the key must be; "" for any.
        said: What to say above it.
        is_mistake: Whether that is what went wrong.
    """
    role = ' role="alert" class="mistake-line"' if is_mistake else ' class="notice-line"'
    body = _FORM.format(
        said=f"<p{role}>{escape(said)}</p>\n" if said else "",
        token=escape(token),
        next=escape(next_place),
        workspace=escape(workspace),
    )
    return _FRAME.format(head="", title="Log in", static=escape(static), body=body).encode()


def write_interstitial(static: str) -> bytes:
    """Asks for the same address once more, from here: then a browser shows its cookie too.

    A cookie that is `SameSite=Strict` does not come along where a link on another site was
    followed.
    """
    return _FRAME.format(
        head='<meta http-equiv="refresh" content="0">',
        title="One moment",
        static=escape(static),
        body='<h1>One moment</h1><p><a href="">Go on</a></p>',
    ).encode()
