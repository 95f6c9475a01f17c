"""`quark follow`: a run that goes on, in the terminal."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from quark.cli.analyze import FAILED_CHECK
from quark.cli.completion import RUN, complete_metrics
from quark.cli.options import option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    SOURCE,
    RunSource,
    find_run,
    make_finite,
)
from quark.cli.texts import UNBOUNDED, Console
from quark_core.errors import SchemaValidationError, StoreUnavailableError
from quark_core.system.terminal_text import clean_line, escape_json

if TYPE_CHECKING:
    from quark.cli.follow_view import FollowedRun, Frame, Look
    from quark_core.backends.run_summary import RunSummary

_TERMINATED = 128
# What Windows has not, typed so that it is checked for Windows too.
_select: Any = select
_os: Any = os


class Waiting:
    """Waits between looks; a change of the window's size, or a reader who leaves, ends it early.

    Used by the main thread. SIGTERM and SIGHUP end the command with what it has to do at its
    end, as Ctrl-C does. Where a system has no such signals (Windows), a window of another size
    is seen at the next look, and a reader who has left by what is printed next.

    Args:
        on_suspend: What Ctrl-Z does, at the next wait: a picture is not left half drawn. Without
            it Ctrl-Z stops the process, as ever.
    """

    def __init__(self, on_suspend: Callable[[], None] | None = None) -> None:
        self._on_suspend = on_suspend
        self._suspended = False
        self._before: dict[int, Any] = {}
        self._alarm: _Alarm | None = None

    def __enter__(self) -> Waiting:
        handlers: dict[int, Callable[[int, FrameType | None], Any]] = {signal.SIGTERM: self._end}
        if hasattr(signal, "SIGHUP"):
            handlers[signal.SIGHUP] = self._end
        if hasattr(select, "poll") and hasattr(os, "set_blocking"):
            self._alarm = _Alarm()
            if hasattr(signal, "SIGWINCH"):
                handlers[signal.SIGWINCH] = lambda *_: None
            if self._on_suspend is not None and hasattr(signal, "SIGTSTP"):
                handlers[signal.SIGTSTP] = self._suspend
        for number, handler in handlers.items():
            self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._alarm is not None:
            self._alarm.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait for so long; True, and at once, where what is shown must be shown anew.

        Raises:
            BrokenPipeError: Nobody reads what is printed any more.
        """
        if self._alarm is None:
            time.sleep(timeout_s)
            return False
        if not self._alarm.wait(timeout_s):
            return False
        if self._suspended and self._on_suspend is not None:
            self._suspended = False
            self._on_suspend()
        return True

    def ignore_interrupts(self) -> None:
        """Take no notice of Ctrl-C, and of whoever else wants an end, from now on."""
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None:
                self._before.setdefault(number, signal.getsignal(number))
                signal.signal(number, signal.SIG_IGN)

    def _suspend(self, *_: object) -> None:
        self._suspended = True

    def _end(self, number: int, _: FrameType | None) -> None:
        sys.exit(_TERMINATED + number)


