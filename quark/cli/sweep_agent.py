"""The agent of `quark sweep run`: starts a command as a process for one trial after another.

The agent claims, starts, and looks on. What becomes of a trial is said by the run that the
command begins; the agent says it only where there is no such run, or where its process was
killed. It renews the lease of what it has started, and gives back what it is told to end.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from quark.sweeps.definition import fill_values
from quark_core.config import settings
from quark_core.config.redaction import redact_text
from quark_core.errors import QuarkError, SchemaValidationError, SessionStoreError
from quark_core.formatting import format_count, format_duration, format_value
from quark_core.ranks.launches import leave_launch
from quark_core.records.sweeps import StoredTrial, TrialResult

if TYPE_CHECKING:
    from quark.sweeps.sweep import Sweep

_CHUNK_BYTES = 65_536
_TAIL_BYTES = 8_192
_MOST_BYTES = 1_000_000
_KILL_S = 1.0
_REASON_CHARACTERS = 300
# What Windows has not, typed so that it is checked for Windows too.
_os: Any = os
_subprocess: Any = subprocess


class TrialProcess:
    """A command that runs for one trial.

    It is the first of a group of processes of its own, so that Ctrl-C of the terminal reaches
    the one who has started it alone, and signals reach all that the command starts. What it
    writes to standard error is passed on by `poll`, and the last line of it kept.

    Args:
        command: Program and arguments; no shell is between.
        environment: All of its environment.
        label: What each line of its output begins with, where several run at once; "" where
            standard output is the one of this process.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], label: str = ""
    ) -> None:
        self.was_interrupted = False
        """Whether it has been asked to end."""
        self.was_killed = False
        """Whether it was ended at once."""
        self.started_at = time.monotonic()
        self._errors = _Output(sys.stderr, label)
        self._printed = _Output(sys.stdout, label) if label else None
        try:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=None if self._printed is None else self._printed.fd,
                stderr=self._errors.fd,
                **_make_group(),
            )
        except BaseException:
            self._close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def duration_s(self) -> float:
        """How long ago it was started, in seconds."""
        return time.monotonic() - self.started_at

    @property
    def last_line(self) -> str:
        """The last line that it has written to standard error and that says something."""
        return self._errors.last_line

    def poll(self) -> int | None:
        """Pass on what it writes; its exit status once it has ended, below 0 the signal by which.

        Once there is a status nothing more is passed on.
        """
        status = self._process.poll()
        for output in self._outputs:
            output.pass_on(to_end=status is not None)
        if status is not None:
            self._close()
        return status

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask it, and what it has started, to end; a second call does nothing."""
        if self.was_interrupted or self._process.poll() is not None:
            return
        self.was_interrupted = True
        with suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(_find_break())

    def kill(self) -> None:
        """End it at once, with all that it has started, in sessions of their own too."""
        if self._process.poll() is not None:
            return
        self.was_killed = True
        # Launchers give each of their workers a session, which no signal to the group reaches.
        others = _list_descendants(self._process.pid)
        with suppress(OSError):
            if sys.platform != "win32":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        for other in others:
            with suppress(Exception):  # it is gone, or another user's
                other.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)

    @property
    def _outputs(self) -> list[_Output]:
        return [each for each in (self._printed, self._errors) if each is not None]

    def _close(self) -> None:
        for output in self._outputs:
            output.close()


class _Output:
    """What a process writes, in memory, until it is passed on.

    Not a pipe: a training whose agent was killed would break at the next line that it prints.

    Args:
        target: The stream of this process that it is passed on to.
        label: What each line begins with there, or "".
    """

    def __init__(self, target: Any, label: str) -> None:
        self._target = target
        self._label = label.encode()
        self._file: Any = None
        if hasattr(os, "memfd_create"):
            self.fd = int(_os.memfd_create("quark-trial"))
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
            self.fd = self._file.fileno()
        self._is_appended = _append_always(self.fd)
        self._read_bytes = 0
        self._line = b""
        self._tail = b""
        self._is_cut = False
        self._is_open = True

    @property
    def last_line(self) -> str:
        """The last line that says something, without what looks like a secret."""
        lines = self._tail.decode("utf-8", "replace").replace("\r", "\n").split("\n")
        if self._is_cut:
            # It may begin within a word, and so within a secret that nobody would know again.
            _, _, lines[0] = lines[0].partition(" ")
        said = [line.strip() for line in lines if line.strip()]
        return redact_text(said[-1])[:_REASON_CHARACTERS] if said else ""

    def pass_on(self, *, to_end: bool) -> None:
        """Pass on what is new; `to_end` says that nothing comes after it."""
        while self._is_open:
            chunk = self._read()
            if not chunk:
                break
            self._read_bytes += len(chunk)
            self._is_cut = self._is_cut or len(self._tail) + len(chunk) > _TAIL_BYTES
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
            self._write(chunk)
        if to_end and self._line:
            self._write(b"\n")
        if self._is_open and self._is_appended and self._read_bytes > _MOST_BYTES:
            with suppress(OSError):
                os.ftruncate(self.fd, 0)
                self._read_bytes = 0

    def close(self) -> None:
        """Let go of the memory; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if self._file is not None:
            self._file.close()
        else:
            os.close(self.fd)

    def _read(self) -> bytes:
        if sys.platform != "win32":
            return os.pread(self.fd, _CHUNK_BYTES, self._read_bytes)
        else:  # noqa: RET505 - without it this would be unreachable elsewhere
            self._file.seek(self._read_bytes)
            return bytes(self._file.read(_CHUNK_BYTES))

    def _write(self, chunk: bytes) -> None:
        if self._label:
            # A line of another trial must not stand in the midst of one of this.
            *lines, self._line = (self._line + chunk).split(b"\n")
            chunk = b"".join(self._label + line + b"\n" for line in lines)
        stream = getattr(self._target, "styled", self._target)
        with suppress(OSError, ValueError):
            buffer = getattr(stream, "buffer", None)
            if buffer is None:
                stream.write(chunk.decode("utf-8", "replace"))
            else:
                buffer.write(chunk)
            stream.flush()


