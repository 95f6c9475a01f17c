"""The helper process that hosts one backend: `python -m quark_core.hosting.worker`.

When the process that started it is gone, this one ends at once, in the middle
of whatever it does: to its backend that is the kill of the process, from which
every backend recovers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any

import msgspec

from quark_core.backends.contract import (
    Backend,
    BackendConfig,
    BackendDefinition,
    Capability,
    Payload,
    SupportsArtifacts,
    SupportsGroups,
)
from quark_core.backends.registry import check_capabilities
from quark_core.errors import BackendError, BackendUnavailable, QuarkError
from quark_core.hosting.protocol import (
    CallMethod,
    CloseBackend,
    Message,
    OpenBackend,
    PutPayload,
    ReadPayload,
    Reply,
    WriteBatches,
    dump_value,
    extend_import_path,
    load_definition,
    load_value,
    read_frame,
    serve_parent,
    write_frame,
)
from quark_core.system.process import ProcessIdentity, current_process, is_alive

_PREDECESSOR_WAIT_S = 5.0
_POLL_S = 0.02
# Windows has no other.
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
# A type to msgspec, and to the checker one that a message may be taken for.
_ANY_MESSAGE: Any = Message


class _Presence(msgspec.Struct, frozen=True):
    """A helper that lives, and the process that it helps."""

    helper: ProcessIdentity
    parent: ProcessIdentity


class _Ear(logging.Handler):
    """Keeps what is logged until the next reply takes it along."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.said.append((record.levelno, record.getMessage()))

    def take(self) -> tuple[tuple[int, str], ...]:
        """What was logged since the last call."""
        count = len(self.said)
        taken = tuple(self.said[:count])
        del self.said[:count]
        return taken


class _Worker:
    def __init__(self, source: RawIOBase, target: RawIOBase) -> None:
        self._source = source
        self._target = target
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._ear = _Ear()
        self._backend: Backend | None = None
        self._iterations: dict[str, Iterator[Any]] = {}
        self._presence: Path | None = None

    def run(self) -> int:
        """Serve until told to close."""
        # As a lane's thread is named: libraries are kept quiet by that.
        threading.current_thread().name = "quark-lane-hosted"
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        while True:
            message = self._messages.get()
            reply = self._serve(message)
            try:
                write_frame(self._target, reply)
            except OSError:
                return 1
            if isinstance(message, CloseBackend):
                return 0

    def _read(self) -> None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            while (message := read_frame(self._source, _ANY_MESSAGE)) is not None:
                self._messages.put(message)
        os._exit(1)

    def _serve(self, message: Message) -> Reply:
        try:
            value = self._obey(message)
        except BaseException as error:  # noqa: BLE001 - sys.exit too goes to whoever asked
            asked_s = getattr(error, "retry_after_s", None)
            return Reply(*_describe(error), asked_s, self._ear.take())
        return Reply(said=self._ear.take(), value=value)

    def _obey(self, message: Message) -> bytes:
        """Do what a message asks for; returns what `dump_value` made of the result, or ""."""
        if isinstance(message, OpenBackend):
            self._open(message)
            return b""
        backend = self._backend
        assert backend is not None
        if isinstance(message, CallMethod):
            return self._call(backend, message)
        if isinstance(message, WriteBatches):
            if len(message.batches) > 1 and isinstance(backend, SupportsGroups):
                backend.write_group(message.batches)
            else:
                for batch in message.batches:
                    backend.write(batch)
        elif isinstance(message, PutPayload):
            assert isinstance(backend, SupportsArtifacts)
            backend.put_payload(
                Payload(
                    run_id=message.run_id,
                    sha256=message.sha256,
                    size_bytes=message.size_bytes,
                    path=Path(message.path),
                )
            )
        elif isinstance(message, ReadPayload):
            assert isinstance(backend, SupportsArtifacts)
            with (
                backend.open_payload(message.run_id, message.sha256) as source,
                Path(message.into).open("xb") as target,
            ):
                shutil.copyfileobj(source, target)
        else:
            try:
                backend.close()
            finally:
                if self._presence is not None:
                    self._presence.unlink(missing_ok=True)
        return b""

    def _call(self, backend: Backend, message: CallMethod) -> bytes:
        arguments, named = load_value(message.arguments)
        if message.name == "iterate":
            token, *arguments = arguments
            parts = backend.iterate(*arguments, **named)  # type: ignore[attr-defined]
            self._iterations[token] = iter(parts)
            return dump_value(None)
        if message.name == "next_part":
            return dump_value(next(self._iterations[arguments[0]], None))
        if message.name == "end_iteration":
            self._iterations.pop(str(arguments[0]), None)
            return dump_value(None)
        return dump_value(getattr(backend, message.name)(*arguments, **named))

    def _open(self, message: OpenBackend) -> None:
        extend_import_path(message.import_path)
        log = logging.getLogger("quark")
        log.setLevel(message.log_level)
        log.addHandler(self._ear)
        log.propagate = False
        if message.folder:
            self._presence = _enter(Path(message.folder), message.name, message.parent)
        config = dict(message.config)
        config["storage_dir"] = Path(config["storage_dir"])
        config["run_path"] = None if config["run_path"] is None else Path(config["run_path"])
        declared = BackendDefinition(
            name=message.name,
            summary="",
            open=_open_nothing,
            capabilities=frozenset(map(Capability, message.capabilities)),
        )
        definition = load_definition(declared, message.opener, message.plugin)
        opened = definition.open(BackendConfig(**config))
        self._backend = check_capabilities(definition, opened)


def _open_nothing(config: BackendConfig) -> Backend:
    raise NotImplementedError(config)


def _describe(error: BaseException) -> tuple[str, str]:
    """The nearest error of Quark's own that an error is, by name, and what it says."""
    for kind in type(error).__mro__:
        if kind.__module__ == QuarkError.__module__ and kind not in (QuarkError, BackendError):
            return kind.__name__, str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    # Whoever writes the backend looks for it where it happened.
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return BackendError.__name__, text + where


def _enter(folder: Path, name: str, parent: ProcessIdentity) -> Path:
    """Note that this process lives, once the helpers of processes that are gone are gone too.

    Such a one may still be at its last batch, and must not write over what
    this one acknowledges. One that cannot even see that it is alone, since a
    call of its backend keeps the interpreter, is killed.

    Raises:
        BackendUnavailable: One of them does not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = current_process()
    path = folder / f"{own.pid}-{own.started or time.time_ns()}.json"
    path.write_bytes(msgspec.json.encode(_Presence(own, parent)))
    patience = time.monotonic() + _PREDECESSOR_WAIT_S
    deadline = patience + _PREDECESSOR_WAIT_S
    for other in folder.glob("*.json"):
        while other != path and (left_over := _find_left_over(other)) is not None:
            if time.monotonic() > patience:
                with contextlib.suppress(OSError):
                    os.kill(left_over.pid, _KILL)
            if time.monotonic() > deadline:
                path.unlink(missing_ok=True)
                raise BackendUnavailable(
                    "the process of an earlier training process "
                    f"({other.stem.partition('-')[0]}) is still writing this run",
                    backend=name,
                )
            time.sleep(_POLL_S)
    return path


def _find_left_over(path: Path) -> ProcessIdentity | None:
    """The helper, where it lives and its parent does not; what is left of dead ones is removed."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Presence)
    except (OSError, msgspec.DecodeError):
        return None
    alive = is_alive(found.helper)
    if alive is False:
        path.unlink(missing_ok=True)
    return found.helper if alive and is_alive(found.parent) is False else None


if __name__ == "__main__":
    serve_parent(lambda source, target: _Worker(source, target).run())
