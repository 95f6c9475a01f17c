"""How many different metrics a run has, without asking the store for each batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable

from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.failure import ServiceFailure

__all__ = ["RunKeys"]

_KNOWN_KEYS = 1_000_000


class RunKeys:
    """Remembers the keys of the runs that were written to last; of one event loop.

    Several processes and requests that come at the same moment may let in a few
    more than the limit.

    Args:
        limit: Keys that one run may have.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[tuple[str, str], set[str]] = OrderedDict()
        self._count = 0

    async def check(
        self,
        workspace: str,
        run_id: str,
        keys: set[str],
        load: Callable[[], Awaitable[Iterable[str]]],
    ) -> None:
        """Take note of keys that a run is about to have.

        Args:
            workspace, run_id: The run.
            keys: Those of some batches.
            load: Returns the keys that the run has; asked when it is not remembered.

        Raises:
            ServiceFailure: They would be too many.
        """
        place = (workspace, run_id)
        known = self._known.get(place)
        if known is not None and keys <= known:
            self._known.move_to_end(place)
            return
        if known is None:
            loaded = set(await load())
            known = self._known.setdefault(place, set())
            self._count += len(loaded - known)
            known |= loaded
        new = keys - known
        if len(known) + len(new) > self._limit:
            raise ServiceFailure(
                ErrorCode.REJECTED,
                f"run {run_id} would have {len(known) + len(new)} different metrics; this server "
                f"takes {self._limit} (limit keys_per_run). Is a step, an id or a time part of "
                "their names?",
                field="batches",
            )
        known |= new
        self._count += len(new)
        while self._count > _KNOWN_KEYS and len(self._known) > 1:
            _, forgotten = self._known.popitem(last=False)
            self._count -= len(forgotten)