def describe_exit(status: int) -> str:
    """How a process has ended, in words: `ended with status 3`, `was ended by SIGKILL`."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}"


def _make_group() -> dict[str, Any]:
    if sys.platform == "win32":
        return {"creationflags": _subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"process_group": 0}


def _find_break() -> int:
    return int(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))


def _append_always(fd: int) -> bool:
    """Have what is written to a file go to its end, wherever that is; whether that can be."""
    if sys.platform == "win32":
        return False

    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return True


def _list_descendants(pid: int) -> list[Any]:
    import psutil

    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


# The command of a trial: what `quark sweep run NAME -- python train.py` starts for its parameters.
#
# No shell takes part: each argument stays one, whatever is in it. Parameters may come out of a
# store that others write to, so that into an argument which is itself a line for a shell only plain
# values are put.

ArgumentForm = Literal["flags", "assignments", "none"]
"""How parameters are appended: `--lr 0.01`, `lr=0.01` (Hydra, `Layers`), or not at all."""

_PLACEHOLDER = re.compile(r"\{([^{}\s]+)\}")
_ALL = "parameters"
# What no shell takes for more than a word.
_PLAIN = re.compile(r"[\w.+@%:,/=-]*")
_LIKENESS = 0.75


def check_command(command: Sequence[str]) -> None:
    """See that a command can be started, before any trial is claimed for it.

    Raises:
        SchemaValidationError: There is none, or no such program.
    """
    if not command or not command[0]:
        raise SchemaValidationError(
            "Pass the command to run for each trial after --, as in "
            "`quark sweep run NAME -- python train.py`."
        )
    program = command[0]
    if _PLACEHOLDER.search(program) or shutil.which(program) is not None:
        return
    if Path(program).is_file():
        hint = f"it is not executable. To run a script: python {program}"
    else:
        hint = "no such program on the PATH"
    raise SchemaValidationError(f"{program!r} cannot be started: {hint}")


def check_placeholders(command: Sequence[str], names: Iterable[str]) -> None:
    """See that what is meant for a parameter's place is one; other braces are the script's own.

    Raises:
        SchemaValidationError: It is nearly a parameter's name.
    """
    known = [*names, _ALL]
    for argument in command:
        for name in _PLACEHOLDER.findall(argument):
            near = get_close_matches(name, known, n=1, cutoff=_LIKENESS)
            if name not in known and near:
                raise SchemaValidationError(
                    f"{{{name}}} is not a parameter of the sweep. Did you mean {{{near[0]}}}?"
                )


def build_command(
    command: Sequence[str], parameters: Mapping[str, Any], form: ArgumentForm = "flags"
) -> list[str]:
    """The command with the parameters of a trial.

    Where it has placeholders, `{lr}` for one parameter or `{parameters}` for all of them as
    JSON, these are filled in and nothing is appended. Else each parameter is appended.

    Args:
        command: What was given behind `--`.
        parameters: Of the trial.
        form: How they are appended.

    Raises:
        SchemaValidationError: A value is none that a command can be given, or one that a shell
            might take for a command would stand in a line for one.
    """
    texts = {name: describe_value(value) for name, value in parameters.items()}
    # A parameter of that name comes first: it is what the sweep has.
    texts = {_ALL: json.dumps(dict(parameters), ensure_ascii=False), **texts}
    for name, text in texts.items():
        if not _can_be_given(name + text) or name.startswith("-"):
            raise SchemaValidationError(f"parameter {name!r:.60} cannot be passed to a command")
    filled = [_fill(argument, texts) for argument in command]
    if any(set(_PLACEHOLDER.findall(argument)) & set(texts) for argument in command):
        return filled
    del texts[_ALL]
    if _ALL in parameters:
        texts[_ALL] = describe_value(parameters[_ALL])
    return [*filled, *_append(texts, form)]


def repeat_name(name: str, sweep_id: str) -> str:
    """What to call a sweep in a line that somebody may copy into a shell: its name or its id.

    The name may be a stranger's.
    """
    return shlex.quote(sweep_id if name.startswith("-") else name)


def describe_value(value: object) -> str:
    """A value as an argument of a command: a text as it is, anything else as JSON has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _append(texts: Mapping[str, str], form: ArgumentForm) -> list[str]:
    if form == "none":
        return []
    if form == "assignments":
        return [f"{name}={text}" for name, text in texts.items()]
    words: list[str] = []
    for name, text in texts.items():
        # Behind a space it would be taken for the next option.
        words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return words


