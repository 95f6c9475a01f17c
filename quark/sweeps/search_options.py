"""The settings of a search, such as `rate` of `halving(rate=0.3)`."""

from __future__ import annotations

from collections.abc import Mapping

from quark.sweeps.definition import SearchChoice
from quark_core.errors import SchemaValidationError

_MOST = 1_000_000_000


def read_options(choice: SearchChoice, defaults: Mapping[str, float]) -> dict[str, float]:
    """The settings of a search, those that are not given by default; all of them are numbers.

    Raises:
        SchemaValidationError: One that the search does not have, or no number within bounds.
    """
    for name, value in choice.options.items():
        if name not in defaults:
            raise SchemaValidationError(
                f"search: {choice.name} has no setting {name!r}; it has "
                f"{', '.join(defaults) or 'none'}"
            )
        if isinstance(value, bool | str):
            raise SchemaValidationError(f"search: {name} must be a number, got {value!r:.60}")
        if not abs(value) <= _MOST:
            raise SchemaValidationError(
                f"search: {name} must be a finite number of at most {_MOST:,}, got {value!r:.40}"
            )
    given = {name: value for name, value in choice.options.items() if not isinstance(value, str)}
    return {**defaults, **given}
