"""Writing of an artifact: checked arguments, and its payload, stored at once or by a thread."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, TypeAlias, TypedDict, TypeVar, cast

import msgspec

from quark_core.artifacts.payload_folder import (
    NoPayloadFolder,
    PayloadFolder,
    PutPayload,
    open_source,
)
from quark_core.artifacts.payload_formats import (
    EXTENSIONS,
    HEAD_BYTES,
    encode_payload,
    identify_media,
)
from quark_core.config import settings
from quark_core.config.redaction import REDACTED, cut_text, redact_object, redact_shapes
from quark_core.errors import (
    InvalidRunStateError,
    RetentionHookError,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.records import ArtifactRecord, format_time
from quark_core.records.base import check_timestamp, now_us
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.names import (
    ARTIFACT_STORAGE_LAYOUT,
    check_artifact_key,
    check_artifact_type,
    check_text,
    choose_stem,
    object_path,
    split_name,
)
from quark_core.records.query import check_step
from quark_core.runs.step_counters import read_step
from quark_core.system.process import start_thread
from quark_core.writers.artifact_reading import NOT_KEPT
from quark_core.writers.buffered_writer import BufferedWriter

_log = logging.getLogger("quark")

A = TypeVar("A")
B = TypeVar("B")

_MOST_WAITING = 64
_LOOK_S = 0.05


class PendingArtifact:
    """Artifact that a background thread is storing.

    Returned by `log_video` and `log_directory`. Thread-safe.

    Attributes:
        name: Key of the artifact.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._done = threading.Event()
        self._record: ArtifactRecord | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Return whether the artifact is stored or has failed."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> ArtifactRecord:
        """Wait until the payload is on disk, and return the record.

        Args:
            timeout_s: Timeout in seconds. Defaults to no limit.

        Raises:
            TimeoutError: The artifact is not stored yet. The thread continues.
            SchemaValidationError, SessionStoreError, RetentionHookError: The artifact could not be
                stored.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"artifact {self.name!r} is not stored within {timeout_s} s")
        if self._error is not None:
            raise self._error
        assert self._record is not None
        return self._record

    def settle(self, work: Callable[[], ArtifactRecord]) -> BaseException | None:
        """Do the work and keep its result; return the error if it failed."""
        try:
            self._record = work()
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            self._error = error
        finally:
            self._done.set()
        return self._error

    def fail(self, error: BaseException) -> None:
        """Mark the artifact as failed."""
        self._error = error
        self._done.set()

    def __repr__(self) -> str:
        state = "stored" if self._record else "failed" if self._error else "on its way"
        return f"PendingArtifact({self.name!r}, {state})"


def map_in_threads(work: Callable[[A], B], items: Sequence[A], threads: int, name: str) -> list[B]:
    """What `work` makes of each item, in their order; done by this thread and some more.

    `concurrent.futures` takes nothing more once the main thread is through, and what a script
    promised on its last line is done after that. Nor may a thread be started there in Python 3.12.

    Args:
        work: Called with each item, from any of the threads.
        items: The items.
        threads: How many threads at most.
        name: Name of the threads.
    """
    made: list[B | None] = [None] * len(items)
    failed: list[BaseException] = []
    left = iter(range(len(items)))

    def run() -> None:
        # `next` of a range is one step of the interpreter, so that each is taken once.
        for place in left:
            if failed:
                return
            try:
                made[place] = work(items[place])
            except BaseException as error:  # noqa: BLE001 - whoever called is told
                failed.append(error)

    others = []
    for _ in range(min(threads, len(items)) - 1):
        thread = start_thread(run, name=name)
        if thread is None:
            break
        others.append(thread)
    run()
    for thread in others:
        thread.join()
    if failed:
        raise failed[0]
    return cast("list[B]", made)


class ArtifactThread:
    """Stores one artifact after the other, beside training; starts with the first of them.

    Args:
        on_failure: Called with the name of an artifact that could not be stored, and why.
    """

    def __init__(self, on_failure: Callable[[str, BaseException], None]) -> None:
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._pid = 0
        self._progress = 0
        self._is_over = False

    def submit(self, name: str, work: Callable[[], ArtifactRecord]) -> PendingArtifact:
        """Have something stored; waits where 64 artifacts wait already."""
        pending = PendingArtifact(name)
        with self._lock:
            if self._pid != os.getpid():
                # The first one, or a forked child, which has none of its parent's threads.
                self._pid = os.getpid()
                self._work: queue.Queue[tuple[PendingArtifact, Callable[[], ArtifactRecord]]] = (
                    queue.Queue(_MOST_WAITING)
                )
                self._waiting = 0
                threading.Thread(target=self._run, name="quark-artifacts", daemon=True).start()
            self._waiting += 1
        self._work.put((pending, work))
        return pending

    def advance(self, _amount: int = 1) -> None:
        """Something got on."""
        self._progress += 1

    def finish(self, timeout_s: float | None = None) -> bool:
        """Wait until all is stored, or nothing has got on for so long; whether all is."""
        if self._pid != os.getpid():
            return True
        limit_s = settings.exit_timeout_s() if timeout_s is None else timeout_s
        seen, since = self._progress, time.monotonic()
        while self._waiting > 0:
            if self._progress != seen:
                seen, since = self._progress, time.monotonic()
            if time.monotonic() - since > limit_s:
                self._is_over = True
                _log.warning(
                    "%d artifacts are not stored: there was no progress for %.0f s",
                    self._waiting,
                    limit_s,
                )
                return False
            time.sleep(_LOOK_S)
        return True

    def _run(self) -> None:
        while True:
            pending, work = self._work.get()
            if self._is_over:
                pending.fail(InvalidRunStateError("the run has ended before this was stored"))
            else:
                error = pending.settle(work)
                if error is not None:
                    self._tell(pending.name, error)
            self._progress += 1
            with self._lock:
                self._waiting -= 1

    def _tell(self, name: str, error: BaseException) -> None:
        try:
            self._on_failure(name, error)
        except (SessionStoreError, InvalidRunStateError):
            _log.warning("artifact %r is not stored: %s", name, error)


# The way of an artifact: its arguments are checked, its payload kept, its record handed over.
#
# People find it by a name: a link to the payload, and its metadata.

RetentionHook: TypeAlias = Callable[[Any, ArtifactRecord], object]
"""Called with the ArtifactStore and the record of each artifact that was stored."""

_MESSAGE_LENGTH = 500
_CHANGED = "changed_while_read"
_MEDIA_TYPE = "media_type"


class Placement(TypedDict, total=False):
    """What every way of storing an artifact takes: where it belongs, and what is said of it."""

    step: int | None
    epoch: int | None
    namespace: str | None
    metadata: Mapping[str, Any] | None
    timestamp: str | None


class Intake(NamedTuple):
    """The checked arguments of one call."""

    call: str
    artifact_type: str
    key: str
    step: int | None
    epoch: int | None
    metadata: JsonObject | None
    time_us: int


class OpenedFile(NamedTuple):
    """A file of the user's, open, as long as it was at the call."""

    source: BinaryIO
    size_bytes: int
    extension: str


