"""How the commands reach a store or another backend: their options, and one reader."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.options import Combined, option
from quark_core.backends.contract import SupportsGenerations, SupportsPrimary, SupportsRead
from quark_core.backends.edits import SupportsRemoval
from quark_core.backends.run_summary import StoredRun
from quark_core.config.arguments import check_run_id, resolve_storage_dir
from quark_core.errors import RunNotFoundError, SchemaValidationError, SessionStoreError
from quark_core.formatting import format_count, join_first
from quark_core.records import AlertRecord, HealthScoreRecord
from quark_core.runs.backend_choice import open_reader
from quark_core.runs.run_ids import (
    LEAST_CHARACTERS,
    describe_near,
    find_labels,
    name_store,
    shorten_run_id,
)
from quark_core.system.terminal_text import clean_line, escape_json

if TYPE_CHECKING:
    from quark.page.routes.page_source import PageSource
    from quark_core.runs.run_reader import ForeignStore, RunReader

# As `quark.analysis.engine.ANALYZER_NAME`, which is too much to load for one line.
_ANALYZER = "analyzer"
_LISTED = 5

STORAGE_DIR = option(
    "Folder with the .quark store.",
    "-d",
    show_default="the working directory, or the nearest parent that has a store",
)
BACKEND = option(
    "Read from this backend instead of the store, such as mlflow+http://HOST:PORT or csv:DIR.",
    "-b",
    metavar="URI",
)
AS_JSON = option("Print JSON.", "--json")


def open_store(storage_dir: Path | None) -> SupportsPrimary:
    """The store of a storage root, for reading.

    Raises:
        SessionStoreError: There is none, or it cannot be read.
    """
    return open_reader(resolve_storage_dir(storage_dir))


def describe_place(store: SupportsPrimary) -> str:
    """Where a store is: its folder, or its URI."""
    return str(store.locate("unknown").store_root)


def find_run(store: SupportsRead, text: str, place: str | None = None) -> StoredRun:
    """The run whose id or name is given, or is the only one that begins so.

    A whole id is asked for first: there may be more runs than one wants to list.

    Args:
        store: The store.
        text: The id, the name, or the beginning of one.
        place: How a backend was asked for that is read in place of the store.

    Raises:
        RunNotFoundError: No run, or more than one, fits, or it is in the trash.
    """
    known = find_by_id(store, text)
    if known is not None:
        return known
    labels = {label.run_id: label.name for label in find_labels(store, "")}
    found = find_ids(text, labels)
    where = name_store(store, place)
    if not found:
        if trashed := _find_in_trash(store, text):
            raise RunNotFoundError(
                f"run {text!r} is in the trash of {where} "
                f"({', '.join(map(shorten_run_id, trashed[:5]))}). "
                f"`quark restore {text}` restores it."
            )
        near = describe_near(store, text) if len(text) >= LEAST_CHARACTERS else ""
        raise RunNotFoundError(
            f"no run matches {text!r} (ID, unique prefix or name) in {where}. "
            f"`quark runs` lists the runs{near}"
        )
    if len(found) > 1:
        raise RunNotFoundError(describe_several(text, found, labels))
    return store.load_run(found[0])


def find_ids(text: str, names: Mapping[str, str | None]) -> list[str]:
    """The ids of runs that a text names, or else of those whose id or name begins so.

    Args:
        text: The id, the name, or the beginning of one.
        names: The name of each run by its id.
    """
    found = [run_id for run_id, name in names.items() if text in (run_id, name)]
    # An empty text is the beginning of every id, and surely not what was meant.
    return found or [
        run_id
        for run_id, name in names.items()
        if text and (run_id.startswith(text) or (name or "").startswith(text))
    ]


def describe_several(text: str, found: Sequence[str], names: Mapping[str, str | None]) -> str:
    """What to say of a text that several runs fit: which ones, and how to name one."""
    listed = [
        run_id if names[run_id] in (None, "", text) else f'{run_id} "{names[run_id]}"'
        for run_id in found
    ]
    hint = "Pass the run ID." if text in map(names.get, found) else "Pass a longer prefix."
    return f"{text!r} matches {len(found)} runs: {clean_line(join_first(listed, _LISTED))}. {hint}"


def find_by_id(store: SupportsRead, run_id: str) -> StoredRun | None:
    """A run that lists leave out, such as one of another project store of a service."""
    try:
        return store.load_run(check_run_id(run_id)) if run_id else None
    except (RunNotFoundError, SchemaValidationError):
        return None


def _find_in_trash(store: object, text: str) -> list[str]:
    """Ids of the runs in the trash that a text fits."""
    if not isinstance(store, SupportsRemoval):
        return []
    return find_ids(text, {usage.run_id: usage.name for usage in store.list_trash()})


def print_json(value: Any) -> None:
    """Print a value as JSON, exactly.

    What is not finite becomes null, since JSON has no word for it; what is not fit for a
    terminal is escaped, which reads as the same.

    Raises:
        SessionStoreError: It is nested so deeply that no Quark has written it.
    """
    try:
        text = json.dumps(make_finite(value), indent=2, ensure_ascii=False)
    except RecursionError:
        raise SessionStoreError("a value in this store is nested too deeply to print") from None
    click.echo(escape_json(text))


def make_finite(value: Any) -> Any:
    """JSON values in which what is not finite is None."""
    if isinstance(value, dict):
        return {key: make_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [make_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


@contextmanager
def usage_mistakes() -> Iterator[None]:
    """What the user has said wrongly is a mistake of the command line."""
    try:
        yield
    except SchemaValidationError as error:
        raise click.UsageError(str(error)) from None


def write_file(path: Path, option: str, write: Callable[[Path], Path]) -> Path:
    """Write a file that the user has named; what the system says against it is said in one line."""
    try:
        return write(path)
    except OSError as error:
        why = error.strerror or str(error)
        raise click.ClickException(
            f"{path} cannot be written: {why}. Pass another file with {option}."
        ) from error


_MOST_PROJECTS = 10


class RunSource:
    """The store that a command reads; opened when it is first asked for something.

    Args:
        storage_dir: The storage root, or None for the working directory.
        backend: Name or URI of a backend to read from in place of the root's store.
    """

    def __init__(self, storage_dir: Path | None, backend: str | None = None) -> None:
        self.storage_dir = storage_dir
        self.backend = backend

    @cached_property
    def reader(self) -> SupportsRead:
        """The place that runs are read from.

        Raises:
            SessionStoreError: There is nothing, or it cannot be read.
            SchemaValidationError: The backend cannot be read back.
        """
        return open_store(self.storage_dir) if self.backend is None else self._foreign.reader

    @cached_property
    def _foreign(self) -> ForeignStore:
        from quark_core.runs.run_reader import open_foreign_store

        return open_foreign_store(self.storage_dir, str(self.backend))

    @property
    def _place(self) -> str | None:
        return None if self.backend is None else self._foreign.place

    def open_page_source(self) -> PageSource:
        """The same as the page's answers and reports read it; to be closed.

        Raises:
            SessionStoreError: There is nothing, or it cannot be read.
            SchemaValidationError: The backend cannot be read back.
        """
        from quark.page.routes.page_source import open_source

        return open_source(self.storage_dir, self.backend)

    @property
    def arguments(self) -> str:
        """The option that asks for the same backend again, with a space before it, or nothing."""
        return "" if self.backend is None else f" --backend {shlex.quote(self._foreign.place)}"

    @property
    def store(self) -> str:
        """The store in words, for messages that say where something was looked for."""
        return name_store(self.reader, self._place)

    def check_project(self, project: str | None, argument: str) -> None:
        """Refuse a project that has no run here; for where nothing was found.

        Raises:
            click.UsageError: There is none of the name; the message lists those there are.
        """
        if project is None or self.reader.list_runs(project=project, limit=1):
            return
        from quark_core.search.resolution import suggest_names

        known = sorted({label.project for label in find_labels(self.reader, "")})
        if not known:
            return
        shown = suggest_names(project, known) or known[:_MOST_PROJECTS]
        more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
        raise click.UsageError(
            f"{argument}: no project {project!r} in {self.store}. Projects: "
            f"{', '.join(map(repr, shown))}{more}."
        )

    def find(self, run: str) -> StoredRun:
        """The run whose id or name, or the beginning of one, is given.

        Raises:
            RunNotFoundError: No run, or more than one, fits.
        """
        return find_run(self.reader, run, self._place)

    def open(self, run: str) -> RunReader:
        """The run whose id or name, or the beginning of one, is given, to be read.

        Raises:
            RunNotFoundError: No run, or more than one, fits.
        """
        return self.read(self.find(run))

    def open_side(self, text: str) -> list[RunReader]:
        """The runs of one side, given by comma, each once.

        Raises:
            click.UsageError: There is nothing between two commas.
            RunNotFoundError: No run, or more than one, fits.
        """
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise click.UsageError(
                f"{text!r} has an empty entry. Separate runs with single commas."
            )
        found = [self.find(part) for part in parts]
        return [self.read(one) for one in {one.run.id: one for one in found}.values()]

    def read(self, stored: StoredRun) -> RunReader:
        """A run that was found here, to be read."""
        from quark_core.runs.run_reader import read_stored

        if self.backend is not None:
            return self._foreign.read(stored)
        return read_stored(stored, self.reader, resolve_storage_dir(self.storage_dir))

    def describe_state(self, run_id: str) -> list[str]:
        """Lines on what is stored of a run's analysis, and on what is not stored of it yet."""
        return [
            line
            for line in (
                self.describe_analysis(run_id),
                self.describe_unstored(run_id) or self._describe_mirrors(run_id),
            )
            if line
        ]

    def describe_analysis(self, run_id: str) -> str | None:
        """A line on the alerts that are stored of a run, or None where it was not analyzed."""
        reader: object = self.reader
        if self.backend is not None or not isinstance(reader, SupportsGenerations):
            return None
        from quark.analysis.health import count_severities, is_of_another_end, tell_end

        scores = reader.read_outputs(run_id, HealthScoreRecord.KIND, _ANALYZER)
        if not scores.count:
            return None
        records: Any = scores.to_records()
        alerts: Any = reader.read_outputs(run_id, AlertRecord.KIND, _ANALYZER).to_records()
        stored = self.reader.load_run(run_id)
        if is_of_another_end(stored, alerts):
            return None
        alerts, records = tell_end(stored, alerts, records, None)
        counted = ", ".join(count_severities(alerts))
        told = f"{len(alerts)} ({counted})" if counted else "none"
        number = str(scores["writer_id"][-1]).rpartition(".")[2]
        unknown = [record.score_key for record in records if not record.is_known]
        if unknown:
            told += f"; health not known: {', '.join(dict.fromkeys(unknown))}"
        return f"alerts: {told} (analysis {number}): quark analyze {shorten_run_id(run_id)}"

    def describe_unstored(self, run_id: str) -> str | None:
        """A line that says that a run is not whole in its store, or None.

        What a living process, or another `quark sync`, is about to deliver is not meant.
        """
        if self.backend is not None:
            return None  # what waits for another place is in the run's own journal
        from quark_core.runs.recovery import count_unstored, list_lost

        root = resolve_storage_dir(self.storage_dir)
        if list_lost(root, run_id):
            return f"Some records of this run are lost: quark doctor -d {shlex.quote(str(root))}"
        keeps_journal = bool(getattr(self.reader, "keeps_journal", False))
        if not count_unstored(root, run_id, keeps_journal=keeps_journal):
            return None
        place = shlex.quote(str(root))
        return f"Some records of this run are not in the store yet: quark sync {place}"

    def _describe_mirrors(self, run_id: str) -> str | None:
        """A line that says what a run's mirrors lack that nobody delivers now, or None."""
        if self.backend is not None:
            return None
        from quark.mirrors import survey_mirrors

        root = resolve_storage_dir(self.storage_dir)
        states = survey_mirrors(root, root / ".quark" / "runs" / run_id, run_id)
        lacking = [
            f"{state.backend} lacks {format_count(state.waiting, 'record')}"
            for state in states
            if state.state == "waiting" and not state.primary
        ]
        if not lacking:
            return None
        return f"{', '.join(lacking)} of this run: quark sync {shlex.quote(str(root))}"


SOURCE: Any = Combined(
    RunSource, {"storage_dir": (Path | None, STORAGE_DIR), "backend": (str | None, BACKEND)}
)
"""The source that --storage-dir and --backend make, for commands that read runs."""
