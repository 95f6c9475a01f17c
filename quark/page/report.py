"""Reports of runs: what is wrong and what shows it, as text, dict, Markdown and one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.page.api.source import PageSource
from quark.page.markup import escape
from quark.page.report_contents import MOST_RUNS, ReportOptions, RunContents, gather_run
from quark.page.report_texts import (
    show_comparison,
    show_run,
    tell_comparison,
    tell_run_in_words,
    write_comparison,
    write_run,
)
from quark_core.errors import (
    InvalidRunStateError,
    QuarkError,
    SchemaValidationError,
)
from quark_core.presentation import bundle
from quark_core.records import format_time
from quark_core.records.base import now_us
from quark_core.runs.run_reader import RunReader
from quark_core.system.terminal_text import clean_text
from quark_core.version import __version__

if TYPE_CHECKING:
    from quark.analysis.comparison.results import RunComparisonResult
    from quark.page.api.run_analysis import Analysis
    from quark_core.sessions.session import TrainingSession


class RunReport:
    """What a report says of one run or several, as it was when it was made.

    `str()` is text for a terminal, `to_html()` one file that works without a server and without
    the network, and `_repr_html_` shows that in a notebook. Made by `session.report()`,
    `quark.report` and `quark report`.
    """

    def __init__(
        self,
        runs: Sequence[RunContents],
        comparisons: Sequence[RunComparisonResult] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self._runs = tuple(runs)
        self._comparisons = tuple(comparisons)
        self._notes = tuple(notes)
        self._made_at = format_time(now_us())

    @property
    def contents(self) -> tuple[RunContents, ...]:
        """What it holds of each run."""
        return self._runs

    @property
    def run_ids(self) -> tuple[str, ...]:
        """The runs, in the order in which they were asked for."""
        return tuple(str(run.data["run"]["id"]) for run in self._runs)

    @property
    def title(self) -> str:
        """Names of the runs."""
        names = [str(run.data["run"]["name"] or run.data["run"]["id"]) for run in self._runs]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3])}{more} · Quark report"

    def __repr__(self) -> str:
        return f"RunReport({', '.join(self.run_ids)})"

    def __str__(self) -> str:
        parts = [tell_run_in_words(run.data) for run in self._runs]
        parts += [tell_comparison(result) for result in self._comparisons]
        return clean_text("\n\n".join([*parts, *self._notes]))

    def to_dict(self) -> dict[str, Any]:
        """Runs with findings, scores, phases and what is known of metrics; no points of curves."""
        from quark.page.pack import make_plain

        inner = ("curves", "maps")
        runs = [{k: v for k, v in run.data.items() if k not in inner} for run in self._runs]
        found: dict[str, Any] = make_plain(
            {
                "made_at": self._made_at,
                "version": __version__,
                "runs": runs,
                "comparisons": [result.to_dict() for result in self._comparisons],
                "notes": self._notes,
            }
        )
        return found

    def to_markdown(self) -> str:
        """The same in short, for a CI job's page; no text of a run is markup in it."""
        parts = [write_run(run.data) for run in self._runs]
        parts += [write_comparison(result) for result in self._comparisons]
        return "\n".join(parts)

    def to_html(self) -> str:
        """One file: it asks nobody for anything, and nothing in it but Quark's script may run."""
        from quark.page.report_file import write_report

        packs = {name: pack for run in self._runs for name, pack in run.packs.items()}
        contents = {"runs": [run.data for run in self._runs], "packs": list(packs)}
        return write_report(
            self.title,
            self._show_head(),
            "".join(map(show_run, self._runs)),
            contents,
            list(packs.values()),
        )

    def save(self, path: str | Path) -> Path:
        """Write `to_html()` into a file; folders on the way are made.

        Raises:
            OSError: It cannot be written.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.to_html(), "utf-8")
        return target

    def _repr_html_(self) -> str:
        from quark.page.notebook import show_report

        return show_report(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str] | None:
        return bundle(self)

    def show_static(self) -> str:
        """What is in it without curves, as HTML that needs neither scripts nor styles."""
        runs = "".join(map(show_run, self._runs))
        return runs + "".join(map(show_comparison, self._comparisons))

    def _show_head(self) -> str:
        count, moment = len(self._runs), self._made_at[:19].replace("T", " ")
        said = f"{count} run{'' if count == 1 else 's'}, made {moment} UTC by Quark {__version__}"
        notes = "".join(f"<p>{escape(note)}</p>" for note in self._notes)
        return (
            f'<header class="report-head"><h1>Quark report</h1><p class="quiet">{said}; '
            f"one file, which asks nobody for anything</p></header>{notes}"
            + "".join(map(show_comparison, self._comparisons))
        )


def report(
    run: TrainingSession | str | Sequence[TrainingSession | str],
    *,
    storage_dir: str | Path | None = None,
    backend: str | None = None,
    config: bool = True,
    logs: bool = True,
) -> RunReport:
    """A report of a run, or of several and what differs between them.

        quark.report(session).save("report.html")
        print(quark.report(["a1b2", "c3d4"], storage_dir="experiments"))

    Reads only: of a run without a stored analysis it makes one in memory. A run that this process
    holds open is flushed first.

    Args:
        run: A session or the id of a run, or up to 20 of them; each is compared with the first.
        storage_dir: Storage root of ids; the working directory by default.
        backend: Name or URI of a backend to read ids from in place of the root's store.
        config: Whether configuration, environment, command line and paths are in it.
        logs: Whether the newest events and log lines are.

    Raises:
        SchemaValidationError: No run, too many, or one of another type.
        RunNotFoundError: There is no such run.
        SessionStoreError: A store cannot be read.
    """
    from quark.page.api.source import open_source
    from quark_core.runs.run_ids import find_run_id
    from quark_core.sessions.session import TrainingSession

    asked = [run] if isinstance(run, (str, TrainingSession)) else list(run)
    for each in asked:
        if not isinstance(each, (str, TrainingSession)):
            raise SchemaValidationError(
                f"run must be a session or an id, or a list of them, got {each!r:.60}"
            )
    root = None if storage_dir is None else Path(storage_dir)
    shared: PageSource | None = None
    chosen: list[tuple[PageSource, str]] = []
    try:
        for each in asked:
            if isinstance(each, TrainingSession):
                chosen.append((open_session_source(each), str(each.run_id)))
                continue
            shared = shared or open_source(root, backend)
            chosen.append((shared, find_run_id(shared.reader, each)))
        return compose_report(chosen, ReportOptions(config=config, logs=logs))
    finally:
        if shared is not None:
            shared.close()


def compose_report(
    runs: Sequence[tuple[PageSource, str]],
    options: ReportOptions,
    analyses: Sequence[Analysis | None] = (),
) -> RunReport:
    """A report of runs that lie in opened stores.

    Args:
        runs: Where each lies, and its id.
        options: What goes in.
        analyses: What is known of each already; None and what is missing is looked up.

    Raises:
        SchemaValidationError: No run, or too many.
        RunNotFoundError: There is no such run.
        SessionStoreError: A store cannot be read.
    """
    chosen = list(dict.fromkeys(runs))
    if not 1 <= len(chosen) <= MOST_RUNS:
        raise SchemaValidationError(
            f"a report is of 1 to {MOST_RUNS} runs, got {len(chosen)}; `quark ui` shows more"
        )
    known = [*analyses, *[None] * len(chosen)]
    contents = [
        gather_run(source, run_id, options, analysis)
        for (source, run_id), analysis in zip(chosen, known, strict=False)
    ]
    comparisons: list[RunComparisonResult] = []
    notes: list[str] = []
    for source, run_id in chosen[1:]:
        try:
            comparisons.append(_compare((source, run_id), chosen[0]))
        except QuarkError as error:
            notes.append(f"{run_id} cannot be compared with {chosen[0][1]}: {error}")
    return RunReport(contents, comparisons, notes)


def _compare(primary: tuple[PageSource, str], reference: tuple[PageSource, str]) -> Any:
    from quark.analysis.comparison.engine import ComparisonEngine

    sides = [source.open_run(run_id) for source, run_id in (primary, reference)]
    return ComparisonEngine.compare_runs(*sides)


def open_session_source(session: TrainingSession, *, flushes: bool = True) -> PageSource:
    """The backend that a session reads from; see `open_reader_source`."""
    return open_reader_source(RunReader.of(session.open_run), flushes=flushes)


def open_reader_source(run: RunReader, *, flushes: bool = True) -> PageSource:
    """The backend that a run is read from.

    Args:
        run: The run.
        flushes: Whether what a session of this process has logged so far is waited for.

    Raises:
        InvalidRunStateError: It keeps nothing that could be read back.
        SessionStoreError: What was logged cannot be flushed in time.
    """
    if run.reader is None or run.run_id is None:
        raise InvalidRunStateError(
            'this run is kept nowhere that can be read back (backends="none", or a rank that '
            "keeps no records): there is nothing to report"
        )
    if flushes and run.held is not None and run.held.refusal is None:
        run.held.flush()
    context = run.context
    return PageSource(
        run.reader,
        place=str(context.store_root),
        backend=str(getattr(run.reader, "backend_name", "embedded")),
        storage_dir=Path(context.storage_dir),
        open_run=lambda _: run,
    )
