"""Lines on standard error when a run begins and when it ends: one each.

    quark: run 3f2a91c0 "digits" — quark show 3f2a91c0 · quark ui
    quark: run 3f2a91c0 "digits" completed after 3 min 12 s — quark show 3f2a91c0

A trial of a sweep says only the second, since many follow one another:

    quark: trial 6 of lr-search completed: val/loss 0.0033 (lr=0.0127) after 29.0 s — quark show …

Only the process that leads the run says it, never a forked child: its standard error may be
locked for good by a thread that has not come along. QUARK_QUIET=1 says nothing. Where the
program has set up `logging` such that INFO is seen, the lines go to the logger "quark"; in a
notebook to standard output, since standard error looks like a mistake there. Whatever is
wrong with the stream costs nothing but the line.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from quark_core.config import settings
from quark_core.config.arguments import resolve_storage_dir, working_directory
from quark_core.errors import QuarkError
from quark_core.formatting import format_duration
from quark_core.records import RunStatus
from quark_core.records.names import decode_name
from quark_core.runs.open_run import OpenRun, ask_extensions
from quark_core.runs.run_ids import shorten_run_id
from quark_core.system.terminal_text import clean_line
from quark_core.writers.events import LoggingHandler

_log = logging.getLogger("quark")

_NAME_CHARACTERS = 60
_SHOWN_METRICS = 3
_PLAIN = str.maketrans({"—": "-", "·": "|", "…": "..."})


class Introduction:
    """Both lines of one run of this process.

    Args:
        run: The run, which has just begun.
    """

    __slots__ = ("_command", "_run", "_shows")

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._shows = run.leads and run.stream.active and not _forked and not settings.is_quiet()
        self._command = ""

    def greet(self) -> None:
        """Say that the run has begun, and how to look at it."""
        if not self._shows:
            return
        try:
            self._command = self.find_command()
            if not all(ask_extensions(self._run.extensions, lambda each: each.is_announced)):
                return
            page = find_page(self._run, asks=False)
            attempt = self._run.context.run.attempt
            goes_on = f" resumed (attempt {attempt})" if attempt else ""
            ways = page or f"quark ui{self._find_place()}"
            where = "" if page else self._find_store()
            print_line(f"{self.describe()}{goes_on}{where} — {self._command} · {ways}")
        except Exception as error:  # noqa: BLE001 - a line is worth no run
            _log.debug("the start of the run cannot be shown: %s", error)

    def part(self, status: RunStatus, lasted_s: float) -> None:
        """Say how the run has ended, and what is known to be wrong without looking for it.

        Args:
            status: How.
            lasted_s: How long it was, as lists of runs say it.
        """
        if not self._shows or _forked:
            return
        try:
            lasted = format_duration(lasted_s)
            wrong = "".join(f"; {each}" for each in self._list_faults())
            told = ask_extensions(self._run.extensions, lambda each: each.summarize())
            said = f"{self.describe()} {status}"
            for each in filter(None, told):
                said = f"quark: {clean_line(each)}"
            print_line(f"{said} after {lasted}{wrong} — {self._command}")
        except Exception as error:  # noqa: BLE001 - as above
            _log.debug("the end of the run cannot be shown: %s", error)

    def describe(self) -> str:
        """The run in a few words."""
        record = self._run.context.run
        name = clean_line(record.name or record.project_name).replace('"', "'")
        if len(name) > _NAME_CHARACTERS:
            name = f"{name[: _NAME_CHARACTERS - 1]}…"
        shown = f' "{name}"' if name else ""
        return f"quark: run {shorten_run_id(record.id or '')}{shown}"

    def find_command(self) -> str:
        """The command that shows it."""
        run_id = shorten_run_id(self._run.context.run_id or "")
        return f"quark show {run_id}{self._find_place()}"

    def _find_store(self) -> str:
        """Which store it is, where neither the working directory nor a command's option says."""
        context = self._run.context
        if not isinstance(context.store_root, Path):
            return f" at {clean_line(context.store_root.partition('?')[0])}"
        found_above = not self._find_place() and context.storage_dir != working_directory()
        return f" in {clean_line(str(context.storage_dir))}" if found_above else ""

    def _find_place(self) -> str:
        """What a command must be told to find the store from here, or nothing."""
        context = self._run.context
        if not isinstance(context.store_root, Path):
            return ""  # by its id a run is found in all of a service's workspace
        return find_store_option(context.storage_dir)

    def _list_faults(self) -> Iterable[str]:
        run = self._run
        lane = run.stream.report_primary()
        if lane is not None and lane.waiting:
            root = shlex.quote(clean_line(str(run.context.storage_dir)))
            reason = f" ({clean_line([*lane.errors][-1])})" if lane.errors else ""
            yield (
                f"{lane.waiting} records are not in its store yet{reason}. Its final status is "
                f"unknown until you run: quark sync {root}"
            )
        gaps = run.stream.list_gaps()
        if gaps:
            root = shlex.quote(clean_line(str(run.context.storage_dir)))
            yield f"some records are lost ({'; '.join(gaps)}): quark doctor -d {root}"
        if run.stop_request is not None:
            yield f"{clean_line(run.stop_request.by)} has asked it to stop"
        broken = [clean_line(decode_name(key)) for key, count in run.non_finite.items() if count]
        if broken:
            more = f" and {len(broken) - _SHOWN_METRICS} more" if broken[_SHOWN_METRICS:] else ""
            yield f"not finite at the end: {', '.join(broken[:_SHOWN_METRICS])}{more}"
        for faults in ask_extensions(run.extensions, lambda each: list(each.list_faults())):
            yield from map(clean_line, faults)


