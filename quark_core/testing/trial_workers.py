"""Processes of the conformance kit that share the trials, entries and fields of one store.

    python -m quark_core.testing.trial_workers FOLDER

imports a backend and forks a worker for each line that it is given, so that a dozen of them cost
one interpreter. Each worker opens the backend for itself, does its task, and notes what it was
told as lines of JSON in a file of its own: what stands there outlives SIGKILL. At the end of its
input the process kills the workers that are left, and ends.

The file `plan` in the folder is pickled; the test itself has just written it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import pytest

from quark_core.backends.contract import BackendConfig, BackendDefinition, Batch
from quark_core.backends.coordination import NewTrial
from quark_core.backends.registry import check_capabilities
from quark_core.errors import BackendUnavailable, RunNotFoundError, SessionStoreError
from quark_core.records.sweeps import StoredTrial
from quark_core.system.process import ProcessIdentity, current_process
from quark_core.testing.fakes import BatchMaker
from quark_core.testing.kit import stretch_s

_PATIENCE_S = 45.0
_RETRY_S = 0.02
_TICK_S = 0.05

T = TypeVar("T")


class WorkerTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to do.

    Attributes:
        name: Its name, and that of the file with its notes.
        what: `trials`: claim and settle trials until all are final. `hold`: claim one, and settle
            it when the file `finish` is there. `entries`: append `count` times to the log `where`.
            `read`: read that log until it has `count` entries. `fields`: raise the field `where`
            of the kit's run by one, `count` times. `add`: add `count` trials under the key `where`.
        where: A sweep, a log, a field or a key.
        sweep_id: Of which sweep.
        count: How many.
        lease_s: For how long a trial is held.
        work_s: How long a trial takes; there are heartbeats meanwhile.
        clock_shift_s: How far the worker's clock is ahead.
        repeats: Whether each call is made twice, as after a lost reply.
    """

    name: str
    what: Literal["trials", "hold", "entries", "read", "fields", "add"]
    where: str = ""
    sweep_id: str = ""
    count: int = 0
    lease_s: float = 60.0
    work_s: float = 0.0
    clock_shift_s: float = 0.0
    repeats: bool = False


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker was told.

    Attributes:
        what: `claimed`, `again` (the answer to the same claim), `began` (its run), `settled`,
            `counted` (its result is the trial's), `appended`, `read`, `raised`, `added`.
        number, token: The trial, or first and count of entries.
        texts: Entries.
        took_s: How long the call took, of `claimed`.
    """

    what: str
    number: int = 0
    token: int = 0
    texts: tuple[str, ...] = ()
    took_s: float = 0.0


def run_id_of(trial: StoredTrial) -> str:
    """The run that the kit's workers begin for a claim."""
    return f"{trial.sweep_id}-{trial.number}-{trial.token}"


def value_of(number: int, token: int) -> float:
    """The value that the kit's workers tell of a trial: another one for each claim."""
    return number * 1000.0 + token


def when_reached(call: Callable[[], T]) -> T:
    """Call again, after a while, for as long as the store is busy or out of reach.

    Raises:
        SessionStoreError, BackendUnavailable: It was for too long.
    """
    deadline = time.monotonic() + stretch_s(_PATIENCE_S)
    while True:
        try:
            return call()
        except RunNotFoundError:
            raise
        except (SessionStoreError, BackendUnavailable):
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def begin_run(backend: Any, trial: StoredTrial, clock_shift_s: float = 0.0) -> BatchMaker:
    """Begin the run of a claim in its worker's process, with a clock that is so far ahead."""
    started_us = time.time_ns() // 1000 + int(clock_shift_s * 1e6)
    maker = BatchMaker(
        run_id_of(trial), writer_id=f"w{uuid.uuid4().hex[:12]}", started_us=started_us
    )
    worker = msgspec.convert(trial.worker, ProcessIdentity)
    _write(backend, maker.start(trial=trial.claim, process=worker))
    return maker


def end_run(
    backend: Any, maker: BatchMaker, trial: StoredTrial, *, status: str = "completed", **told: Any
) -> Batch:
    """Tell how the run of a claim has ended, and what became of its trial; returns the batch."""
    values = told.pop("values", (value_of(trial.number, trial.token),))
    result = {"state": "completed", "values": list(values), **told}
    batch = maker.lifecycle(("status", {"status": status, "trial": result}))
    _write(backend, batch)
    return batch


def _write(backend: Any, batch: Batch) -> None:
    when_reached(lambda: backend.write(batch))


class TrialWorkers:
    """Workers of one store, and what they have noted.

    Args:
        folder: Where plan, notes and errors lie.
        definition: The backend. Its `open` must be found by its name.
        config: What it is opened with.
    """

    def __init__(self, folder: Path, definition: BackendDefinition, config: BackendConfig) -> None:
        if not hasattr(os, "fork"):
            pytest.skip("the kit forks its workers, and this system has no fork")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        try:
            (folder / "plan").write_bytes(pickle.dumps((definition, config)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            pytest.fail(
                f"the kit opens the backend in other processes, so `definition.open` must be a "
                f"function of a module and the config plain data: {error}"
            )
        self._errors = folder / "errors.txt"
        path = os.pathsep.join(place for place in sys.path if place)
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quark_core.testing.trial_workers", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": path},
                # What has come must not lie in a buffer where `select` does not see it.
                bufsize=0,
            )
        self.pids: dict[str, int] = {}
        self._ended: dict[str, int] = {}

    def start(self, task: WorkerTask) -> None:
        """Begin a worker; returns when its process is there."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(task) + b"\n")
        self._process.stdin.flush()
        while task.name not in self.pids:
            self._hear()

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a worker, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[name], number)

    def is_over(self, name: str) -> bool:
        """Whether a worker has ended."""
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], 0)[0]:
            self._hear()
        return name in self._ended

    def find_status(self, name: str) -> int | None:
        """With what a worker has ended; minus the signal that killed it, None if it has not."""
        return self._ended[name] if self.is_over(name) else None

    def wait(self, *names: str, killed: bool = False) -> None:
        """Wait until workers have ended, all by default. A failure of theirs is the test's."""
        for name in names or tuple(self.pids):
            while name not in self._ended:
                self._hear()
            status = self._ended[name]
            assert status == 0 or killed, f"{name} ended with {status}: {self.errors}"

    def read(self, *names: str) -> dict[str, list[Note]]:
        """What workers have noted up to now, all by default."""
        return {name: self._read(name) for name in names or self.pids}

    def wait_for(self, name: str, what: str) -> Note:
        """Wait until a worker has noted something."""
        while True:
            is_over = self.is_over(name)
            for note in self._read(name):
                if note.what == what:
                    return note
            assert not is_over, f"{name} has ended without {what}: {self.errors}"
            time.sleep(_RETRY_S)

    @property
    def errors(self) -> str:
        """What workers have written to standard error."""
        return self._errors.read_text("utf-8", "replace")

    def _read(self, name: str) -> list[Note]:
        path = self.folder / f"{name}.jsonl"
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        return [msgspec.json.decode(line, type=Note) for line in whole.splitlines()]

    def _hear(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            pytest.fail(f"another process could not begin: {self.errors}")
        word, name, number = line.decode().split()
        if word == "began":
            self.pids[name] = int(number)
        else:
            self._ended[name] = int(number)

    def __enter__(self) -> TrialWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        if sys.platform == "win32":
            raise NotImplementedError("workers are forked, which Windows cannot")
        for name in self.pids:
            if name not in self._ended:
                self.send(name, signal.SIGCONT)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()


# What the other process does.


def main() -> None:
    """Fork a worker for each line of the input, until it ends."""
    if sys.platform == "win32":
        raise NotImplementedError("workers are forked, which Windows cannot")
    folder = Path(sys.argv[1])
    # The plan is a file that the test itself has just written.
    loaded: Any = pickle.loads((folder / "plan").read_bytes())  # noqa: S301
    definition, config = loaded
    names: dict[int, str] = {}
    rest = b""
    try:
        while True:
            if select.select([0], [], [], _TICK_S)[0]:
                read = os.read(0, 65536)
                if not read:
                    return
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    task = msgspec.json.decode(line, type=WorkerTask)
                    names[_fork(folder, definition, config, task)] = task.name
            for pid, status in _reap(names):
                name = names.pop(pid)
                os.write(1, f"ended {name} {os.waitstatus_to_exitcode(status)}\n".encode())
    except BrokenPipeError:
        pass
    finally:
        for pid in names:
            os.kill(pid, signal.SIGKILL)
        for pid in names:
            os.waitpid(pid, 0)


def _reap(names: dict[int, str]) -> Iterator[tuple[int, int]]:
    if sys.platform == "win32":
        raise NotImplementedError("workers are forked, which Windows cannot")
    for pid in list(names):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            yield pid, status


def _fork(
    folder: Path, definition: BackendDefinition, config: BackendConfig, task: WorkerTask
) -> int:
    if sys.platform == "win32":
        raise NotImplementedError("workers are forked, which Windows cannot")
    pid = os.fork()
    if pid:
        os.write(1, f"began {task.name} {pid}\n".encode())
        return pid
    status = 1
    try:
        os.close(0)
        if definition.remote:
            _shift_clock(task.clock_shift_s)
        opened = when_reached(lambda: definition.open(config))
        backend: Any = check_capabilities(definition, opened)
        _Worker(folder, backend, config, task).do()
        backend.close()
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it was, a fork never returns
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _shift_clock(shift_s: float) -> None:
    """Set this process's clock, as Python has it. One in a file has its machine's clock."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + shift_s
    time.time_ns = lambda: real_ns() + int(shift_s * 1e9)


class _Worker:
    def __init__(self, folder: Path, backend: Any, config: BackendConfig, task: WorkerTask) -> None:
        self._folder = folder
        self._backend = backend
        self._run_id = config.run_id or ""
        self._task = task
        self._identity = current_process()
        self._notes = os.open(
            folder / f"{task.name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666
        )

    def do(self) -> None:
        getattr(self, f"_do_{self._task.what}")()

    def _note(
        self, what: str, number: int = 0, token: int = 0, texts: Any = (), took_s: float = 0.0
    ) -> None:
        line = msgspec.json.encode(Note(what, number, token, tuple(texts), took_s))
        os.write(self._notes, line + b"\n")

    def _twice(self, call: Callable[[], T]) -> tuple[T, ...]:
        """The answers to a call, which comes a second time as after a lost reply."""
        return tuple(when_reached(call) for _ in range(1 + self._task.repeats))

    def _do_trials(self) -> None:
        while True:
            trial = self._claim()
            if trial is not None:
                self._work(trial)
                continue
            sweep = when_reached(lambda: self._backend.load_sweep(self._task.sweep_id))
            if not {"waiting", "running", "suspended"} & sweep.counts.keys():
                return
            time.sleep(_RETRY_S)

    def _claim(self) -> StoredTrial | None:
        request_id = uuid.uuid4().hex
        task = self._task

        def claim() -> StoredTrial | None:
            found: StoredTrial | None = self._backend.claim_trial(
                task.sweep_id,
                request_id=request_id,
                worker=self._identity,
                lease_s=task.lease_s,
            )
            return found

        began = time.perf_counter()
        first = when_reached(claim)
        took_s = time.perf_counter() - began
        again = [when_reached(claim) for _ in range(task.repeats)]
        if first is not None:
            self._note("claimed", first.number, first.token, took_s=took_s)
        for other in again:
            if other is not None and first is None:
                # A trial was free by the second time.
                self._note("claimed", other.number, other.token)
                return other
            if other is not None:
                self._note("again", other.number, other.token)
        return first

    def _work(self, trial: StoredTrial) -> None:
        task = self._task
        maker = begin_run(self._backend, trial, task.clock_shift_s)
        self._note("began", trial.number, trial.token)
        until = time.monotonic() + task.work_s
        finish = self._folder / "finish"
        while time.monotonic() < until or (task.what == "hold" and not finish.exists()):
            time.sleep(min(_RETRY_S, task.work_s or _RETRY_S))
            if task.what != "hold":
                _write(self._backend, maker.lifecycle(("heartbeat", {})))
        batch = end_run(self._backend, maker, trial)
        if task.repeats:
            _write(self._backend, batch)
        self._note("settled", trial.number, trial.token)
        (now,) = when_reached(
            lambda: self._backend.list_trials(trial.sweep_id, start=trial.number, limit=1)
        )
        if now.values == (value_of(trial.number, trial.token),):
            self._note("counted", trial.number, trial.token)

    def _do_hold(self) -> None:
        trial = self._claim()
        assert trial is not None
        self._work(trial)

    def _do_entries(self) -> None:
        for turn in range(self._task.count):
            texts = [f"{self._task.name} {turn} {place}" for place in range(1 + turn % 3)]
            request_id = uuid.uuid4().hex

            def append(texts: list[str] = texts, request_id: str = request_id) -> Any:
                return self._backend.append_entries(self._task.where, texts, request_id=request_id)

            for answer in self._twice(append):
                self._note("appended", answer.first, answer.count, texts)

    def _do_read(self) -> None:
        known: list[str] = []
        turn = 0
        while len(known) < self._task.count:
            turn += 1
            start = 0 if turn % 3 == 0 else len(known)
            found = self._read_entries(start)
            earlier = known[start:]
            assert found[: len(earlier)] == earlier, "an entry came before one that was read"
            known[start:] = found
        self._note("read", texts=known)

    def _read_entries(self, start: int) -> list[str]:
        found: list[str] = when_reached(lambda: self._backend.read_entries(self._task.where, start))
        return found

    def _do_fields(self) -> None:
        for _ in range(self._task.count):
            while not self._raise_field():
                pass
            self._note("raised")

    def _raise_field(self) -> bool:
        field, run_id = self._task.where, self._run_id
        stored = when_reached(lambda: self._backend.load_run(run_id))
        value = stored.fields.get(field)
        change = (run_id, field, value, (value or 0) + 1)
        return bool(when_reached(lambda: self._backend.compare_and_set(*change, by="kit@test")))

    def _do_add(self) -> None:
        for turn in range(self._task.count):
            # The same key for all, and one of its own.
            for key in (f"{self._task.where}-{turn}", f"{self._task.name}-{turn}"):
                self._add(key)

    def _add(self, key: str) -> None:
        name, sweep_id = self._task.name, self._task.sweep_id
        trials = [NewTrial(parameters={"by": name, "n": n}) for n in range(3)]
        for added in self._twice(lambda: self._backend.add_trials(sweep_id, trials, key=key)):
            for trial in added:
                self._note("added", trial.number, texts=(key, trial.parameters["by"]))


if __name__ == "__main__":
    main()