class _Alarm:
    """Rings when a signal comes, and when nobody reads any more what this process prints."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            _os.set_blocking(end, False)
        self._before_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._poll = _select.poll()
        self._poll.register(self._reading, _select.POLLIN)
        self._stdout = -1
        with suppress(OSError):  # what is printed to has no file
            stdout = sys.stdout.fileno()
            # macOS takes a terminal for broken; one that goes says so by SIGHUP.
            if sys.platform != "darwin" or not stat.S_ISCHR(os.fstat(stdout).st_mode):
                self._stdout = stdout
                # Nothing is asked of it: that nobody reads any more is told unasked.
                self._poll.register(self._stdout, 0)

    def wait(self, timeout_s: float) -> bool:
        """Whether a signal came within so long.

        Raises:
            BrokenPipeError: Nobody reads what is printed any more.
        """
        ready = dict(self._poll.poll(timeout_s * 1e3))
        if self._stdout in ready:
            raise BrokenPipeError("the output is closed")
        if self._reading not in ready:
            return False
        with suppress(BlockingIOError):
            while os.read(self._reading, 512):
                pass
        return True

    def close(self) -> None:
        signal.set_wakeup_fd(self._before_fd)
        os.close(self._reading)
        os.close(self._writing)


_BROKEN_OFF = ("failed", "interrupted", "lost")

_INTERRUPTED = 130  # as a shell says of Ctrl-C
_SCREEN_S = 1.0
_LINES_S = 5.0
_ANALYSIS_S = 60.0
_LAST_ANALYSIS_S = 10.0
_END_S = 0.5
_FRAME = 100  # columns, where no terminal says how many
_NOTE = "Ctrl-C exits; the run continues"


@click.command()
@takes_options
def follow(
    *,
    run: str = RUN,
    source: RunSource = SOURCE,
    metrics: tuple[str, ...] = option(
        "Metric to show. Repeatable.",
        "-m",
        "--metric",
        shell_complete=complete_metrics,
        show_default="the objective and the loss first",
    ),
    interval: float | None = option(
        "Time between refreshes.",
        show_default=f"{_SCREEN_S:g}, or {_LINES_S:g} when lines are printed",
        least=0.05,
        most=3600,
        metavar="SECONDS",
    ),
    once: bool = option("Print the current state and exit."),
    lines: bool = option("Print lines, also on a terminal."),
    no_analyze: bool = option("Do not analyze; show only stored results."),
    as_json: bool = AS_JSON,
) -> None:
    """Follow a running run in the terminal.

    RUN is a run ID, unique prefix or name. Shows curves, step, speed, remaining
    time, phase, health, alerts and log lines. In a pipe, in a terminal without
    cursor control, or with --lines, each new item is printed as a line. With
    --json, each refresh is a line.

    If no monitor checks the run, Quark analyzes it once a minute and does not
    store the result. The command ends with the run, or with Ctrl-C.

    \b
    Exit codes:
      0    the run completed, or is running and --once was passed
      1    the run or the store cannot be read
      2    usage error
      3    the run failed, was interrupted or was lost
      130  Ctrl-C; the run continues
    """  # noqa: D301 - click wants the character
    from quark.cli.follow_view import FollowedRun

    try:
        page = source.open_page_source()
        run_id = str(find_run(page.reader, run, page.place).run.id)
        _check_metrics(page.summarize(run_id), metrics)
        followed = FollowedRun(page, run_id, names=metrics, analyze=not no_analyze)
        console = Console(highlight=False)
        try:
            if once:
                look = _show_once(followed, console, as_json=as_json)
            elif as_json or lines or not console.is_terminal or console.is_dumb_terminal:
                look = _follow_in_lines(followed, interval or _LINES_S, as_json=as_json)
            else:
                look = _follow_on_screen(followed, console, interval or _SCREEN_S)
        finally:
            # What still reads has the connections until the process ends.
            if followed.close(_END_S):
                page.close()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    status = FAILED_CHECK if look.summary.state in _BROKEN_OFF else 0
    sys.exit(status if look.has_ended or once else _INTERRUPTED)


def _check_metrics(summary: RunSummary, names: tuple[str, ...]) -> None:
    """Refuse a metric that a run has not; one that goes on may get it."""
    from quark_core.runs.reading import refuse_unknown_metric

    for name in names:
        try:
            refuse_unknown_metric(name, summary.metrics, "--metric", "the run")
        except SchemaValidationError as error:
            if summary.state != "running":
                raise click.UsageError(str(error)) from None
            click.echo(f"quark: {error}, so far", err=True)


def _make_frame(console: Console) -> Frame:
    """A frame of the terminal's width, or of one that can be read where there is none."""
    from quark.cli.follow_view import Frame

    width = _FRAME if console.width == UNBOUNDED else console.width
    return Frame(width=width, height=None, ascii_only=console.options.ascii_only)


def _show_once(followed: FollowedRun, console: Console, *, as_json: bool) -> Look:
    from quark.cli.follow_view import build_frame

    look = _look_after_analysis(followed, _ANALYSIS_S)
    if as_json:
        _print_json_line(followed, look)
        return look
    frame = _make_frame(console)
    console.print(build_frame(look, followed.keys, frame))
    return look


def _look_after_analysis(followed: FollowedRun, timeout_s: float) -> Look:
    """A look that has the analysis which the one before it has asked for, if it comes in time."""
    look = followed.look()
    if not look.computing:
        return look
    followed.wait_for_analysis(timeout_s)
    after = followed.look()
    return replace(after, new_events=[*look.new_events, *after.new_events])


