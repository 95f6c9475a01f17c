"""The code of two sides held against each other: what `compare`, `why` and the page all say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from quark.analysis.comparison.results import ChangeDiff
from quark.provenance.code_changes import CodeChange, compare_sources
from quark.provenance.code_fingerprints import FingerprintCache
from quark.provenance.kept_sources import KeptSources, read_sources
from quark_core.backends.contract import StoredRun, SupportsRead
from quark_core.errors import ArtifactDamagedError, ArtifactNotFoundError

SOURCES = "sources"
"""Path of all sources together, where no more than their digest is known."""

_SHOWN_DIGITS = 12
_MOST_NAMED = 4


class CodeHolder(Protocol):
    """A run whose code is compared."""

    @property
    def stored(self) -> StoredRun:
        """The run as its store knows it."""

    @property
    def reader(self) -> SupportsRead | None:
        """Where its sources are read, or None."""


@dataclass(frozen=True, slots=True)
class CodeComparison:
    """What holding the code of two sides against each other has found.

    Attributes:
        manner: `same`: all that was kept is the same to the byte. `changed`: it differs, and
            `changes` says in what. `digests`: it differs, and no more is known. `varies`: the
            runs of a side are not of one code. `unknown`: it was not compared.
        reason: Why no more is known, or "".
        digests: Those of the runs of either side, sorted.
        changes: By function, of comments and layout too.
        sources: The sources of a run of either side, or None; texts are read where they differ.
        unseen: What code there was that nobody has kept.
    """

    manner: Literal["same", "changed", "digests", "varies", "unknown"]
    reason: str = ""
    digests: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    changes: tuple[CodeChange, ...] = ()
    sources: tuple[KeptSources, KeptSources] | None = None
    unseen: tuple[tuple[str, str], ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the code is known to do the same on both sides."""
        is_same = self.manner == "same" or (
            self.manner == "changed" and all(each.kind == "cosmetic" for each in self.changes)
        )
        return is_same and not self.unseen

    def list_notes(self) -> list[str]:
        """What is to be said of it beside what differs."""
        out = []
        if self.manner == "unknown":
            out.append(f"The code was not compared: {self.reason}.")
        elif self.manner == "digests":
            out.append(f"The code differs, and no more is known: {self.reason}.")
        quiet = [each.describe() for each in self.changes if not each.is_logic]
        if quiet:
            more = f" and {len(quiet) - _MOST_NAMED} more" if len(quiet) > _MOST_NAMED else ""
            out.append(f"Of the code also: {', '.join(quiet[:_MOST_NAMED])}{more}.")
        out += [f"Of the code not compared: {place}, {words}." for place, words in self.unseen]
        return out


def compare_code(
    before: Sequence[CodeHolder],
    after: Sequence[CodeHolder],
    cache: FingerprintCache | None = None,
) -> CodeComparison:
    """Hold the code of two sides against each other; parses what differs, nothing else.

    Args:
        before, after: The runs of either side.
        cache: Where fingerprints of modules are kept.
    """
    found = [{run.stored.digests.code for run in side} for side in (before, after)]
    if None in found[0] | found[1]:
        return _compare_commits(before, after)
    digests = [tuple(sorted(filter(None, side))) for side in found]
    both = digests[0], digests[1]
    if any(len(side) > 1 for side in both):
        return CodeComparison(
            "varies", "the runs of a side were not all made by the same code", both
        )
    is_same = both[0] == both[1]
    try:
        one, two = (_read(side[0], texts=not is_same) for side in (before, after))
    except (ArtifactNotFoundError, ArtifactDamagedError) as error:
        return CodeComparison("same" if is_same else "digests", str(error), both)
    changes = () if is_same else compare_sources(one.files, two.files, cache)
    return CodeComparison(
        "same" if is_same else "changed", "", both, changes, (one, two), _list_unseen(one, two)
    )


def _read(run: CodeHolder, *, texts: bool) -> KeptSources:
    run_id = str(run.stored.run.id)
    if run.reader is None:
        raise ArtifactNotFoundError(f"run {run_id}: nothing of it can be read back")
    return read_sources(run.reader, run_id, texts=texts)


def _compare_commits(before: Sequence[CodeHolder], after: Sequence[CodeHolder]) -> CodeComparison:
    """Without sources one commit of git with nothing beside it is one code."""
    everyone = [run.stored for run in (*before, *after)]
    commits = {_find_commit(run) for run in everyone}
    if len(commits) == 1 and None not in commits:
        return CodeComparison("same", "by the commit of git")
    lacking = dict.fromkeys(str(run.run.id) for run in everyone if run.digests.code is None)
    named = ", ".join(list(lacking)[:_MOST_NAMED]) + (" …" if len(lacking) > _MOST_NAMED else "")
    which = f"run {named} has" if len(lacking) == 1 else f"runs {named} have"
    return CodeComparison("unknown", f"{which} kept no sources")


def _find_commit(run: StoredRun) -> str | None:
    """The commit of a run that had nothing beside it, or None."""
    environment = {} if run.environment is None else run.environment.values
    git = environment.get("git") or {}
    return git.get("commit") if git.get("dirty") is False else None


def _list_unseen(one: KeptSources, two: KeptSources) -> tuple[tuple[str, str], ...]:
    """Place and words of what code there was that nobody has kept."""
    found = []
    outside = sorted({*one.outside, *two.outside})
    if outside:
        named = ", ".join(outside[:_MOST_NAMED]) + (" …" if len(outside) > _MOST_NAMED else "")
        found.append(
            ("outside", f"imported from outside of the project, which is not kept: {named}")
        )
    altered = sorted({*one.changed, *two.changed})
    found += [(path, "was altered while a run went on") for path in altered]
    return tuple(found)


def list_code_changes(code: CodeComparison) -> tuple[ChangeDiff, ...]:
    """What differs in the code as changes of a comparison, whose primary came after."""
    if code.manner == "digests":
        shown = [side[0][:_SHOWN_DIGITS] for side in code.digests]
        return (ChangeDiff("code", SOURCES, "changed", shown[1], shown[0]),)
    if code.manner == "varies":
        lists = [[digest[:_SHOWN_DIGITS] for digest in side] for side in code.digests]
        return (
            ()
            if lists[0] == lists[1]
            else (ChangeDiff("code", SOURCES, "varies", lists[1], lists[0]),)
        )
    return tuple(
        _tell(change, code.sources) for change in code.changes if change.is_logic and code.sources
    )


def _tell(change: CodeChange, sources: tuple[KeptSources, KeptSources]) -> ChangeDiff:
    before = sources[0].find(change.before_path or change.path)
    after = sources[1].find(change.path)
    shown = [None if each is None else each.sha256[:_SHOWN_DIGITS] for each in (before, after)]
    words = change.describe().removeprefix(f"{change.place} ")
    if change.kind == "added":
        return ChangeDiff("code", change.place, "added", f"{words}, file {shown[1]}", None)
    if change.kind == "removed":
        return ChangeDiff("code", change.place, "removed", None, f"file {shown[0]}")
    return ChangeDiff(
        "code", change.place, "changed", f"{words}, file {shown[1]}", f"file {shown[0]}"
    )