def tell_done(run: OpenRun) -> None:
    """Say that an earlier run has done what this process was to do, which records nothing."""
    done = run.already_done
    if done is None:
        return
    try:
        way = Introduction(run)
        does = "is running this config now" if done.state == "running" else "has done this"
        said = f"{way.describe()} {does}, so this process records nothing"
        print_line(f"{said} — {way.find_command()}")
    except Exception as error:  # noqa: BLE001 - a line is worth no run
        _log.debug("it is unknown if a run with this config exists: %s", error)


def find_store_option(root: Path) -> str:
    """The option by which a command finds a storage root from here; nothing if it needs none."""
    try:
        here = resolve_storage_dir(None)
    except QuarkError:
        here = None
    return "" if root == here else f" -d {shlex.quote(clean_line(str(root)))}"


def find_page(run: OpenRun, *, asks: bool = True) -> str | None:
    """Address of the page that shows a run in a browser, where its store has one; or None.

    Args:
        run: The run.
        asks: Whether the store may be asked, where it has not said so by itself.
    """
    find = getattr(run.reader, "find_page", None)
    if find is None or run.context.run_id is None:
        return None
    try:
        page: str | None = find(run.context.run_id, asks=asks)
    except Exception as error:  # noqa: BLE001 - a backend's own
        _log.debug("the URL of run %s is unknown: %s", run.context.run_id, error)
        return None
    return page


def print_line(text: str) -> None:
    """Print a line for people, or log it; nothing in a forked child and with QUARK_QUIET.

    Args:
        text: The line, which begins with `quark: `.
    """
    if _forked or settings.is_quiet():
        return
    if _is_logged():
        _log.info("%s", text.removeprefix("quark: "))
        return
    stream: TextIO | None = sys.stdout if _is_notebook() else sys.stderr
    if stream is None:
        return
    stream.write(_fit(text, stream) + "\n")
    stream.flush()


def _is_logged() -> bool:
    """Whether the program itself has set up a handler that shows what is logged at INFO."""
    if not _log.isEnabledFor(logging.INFO):
        return False
    logger: logging.Logger | None = _log
    while logger is not None:
        for handler in logger.handlers:
            # What a run keeps of the log is seen by nobody now.
            own = isinstance(handler, (LoggingHandler, logging.NullHandler))
            if handler.level <= logging.INFO and not own:
                return True
        logger = logger.parent if logger.propagate else None
    return False


def _is_notebook() -> bool:
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return find is not None and getattr(find(), "kernel", None) is not None


def _fit(text: str, stream: TextIO) -> str:
    """The text in the characters that a stream can write."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        plain = text.translate(_PLAIN)
        return plain.encode(encoding, "backslashreplace").decode(encoding)
    return text


_forked = False


def _become_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_become_child)
