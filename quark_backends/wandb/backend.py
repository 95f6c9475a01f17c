"""The W&B mirror as a backend.

A run becomes a run of Weights & Biases: see `quark_backends.mirroring.curves` for
what becomes of each record, and `quark_backends.wandb.options` for what may be
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

import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar

from quark_backends.mirroring.saved_state import keep_payload
from quark_backends.wandb.options import choose_folder, read_options
from quark_backends.wandb.process import (
    Apply,
    Finish,
    Message,
    OpenRun,
    Reply,
    WorkerGone,
    WorkerProcess,
)
from quark_core.api import (
    HELD_FILE,
    BackendConfig,
    BackendError,
    BackendRejected,
    BackendUnauthorized,
    BackendUnavailable,
    BackendUnusable,
    Batch,
    Lease,
    Payload,
    PayloadFolder,
    exit_timeout_s,
)

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
            raise _unavailable("the W&B mirror is opened for writing one run only")
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
        self._process: WorkerProcess | None = None
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

    def _finish(self, process: WorkerProcess) -> bool:
        """End the W&B run; whether its process could."""
        self._process = None
        try:
            # The process bounds the end itself; what is beyond that is its own end.
            reply = process.request(Finish(), self._opening.finish_timeout_s + 5.0)
        except WorkerGone as error:
            _log.warning(
                "backend wandb: run %s was not finished in W&B (%s); "
                "to send what is left: wandb sync --include-online %s",
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

    def _start(self) -> WorkerProcess:
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
            process = WorkerProcess(self._folder)
        except (OSError, WorkerGone) as error:
            raise _unavailable(
                f"the process of the W&B mirror cannot be started: {error}"
            ) from error
        self._check(self._ask(process, self._opening, _OPEN_TIMEOUT_S))
        return process

    def _ask(self, process: WorkerProcess, message: Message, timeout_s: float) -> Reply:
        self._process = None
        try:
            reply = process.request(message, timeout_s)
        except WorkerGone as error:
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
