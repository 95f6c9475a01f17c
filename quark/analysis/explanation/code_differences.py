"""What differs in the sources of two sides, function by function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quark.analysis.comparison.code import CodeComparison, compare_code
from quark.analysis.explanation.differences import Difference, Findings
from quark.analysis.explanation.results import Remark
from quark.analysis.explanation.sides import ExplainedRun
from quark.analysis.explanation.traits import CODE_PLACE
from quark.provenance.code_changes import CodeChange
from quark.provenance.code_fingerprints import (
    MODULE_UNIT,
    FingerprintCache,
    ModuleFingerprint,
    fingerprint_modules,
)
from quark.provenance.code_reach import CodeReach
from quark.provenance.kept_sources import KeptSources

if TYPE_CHECKING:
    from quark_core.records.kinds.provenance import FingerprintRecord

_MOST_MODULES = 1_000
_MOST_NAMED = 5
_PYTHON = ".py"


def find_code_differences(
    before: Sequence[ExplainedRun], after: Sequence[ExplainedRun]
) -> Findings:
    """Hold the sources of two sides against each other; parses what differs, nothing else."""
    cache = FingerprintCache()
    code = compare_code(before, after, cache)
    unseen = tuple(Remark("code", place, words) for place, words in code.unseen)
    if code.manner == "unknown" or not code.digests[0]:
        return Findings()
    if code.manner == "varies":
        return _tell_varied(code)
    if code.manner == "digests":
        words = f"the sources differ, and no more is known: {code.reason}"
        (one,), (two,) = code.digests
        return Findings((Difference("code", CODE_PLACE, one, two, words=words),))
    if code.manner == "same":
        return Findings((), () if unseen else (Remark("code", "", _describe_same(code)),), unseen)
    assert code.sources is not None
    return _tell_changes(code, code.sources, unseen, (before[0], after[0]), cache)


def _tell_varied(code: CodeComparison) -> Findings:
    one, two = (list(side) for side in code.digests)
    if one == two:
        return Findings(unknown=(Remark("code", CODE_PLACE, code.reason),))
    return Findings((Difference("code", CODE_PLACE, one, two, False, words=code.reason),))


def _describe_same(code: CodeComparison) -> str:
    if code.sources is None:
        return "one digest over all sources of the project"
    count = len(code.sources[0].files)
    return f"{count} file{'' if count == 1 else 's'}, all the same to the byte"


def _tell_changes(
    code: CodeComparison,
    sources: tuple[KeptSources, KeptSources],
    unseen: tuple[Remark, ...],
    runs: Sequence[ExplainedRun],
    cache: FingerprintCache,
) -> Findings:
    logic = [change for change in code.changes if change.is_logic]
    reach = _Reach(sources, runs, cache) if len(logic) > 1 else None
    found = tuple(_make(change, *sources, reach) for change in logic)
    quiet = [change for change in code.changes if not change.is_logic]
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
