"""What a URL of a PostgreSQL database may ask of its connections."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import URL

_TARGET = "target_session_attrs"
_VARIABLE = "PGTARGETSESSIONATTRS"
_TARGETS = ("any", "primary")


def find_refusal(url: URL) -> str | None:
    """Why no store can be written over such connections, and what to write instead, or None."""
    asked, place = url.query.get(_TARGET), f"{_TARGET}="
    if asked is None:
        asked, place = os.environ.get(_VARIABLE, "any"), f"the environment's {_VARIABLE}="
    if asked in _TARGETS:
        return None
    return (
        f"{place}{asked!s:.40} lets no batch in, or only at times: a session may be read-only by a "
        f"setting, and a standby always is. Say {_TARGET}=primary"
    )
