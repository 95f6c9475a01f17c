"""Makes text from other users safe to print in a terminal.

Names, notes and settings of a run may be another user's. Shown as they are,
some characters would steer the reader's terminal (escape sequences, bells),
turn what is read around (bidi controls), or hide (zero width, tags). They are
spelled out instead, as Python spells them; everything that has a shape of its
own stays, in every script, emoji included.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

# Within these a joiner shapes what is seen: emoji of several parts, Arabic and Indic scripts.
_JOINED = "\u0600-\u0dff\u2190-\u2bff\ufe0f\U0001f000-\U0001faff"
_UNFIT = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but line feed and tab
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\u2028\u2029"  # ends of lines
    "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\uffa0"  # letters and marks unseen
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff"  # tags, further variation selectors
    "\ud800-\udfff"  # no characters at all
    f"]|(?<![{_JOINED}])[\u200c\u200d]|[\u200c\u200d](?![{_JOINED}])"
)
_LINE_ENDS = re.compile("[\n\t]")


def clean_text(text: str) -> str:
    """A text in which every character that is not fit for a terminal is spelled out.

    Ends of lines and tabs stay.
    """
    return _UNFIT.sub(_spell, text)


def clean_line(text: str) -> str:
    """A text as `clean_text` has it, in one line: ends of lines and tabs are spelled out too."""
    return _LINE_ENDS.sub(_spell, clean_text(text))


def escape_json(text: str) -> str:
    """The same JSON with such characters escaped: it reads as the same values."""
    return _UNFIT.sub(_spell_json, text)


class TerminalFilter(logging.Filter):
    """Makes what is logged fit for a terminal, in whatever handler it ends.

    Arguments become one line each, so that a name cannot write a line of the log.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`; every record passes."""
        if isinstance(record.msg, str):
            record.msg = clean_text(record.msg)
        if isinstance(record.args, Mapping):
            record.args = {name: _clean_argument(value) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple(_clean_argument(value) for value in record.args)
        if record.exc_info and not record.exc_text:
            traceback = logging.Formatter().formatException(record.exc_info)
            cleaned = clean_text(traceback)
            record.exc_text = cleaned if cleaned != traceback else None
        return True


def guard_logger(name: str) -> None:
    """Make fit for a terminal what is logged with a logger; one below it needs its own."""
    logger = logging.getLogger(name)
    if not any(isinstance(each, TerminalFilter) for each in logger.filters):
        logger.addFilter(TerminalFilter())


def _clean_argument(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - logging itself says what is wrong with it
        return value
    cleaned = clean_line(text)
    return value if cleaned == text else cleaned


def _spell(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _spell_json(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