def _fill(argument: str, texts: Mapping[str, str]) -> str:
    is_line = len(argument.split()) > 1

    def put(found: re.Match[str]) -> str:
        name = found[1]
        if name not in texts:
            return found[0]
        text = texts[name]
        if is_line and not _PLAIN.fullmatch(text):
            raise SchemaValidationError(
                f"{{{name}}} is part of {argument[:60]!r}, so a shell would interpret its value "
                f"{text[:60]!r}. Pass it as a separate argument, or read QUARK_PARAMETERS."
            )
        return text

    return _PLACEHOLDER.sub(put, argument)


def _can_be_given(text: str) -> bool:
    """Whether a text can be an argument: it has no NUL, and all of it are characters."""
    try:
        return "\0" not in text and bool(text.encode())
    except UnicodeEncodeError:
        return False


ALL_FAILED = 3
INTERRUPTED = 130
_TERMINATED = 128

_POLL_S = 0.05
_CLAIM_S, _LONGEST_CLAIM_S = 0.5, 5.0
_LAST_CLAIM_S = 2.0  # as long is a claim waited for that was on its way at the end
_RENEWALS = 3  # in each lease
_UNBEGUN = 3  # in a row, after which it is the command that is wrong
_SHOWN_PARAMETERS = 6


@dataclass(frozen=True)
class AgentChoices:
    """How an agent goes about it.

    Attributes:
        command: What is run for each trial.
        form: How parameters are appended to it.
        workers: How many trials run at once.
        limit: How many trials are taken at most; None for all there are.
        waits: Whether it stays as long as trials may still come.
        storage_dir: The storage root of the sweep.
    """

    command: tuple[str, ...]
    storage_dir: Path
    form: ArgumentForm = "flags"
    workers: int = 1
    limit: int | None = None
    waits: bool = True


