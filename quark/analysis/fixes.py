"""How to fix what a rule finds: the sections of docs/diagnose/fix-an-alert.md, as installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

_SECTION = re.compile(r"^### (\w+)\n+(.*?)\n*(?=^##|\Z)", re.DOTALL | re.MULTILINE)


@cache
def read_fixes() -> Mapping[str, str]:
    """Rule ID -> Markdown that explains its alerts: what to check first, and in the code.

    Rules of other distributions have none.
    """
    text = files("quark.analysis").joinpath("fix-an-alert.md").read_text("utf-8")
    return dict(_SECTION.findall(text))
