"""Resolves a run id that a user has typed: the whole id or its beginning, as in git.

Four characters are enough where one run begins so. What fits several runs, or none, is
answered with those that may be meant. Programs that hold an id hold the whole of it: a
beginning is only looked for where no run has it as its id.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from quark_core.backends.contract import SupportsPrimary, SupportsRead, SupportsSearch
from quark_core.backends.run_summary import StoredRun
from quark_core.config.arguments import describe_argument, may_be_run_id
from quark_core.errors import QuarkError, RunNotFoundError
from quark_core.records.names import check_text
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark_core.backends.run_pages import RunLabel

LEAST_CHARACTERS = 4
"""How much of an id is taken for its beginning."""

_SHORT = 8
_MOST_SHOWN = 128
_RANDOM_CHARACTERS = 16
_LISTED = 5
_NEAR = 3
_CANDIDATES = 2_000
_HEXADECIMAL = frozenset("0123456789abcdef")


def shorten_run_id(run_id: str) -> str:
    """As much of an id as tells runs apart: of ids that somebody has chosen, all."""
    is_random = len(run_id) >= _RANDOM_CHARACTERS and _HEXADECIMAL.issuperset(run_id)
    return run_id[:_SHORT] if is_random else run_id


def name_store(reader: object, place: str | None = None) -> str:
    """The store that a reader reads, for a message that says where something was looked for.

    Args:
        reader: The store.
        place: How a backend was asked for in place of the primary store.
    """
    if place is None and isinstance(reader, SupportsPrimary):
        root = reader.locate("unknown").store_root
        # People name the folder that the store is in.
        place = str(root.parent if isinstance(root, Path) and root.name == ".quark" else root)
    place = place or getattr(reader, "place", None)
    return f"the store {clean_line(place)}" if place else "this store"


def find_run(reader: SupportsRead, given: str, argument: str = "run_id") -> StoredRun:
    """The run of a store whose id, or the beginning of it, is given.

    Raises:
        RunNotFoundError: No run, or more than one, fits; the message lists which may be meant.
        SessionStoreError: The store cannot be read.
    """
    given = check_text(given, argument)
    try:
        return reader.load_run(given)
    except RunNotFoundError as error:
        unknown = error
    found = _list_beginnings(reader, given)
    if len(found) == 1:
        return reader.load_run(found[0].run_id)
    if found:
        raise RunNotFoundError(_describe_several(argument, given, found))
    reason = str(unknown).removeprefix(f"run_id {given}: ")
    reason = reason.replace("this store has", f"{name_store(reader)} has")
    # Whatever was pasted there must not steer a terminal, nor fill it.
    shown = (
        given if may_be_run_id(given) and len(given) <= _MOST_SHOWN else describe_argument(given)
    )
    raise RunNotFoundError(f"{argument} {shown}: {reason}{describe_near(reader, given)}")


def find_run_id(reader: SupportsRead, given: str) -> str:
    """The id of that run; see `find_run`."""
    return find_run(reader, given).run.id or given


def complete_id(reader: SupportsRead, given: str) -> str:
    """The id that is meant; what was given where no run, or more than one, fits."""
    found = [label.run_id for label in _list_beginnings(reader, given)]
    return found[0] if len(found) == 1 and given not in found else given


def find_labels(reader: SupportsRead, beginning: str, limit: int | None = None) -> list[RunLabel]:
    """Runs whose id begins so, newest first, by the store's own list where it has one."""
    if beginning and not may_be_run_id(beginning):
        return []
    # Late: most runs begin without a look at others.
    from quark_core.backends.run_pages import SupportsLabels

    store: object = reader
    if isinstance(store, SupportsLabels):
        return store.list_labels(beginning, limit)
    if beginning and isinstance(reader, SupportsSearch):
        from quark_core.records.query import Contains, Field, RunSearch, SearchSource

        text = f"'{beginning}' in run.id"
        search = RunSearch(
            where=Contains(Field("run", "id"), beginning),
            archived=True,
            source=SearchSource(text, (), "where", "order_by"),
        )
        stored: Iterable[StoredRun] = [summary.stored for summary in reader.search(search)]
    else:
        # Of what can only list, such as another tool's server, the newest are looked at.
        stored = reader.list_runs(limit=_CANDIDATES if beginning else limit)
    found = [_label(each) for each in stored if (each.run.id or "").startswith(beginning)]
    return found[:limit]


def _describe_several(argument: str, given: str, found: list[RunLabel]) -> str:
    """What to say of a beginning that several runs have."""
    listed = ", ".join(map(_describe, found[:_LISTED]))
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    count = f"{len(found)}" if len(found) < _CANDIDATES else f"more than {_CANDIDATES:,}"
    return f"{argument} {given!r} matches {count} runs: {listed}{more}. Type more characters"


def describe_near(reader: SupportsRead, given: str) -> str:
    """Which runs an id that no run has may have meant: by its name, or by a slip of the hand."""
    try:
        labels = find_labels(reader, "", _CANDIDATES)
    except QuarkError:
        return ""
    named = [label for label in labels if label.name == given]
    if named:
        listed = ", ".join(label.run_id for label in named[:_LISTED])
        more = f" and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
        have = "have" if len(named) > 1 else "has"
        return f". {listed}{more} {have} that name, but a run ID is required"
    if len(given) < LEAST_CHARACTERS:
        return f". Pass the full ID or at least its first {LEAST_CHARACTERS} characters"
    near = _find_near(given, labels)
    return f". Similar IDs: {', '.join(map(_describe, near))}" if near else ""


def _list_beginnings(reader: SupportsRead, given: str) -> list[RunLabel]:
    if len(given) < LEAST_CHARACTERS:
        return []
    return find_labels(reader, given, _CANDIDATES)


def _find_near(given: str, labels: list[RunLabel]) -> list[RunLabel]:
    import difflib

    # Whoever types a beginning mistypes a beginning.
    by_text: dict[str, RunLabel] = {}
    for label in labels:
        for text in (label.run_id[: len(given)], label.name or ""):
            if text:
                by_text.setdefault(text.lower(), label)
    near = difflib.get_close_matches(given.lower(), by_text, _NEAR, cutoff=0.7)
    return list(dict.fromkeys(by_text[text] for text in near))


def _label(stored: StoredRun) -> RunLabel:
    from quark_core.backends.run_pages import RunLabel

    run = stored.run
    return RunLabel(run.id or "", run.project_name, run.name, run.status)


def _describe(label: RunLabel) -> str:
    name = f' "{clean_line(label.name)}"' if label.name else ""
    return f"{label.run_id}{name}"
