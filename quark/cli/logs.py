"""`quark logs`: what a run has printed."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from quark.cli.options import argument, option, takes_options
from quark.cli.store_access import AS_JSON, SOURCE, RunSource
from quark_core.errors import StoreUnavailableError
from quark_core.records import parse_time
from quark_core.runs.run_ids import shorten_run_id
from quark_core.system.terminal_text import clean_line, clean_text, escape_json

if TYPE_CHECKING:
    from quark_core.records import EventRecord
    from quark_core.records.kinds.console import ConsoleRecord
    from quark_core.runs.console_lines import LineKey

_INTERRUPTED = 130
_LOOK_S = 0.5
_TAIL = 1000
# How often a line that goes on is printed anew while it is followed.
_AGAIN_S = 5.0
_STREAMS = {"out": "stdout", "err": "stderr", "stdout": "stdout", "stderr": "stderr"}
_AGE = re.compile(r"(\d{1,9})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@click.command()
@takes_options
def logs(
    *,
    run: str = argument(),
    source: RunSource = SOURCE,
    follows: bool = option("Continue until the run ends.", "-f", "--follow"),
    stream: str | None = option("Only this stream.", type=click.Choice(list(_STREAMS))),
    rank: int | None = option("Only the output of this rank.", least=0),
    limit: int | None = option(
        "Number of newest lines to print.",
        "-n",
        least=0,
        show_default=f"all, or {_TAIL} with --follow",
    ),
    since: str | None = option(
        "Only lines from this time on: 10m, 2h, 1d, or an ISO 8601 time.", metavar="TIME"
    ),
    search: str | None = option(
        "Only lines that contain this text, in upper or lower case.", metavar="TEXT"
    ),
    with_time: bool = option("Print the time of each line (UTC).", "--time"),
    with_events: bool = option("Include events, tracebacks and log records.", "--events"),
    as_json: bool = AS_JSON,
) -> None:
    """Print a run's console output.

    RUN is a run ID, unique prefix or name. Each line is printed once, without
    terminal control codes. A progress bar is printed in its last state. With
    --json, each line is an object.

    With --follow, Ctrl-C exits with code 130, and the run continues.
    """
    from quark_core.runs.console_lines import ConsoleFollower, read_lines

    run_id = str(source.find(run).run.id)
    is_wanted = _make_filter(
        None if stream is None else _STREAMS[stream], rank, _read_since(since), search
    )
    printer = _Printer(with_time=with_time, as_json=as_json)
    if follows and limit is None:
        limit = _TAIL
    try:
        if not follows and not with_events:
            lines: list[Any] = list(
                read_lines(source.reader, run_id, rank=rank, tail=limit, is_wanted=is_wanted)
            )
        else:
            follower = ConsoleFollower(source.reader, run_id, ("event",) if with_events else ())
            lines = follower.read_first(rank=rank, tail=limit, is_wanted=is_wanted)
        printer.print_first(lines)
        if follows:
            _follow(source, run_id, follower.read, is_wanted, printer)
        elif not lines and not as_json:
            click.echo(_say_nothing(source, run_id), err=True)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _say_nothing(source: RunSource, run_id: str) -> str:
    unstored = source.describe_unstored(run_id)
    told = (
        f"quark: no matching console output in run {shorten_run_id(run_id)} of {source.store}. "
        "It printed none, or it was started with capture=None."
    )
    return f"{told}\n{unstored}" if unstored else told


def _follow(
    source: RunSource,
    run_id: str,
    read: Callable[[], list[Any]],
    is_wanted: Callable[[Any], bool],
    printer: _Printer,
) -> None:
    told: str | None = None
    while True:
        try:
            has_ended = source.reader.load_run(run_id).state != "running"
            records = read()
        except StoreUnavailableError as error:
            if str(error) != told:
                told = str(error)
                click.echo(f"quark: {told}; retrying", err=True)
            time.sleep(_LOOK_S)
            continue
        told = None
        for record in records:
            if is_wanted(record):
                printer.follow(record)
        printer.print_waiting(is_last=has_ended)
        sys.stdout.flush()
        if has_ended:
            return
        time.sleep(_LOOK_S)


def _make_filter(
    stream: str | None, rank: int | None, since_us: int | None, search: str | None
) -> Callable[[Any], bool]:
    wanted = None if search is None else search.lower()

    def is_wanted(record: Any) -> bool:
        if since_us is not None and record.time_us < since_us:
            return False
        if rank is not None and record.rank != rank:
            return False
        if record.KIND == "event":
            return wanted is None or wanted in _describe_event(record).lower()
        if stream is not None and record.stream != stream:
            return False
        return wanted is None or wanted in record.text.lower()

    return is_wanted


def _read_since(text: str | None) -> int | None:
    """Microseconds since the epoch."""
    if text is None:
        return None
    age = _AGE.fullmatch(text.strip())
    try:
        if age is not None:
            begin = datetime.now(UTC) - timedelta(**{_UNITS[age[2]]: int(age[1])})
            return int(begin.timestamp() * 1e6)
        return parse_time(text.strip())
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r:.60} is not an age such as '10m' or an ISO 8601 time.",
            param_hint="--since",
        ) from None


class _Printer:
    """Prints lines and events."""

    def __init__(self, *, with_time: bool, as_json: bool) -> None:
        self._with_time = with_time
        self._as_json = as_json
        self._waiting: dict[LineKey, ConsoleRecord] = {}
        self._shown: dict[LineKey, tuple[float, str]] = {}

    def print(self, record: Any) -> None:
        """Print one record."""
        is_event = record.KIND == "event"
        if self._as_json:
            told = record.to_dict()
            if is_event:
                told["text"] = _describe_event(record)
            click.echo(escape_json(json.dumps(told, ensure_ascii=False)))
            return
        head = f"{record.timestamp[11:23]} " if self._with_time else ""
        if record.rank:
            head += f"[rank {record.rank}] "
        if is_event:
            click.echo(f"{head}{clean_line(_describe_event(record))}")
            if trace := (record.payload or {}).get("traceback"):
                click.echo(clean_text(str(trace).rstrip()))
            return
        if record.left_out:
            noun = "line was" if record.left_out == 1 else "lines were"
            click.echo(f"{head}… {record.left_out:,} {noun} left out here …")
        click.echo(head + clean_text(record.text.replace("\n", " ")))

    def print_first(self, records: Iterable[Any]) -> None:
        """Print what there is; of a line that goes on only what becomes of it is printed again."""
        from quark_core.runs.console_lines import find_key

        for record in records:
            self.print(record)
            if record.KIND != "event" and not record.is_whole:
                self._shown[find_key(record)] = (time.monotonic(), record.text)

    def follow(self, record: Any) -> None:
        """Print a whole line; one that goes on waits for what becomes of it."""
        from quark_core.runs.console_lines import find_key

        if record.KIND == "event":
            self.print(record)
            return
        key = find_key(record)
        if not record.is_whole:
            self._waiting[key] = record
            return
        self._waiting.pop(key, None)
        _, text = self._shown.pop(key, (0.0, None))
        if text != record.text:
            self.print(record)

    def print_waiting(self, *, is_last: bool) -> None:
        """Print lines that go on, now and then, and at the end."""
        now_s = time.monotonic()
        for key, record in list(self._waiting.items()):
            shown_s, text = self._shown.get(key, (0.0, ""))
            if text == record.text or not record.text.strip():
                continue
            if is_last or now_s - shown_s >= _AGAIN_S:
                self._shown[key] = (now_s, record.text)
                self.print(record)
        if len(self._shown) > _TAIL:
            self._shown.clear()


def _describe_event(record: EventRecord) -> str:
    """Such as `warning alert_raised: the loss does not fall`."""
    payload: Mapping[str, Any] = record.payload or {}
    message = payload.get("message")
    told = f": {message}" if isinstance(message, str) and message else ""
    return f"{record.severity} {record.event_type}{told}"