@dataclass
class _Holding:
    """A trial that a process is at work on, and when its lease is to be renewed."""

    trial: StoredTrial
    process: TrialProcess
    renew_at: float
    is_lost: bool = False


class SweepAgent:
    """Works on a sweep until nothing is left to do, or a signal comes.

    The first SIGINT or SIGTERM is passed on to all that runs, which has as long as it takes to
    end; nothing more is claimed. The second kills it. Either way its trials are given back as
    suspended, and somebody goes on with them later.

    Args:
        sweep: The sweep, opened.
        choices: See there.
        say: Takes a line for people.
    """

    def __init__(self, sweep: Sweep, choices: AgentChoices, say: Callable[[str], None]) -> None:
        self._sweep = sweep
        self._choices = choices
        self._say = say
        self._lease_s = sweep.definition.lease_s
        self._held: list[_Holding] = []
        self._signal = 0
        self._signals = 0
        self._taken = 0
        self._good = 0
        self._unbegun = 0
        self._claim_at = 0.0
        self._claim_wait_s = _CLAIM_S
        self._claiming: _Claiming | None = None
        self._waits_for = ""
        self._error: SchemaValidationError | None = None

    def run(self) -> int:
        """Work; returns the exit status of the command.

        Raises:
            SessionStoreError: The store cannot be used.
            SchemaValidationError: The command and the parameters do not go together.
        """
        # A store that cannot be written at all is told now; one that goes away later is waited for.
        _ = self._sweep.store
        before = {number: signal.signal(number, self._note) for number in _list_signals()}
        try:
            while self._go_on():
                time.sleep(_POLL_S)
        except BaseException:
            for holding in self._held:
                holding.process.kill()
            raise
        finally:
            self._give_back_claimed()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._error is not None:
            raise self._error
        if self._signals:
            return INTERRUPTED if self._signal == signal.SIGINT else _TERMINATED + self._signal
        return ALL_FAILED if self._taken and not self._good else 0

    def _give_back_claimed(self) -> None:
        """Give back a trial that was on its way when the work ended, and is begun by nobody."""
        claiming, self._claiming = self._claiming, None
        if claiming is None:
            return
        deadline_s = time.monotonic() + _LAST_CLAIM_S
        while not claiming.is_done and time.monotonic() < deadline_s and self._signals < 2:
            time.sleep(_POLL_S)
        if claiming.trial is not None:
            # A store that is away now gives it to somebody else when its lease is over.
            with suppress(QuarkError):
                result = TrialResult(state="suspended", reason="it was not started")
                self._say_state(claiming.trial, result)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler of signals: the processes get it at once, whatever this one waits for."""
        del frame
        self._signals += 1
        self._signal = number
        for holding in list(self._held):
            self._end(holding)

    def _end(self, holding: _Holding) -> None:
        if self._signals > 1:
            holding.process.kill()
        elif self._signals or holding.is_lost or self._error is not None:
            # Python ends by SIGINT as by an exception; SIGTERM it does not notice by itself.
            holding.process.interrupt(self._signal or signal.SIGINT)

    def _go_on(self) -> bool:
        """One turn; whether another one is needed."""
        if self._signals == 1 and self._waits_for != "signal":
            self._waits_for = "signal"
            if self._held:
                self._say(
                    f"waiting for {format_count(len(self._held), 'trial')} to end; Ctrl-C again "
                    f"kills {'it' if len(self._held) == 1 else 'them'}"
                )
        for holding in list(self._held):
            self._end(holding)
            status = holding.process.poll()
            if status is not None:
                self._settle(holding, status)
            elif time.monotonic() >= holding.renew_at:
                self._renew(holding)
        if self._signals or self._error is not None:
            return bool(self._held)
        if self._has_room() and time.monotonic() >= self._claim_at:
            return self._claim() or bool(self._held)
        return bool(self._held) or self._has_room()

    def _has_room(self) -> bool:
        limit = self._choices.limit
        return len(self._held) < self._choices.workers and (limit is None or self._taken < limit)

    def _claim(self) -> bool:
        """Claim a trial and begin it; whether there may be more to do.

        Raises:
            SessionStoreError: The store cannot be used.
        """
        if self._claiming is None:
            self._claiming = _Claiming(self._sweep)
        if not self._claiming.is_done:
            return True
        claiming, self._claiming = self._claiming, None
        if claiming.error is not None:
            if self._held:
                self._put_off()  # what runs is not ended by it
                return True
            raise claiming.error
        if claiming.trial is None:
            if claiming.is_over or not (self._choices.waits or self._held):
                return False
            self._wait_for_trials()
            return True
        self._claim_wait_s, self._waits_for = _CLAIM_S, ""
        self._taken += 1
        self._begin(claiming.trial)
        return True

    def _wait_for_trials(self) -> None:
        self._put_off()
        if self._held:
            return  # what comes next depends on what runs here
        if self._sweep.state == "paused":
            name = repeat_name(self._sweep.name, self._sweep.id)
            said = f"is paused. `quark sweep resume {name}` resumes it. Ctrl-C exits"
        else:
            said = "waits for trials of other workers. Ctrl-C exits"
        if said != self._waits_for:
            self._waits_for = said
            self._say(f"the sweep {said}")

    def _put_off(self) -> None:
        """Claim again later, and not at the same time as all others who wait."""
        self._claim_at = time.monotonic() + self._claim_wait_s * random.uniform(0.5, 1.0)
        self._claim_wait_s = min(self._claim_wait_s * 1.5, _LONGEST_CLAIM_S)

    def _begin(self, trial: StoredTrial) -> None:
        try:
            command = build_command(self._choices.command, trial.parameters, self._choices.form)
        except SchemaValidationError as error:
            # Of this trial alone: the next one has other values.
            self._say(f"trial {trial.number}: failed: {error}")
            self._say_state(trial, TrialResult(state="failed", reason=str(error)))
            return
        try:
            process = TrialProcess(command, self._make_environment(trial), self._label(trial))
        except OSError as error:
            # The trial is as good as before.
            self._say_state(trial, TrialResult(state="suspended", reason="it was not started"))
            program = self._choices.command[0]
            self._error = SchemaValidationError(f"{program!r} cannot be started: {error}")
            return
        renew_at = time.monotonic() + self._lease_s / _RENEWALS
        self._held.append(_Holding(trial, process, renew_at))
        self._say(f"trial {trial.number}: {_describe_parameters(trial)}")
        if self._signals:
            self._end(self._held[-1])

    def _label(self, trial: StoredTrial) -> str:
        return f"{trial.number}| " if self._choices.workers > 1 else ""

    def _make_environment(self, trial: StoredTrial) -> dict[str, str]:
        # An agent may be a task of a job itself; what it starts is a training of its own.
        environment = leave_launch(os.environ)
        environment.pop(settings.RUN_ID, None)
        return {
            **environment,
            settings.TRIAL: trial.claim.to_text(),
            settings.PARAMETERS: json.dumps(trial.parameters),
            settings.SWEEP_STORAGE_DIR: str(self._choices.storage_dir),
        }

    def _renew(self, holding: _Holding) -> None:
        holding.renew_at = time.monotonic() + self._lease_s / _RENEWALS
        trial = holding.trial
        try:
            known = self._sweep.store.settle_trial(
                trial.sweep_id, trial.number, trial.token, None, lease_s=self._lease_s
            )
        except SessionStoreError:
            holding.renew_at = time.monotonic() + _LONGEST_CLAIM_S
            return
        if known.token != trial.token and not holding.is_lost:
            holding.is_lost = True
            self._say(f"trial {trial.number} was claimed by another worker and is stopped here")

    def _settle(self, holding: _Holding, status: int) -> None:
        """A process has ended: see what its run has said of the trial, or say it."""
        process, trial = holding.process, holding.trial
        try:
            known = self._load(trial)
            if self._is_open(known, trial):
                # A process that was killed has left what it said last in its journal.
                self._deliver_leftovers()
                known = self._load(trial)
            if self._is_open(known, trial):
                known = self._say_end(known, holding, status)
        except QuarkError as error:
            self._held.remove(holding)
            self._say(f"trial {trial.number}: its result cannot be read now: {error}")
            return
        self._held.remove(holding)
        self._count(known, trial)
        self._tell(known, trial, process)

    def _say_end(self, known: StoredTrial, holding: _Holding, status: int) -> StoredTrial:
        process, trial = holding.process, holding.trial
        has_run = self._has_run(known, trial)
        if process.was_interrupted or process.was_killed:
            result = TrialResult(state="suspended", reason=f"{describe_exit(status)} when asked to")
        elif status == 0 and has_run:
            return known  # its end waits in a journal, for a store that is out of reach
        else:
            reason = describe_exit(status)
            if not has_run:
                reason += " before it started a run"
                self._unbegun += 1
            if process.last_line:
                reason += f": {process.last_line}"
            # Without a mistake there is none to try again.
            result = TrialResult(state="waiting" if status else "failed", reason=reason)
        return self._say_state(trial, result)

    def _say_state(self, trial: StoredTrial, result: TrialResult) -> StoredTrial:
        return self._sweep.store.settle_trial(
            trial.sweep_id, trial.number, trial.token, result, lease_s=self._lease_s
        )

    def _load(self, trial: StoredTrial) -> StoredTrial:
        store: Any = self._sweep.store
        found = store.list_trials(trial.sweep_id, start=trial.number, limit=1)
        return fill_values(store, found, self._sweep.definition)[0]

    @staticmethod
    def _is_open(known: StoredTrial, trial: StoredTrial) -> bool:
        """Whether nobody has said what became of a claim."""
        return known.token == trial.token and known.state == "running"

    def _has_run(self, known: StoredTrial, trial: StoredTrial) -> bool:
        if known.run_id is None:
            return False
        reader: Any = self._sweep.store
        claim = reader.load_run(known.run_id).trial
        return claim is not None and claim.token == trial.token

    def _deliver_leftovers(self) -> None:
        from quark_core.runs import recovery

        recovery.sync(self._choices.storage_dir)

    def _count(self, known: StoredTrial, trial: StoredTrial) -> None:
        is_own = known.token == trial.token
        if not is_own or known.state in ("completed", "pruned", "suspended"):
            self._good += 1
        if "before it started a run" not in (known.reason or ""):
            self._unbegun = 0
        elif self._unbegun >= _UNBEGUN:
            self._error = SchemaValidationError(
                f"{_UNBEGUN} trials in a row ended before they started a run, so the worker stops. "
                f"The last one {known.reason}. Test the command without the sweep: it must call "
                "quark.start_run(…), or quark.sweep(…) with a loop over it."
            )

    def _tell(self, known: StoredTrial, trial: StoredTrial, process: TrialProcess) -> None:
        said = known.state if known.token == trial.token else "claimed by another worker"
        if known.values and known.token == trial.token:
            names = [goal.metric for goal in self._sweep.definition.goals]
            pairs = zip(names, known.values, strict=False)
            said += "".join(f", {name} {format_value(value)}" for name, value in pairs)
        elif known.state == "waiting":
            said = "failed, will be retried"
        if known.reason and known.state not in ("completed", "running"):
            said += f": {known.reason}"
        self._say(f"trial {trial.number}: {said} ({format_duration(process.duration_s)})")


class _Claiming:
    """A claim that is on its way, on a thread of its own: it may wait for a store for long."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self.trial: StoredTrial | None = None
        self.is_over = False
        self.error: QuarkError | None = None
        self._thread = threading.Thread(target=self._work, name="quark-claim", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether there is an answer."""
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            claimed = self._sweep.claim()
            if claimed is None:
                self.is_over = self._sweep.is_over
            else:
                self.trial = claimed.stored
        except QuarkError as error:
            self.error = error


def _list_signals() -> Sequence[int]:
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _describe_parameters(trial: StoredTrial) -> str:
    pairs = [f"{name}={describe_value(value)}" for name, value in trial.parameters.items()]
    shown = " ".join(pairs[:_SHOWN_PARAMETERS])
    more = len(pairs) - _SHOWN_PARAMETERS
    return f"{shown} and {more} more" if more > 0 else shown or "no parameters"
