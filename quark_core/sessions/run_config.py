"""A run's configuration as it is kept, for who has the session."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from quark_core.runs.open_run import OpenRun

__all__ = ["RunConfig"]

_SHOWN_KEYS = 5


class RunConfig(Mapping[str, Any]):
    """A run's configuration as its store keeps it: plain JSON values, secrets redacted.

    Read-only, and always as this process knows the run now. What is nested comes
    as a copy, so that a change of it changes nothing here.

    Args:
        run: The run as it is open here.
    """

    __slots__ = ("_run",)

    def __init__(self, run: OpenRun) -> None:
        self._run = run

    @property
    def _values(self) -> Mapping[str, Any]:
        config = self._run.config
        return {} if config is None else config.values

    def __getitem__(self, key: str) -> Any:
        return copy.deepcopy(self._values[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        keys = list(self._values)
        more = f", and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
        return f"RunConfig({', '.join(map(repr, keys[:_SHOWN_KEYS]))}{more})"
