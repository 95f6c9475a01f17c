"""Delegation of a backend's measuring and removing of runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from quark_core.backends.edits import SupportsRemoval

P = ParamSpec("P")
T = TypeVar("T")


def _of_trash(
    method: Callable[Concatenate[SupportsRemoval, P], T],
) -> Callable[Concatenate[SupportsTrash, P], T]:
    """A method that calls the one of its name of a backend's trash."""

    @wraps(method)
    def ask(self: SupportsTrash, /, *args: P.args, **kwargs: P.kwargs) -> T:
        call: Callable[P, T] = getattr(self._trash, method.__name__)
        return call(*args, **kwargs)

    return ask


class SupportsTrash:
    """Hands the calls of `SupportsRemoval` on to a backend's trash."""

    _trash: SupportsRemoval

    measure_store = _of_trash(SupportsRemoval.measure_store)
    measure_runs = _of_trash(SupportsRemoval.measure_runs)
    list_trash = _of_trash(SupportsRemoval.list_trash)
    list_damaged = _of_trash(SupportsRemoval.list_damaged)
    trash_runs = _of_trash(SupportsRemoval.trash_runs)
    restore_runs = _of_trash(SupportsRemoval.restore_runs)
    collect_trash = _of_trash(SupportsRemoval.collect_trash)
