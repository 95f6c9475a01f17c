"""Why a run ends, by the exception that leaves its program."""

from __future__ import annotations

from quark_core.config.redaction import redact_text
from quark_core.errors import StopRequested
from quark_core.records.runs import RunEnding
from quark_core.sessions.signals import describe_signal, find_received
from quark_core.system.exit_status import find_signal, read_exit_code


def is_interruption(error: BaseException) -> bool:
    """Whether what leaves a program says that it was interrupted, rather than that it failed."""
    if isinstance(error, (KeyboardInterrupt, SystemExit, StopRequested)):
        return True
    return find_signal(error) is not None


def word_error(error: BaseException) -> str:
    """An exception in one line, with whatever secrets are in it."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def find_ending(error: BaseException) -> RunEnding:
    """Why a run ends that an exception ends, without secrets."""
    message = redact_text(word_error(error))
    if isinstance(error, StopRequested):
        return RunEnding("stop_request", message)
    if isinstance(error, KeyboardInterrupt):
        return RunEnding("signal", find_signal(error) or "SIGINT (Ctrl-C)")
    if isinstance(error, SystemExit):
        told = f"exit status {read_exit_code(error)}"
        # A handler may only note the signal, and leave the exit to the training loop.
        name = find_signal(error) or (find_received() if read_exit_code(error) else None)
        return RunEnding("exit_status", told) if name is None else describe_signal(name, told)
    name = find_signal(error)
    return RunEnding("exception", message) if name is None else describe_signal(name, message)
