"""With which status this process ends, as far as Python tells before it has ended.

Python lets go of the SystemExit that ends a program before it calls what is
registered with `atexit`. So the status is noted where it passes by:

- `sys.exit` is wrapped; what was there before is called;
- when a script is over, Python flushes the standard streams while the exception
  is still there. It is looked for then, which also finds `raise SystemExit(3)`.

Both only say what may be. That an exception has ended the program at all is seen
by its outermost frame, which has not returned: a `sys.exit` that somebody has
caught, one in a thread and one in a notebook count for nothing.

An exception that a signal handler has raised, or any code that it has called, came by that
signal: a frame of the handler is in its traceback. `sys.exit` notes that, as it notes the status.

Not known are the status of `os._exit`, and that of a bare `raise SystemExit(3)`
under `python -m` and `python -c`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import io
import logging
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import NoReturn

_log = logging.getLogger("quark")
_RETURNS = ("RETURN_VALUE", "RETURN_CONST")


_acts: list[Callable[[], None]] = []
_closings: list[Callable[[], None]] = []


def call_last(function: Callable[[], None], *, closes: bool = False) -> None:
    """Have a function called at exit, after the runs have ended; it must not raise.

    Args:
        function: The function; it is called once, however often it was given.
        closes: Whether it closes what others may still use in their last calls.
    """
    functions = _closings if closes else _acts
    if function not in functions:
        functions.append(function)


def make_last_calls() -> None:
    """Call what was given to `call_last`."""
    for functions in (_acts, _closings):
        while functions:
            functions.pop(0)()


# Where no run is begun nobody else calls it. Whatever ends runs registers later than this module,
# and so comes first.
atexit.register(make_last_calls)


def read_exit_code(error: SystemExit) -> int:
    """The status that a process has for its parent if this exception ends it."""
    if error.code is None:
        return 0
    # Whatever is no integer is printed, and the status is 1.
    return error.code & 0xFF if isinstance(error.code, int) else 1


# Signals that somebody sends to end a program, where the system has them. SIGALRM is not among
# them: by that a program bounds its own steps.
_ENDING_SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
_SIGNAL = "_quark_signal"

handler_codes: set[CodeType] = set()
"""Code of handlers that are known to be some even where they are installed no more."""


def find_signal(error: BaseException) -> str | None:
    """Name of the signal whose handler has raised an exception, or None."""
    noted = error.__dict__.get(_SIGNAL)
    if isinstance(noted, str):
        return noted
    trace = error.__traceback__
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return _find_handled(frames)


def _find_handled(frames: list[FrameType]) -> str | None:
    """Name of the signal that one of these frames handles."""
    names = {n: getattr(signal, n) for n in _ENDING_SIGNALS if hasattr(signal, n)}
    codes = {_find_code(signal.getsignal(number)) for number in names.values()} | handler_codes
    for frame in frames:
        if frame.f_code not in codes:
            continue
        # Arguments come first; of `lambda *_: sys.exit()` they are a tuple.
        for value in frame.f_locals.values():
            number = value[0] if isinstance(value, tuple) and value else value
            if type(number) is int or isinstance(number, signal.Signals):
                return next((name for name in names if names[name] == number), None)
    return None


def _find_code(handler: object) -> CodeType | None:
    """The code that a handler runs, where it is written in Python."""
    if isinstance(handler, functools.partial):
        handler = handler.func
    for found in (handler, getattr(handler, "__call__", None)):  # noqa: B004 - to look into it
        code = getattr(getattr(found, "__func__", found), "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def _list_frames(frame: FrameType | None) -> list[FrameType]:
    """A frame with all that have called it."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


class _Passage:
    """Goes with a SystemExit and is gone with it, which tells whether it was caught."""

    def __init__(self, watch: ExitWatch, noted: SystemExit) -> None:
        self._watch = watch
        self._noted = noted

    def __del__(self) -> None:
        self._watch.forget(self._noted)

    def __reduce__(self) -> tuple[type[str], tuple[()]]:
        return str, ()  # an exception may be sent to another process


class ExitWatch:
    """Watches what ends the program that runs in the main thread of this process."""

    def __init__(self) -> None:
        self._program: FrameType | None = None
        self._noted: SystemExit | None = None
        self._found: SystemExit | None = None
        self._streams: list[io.TextIOWrapper] = []

    def install(self) -> None:
        """Begin to watch; called once, from any thread, while the program runs."""
        frame = _find_main_frame()
        self._program = None if frame is None else _find_outermost(frame)
        self._wrap_exit()
        if not hasattr(sys, "ps1"):  # at a prompt each line is a program of its own
            for stream in (sys.stdout, sys.stderr):
                if type(stream) is io.TextIOWrapper:
                    self._wrap_flush(stream)

    def find_end(self) -> BaseException | None:
        """The exception that has ended the program, None where it has returned or still runs.

        Called at exit. A SystemExit is one without a traceback, with the status as its code.
        It is None, too, where the program was left by one whose status is not known.
        """
        for stream in self._streams:
            # Python flushes them once more later, and must find them as they were.
            stream.__dict__.pop("flush", None)
        if not self._is_left():
            return None
        if self._found is not None:
            return self._found
        # Set for whatever is not caught, also where somebody has replaced `sys.excepthook`.
        error: BaseException | None = getattr(sys, "last_value", None)
        return self._noted if error is None else error

    def forget(self, noted: SystemExit) -> None:
        """Let go of a status that was noted where its exception is gone and the program runs on."""
        if self._noted is noted and self._is_running():
            self._noted = None

    def _is_running(self) -> bool:
        frame = _find_main_frame()
        return frame is not None and _find_outermost(frame) is self._program

    def _is_left(self) -> bool:
        """Whether the program is over and has not returned."""
        program = self._program
        if program is None or self._is_running():
            return False
        from opcode import opname

        last = program.f_lasti
        return last >= 0 and opname[program.f_code.co_code[last]] not in _RETURNS

    def _wrap_exit(self) -> None:
        before = sys.exit

        def note_and_exit(*status: object) -> NoReturn:
            try:
                before(*status)  # type: ignore[arg-type]
            except SystemExit as error:
                if threading.current_thread() is threading.main_thread():
                    self._noted = _copy(error, _find_handled(_list_frames(sys._getframe())))
                    error.__dict__["_quark_passage"] = _Passage(self, self._noted)
                raise

        sys.exit = functools.wraps(before)(note_and_exit)

    def _wrap_flush(self, stream: io.TextIOWrapper) -> None:
        flush = stream.flush

        def flush_and_look() -> None:
            try:
                if self._found is None and threading.current_thread() is threading.main_thread():
                    self._look()
            except Exception as error:  # noqa: BLE001 - what is printed must get out
                _log.debug("the exit status of the program cannot be recorded: %s", error)
            flush()

        stream.flush = flush_and_look  # type: ignore[method-assign]
        self._streams.append(stream)

    def _look(self) -> None:
        """Look for the exception that has just ended the program."""
        if not self._is_left():
            return
        found = [each for each in gc.get_objects() if issubclass(type(each), SystemExit)]
        if found:
            # The one that is on its way is in the hands of the interpreter alone.
            error = min(found, key=lambda each: len(gc.get_referrers(each)))
            self._found = _copy(error, find_signal(error))


def _copy(error: SystemExit, signal_name: str | None) -> SystemExit:
    """What a SystemExit says, without its traceback, which would keep what the frames hold."""
    copy = SystemExit(error.code)
    if signal_name is not None:
        copy.__dict__[_SIGNAL] = signal_name
    return copy


def _find_main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _find_outermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame
