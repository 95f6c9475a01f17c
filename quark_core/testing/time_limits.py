"""How long the kit waits: QUARK_KIT_TIMEOUT_FACTOR stretches its limits for a slow machine."""

from __future__ import annotations

import math
import os

from quark_core.errors import SchemaValidationError

TIMEOUT_FACTOR = "QUARK_KIT_TIMEOUT_FACTOR"


def stretch_s(limit_s: float) -> float:
    """A time limit of the kit, as the environment wants it.

    Raises:
        SchemaValidationError: The factor is not a positive number.
    """
    text = os.environ.get(TIMEOUT_FACTOR, "").strip()
    if not text:
        return limit_s
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not (factor > 0 and math.isfinite(factor)):
        raise SchemaValidationError(f"{TIMEOUT_FACTOR} must be a positive number, got {text!r:.40}")
    return limit_s * factor