def _follow_in_lines(followed: FollowedRun, interval_s: float, *, as_json: bool) -> Look:
    from quark.cli.follow_view import LineTeller, describe_end

    teller = LineTeller()
    last: Look | None = None

    def show(look: Look, trouble: str | None) -> None:
        if trouble is not None:
            click.echo(f"quark: {trouble}", err=True)
        elif as_json:
            _print_json_line(followed, look)
        else:
            now = datetime.now(UTC).isoformat()[11:19]
            for line in teller.tell(look, followed.keys, now):
                _print_line(line)

    with Waiting() as waiting:
        last = _look_until_end(followed, waiting, interval_s, show, repeats=False)
    if not as_json and last is not None:
        _print_line(describe_end(last))
    return _need(last)


def _print_line(text: str) -> None:
    click.echo(clean_line(text))
    sys.stdout.flush()


def _print_json_line(followed: FollowedRun, look: Look) -> None:
    from quark.cli.follow_view import describe_look

    told = make_finite(describe_look(look, followed.keys))
    click.echo(escape_json(json.dumps(told, ensure_ascii=False)))
    sys.stdout.flush()


def _follow_on_screen(followed: FollowedRun, console: Console, interval_s: float) -> Look:
    from quark.cli.follow_view import Frame, build_frame, describe_end

    warnings = _LastWarning(logging.WARNING)

    def show(look: Look, trouble: str | None) -> None:
        note = f"{trouble}; retrying" if trouble else warnings.text or _NOTE
        width, height = console.size
        ascii_only = console.options.ascii_only
        frame = Frame(width=width, height=height, ascii_only=ascii_only, note=note)
        console.update_screen(build_frame(look, followed.keys, frame))

    logger = logging.getLogger("quark")
    logger.addHandler(warnings)
    screen = _Screen(console)
    last: Look | None = None
    try:
        with Waiting(screen.suspend) as waiting:
            try:
                screen.enter()
                last = _look_until_end(followed, waiting, interval_s, show, repeats=True)
            finally:
                # Whatever comes now, the terminal is made whole first.
                try:
                    waiting.ignore_interrupts()
                finally:
                    screen.leave()
    finally:
        logger.removeHandler(warnings)
    last = _need(last)
    frame = _make_frame(console)
    console.print(build_frame(last, followed.keys, frame))
    _print_line(describe_end(last))
    return last


def _need(look: Look | None) -> Look:
    """The last look; without one there is nothing to say of the run."""
    if look is None:
        sys.exit(_INTERRUPTED)
    return look


def _look_until_end(
    followed: FollowedRun,
    waiting: Waiting,
    interval_s: float,
    show: Callable[[Look, str | None], None],
    *,
    repeats: bool,
) -> Look | None:
    """Look again and again until the run has ended, or Ctrl-C; returns the last look.

    Args:
        followed: The run.
        waiting: Waits between two looks.
        interval_s: How long.
        show: Shows a look, or what is wrong with reading beside the look before.
        repeats: Whether that is said at each look, or once.
    """
    look: Look | None = None
    told: str | None = None
    try:
        while True:
            try:
                look, trouble = followed.look(), None
                if look.has_ended:
                    look = _look_at_end(followed, look)
            except StoreUnavailableError as error:
                if look is None:
                    raise
                trouble = str(error)
            assert look is not None
            if trouble is None or repeats or trouble != told:
                show(look, trouble)
            told = trouble
            if look.has_ended:
                return look
            while waiting.wait(interval_s):
                if repeats:
                    show(look, trouble)
    except KeyboardInterrupt:
        return look


def _look_at_end(followed: FollowedRun, look: Look) -> Look:
    """The last look, with what is found in the whole run, as far as it can be read."""
    if not look.computing:
        return look
    followed.wait_for_analysis(_LAST_ANALYSIS_S)
    try:
        after = followed.look()
    except StoreUnavailableError:
        # There is no look after this one that would tell what this one has to tell.
        return look
    return replace(
        after,
        new_events=[*look.new_events, *after.new_events],
        new_alerts=[*look.new_alerts, *after.new_alerts],
    )


class _Screen:
    """The alternate screen of a terminal, without a cursor; both methods may be called again."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def enter(self) -> None:
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def leave(self) -> None:
        self._console.show_cursor(True)
        self._console.set_alt_screen(False)

    def suspend(self) -> None:
        """Stop this process, with the terminal whole meanwhile; only where Ctrl-Z does so."""
        if not hasattr(signal, "SIGTSTP"):
            return
        self.leave()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self.enter()


class _LastWarning(logging.Handler):
    """Keeps what was warned of last: printed, it would stand in the midst of the screen."""

    text: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
