"""The trash of a workspace, for keys with the scope: collected in turns of a few seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from quark_backends.service.client.derived_calls import ServiceCaller, cut, refuse_writing
from quark_backends.service.client.http_client import Call
from quark_backends.service.protocol import CollectReply, CollectRequest
from quark_core.backends.edits import Collection, CollectionProgress, RunUsage, StoreUsage
from quark_core.errors import StoreUnavailableError

_PATIENCE = 5
_FIRST_PAUSE_S = 0.2


class CollectsTrash(ServiceCaller):
    """What of `SupportsRemoval` takes more than one call: of all stores of the workspace."""

    def list_trash(self) -> list[RunUsage]:
        """See `SupportsRemoval`."""
        found: list[RunUsage] = self.call("list_trash", {})
        return found

    def measure_store(self) -> StoreUsage:
        """See `SupportsRemoval`; of the whole workspace."""
        found: StoreUsage = self.call("measure_store", {})
        return replace(found, store_root=self._address.store_root)

    def collect_trash(
        self,
        *,
        older_than_s: float = 0.0,
        run_ids: Sequence[str] | None = None,
        dry_run: bool = False,
        on_progress: CollectionProgress | None = None,
    ) -> Collection:
        """See `SupportsRemoval`. The service works while it is asked, a few seconds each time."""
        plan = self._collect(CollectRequest(older_than_s=older_than_s, dry_run=True))
        wanted = None if run_ids is None else set(run_ids)
        planned = tuple(run for run in plan.removed if wanted is None or run.run_id in wanted)
        if dry_run:
            return _to_collection(plan, planned, plan, plan.leftovers)
        if self._read_only:
            raise refuse_writing(self._address.url)
        total_bytes = sum(usage.total_bytes for usage in planned)
        leftovers = dict(plan.leftovers)
        reply = plan
        # What comes into the trash while it works is left to the next call.
        for part in cut([usage.run_id for usage in planned]) or [[]]:
            request = CollectRequest(older_than_s=older_than_s, run_ids=part)
            is_done = False
            while not is_done:
                reply = self._collect(request)
                is_done = reply.done
                if on_progress is not None:
                    done_bytes = max(0, plan.before_bytes - reply.after_bytes)
                    on_progress("removing runs", done_bytes, max(done_bytes, total_bytes))
        # Whatever was killed or lost its reply on the way, what is left says what is gone.
        left = {usage.run_id for usage in self.list_trash()}
        removed = tuple(usage for usage in planned if usage.run_id not in left)
        return _to_collection(plan, removed, reply, leftovers)

    def _collect(self, request: CollectRequest) -> CollectReply:
        """One turn, asked for again where the service is busy: it goes on where it was."""
        body = msgspec.msgpack.encode(request)
        call = Call(method="POST", path="/v1/trash/collect", body=body)
        for attempt in range(_PATIENCE):
            try:
                with self._reading():
                    return self._fetch(call, CollectReply)
            except StoreUnavailableError:
                if attempt == _PATIENCE - 1:
                    raise
                time.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError  # pragma: no cover - the last attempt returns or raises


def _to_collection(
    plan: CollectReply, removed: tuple[RunUsage, ...], last: CollectReply, leftovers: dict[str, int]
) -> Collection:
    return Collection(
        runs=removed,
        skipped=last.skipped,
        leftovers=leftovers,
        before_bytes=plan.before_bytes,
        after_bytes=last.after_bytes,
        notes=tuple(last.notes),
    )
