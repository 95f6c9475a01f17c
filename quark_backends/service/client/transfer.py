"""Sends batches to the service, and payloads of artifacts to it and back."""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO, cast
from urllib.parse import quote

import msgspec

from quark_backends.service.client.http_client import (
    BACKEND,
    Call,
    Refused,
    Reply,
    ServiceClient,
    ServiceError,
    Unreachable,
)
from quark_backends.service.protocol import (
    ACKNOWLEDGED_LIMIT_BATCHES,
    JSON,
    Acknowledged,
    IngestRequest,
    WireBatch,
)
from quark_core.backends.contract import Batch, Payload
from quark_core.errors import ArtifactDamagedError, BackendRejected, BackendUnavailable

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
                        f"larger than the server accepts: {error.reason}",
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
                "run %s was permanently deleted from the server, so its further records are "
                "dropped",
                run_id,
            )


def _measure(batches: Sequence[Batch]) -> int:
    return sum(len(batch.body) + _OVERHEAD_BYTES for batch in batches)


def _may_pay(batches: Sequence[Batch], size_bytes: int) -> bool:
    """Whether compressing may pay: large bodies are compressed already, small ones are not."""
    if size_bytes < _COMPRESS_FROM_BYTES:
        return False
    plain = sum(len(batch.body) + _OVERHEAD_BYTES for batch in batches if batch.body[:1] == b"\0")
    return 2 * plain > size_bytes


_BYTES = "application/octet-stream"
_PIECE_BYTES = 256 * 1024
_SPOOL_BYTES = 8 * 2**20


def send_payload(client: ServiceClient, payload: Payload) -> None:
    """Send a payload, unless the service has it.

    Raises:
        ServiceError: It is not there.
        BackendUnavailable: Its file cannot be read.
        BackendRejected: Its file is no longer what it was.
    """
    path = _path(payload.run_id, payload.sha256)
    try:
        client.ask(Call(method="HEAD", path=path))
    except Refused as error:
        # A key that may only send may not ask what is there.
        if error.status not in (403, 404):
            raise
    else:
        return

    def read() -> Iterator[bytes]:
        digest = hashlib.sha256()
        remaining = payload.size_bytes
        try:
            with payload.path.open("rb") as source:
                while remaining and (piece := source.read(min(_PIECE_BYTES, remaining))):
                    digest.update(piece)
                    remaining -= len(piece)
                    if not remaining and digest.hexdigest() != payload.sha256:
                        raise _SourceChanged
                    yield piece
        except OSError as error:
            raise _SourceUnreadable(str(error)) from error
        if remaining:
            raise _SourceChanged

    call = Call(method="PUT", path=path, body=read, size_bytes=payload.size_bytes, media=_BYTES)
    try:
        client.ask(call)
    except _SourceChanged:
        raise BackendRejected(
            f"{payload.path} has changed since it was stored: its SHA-256 differs", backend=BACKEND
        ) from None
    except _SourceUnreadable as error:
        raise BackendUnavailable(f"{payload.path}: {error}", backend=BACKEND) from error


class _SourceChanged(ServiceError):
    """The service must not get the whole of what is wrong."""

    def __init__(self) -> None:
        super().__init__("the payload's file has changed")


class _SourceUnreadable(ServiceError):
    """The payload's file cannot be read."""


def fetch_payload(client: ServiceClient, run_id: str, sha256: str) -> BinaryIO:
    """A payload, checked, in a file that goes when it is closed.

    What has come is kept where the connection breaks, and the rest asked for.

    Raises:
        ServiceError: It cannot be had.
        ArtifactDamagedError: What comes is not what was stored.
    """
    spool = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115 - the caller's
    try:
        digest = hashlib.sha256()
        size = 0
        for last in (False, False, True):

            def read(reply: Reply) -> None:
                nonlocal size, digest
                if "content-length" not in reply.headers:
                    # What has no end could fill the disk.
                    raise Unreachable("its reply does not state its length", answered=True)
                if size and reply.status != 206:
                    size, digest = 0, hashlib.sha256()
                    spool.seek(0)
                    spool.truncate()
                for piece in reply.iterate():
                    spool.write(piece)
                    digest.update(piece)
                    size += len(piece)

            headers = (("Range", f"bytes={size}-"),) if size else ()
            before = size
            try:
                client.use(
                    Call(
                        method="GET",
                        path=_path(run_id, sha256),
                        accept=_BYTES,
                        headers=headers,
                        attempts=1,
                    ),
                    read,
                )
                break
            except Unreachable as error:
                if last or error.answered or size == before:
                    raise
        if digest.hexdigest() != sha256:
            raise ArtifactDamagedError(
                f"payload {sha256} of run {run_id} is damaged: the server sent {size} bytes "
                f"with the SHA-256 {digest.hexdigest()}"
            )
        spool.seek(0)
    except BaseException:
        spool.close()
        raise
    return cast(BinaryIO, spool)


def _path(run_id: str, sha256: str) -> str:
    return f"/v1/runs/{quote(run_id, safe='')}/payloads/{quote(sha256, safe='')}"
