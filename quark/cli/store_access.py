"""How the commands reach a store: one option, one reader."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from quark_core.backends.contract import (
    StoredRun,
    SupportsGenerations,
    SupportsPrimary,
    SupportsRead,
)
from quark_core.backends.removal import SupportsRemoval
from quark_core.config.arguments import check_run_id, resolve_storage_dir
from quark_core.errors import RunNotFoundError, SchemaValidationError, SessionStoreError
from quark_core.runs.composition import open_reader
from quark_core.runs.run_ids import describe_near, find_labels
from quark_core.system.terminal_text import escape_json

__all__ = [
    "describe_analysis",
    "describe_place",
    "describe_unstored",
    "find_by_id",
    "find_run",
    "json_option",
    "make_finite",
    "open_store",
    "print_json",
    "storage_option",
]

# As `quark_core.analysis.engine.ANALYZER_NAME`, which is too much to load for one line.
_ANALYZER = "analyzer"

F = TypeVar("F", bound=Callable[..., Any])


def storage_option(command: F) -> F:
    """Add --storage-dir to a command."""
    return click.option(
        "-d",
        "--storage-dir",
        type=click.Path(path_type=Path),
        default=None,
        help="Storage root of the runs [default: the working directory, or a store above it].",
    )(command)


def json_option(command: F) -> F:
    """Add --json to a command."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")(
        command
    )


def open_store(storage_dir: Path | None) -> SupportsPrimary:
    """The store of a storage root, for reading.

    Raises:
        SessionStoreError: There is none, or it cannot be read.
    """
    return open_reader(resolve_storage_dir(storage_dir))


def describe_place(store: SupportsPrimary) -> str:
    """Where a store is: its folder, or its URI."""
    return str(store.locate("unknown").store_root)


def find_run(store: SupportsRead, prefix: str) -> StoredRun:
    """The run whose id, or whose name, is given; a prefix of the id is enough.

    Of a store that is not Quark's own, a whole id is asked for first: there may be
    more runs than one wants to list.

    Raises:
        RunNotFoundError: No run, or more than one, fits, or it is in the trash.
    """
    reader: object = store
    if not isinstance(reader, SupportsPrimary):
        known = find_by_id(store, prefix)
        if known is not None:
            return known
    runs = find_labels(store, "")
    found = [label.run_id for label in runs if prefix in (label.run_id, label.name)]
    if not found:
        found = [label.run_id for label in runs if label.run_id.startswith(prefix)]
    if not found and (elsewhere := find_by_id(store, prefix)) is not None:
        return elsewhere
    if not found:
        if trashed := _find_in_trash(store, prefix):
            raise RunNotFoundError(
                f"{prefix!r} is in the trash ({', '.join(trashed[:5])}): "
                f"`quark restore {prefix}` puts it back"
            )
        near = describe_near(store, prefix) if prefix else ""
        raise RunNotFoundError(f"no run begins with {prefix!r}; `quark runs` lists them{near}")
    if len(found) > 1:
        ids = ", ".join(found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        is_name = any(label.name == prefix for label in runs)
        hint = "name one by its id" if is_name else "give more of it"
        raise RunNotFoundError(f"{prefix!r} fits {len(found)} runs: {ids}{more}; {hint}")
    return store.load_run(found[0])


def describe_unstored(store: SupportsRead, storage_dir: Path | None, run_id: str) -> str | None:
    """A line that says that a run is not whole in its store, or None where it is.

    What a living process, or another `quark sync`, is about to deliver is not meant.
    """
    from quark_core.runs.recovery import count_unstored

    root = resolve_storage_dir(storage_dir)
    keeps_journal = bool(getattr(store, "keeps_journal", False))
    if not count_unstored(root, run_id, keeps_journal=keeps_journal):
        return None
    return f"not everything of this run is in the store yet: quark sync {shlex.quote(str(root))}"


def describe_analysis(store: SupportsRead, run_id: str) -> str | None:
    """A line on the alerts that are stored of a run, or None where it was not analyzed."""
    reader: object = store
    if not isinstance(reader, SupportsGenerations):
        return None
    from quark_core.records import AlertRecord, HealthScoreRecord

    scores = reader.read_outputs(run_id, HealthScoreRecord.KIND, _ANALYZER)
    if not scores.count:
        return None
    severities = reader.read_outputs(run_id, AlertRecord.KIND, _ANALYZER)["severity"].tolist()
    counted = [
        f"{severities.count(name)} {name}"
        for name in ("critical", "error", "warning", "info")
        if name in severities
    ]
    told = f"{len(severities)} ({', '.join(counted)})" if counted else "none"
    number = str(scores["writer_id"][-1]).rpartition(".")[2]
    records: Any = scores.to_records()
    unknown = [record.score_key for record in records if not record.is_known]
    if unknown:
        told += f"; health not known: {', '.join(dict.fromkeys(unknown))}"
    return f"alerts: {told}, analyzed at generation {number}: quark analyze {run_id}"


def find_by_id(store: SupportsRead, run_id: str) -> StoredRun | None:
    """A run that lists leave out, such as one of another project store of a service."""
    try:
        return store.load_run(check_run_id(run_id)) if run_id else None
    except (RunNotFoundError, SchemaValidationError):
        return None


def _find_in_trash(store: object, prefix: str) -> list[str]:
    """Ids of the runs in the trash that a text fits."""
    if not prefix or not isinstance(store, SupportsRemoval):
        return []
    trash = store.list_trash()
    found = [usage.run_id for usage in trash if prefix in (usage.run_id, usage.name)]
    return found or [usage.run_id for usage in trash if usage.run_id.startswith(prefix)]


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
        raise SessionStoreError("what this store has is nested too deeply to be printed") from None
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
