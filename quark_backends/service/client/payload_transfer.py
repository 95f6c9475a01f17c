"""Payloads of artifacts on their way to the service and back."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from typing import BinaryIO, cast
from urllib.parse import quote

from quark_backends.service.client.calls import Call, Reply, ServiceClient
from quark_backends.service.client.service_errors import BACKEND, Refused, ServiceError, Unreachable
from quark_core.backends.contract import Payload
from quark_core.errors import ArtifactDamagedError, BackendRejected, BackendUnavailable

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
            f"{payload.path} no longer is what was stored: its SHA-256 has changed",
            backend=BACKEND,
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
                    raise Unreachable("its reply does not say how long it is", answered=True)
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
                f"payload {sha256} of run {run_id} is damaged: {size} bytes with the SHA-256 "
                f"{digest.hexdigest()} came from the service"
            )
        spool.seek(0)
    except BaseException:
        spool.close()
        raise
    return cast(BinaryIO, spool)


def _path(run_id: str, sha256: str) -> str:
    return f"/v1/runs/{quote(run_id, safe='')}/payloads/{quote(sha256, safe='')}"