class ArtifactIntake(BufferedWriter[ArtifactRecord]):
    """What every way of storing an artifact has in common; see `ArtifactStore`."""

    KIND: ClassVar[str] = ArtifactRecord.KIND

    def __init__(
        self,
        session: object,
        *,
        retention_hooks: Sequence[RetentionHook] | None = None,
        raise_on_retention_error: bool | None = None,
    ) -> None:
        hooks: Any = () if retention_hooks is None else retention_hooks
        if not isinstance(hooks, Iterable) or isinstance(hooks, (str, bytes)):
            raise SchemaValidationError("retention_hooks must be a sequence of callables")
        self._hooks = tuple(hooks)
        for index, hook in enumerate(self._hooks):
            if not callable(hook):
                raise SchemaValidationError(
                    f"retention_hooks[{index}] must be callable, not {type(hook).__name__}"
                )
        if not isinstance(raise_on_retention_error, (bool, type(None))):
            raise SchemaValidationError("raise_on_retention_error must be a bool or None")
        super().__init__(session)
        strict = self._run.strict
        self._raises = strict if raise_on_retention_error is None else raise_on_retention_error
        self._in_hook = threading.local()
        self._background = ArtifactThread(self._tell_failure)
        self._kept_files: dict[tuple[int, ...], str] = {}
        self._counts_not_kept = itertools.count(1)
        self._hook_failures: set[str] = set()

    def _check(
        self,
        call: str,
        artifact_type: object,
        name: object,
        *,
        step: object = None,
        epoch: object = None,
        namespace: object = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: object = None,
    ) -> Intake:
        """Check everything but the payload, before anything is written."""
        self._check_open(call)
        checked_type = check_artifact_type(artifact_type)
        return Intake(
            call,
            checked_type,
            check_artifact_key(
                hide_secrets(name), hide_secrets(namespace), strict=self._run.strict
            ),
            self._run.step if step is None else read_step(self._run, step),
            check_step(epoch, "epoch"),
            # Beside the payload lies what the record says, and is written before it.
            redact_object(normalize_object(metadata, "metadata")),
            now_us() if timestamp is None else check_timestamp(timestamp),
        )

    def _keep_bytes(
        self, intake: Intake, payload_format: str, extension: str, data: bytes | memoryview
    ) -> ArtifactRecord:
        """Store a payload that is in memory."""
        _check_size(len(data), "payload")
        head = bytes(data[:HEAD_BYTES])

        def put(folder: PayloadFolder) -> PutPayload:
            return msgspec.structs.replace(folder.put_bytes(data), head=head)

        return self._keep(intake, payload_format, extension, put)

    def _keep_json(self, intake: Intake, value: object, facts: Mapping[str, Any]) -> ArtifactRecord:
        """Store a JSON value, with what is known of it beneath the caller's metadata."""
        described = describe_intake(intake, facts) if facts else intake
        return self._keep_bytes(described, "json", "json", encode_payload(value, "json"))

    def _keep_file(self, intake: Intake, path: object) -> ArtifactRecord:
        """Store a file, a piece at a time."""
        return self._keep_opened(intake, open_file(path))

    def _keep_later(self, intake: Intake, path: object) -> PendingArtifact:
        """Have a file stored by a thread; it is open, and seen to be one, when this returns."""
        opened = open_file(path)
        return self._background.submit(intake.key, lambda: self._keep_opened(intake, opened))

    def _keep_opened(
        self, intake: Intake, opened: OpenedFile, *, named: bool = True
    ) -> ArtifactRecord:
        with opened.source:
            source: Any = _Watched(opened.source, self._background.advance)

            def put(folder: PayloadFolder) -> PutPayload:
                try:
                    return folder.put_file(source, opened.size_bytes)
                except OSError as error:
                    raise SchemaValidationError(
                        f"path {opened.source.name} cannot be read: {error.strerror or error}"
                    ) from error

            return self._keep(intake, "bytes", opened.extension, put, named=named)

    def _keep(
        self,
        intake: Intake,
        payload_format: str,
        extension: str,
        put: Callable[[PayloadFolder], PutPayload],
        *,
        named: bool = True,
    ) -> ArtifactRecord:
        stream = self._run.stream
        folder = stream.payloads
        if folder is None:
            reason = (
                "no backend of this run accepts artifacts, or the disk of its journal is full"
                if stream.active
                else "this run stores nothing"
            )
            folder = NoPayloadFolder(reason)
        kept = put(folder)
        metadata = _note_media(intake.metadata, payload_format, kept.head)
        if kept.changed:
            metadata = JsonObject({**(metadata or {}), _CHANGED: True})
        if kept.failure is not None:
            metadata = JsonObject({**(metadata or {}), NOT_KEPT: kept.failure})
            if stream.active and named:
                self._tell_not_kept(intake, kept)
        paths: tuple[str | None, str | None] = (None, None)
        if kept.failure is None and not named:
            paths = object_path(kept.sha256), None
        elif kept.failure is None:
            paths = self._name_files(folder, intake, payload_format, extension, kept, metadata)
        record = self._emit(intake, payload_format, kept, paths, metadata)
        if named:
            self._remember(record, 1)
            self._call_hooks(record)
        return record

    def _emit(
        self,
        intake: Intake,
        payload_format: str,
        kept: PutPayload,
        paths: tuple[str | None, str | None],
        metadata: JsonObject | None,
    ) -> ArtifactRecord:
        return self._run.emit(
            ArtifactRecord,
            intake.artifact_type,
            intake.key,
            *split_name(intake.key),
            payload_format,
            kept.size_bytes,
            kept.sha256,
            intake.step,
            intake.epoch,
            *paths,
            metadata,
            time_us=intake.time_us,
        )

    def _name_files(
        self,
        folder: PayloadFolder,
        intake: Intake,
        payload_format: str,
        extension: str,
        kept: PutPayload,
        metadata: JsonObject | None,
    ) -> tuple[str, str | None]:
        """Names for people, where the payload lies in its final place; before the record is out."""
        if folder.root != self._run.payload_directory:
            return object_path(kept.sha256), None
        origin = self._run.origin
        return write_record_files(
            folder.root,
            sha256=kept.sha256,
            artifact_type=intake.artifact_type,
            artifact_key=intake.key,
            step=intake.step,
            epoch=intake.epoch,
            extension=extension,
            description={
                "run_id": origin.run_id,
                "writer_id": origin.writer_id,
                "attempt": origin.attempt,
                "rank": origin.rank,
                "timestamp": format_time(intake.time_us),
                "artifact_type": intake.artifact_type,
                "artifact_key": intake.key,
                "payload_format": payload_format,
                "size_bytes": kept.size_bytes,
                "sha256": kept.sha256,
                "step": intake.step,
                "epoch": intake.epoch,
                "metadata": metadata,
            },
        )

    def settle(self) -> None:
        """Wait for pending artifacts, as long as they make progress."""
        self._background.finish()

    def close(self) -> None:
        """Wait for pending artifacts, and accept no more.

        Raises:
            SessionStoreError: In strict mode, the primary store's first delivery error.
        """
        if not self._closed:
            self._background.finish()
        super().close()

    def _tell_failure(self, name: str, error: BaseException) -> None:
        """What a thread could not store is an event, since no call can say it."""
        count = next(self._counts_not_kept)
        reason = check_text(cut_text(str(error), _MESSAGE_LENGTH), "reason")
        _log.warning(
            "run %s: artifact %r is not stored: %s", self._run.context.run_id, name, reason
        )
        self._run.emit_event(
            "artifact_not_kept",
            "error",
            payload=JsonObject({"artifact_key": name, "reason": reason, "count": count}),
        )

    def _tell_not_kept(self, intake: Intake, kept: PutPayload) -> None:
        """In strict mode raise; otherwise count it in the run, and log the first."""
        message = (
            f"{intake.call}: the payload of artifact {intake.key!r} ({kept.size_bytes} bytes) "
            f"could not be stored: {kept.failure}"
        )
        if self._run.strict:
            raise SessionStoreError(f"{message}. Free some disk space, or store it elsewhere.")
        count = next(self._counts_not_kept)
        if count == 1:
            _log.warning("run %s: %s", self._run.context.run_id, message)
        self._run.emit_event(
            "artifact_not_kept",
            "error",
            step=intake.step,
            epoch=intake.epoch,
            payload=JsonObject(
                {
                    "artifact_key": intake.key,
                    "artifact_type": intake.artifact_type,
                    "size_bytes": kept.size_bytes,
                    "sha256": kept.sha256,
                    "reason": kept.failure,
                    "count": count,
                }
            ),
        )

    def _call_hooks(self, record: ArtifactRecord) -> None:
        if not self._hooks or getattr(self._in_hook, "active", False):
            return
        self._in_hook.active = True
        try:
            for hook in self._hooks:
                self._call_hook(hook, record)
        finally:
            self._in_hook.active = False

    def _call_hook(self, hook: RetentionHook, record: ArtifactRecord) -> None:
        try:
            hook(self, record)
        except Exception as error:
            name = getattr(hook, "__name__", type(hook).__name__)
            reason = f"retention hook {name} raised {type(error).__name__}"
            if self._raises:
                raise RetentionHookError(
                    f"{reason} for artifact {record.artifact_key!r}, which is stored"
                ) from error
            if reason not in self._hook_failures:
                self._hook_failures.add(reason)
                _log.warning("run %s: %s", record.run_id, reason, exc_info=error)
            self._run.emit_event(
                "retention_hook_failed",
                "error",
                step=record.step,
                epoch=record.epoch,
                payload=JsonObject(
                    {
                        "artifact_key": record.artifact_key,
                        "reason": reason,
                        "message": check_text(cut_text(str(error), _MESSAGE_LENGTH), "message"),
                    }
                ),
            )


