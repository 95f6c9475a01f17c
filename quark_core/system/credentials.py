"""The credentials of the environment: a script may draw new ones while it runs."""

from __future__ import annotations

import os
import re

_NAME = re.compile(
    "token|key|secret|password|credential|auth|username|profile|session|role|cert|netrc|sas",
    re.IGNORECASE,
)


def list_credentials() -> frozenset[tuple[str, str]]:
    """Names and values of the variables that may be credentials, as they are now.

    Those of a later moment differ where one has been refreshed since.
    """
    return frozenset((name, text) for name, text in os.environ.items() if _NAME.search(name))
