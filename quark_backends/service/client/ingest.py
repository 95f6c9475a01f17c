"""Sends batches: as few requests as may be, none larger than the service takes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from quark_backends.service.client.calls import Call, ServiceClient
from quark_backends.service.client.service_errors import BACKEND, Refused, Unreachable
from quark_backends.service.protocol import (
    ACKNOWLEDGED_LIMIT_BATCHES,
    JSON,
    Acknowledged,
    IngestRequest,
    WireBatch,
)
from quark_core.backends.contract import Batch
from quark_core.errors import BackendRejected

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_log = logging.getLogger("quark")

_REQUEST_BYTES = 8 * 2**20
_LEAST_BYTES = 64 * 1024
_OVERHEAD_BYTES = 64
_COMPRESS_FROM_BYTES = 1024
_LEVEL = 1
_TOO_LARGE = 413


class BatchSender:
    """Sends groups of batches in requests of bounded size; used by one thread at a time.

    How large a request may be is learned: from a service that finds one too
    large, for good; from one that does not answer in time, until it does
    again.

    Args:
        client: Where to.
    """

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._removed: set[str] = set()
        self._limit_bytes = _REQUEST_BYTES
        self._now_bytes = _REQUEST_BYTES

    def limit(self, size_bytes: int) -> None:
        """Send no larger requests than these from now on."""
        self._limit_bytes = max(_OVERHEAD_BYTES, min(self._limit_bytes, size_bytes))
        self._now_bytes = min(self._now_bytes, self._limit_bytes)

    def send(self, batches: Sequence[Batch]) -> None:
        """Send batches in order; returns when the service has all of them.

        Raises:
            ServiceError: It has not; some of them may be there.
            BackendRejected: One of them is larger than the service takes.
        """
        waiting = list(batches)
        while waiting:
            count = self._count_fitting(waiting)
            group = waiting[:count]
            try:
                self._post(group)
            except Refused as error:
                if error.status != _TOO_LARGE:
                    raise
                if count == 1:
                    raise BackendRejected(
                        f"a batch of {group[0].count} records ({len(group[0].body)} bytes) is "
                        f"larger than the service takes: {error.reason}",
                        backend=BACKEND,
                    ) from None
                self.limit(_measure(group) // 2)
            except Unreachable as error:
                # A slow line, or a server that breaks off what it finds too large: less at a time.
                if count > 1 and not error.unheard:
                    self._now_bytes = max(_LEAST_BYTES, _measure(group) // 2)
                raise
            else:
                self._now_bytes = min(self._limit_bytes, self._now_bytes * 2)
                del waiting[:count]

    def _count_fitting(self, batches: Sequence[Batch]) -> int:
        """How many of the first batches make one request; at least one."""
        size = 0
        bound = min(self._limit_bytes, self._now_bytes)
        for place, batch in enumerate(batches[:ACKNOWLEDGED_LIMIT_BATCHES]):
            size += len(batch.body) + _OVERHEAD_BYTES
            if place and (size > bound or batch.run_id != batches[0].run_id):
                return place
        return min(len(batches), ACKNOWLEDGED_LIMIT_BATCHES)

    def _post(self, batches: Sequence[Batch]) -> None:
        body = msgspec.msgpack.encode(IngestRequest([WireBatch.of(batch) for batch in batches]))
        encoding = None
        if _may_pay(batches, len(body)):
            smaller = zstd.compress(body, _LEVEL)
            if len(smaller) < 0.9 * len(body):
                body, encoding = smaller, "zstd"
        answer, reply = self._client.ask(
            Call(
                method="POST",
                path=f"/v1/runs/{quote(batches[0].run_id, safe='')}/batches",
                body=body,
                encoding=encoding,
                # A connection that was kept open may be gone: sent again at once it costs nothing.
                attempts=2,
            )
        )
        if b"removed" in answer:
            self._warn_of_removal(batches[0].run_id, answer, reply.media)

    def _warn_of_removal(self, run_id: str, body: bytes, media: str) -> None:
        """Warn once that a run's records are kept nowhere any more."""
        decode = msgspec.json.decode if media == JSON else msgspec.msgpack.decode
        try:
            is_removed = decode(body, type=Acknowledged).removed
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if is_removed and run_id not in self._removed:
            self._removed.add(run_id)
            _log.warning(
                "run %s was removed from the service for good: what is still logged to it is kept "
                "nowhere",
                run_id,
            )


def from_wire(run_id: str, batch: WireBatch) -> Batch:
    """A batch as it was sent."""
    return Batch(
        run_id,
        batch.writer_id,
        batch.attempt,
        batch.rank,
        batch.number,
        batch.kind,
        batch.count,
        batch.body,
    )


def _measure(batches: Sequence[Batch]) -> int:
    return sum(len(batch.body) + _OVERHEAD_BYTES for batch in batches)


def _may_pay(batches: Sequence[Batch], size_bytes: int) -> bool:
    """Whether compressing may pay: large bodies are compressed already, small ones are not."""
    if size_bytes < _COMPRESS_FROM_BYTES:
        return False
    plain = sum(len(batch.body) + _OVERHEAD_BYTES for batch in batches if batch.body[:1] == b"\0")
    return 2 * plain > size_bytes
