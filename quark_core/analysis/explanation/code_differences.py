"""What differs in the sources of two sides, function by function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quark_core.analysis.explanation.differences import Difference, Findings
from quark_core.analysis.explanation.results import Remark
from quark_core.analysis.explanation.sides import ExplainedRun
from quark_core.analysis.explanation.traits import CODE_PLACE
from quark_core.errors import ArtifactDamagedError, ArtifactNotFoundError
from quark_core.provenance.code_changes import CodeChange, compare_sources
from quark_core.provenance.code_fingerprints import (
    MODULE_UNIT,
    FingerprintCache,
    ModuleFingerprint,
    fingerprint_modules,
)
from quark_core.provenance.code_reach import CodeReach
from quark_core.provenance.kept_sources import KeptSources, read_sources

if TYPE_CHECKING:
    from quark_core.records.kinds.provenance import FingerprintRecord

__all__ = ["compare_code"]

_MOST_MODULES = 1_000
_MOST_NAMED = 5
_PYTHON = ".py"


def compare_code(before: Sequence[ExplainedRun], after: Sequence[ExplainedRun]) -> Findings:
    """Hold the sources of two sides against each other; parses what differs, nothing else."""
    digests = [{run.stored.digests.code for run in side} for side in (before, after)]
    if None in digests[0] | digests[1]:
        return Findings()
    if any(len(side) > 1 for side in digests):
        return _tell_varied(digests)
    try:
        one, two = (
            read_sources(side[0].reader, side[0].run_id, texts=digests[0] != digests[1])
            for side in (before, after)
        )
    except (ArtifactNotFoundError, ArtifactDamagedError) as error:
        return _tell_digests(digests, str(error))
    if digests[0] == digests[1]:
        return _tell_same(one, two)
    return _tell_changes(one, two, before[0], after[0])


def _tell_varied(digests: Sequence[set[str | None]]) -> Findings:
    words = "the runs of a side were not all made by the same code"
    if digests[0] == digests[1]:
        return Findings(unknown=(Remark("code", CODE_PLACE, words),))
    shown = [sorted(map(str, side)) for side in digests]
    return Findings((Difference("code", CODE_PLACE, shown[0], shown[1], False, words=words),))


def _tell_digests(digests: Sequence[set[str | None]], reason: str) -> Findings:
    """Only digests are known."""
    if digests[0] == digests[1]:
        said = "one digest over all sources of the project"
        return Findings(ruled_out=(Remark("code", "", said),))
    (one,), (two,) = digests
    words = f"the sources differ, and no more is known: {reason}"
    return Findings((Difference("code", CODE_PLACE, one, two, words=words),))


def _tell_same(one: KeptSources, two: KeptSources) -> Findings:
    unknown = _list_unseen(one, two)
    if unknown:
        return Findings(unknown=unknown)
    count = len(one.files)
    return Findings(
        ruled_out=(
            Remark(
                "code", "", f"{count} file{'' if count == 1 else 's'}, all the same to the byte"
            ),
        )
    )


def _list_unseen(one: KeptSources, two: KeptSources) -> tuple[Remark, ...]:
    """What code there was that nobody has kept."""
    remarks = []
    outside = sorted({*one.outside, *two.outside})
    if outside:
        named = ", ".join(outside[:_MOST_NAMED]) + (" …" if len(outside) > _MOST_NAMED else "")
        words = f"imported from outside of the project, which is not kept: {named}"
        remarks.append(Remark("code", "outside", words))
    altered = sorted({*one.changed, *two.changed})
    remarks += [Remark("code", path, "was altered while a run went on") for path in altered]
    return tuple(remarks)


def _tell_changes(
    one: KeptSources, two: KeptSources, before: ExplainedRun, after: ExplainedRun
) -> Findings:
    cache = FingerprintCache()
    changes = compare_sources(one.files, two.files, cache)
    logic = [change for change in changes if change.is_logic]
    reach = _Reach((one, two), (before, after), cache) if len(logic) > 1 else None
    found = tuple(_make(change, one, two, reach) for change in logic)
    quiet = [change for change in changes if not change.is_logic]
    ruled_out = [
        Remark("code", change.place, change.describe())
        for change in quiet
        if change.kind == "cosmetic"
    ]
    # Functions elsewhere, under other names or in another order do what they did, as far as
    # nothing looks at where they are.
    unknown = [
        Remark("code", change.place, change.describe())
        for change in quiet
        if change.kind != "cosmetic"
    ]
    unseen = _list_unseen(one, two)
    if not found and not unknown and not unseen:
        ruled_out.append(Remark("code", "", "only comments or layout differ"))
    return Findings(found, tuple(ruled_out), (*unknown, *unseen))


def _make(
    change: CodeChange, one: KeptSources, two: KeptSources, reach: _Reach | None
) -> Difference:
    hashes = [
        None if source is None else source.sha256
        for source in (one.find(change.before_path or change.path), two.find(change.path))
    ]
    words = change.describe()
    words = words.removeprefix(f"{change.place} ") if change.name else words
    said = None if reach is None else reach.describe(change)
    return Difference(
        "code",
        change.place,
        hashes[0],
        hashes[1],
        words=words if said is None else f"{words}, {said}",
        is_aside=reach is not None and reach.misses(change),
        past=(CODE_PLACE, one.digest, two.digest),
    )


class _Reach:
    """Which functions what ran reaches, by name: from the main script, and from traced ones."""

    def __init__(
        self,
        sources: Sequence[KeptSources],
        runs: Sequence[ExplainedRun],
        cache: FingerprintCache,
    ) -> None:
        self._reached: set[tuple[str, str]] = set()
        self._traced: dict[tuple[str, str], set[str]] = {}
        self._is_whole = True
        for kept, run in zip(sources, runs, strict=True):
            self._add(kept, run, cache)

    def _add(self, kept: KeptSources, run: ExplainedRun, cache: FingerprintCache) -> None:
        texts = {
            file.path: file.text
            for file in kept.files
            if file.path.endswith(_PYTHON) and file.text is not None
        }
        if kept.main is None or kept.main not in texts or len(texts) > _MOST_MODULES:
            self._is_whole = False
            return
        modules = fingerprint_modules({path: text for path, text in texts.items() if text}, cache)
        reach = CodeReach(modules)
        self._reached |= {(place.path, place.name) for place in reach.find(kept.main, MODULE_UNIT)}
        for path, name, trace in _list_traced(modules, run.fingerprints):
            for place in reach.find(path, name):
                self._traced.setdefault((place.path, place.name), set()).add(trace)

    def describe(self, change: CodeChange) -> str | None:
        """By what a changed function is reached, or that nothing reaches it."""
        traced = sorted(self._traced.get(self._place(change), ()))
        if traced:
            return f"reached by {', '.join(traced[:_MOST_NAMED])}"
        return "nothing that ran reaches it by name" if self.misses(change) else None

    def misses(self, change: CodeChange) -> bool:
        """Whether a function is surely not called by the main script, on either side."""
        if not self._is_whole or not change.name or not change.path.endswith(_PYTHON):
            return False
        return self._place(change) not in self._reached

    @staticmethod
    def _place(change: CodeChange) -> tuple[str, str]:
        return change.path, change.name or MODULE_UNIT


def _list_traced(
    modules: dict[str, ModuleFingerprint], records: Iterable[FingerprintRecord]
) -> list[tuple[str, str, str]]:
    """Path, name and trace of each traced function."""
    known = {record.key for record in records if record.subject in ("code", "output")}
    return [
        (path, unit.name, trace)
        for path, module in modules.items()
        for trace, unit in module.find_traced().items()
        if trace in known or not known
    ]
