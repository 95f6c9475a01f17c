"""The W&B mirror as a backend: its options, and the messages between it and its own process.

A run becomes a run of Weights & Biases: see `quark_backends.mirror_records` for
what becomes of each record, and `WandbOptions` for what may be
chosen. All of W&B lives in a process of its own, so that nothing of it is ever
imported into training, and the user's own `wandb.run` is left alone.

Its files lie in `mirrors/wandb/default/` of the run's directory, or in a
folder named by W&B's entity and project: W&B's own (for `wandb sync`),
`state.json`, `worker.log` with what the process printed, the payloads of
artifacts, `environment.json` and `events.jsonl`.

A batch is acknowledged when W&B's own file has all of its rows. Each row
carries `quark/seq`, so a batch that comes again after a crash is looked up
there, and what is missing of it is sent. Credentials come from W&B's own
environment variables and netrc.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar

import msgspec

from quark_backends.mirror_state import keep_payload, make_file_name
from quark_core.api import (
    HELD_FILE,
    SOURCES_OPTION,
    BackendConfig,
    BackendError,
    BackendRejected,
    BackendUnauthorized,
    BackendUnavailable,
    BackendUnusable,
    Batch,
    ChildGone,
    ChildProcess,
    Lease,
    Payload,
    PayloadFolder,
    exit_timeout_s,
)

# Reads what the user chose: `wandb`, `wandb:PROJECT`, `wandb:ENTITY/PROJECT?option=value`.
#
# Options:
#
# mode       online, offline or disabled; else WANDB_MODE, else online
# entity     W&B's user or team
# project    W&B's project; else WANDB_PROJECT, else the run's project
# group      group of the W&B run; else that of the run's tag `group:NAME`, else its
# lineage, if it has a parent
# job_type   its job type; else that of the tag `job_type:NAME`
# tags       more tags, separated by commas or semicolons
# names      `kept` (default) or `strict`: letters, digits and `_` only, by
# which alone W&B's run table sorts and filters
# layers     how many layers, and how many parameters, have curves in W&B;
# 50 by default, or `all`
# sources    `1`: the code that the run is made of goes to W&B too, as an artifact

_MODES = ("online", "offline", "disabled")
_NAMES = (
    "mode",
    "entity",
    "project",
    "group",
    "job_type",
    "tags",
    "names",
    "layers",
    SOURCES_OPTION,
)
_DEFAULT_LAYERS = 50
_MAX_TAG_LENGTH = 64


class WandbOptions(msgspec.Struct, frozen=True):
    """What the user chose for the mirror.

    Attributes:
        mode: online, offline or disabled; None is WANDB_MODE, else online.
        entity: W&B's user or team; None is WANDB_ENTITY, else the account's own.
        project: W&B's project; None is WANDB_PROJECT, else the run's project.
        group: Group of the W&B run; None is the run's lineage, if it has a parent.
        job_type: Its job type.
        tags: Tags besides those of the run.
        strict_names: Whether names of metrics are changed so that W&B's table sorts by them.
        layers: How many layers, and how many parameters, have curves; None is all.
        keeps_sources: Whether W&B gets the code that the run is made of.
    """

    mode: str | None = None
    entity: str | None = None
    project: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    strict_names: bool = False
    layers: int | None = 50
    keeps_sources: bool = False


def read_options(config: BackendConfig) -> WandbOptions:
    """What the user chose.

    Raises:
        BackendUnusable: An option that there is not, or a value that it does not take.
    """
    given = dict(config.options)
    unknown = sorted(set(given) - set(_NAMES))
    if unknown:
        raise _unusable(f"the W&B mirror has no option {unknown[0]!r}, only {', '.join(_NAMES)}")
    entity, _, project = config.location.strip("/").rpartition("/")
    if "/" in entity:
        raise _unusable(f"wandb:{config.location} must be wandb:ENTITY/PROJECT")
    mode = given.get("mode")
    if mode is not None and mode not in _MODES:
        raise _unusable(f"mode must be one of {', '.join(map(repr, _MODES))}, got {mode!r}")
    names = given.get("names", "kept")
    if names not in ("kept", "strict"):
        raise _unusable(f"names must be 'kept' or 'strict', got {names!r}")
    layers = given.get("layers", str(_DEFAULT_LAYERS))
    if layers != "all" and not layers.isdecimal():
        raise _unusable(f"layers must be a number or 'all', got {layers!r}")
    sources = given.get(SOURCES_OPTION, "0")
    if sources not in ("0", "1"):
        raise _unusable(f"sources must be 0 or 1, got {sources!r}")
    tags = (tag.strip()[:_MAX_TAG_LENGTH] for tag in re.split("[,;]", given.get("tags", "")))
    return WandbOptions(
        mode=mode,
        entity=given.get("entity") or entity or None,
        project=given.get("project") or project or None,
        group=given.get("group") or None,
        job_type=given.get("job_type") or None,
        tags=tuple(tag for tag in tags if tag),
        strict_names=names == "strict",
        layers=None if layers == "all" else int(layers),
        keeps_sources=sources == "1",
    )


def choose_folder(run_path: Path, options: WandbOptions) -> Path:
    """Where the mirror keeps its files: a run may be mirrored to several W&B projects."""
    wanted = "/".join(part for part in (options.entity, options.project) if part)
    if not wanted:
        return run_path / "mirrors" / "wandb" / "default"
    kept = make_file_name(wanted)[:60]
    digest = hashlib.sha256(wanted.encode("utf-8", "replace")).hexdigest()[:8]
    return run_path / "mirrors" / "wandb" / f"{kept}-{digest}"


def _unusable(message: str) -> BackendUnusable:
    return BackendUnusable(message, backend="wandb")


# The mirror's own process, as the training process sees it, and what the two say to each other.
#
# The training process sends one message and reads one reply, framed as
# `quark_core.hosting.protocol` says; nothing comes unasked.


class OpenRun(msgspec.Struct, frozen=True, tag=True):
    """Get ready to mirror a run; W&B itself is asked at the first batch.

    Attributes:
        run_id: The run.
        project: Its project.
        folder: Where the mirror keeps its files.
        options: What the user chose.
        import_path: `sys.path` of the training process.
        finish_timeout_s: How long the end may take.
    """

    run_id: str
    project: str
    folder: str
    options: WandbOptions
    import_path: tuple[str, ...]
    finish_timeout_s: float


class Apply(msgspec.Struct, frozen=True, tag=True):
    """Mirror batches; the reply comes when W&B's own file on this machine has them."""

    batches: tuple[Batch, ...]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """End the W&B run as the mirrored run ended, and end the process."""