class _Watched:
    """A file that says whenever more of it was read."""

    def __init__(self, source: BinaryIO, advance: Callable[[], None]) -> None:
        self._source = source
        self._advance = advance

    def read(self, size: int = -1) -> bytes:
        self._advance()
        return self._source.read(size)

    def fileno(self) -> int:
        return self._source.fileno()


def open_file(path: object) -> OpenedFile:
    """Open a file of the user's that is to be stored.

    Raises:
        SchemaValidationError: No file that can be read, or one that is too large.
    """
    source, size_bytes = open_source(path)
    try:
        _check_size(size_bytes, f"path {source.name}")
    except SchemaValidationError:
        source.close()
        raise
    suffix = Path(source.name).suffix.removeprefix(".")
    extension = suffix if suffix.isascii() and suffix.isalnum() else EXTENSIONS["bytes"]
    return OpenedFile(source, size_bytes, extension)


def describe_intake(intake: Intake, facts: Mapping[str, Any]) -> Intake:
    """The call with what is known of the payload beneath the caller's own metadata."""
    return intake._replace(
        metadata=normalize_object({**facts, **(intake.metadata or {})}, "metadata")
    )


def _note_media(metadata: JsonObject | None, payload_format: str, head: bytes) -> JsonObject | None:
    """The metadata with the media type of the payload, unless that is said already."""
    known: Mapping[str, Any] = metadata or {}
    # Of JSON the format says it, and the metadata stays what the caller gave.
    if payload_format == "json" or _MEDIA_TYPE in known:
        return metadata
    return JsonObject({_MEDIA_TYPE: identify_media(head), **known})


