"""A run's tags, of which some are a key and a value."""

from __future__ import annotations

import re

# A time, a Windows path and an address have no key before their colon.
_PAIR = re.compile(
    r"(?P<key>[^=:/\\]*[^\W\d][^=:/\\]*?)\s*(?:=|:(?!//|\\|\d\d\b))\s*(?P<text>\S.*)", re.DOTALL
)


def split_tag(tag: str) -> tuple[str, str]:
    """Key and value of a tag such as `group:baseline` or `lr=0.1`; the tag itself and ""."""
    match = _PAIR.fullmatch(tag)
    return (match["key"], match["text"]) if match else (tag, "")