class Reply(msgspec.Struct, frozen=True):
    """What became of a message.

    Attributes:
        outcome: ok, rejected, unavailable or unauthorized.
        text: Why, or with ok what the user should know.
        page: Address of the W&B run's page, where it has one.
    """

    outcome: str = "ok"
    text: str = ""
    page: str = ""


Message = OpenRun | Apply | Finish


_MODULE = "quark_backends.wandb.worker"
# Of another run of the user's, whose service and identity are not ours.
_DROPPED = (
    "WANDB_SERVICE",
    "WANDB_RUN_ID",
    "WANDB_RESUME",
    "WANDB_NAME",
    "WANDB_NOTES",
    "WANDB_SWEEP_ID",
    "WANDB_SWEEP_PARAM_PATH",
    "WANDB_LAUNCH",
)
_HOST = "https://api.wandb.ai"
# Nothing goes to the user's home.
_PLACED = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR")


def start_worker(folder: Path) -> ChildProcess:
    """A process that mirrors one run; one request at a time, from any thread.

    Args:
        folder: Where it may keep files; `worker.log` is what it prints.

    Raises:
        ChildGone, OSError: It cannot be started.
    """
    log = folder / "worker.log"
    return ChildProcess(_MODULE, "the W&B mirror", log, _make_environment(folder), finishes=True)