def hide_secrets(name: object) -> object:
    """A name without the tokens in it, as a name may be spelled."""
    return redact_shapes(name).replace(REDACTED, "redacted") if isinstance(name, str) else name


def _check_size(size_bytes: int, what: str) -> None:
    limit = settings.artifact_limit_bytes()
    if size_bytes > limit:
        raise SchemaValidationError(
            f"{what} has {size_bytes} bytes, but the limit is {limit}. To change it, set "
            f"{settings.ARTIFACT_MAX_BYTES}"
        )


_TRIES = 8


def write_record_files(
    root: Path,
    *,
    sha256: str,
    artifact_type: str,
    artifact_key: str,
    step: int | None,
    epoch: int | None,
    extension: str,
    description: Mapping[str, Any],
) -> tuple[str, str | None]:
    """Give a payload that is in place its name for people, and put its metadata beside it.

    Args:
        root: The run's directory.
        sha256: The payload's hash.
        artifact_type, artifact_key, step, epoch: Of the artifact.
        extension: What the name ends in, without a dot.
        description: The metadata, as JSON values.

    Returns:
        Relative paths of the payload and of the metadata. Where the file
        system takes no links, the payload's is that of the object itself;
        where the metadata cannot be written, its is None.
    """
    target = object_path(sha256)
    for _ in range(_TRIES):
        names = {
            "artifact_type": artifact_type,
            "artifact_key": artifact_key,
            "stem": choose_stem(step, epoch, os.urandom(4).hex()),
            "extension": extension,
        }
        payload = ARTIFACT_STORAGE_LAYOUT["payload"].format(**names)
        metadata = ARTIFACT_STORAGE_LAYOUT["metadata"].format(**names)
        path = root / payload
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Relative, so that a run's directory can be moved and copied.
            os.symlink(os.path.relpath(root / target, path.parent), path)
        except FileExistsError:
            continue
        except (OSError, NotImplementedError):
            payload = target
        return payload, _write_metadata(root, metadata, description)
    return target, None


def _write_metadata(root: Path, relative: str, description: Mapping[str, Any]) -> str | None:
    folder = root / ARTIFACT_STORAGE_LAYOUT["partial"]
    scratch = folder / f"{os.getpid()}-{os.urandom(8).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(description), indent=2))
        os.replace(scratch, root / relative)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        return None
    return relative