def _make_environment(folder: Path) -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if name not in _DROPPED}
    for name in _PLACED:
        environment.setdefault(name, str(folder))
    # Else W&B would believe a file `wandb/settings` in the working directory, which may be
    # anybody's, and show that host the user's key.
    environment.setdefault("WANDB_BASE_URL", _find_own_host(environment))
    return environment


def _find_own_host(environment: Mapping[str, str]) -> str:
    """The host of the user's own settings of W&B, or its default."""
    place = environment.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(os.path.join(place, "settings"))
        return parser.get("default", "base_url", fallback=_HOST) or _HOST
    except (configparser.Error, OSError, UnicodeDecodeError):
        return _HOST


_log = logging.getLogger("quark")
_OPEN_TIMEOUT_S = 60.0
# W&B's own timeout for its server is 20 s, within which the first batch must begin.
_APPLY_TIMEOUT_S = 90.0
# A tenth of what a machine that has much else to do takes.
_RECORDS_PER_S = 100
_FINISH_TIMEOUT_S = 30.0


class WandbBackend:
    """Mirrors one run into W&B; see the module for what.

    Several of one run and place in this process share one process of W&B's.
    """

    def __init__(self, config: BackendConfig) -> None:
        options = read_options(config)
        if config.run_id is None or config.read_only:
            raise _unavailable("the W&B mirror can only write, and one run only")
        run_path = config.run_path or config.storage_dir / ".quark" / "runs" / config.run_id
        folder = choose_folder(run_path.resolve(), options)
        self.keeps_sources = options.keeps_sources
        self._run_id = config.run_id
        self._payloads = PayloadFolder(folder)
        self._worker: _SharedWorker | None = _SharedWorker.share(
            OpenRun(
                run_id=config.run_id,
                project=config.project or "quark",
                folder=str(folder),
                options=options,
                import_path=tuple(sys.path),
                finish_timeout_s=min(_FINISH_TIMEOUT_S, max(1.0, exit_timeout_s() - 1.0)),
            )
        )

    def write(self, batch: Batch) -> None:
        """Send a batch; return when W&B's own file has it.

        Raises:
            BackendRejected: Other content under a known number, or a body that
                cannot be read.
            BackendUnavailable: W&B does not take it now.
        """
        self.write_group([batch])

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Send several batches and wait once for W&B's own file; raises as `write` does.

        What of them was sent before a failure is found there when they come again.
        """
        if self._worker is None:
            raise _unavailable("the W&B mirror is closed")
        self._worker.apply(batches)

    def close(self) -> None:
        """End the W&B run; bounded, with a word on how to send what is left."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.release()

    def put_payload(self, payload: Payload) -> None:
        """See `SupportsArtifacts`; it goes to W&B with its record."""
        try:
            keep_payload(self._payloads.root, payload, backend="wandb")
        except OSError as error:
            raise _unavailable(f"a payload cannot be kept for W&B: {error}") from error

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """See `SupportsArtifacts`; what was put on this machine."""
        del run_id
        return self._payloads.open(sha256)

    def payload_directory(self, run_id: str) -> Path | None:
        """See `SupportsArtifacts`; payloads have to be sent."""
        del run_id
        return None


class _SharedWorker:
    """The process of one mirror of one run, shared by the backends of this process."""

    _shared: ClassVar[dict[str, _SharedWorker]] = {}
    _guard = threading.Lock()

    def __init__(self, opening: OpenRun) -> None:
        self._opening = opening
        self._folder = Path(opening.folder)
        self._lease = Lease(self._folder / "lease")
        self._users = 0
        # Held by whoever talks to the process.
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        self._page = ""
        self._was_used = False

    @classmethod
    def share(cls, opening: OpenRun) -> _SharedWorker:
        """The one for a folder, for one more user."""
        with cls._guard:
            found = cls._shared.setdefault(opening.folder, cls(opening))
            found._users += 1
            return found

    @classmethod
    def forget_all(cls) -> None:
        """In a forked child: what is shared is the parent's."""
        cls._guard = threading.Lock()
        for each in cls._shared.values():
            each._lease.forget()
        cls._shared = {}

    def apply(self, batches: Sequence[Batch]) -> None:
        """See `WandbBackend.write_group`."""
        with self._lock:
            self._lease.beat()
            self._was_used = True
            process = self._process or self._start()
            count = sum(batch.count for batch in batches)
            timeout_s = _APPLY_TIMEOUT_S + count / _RECORDS_PER_S
            self._check(self._ask(process, Apply(tuple(batches)), timeout_s))

    def release(self) -> None:
        """One user less; the last one ends the W&B run."""
        with self._guard:
            self._users -= 1
            if self._users:
                return
            self._shared.pop(self._opening.folder, None)
        with self._lock:
            try:
                # Without a process, the one that there was has died.
                process = self._process
                was_ended = not self._was_used if process is None else self._finish(process)
                if not was_ended:
                    self._finish_again()
            finally:
                self._lease.release()

    def _finish_again(self) -> None:
        """Have another process do what the one that died has left.

        That is to send what was acknowledged and held, and to join the folders: W&B's server would
        take the rows of the second one for the first ones of the run.
        """
        is_apart = len(list(self._folder.glob("wandb/offline-run-*"))) > 1
        if not (is_apart or (self._folder / HELD_FILE).exists()):
            return
        try:
            process = self._start()
            self._check(self._ask(process, Apply(()), _APPLY_TIMEOUT_S))
        except BackendError as error:
            _log.warning("backend wandb: run %s: %s", self._opening.run_id, error)
            return
        self._finish(process)

    def _finish(self, process: ChildProcess) -> bool:
        """End the W&B run; whether its process could."""
        self._process = None
        try:
            # The process bounds the end itself; what is beyond that is its own end.
            reply = process.request(Finish(), Reply, self._opening.finish_timeout_s + 5.0)
        except ChildGone as error:
            _log.warning(
                "backend wandb: run %s was not finished in W&B (%s). To send the rest, run: "
                "wandb sync --include-online %s",
                self._opening.run_id,
                error,
                self._folder / "wandb",
            )
            return False
        process.end()
        if reply.text:
            level = logging.INFO if reply.outcome == "ok" else logging.WARNING
            _log.log(level, "backend wandb: run %s: %s", self._opening.run_id, reply.text)
        return True

    def _start(self) -> ChildProcess:
        spec = importlib.util.find_spec("wandb")
        # A folder of that name, such as W&B's own files, counts as a package without an origin.
        if spec is None or spec.origin is None:
            raise BackendUnusable(
                'wandb is not installed: pip install "quark-tracker[wandb]"; the records wait',
                backend="wandb",
            )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._lease.take():
                raise _unavailable("another process mirrors this run to W&B; the records wait")
            process = start_worker(self._folder)
        except (OSError, ChildGone) as error:
            raise _unavailable(
                f"the process of the W&B mirror cannot be started: {error}"
            ) from error
        self._check(self._ask(process, self._opening, _OPEN_TIMEOUT_S))
        return process

    def _ask(self, process: ChildProcess, message: Message, timeout_s: float) -> Reply:
        self._process = None
        try:
            reply = process.request(message, Reply, timeout_s)
        except ChildGone as error:
            raise _unavailable(f"{error}; see {self._folder / 'worker.log'}") from error
        if reply.outcome in ("ok", "rejected"):
            self._process = process
        else:
            # What failed in there is not tried a second time in the same process.
            process.end(wait_s=1.0)
        return reply

    def _check(self, reply: Reply) -> None:
        if reply.outcome == "ok":
            if reply.page not in ("", self._page):
                self._page = reply.page
                _log.info("backend wandb: run %s is at %s", self._opening.run_id, reply.page)
            if reply.text:
                _log.warning("backend wandb: run %s: %s", self._opening.run_id, reply.text)
            return
        kinds: dict[str, type[BackendError]] = {
            "rejected": BackendRejected,
            "unauthorized": BackendUnauthorized,
        }
        raise kinds.get(reply.outcome, BackendUnavailable)(reply.text, backend="wandb")


def _unavailable(message: str) -> BackendUnavailable:
    return BackendUnavailable(message, backend="wandb")


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_SharedWorker.forget_all)
