"""Differences between two groups of runs: config, code, data and environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quark.analysis.comparison.changes import CodeComparison, compare_code
from quark.analysis.explanation.results import (
    ABSENT,
    CauseKind,
    DivergenceManner,
    FirstDivergence,
    Note,
)
from quark.analysis.explanation.run_attributes import (
    CODE_PLACE,
    INSTALLED,
    ExplainedRun,
    Place,
    RunTraits,
    encode_value,
    is_incidental,
    is_redacted,
)
from quark.provenance.code_changes import CodeChange
from quark.provenance.code_fingerprints import (
    MODULE_UNIT,
    CodeReach,
    FingerprintCache,
    ModuleFingerprint,
    fingerprint_modules,
)
from quark.provenance.fingerprint_comparison import FingerprintComparison, compare_fingerprints
from quark.provenance.sources import SourceSnapshot
from quark_core.records import ConfigSnapshot
from quark_core.records.kinds.provenance import FingerprintRecord

_KINDS: tuple[CauseKind, ...] = (
    "seed",
    "config",
    "code",
    "launch",
    "switch",
    "package",
    "hardware",
)
_UNRECORDED: dict[CauseKind, str] = {
    "seed": "the config has no seed",
    "config": "no config was recorded",
    "code": "the sources were not stored",
    "launch": "the launch command was not recorded",
    "switch": "no library was loaded whose switches are recorded",
    "package": "the imported packages were not recorded",
    "hardware": "the hardware was not recorded",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs.

    Attributes:
        kind, place: Which.
        before, after: Its values; lists where the runs of a side differ.
        is_clean: Whether all runs of a side agree.
        repeats: What says the same again.
        words: What is to be said of it besides, such as how many lines.
        is_aside: Whether it has no business with the result: it is told last, as unlikely.
        may_follow: Whether it may be what the other differences brought about, as the batches
            that a loader gives.
        past: What history knows of it, where that is something else: a place of the same kind,
            and its values. Of functions it knows the digest over all sources.
    """

    kind: CauseKind
    place: str
    before: Any
    after: Any
    is_clean: bool = True
    repeats: tuple[str, ...] = ()
    words: str = ""
    is_aside: bool = False
    may_follow: bool = False
    past: tuple[str, Any, Any] | None = None

    @property
    def in_history(self) -> Difference:
        """The difference as other runs may have it."""
        if self.past is None:
            return self
        place, before, after = self.past
        return Difference(self.kind, place, before, after, self.is_clean)

    @property
    def key(self) -> Place:
        """Kind and place."""
        return self.kind, self.place


@dataclass(frozen=True, slots=True)
class Findings:
    """What holding two sides against each other has found.

    Attributes:
        found: What differs.
        ruled_out: What is known to be the same.
        unknown: What a side did not record.
    """

    found: tuple[Difference, ...] = ()
    ruled_out: tuple[Note, ...] = ()
    unknown: tuple[Note, ...] = ()


def join_findings(parts: Iterable[Findings]) -> Findings:
    """Several as one, in their order."""
    all_parts = list(parts)
    return Findings(
        tuple(each for part in all_parts for each in part.found),
        tuple(each for part in all_parts for each in part.ruled_out),
        tuple(each for part in all_parts for each in part.unknown),
    )


def compare_traits(before: Sequence[RunTraits], after: Sequence[RunTraits]) -> Findings:
    """Hold the traits of two sides against each other, sources left out: a digest says too little.

    Seeds are left out where a side has several runs: they are what its runs differ in.
    """
    several = len(before) > 1 or len(after) > 1
    kinds = [kind for kind in _KINDS if not (kind == "seed" and several)]
    return join_findings(_compare_kind(kind, before, after) for kind in kinds)


def rule_out_unread(findings: Findings, reads: Sequence[Mapping[str, bool] | None]) -> Findings:
    """A key of the configuration that no run has read is no cause, whatever it says."""
    if any(read is None for read in reads):
        return findings
    unread = [
        each
        for each in findings.found
        if each.kind in ("config", "seed")
        and not any(read.get(each.place, False) for read in reads if read is not None)
        and any(each.place in read for read in reads if read is not None)
    ]
    remarks = [Note(each.kind, each.place, "differs, but no run has read it") for each in unread]
    return replace(
        findings,
        found=tuple(each for each in findings.found if each not in unread),
        ruled_out=(*findings.ruled_out, *remarks),
    )


def _compare_kind(
    kind: CauseKind, before: Sequence[RunTraits], after: Sequence[RunTraits]
) -> Findings:
    everyone = [*before, *after]
    places = sorted(
        place
        for place in {place for run in everyone for place in run.values}
        if place[0] == kind and place != ("code", CODE_PLACE)
    )
    # Of a package that was imported late, or not at all, the version may not be written down.
    absent = {name for _, name in places if any((kind, name) not in run.values for run in everyone)}
    found: list[Difference] = []
    unknown: list[Note] = []
    unused: list[str] = []
    for place in places:
        difference = _compare(place, before, after)
        if difference is not None and kind == "package" and place[1] in absent:
            if not _have_same_packages(everyone):
                unknown.append(Note(kind, place[1], "imported on one side only"))
        elif difference is None:
            if any(is_redacted(run.values.get(place)) for run in everyone):
                unknown.append(Note(kind, place[1], "a secret, whose value is not stored"))
        elif _is_missing(place, everyone):
            unknown.append(Note(kind, place[1], "recorded on one side only"))
        elif kind == "package" and _is_unused(place[1], everyone):
            unused.append(place[1])
        else:
            found.append(_annotate(difference, everyone))
    if unused:
        words = "differs, and no run has imported it"
        unknown += [Note(kind, name, words) for name in unused]
    if not all(kind in run.known for run in everyone):
        return Findings(tuple(found), (), (Note(kind, "", _UNRECORDED[kind]), *unknown))
    if found or unknown or kind == "code":
        return Findings(tuple(found), (), tuple(unknown))
    return Findings((), (Note(kind, "", _describe_same(kind, places, before)),), ())


def _have_same_packages(runs: Sequence[RunTraits]) -> bool:
    """Whether all that was installed was the same: then so are versions that nobody wrote down."""
    installed = {encode_value(run.values.get(INSTALLED, ABSENT)) for run in runs}
    return len(installed) == 1 and INSTALLED in runs[0].values


def _is_missing(place: Place, runs: Sequence[RunTraits]) -> bool:
    """Whether a run lacks it perhaps only because nobody wrote it down."""
    section = next(run.origins[place] for run in runs if place in run.origins)
    return any(place not in run.values and not run.lacks(place, section) for run in runs)


def _compare(
    place: Place, before: Sequence[RunTraits], after: Sequence[RunTraits]
) -> Difference | None:
    sides = [
        {encode_value(value): value for value in (run.values.get(place, ABSENT) for run in side)}
        for side in (before, after)
    ]
    if sides[0].keys() == sides[1].keys():
        return None
    shown = [
        next(iter(side.values())) if len(side) == 1 else [side[text] for text in sorted(side)]
        for side in sides
    ]
    is_clean = len(sides[0]) == len(sides[1]) == 1
    return Difference(place[0], place[1], shown[0], shown[1], is_clean)


def _annotate(difference: Difference, runs: Sequence[RunTraits]) -> Difference:
    """Tell what only says it again."""
    names = {name for run in runs for name, place in run.repeats.items() if place == difference.key}
    return replace(difference, repeats=(*difference.repeats, *sorted(names)))


def _is_unused(place: str, runs: Sequence[RunTraits]) -> bool:
    if "." in place or place.startswith("python"):
        return place == "installed.digest"
    name = place.lower().replace("_", "-")
    return all(run.imported is not None and name not in run.imported for run in runs)


def _describe_same(kind: CauseKind, places: Sequence[Place], side: Sequence[RunTraits]) -> str:
    if kind == "seed" and places:
        value = side[0].values.get(places[-1])
        return f"{msgspec.json.encode(value).decode()} on both sides"
    count = len(places)
    words = {
        "config": "1 key, the same" if count == 1 else f"{count} keys, all the same",
        "package": f"{count} packages, all the same",
        "switch": f"{count} switches, all the same",
        "hardware": "the recorded hardware is the same",
        "launch": "launched the same way",
    }
    return words.get(kind, "the same on both sides")


def name_origins(
    findings: Findings,
    before: Sequence[ConfigSnapshot | None],
    after: Sequence[ConfigSnapshot | None],
) -> Findings:
    """Say of each setting what gave it its value, as far as all runs of a side agree on it.

    Args:
        findings: What differs.
        before, after: Configurations of the runs of either side.
    """
    sides = [_label(before), _label(after)]
    if not any(sides):
        return findings
    found = tuple(
        _tell(each, *(side.get(each.place) for side in sides))
        if each.kind in ("config", "seed")
        else each
        for each in findings.found
    )
    return replace(findings, found=found)


def _label(configs: Sequence[ConfigSnapshot | None]) -> dict[str, str]:
    """Setting -> what gave it its value, where all of these say the same."""
    told = [
        {key: chain[0].label for key, chain in config.group_origins().items()} if config else {}
        for config in configs
    ]
    first = told[0] if told else {}
    return {
        key: label for key, label in first.items() if all(each.get(key) == label for each in told)
    }


def _tell(difference: Difference, before: str | None, after: str | None) -> Difference:
    if before is None and after is None:
        return difference
    if before == after:
        said = f"by {after} on both sides"
    else:
        said = f"by {after or 'an unknown value'}, before by {before or 'an unknown value'}"
    words = f"{difference.words}; set {said}" if difference.words else f"set {said}"
    return replace(difference, words=words)


_MOST_MODULES = 1_000
_MOST_NAMED = 5
_PYTHON = ".py"


def find_code_differences(
    before: Sequence[ExplainedRun], after: Sequence[ExplainedRun]
) -> Findings:
    """Hold the sources of two sides against each other; parses what differs, nothing else."""
    cache = FingerprintCache()
    code = compare_code(before, after, cache)
    unseen = tuple(Note("code", place, words) for place, words in code.unseen)
    if code.manner == "unknown" or not code.digests[0]:
        return Findings()
    if code.manner == "varies":
        return _tell_varied(code)
    if code.manner == "digests":
        words = f"the sources differ, details unknown: {code.reason}"
        (one,), (two,) = code.digests
        return Findings((Difference("code", CODE_PLACE, one, two, words=words),))
    if code.manner == "same":
        return Findings(
            (),
            () if unseen else (Note("code", "", _describe_same_code(code)),),
            unseen,
        )
    assert code.sources is not None
    return _tell_changes(code, code.sources, unseen, (before[0], after[0]), cache)


def _tell_varied(code: CodeComparison) -> Findings:
    one, two = (list(side) for side in code.digests)
    if one == two:
        return Findings(unknown=(Note("code", CODE_PLACE, code.reason),))
    return Findings((Difference("code", CODE_PLACE, one, two, False, words=code.reason),))


def _describe_same_code(code: CodeComparison) -> str:
    if code.sources is None:
        return "one digest over all sources of the project"
    count = len(code.sources[0].files)
    return f"{count} file{'' if count == 1 else 's'}, all the same to the byte"


def _tell_changes(
    code: CodeComparison,
    sources: tuple[SourceSnapshot, SourceSnapshot],
    unseen: tuple[Note, ...],
    runs: Sequence[ExplainedRun],
    cache: FingerprintCache,
) -> Findings:
    logic = [change for change in code.changes if change.is_logic]
    reach = _Reach(sources, runs, cache) if len(logic) > 1 else None
    found = tuple(_make(change, *sources, reach) for change in logic)
    quiet = [change for change in code.changes if not change.is_logic]
    ruled_out = [
        Note("code", change.place, change.describe())
        for change in quiet
        if change.kind == "cosmetic"
    ]
    # Functions elsewhere, under other names or in another order do what they did, as far as
    # nothing looks at where they are.
    unknown = [
        Note("code", change.place, change.describe())
        for change in quiet
        if change.kind != "cosmetic"
    ]
    if not found and not unknown and not unseen:
        ruled_out.append(Note("code", "", "only comments or layout differ"))
    return Findings(found, tuple(ruled_out), (*unknown, *unseen))


def _make(
    change: CodeChange, one: SourceSnapshot, two: SourceSnapshot, reach: _Reach | None
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
        sources: Sequence[SourceSnapshot],
        runs: Sequence[ExplainedRun],
        cache: FingerprintCache,
    ) -> None:
        self._reached: set[tuple[str, str]] = set()
        self._traced: dict[tuple[str, str], set[str]] = {}
        self._is_whole = True
        for kept, run in zip(sources, runs, strict=True):
            self._add(kept, run, cache)

    def _add(self, kept: SourceSnapshot, run: ExplainedRun, cache: FingerprintCache) -> None:
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
        return "the code that ran does not refer to it" if self.misses(change) else None

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


_NO_DATA = "no fingerprint of the data was recorded: session.fingerprint_data, quark.watch_data"
_STREAM = "stream"
_SAMPLES = "samples of "
_ORDER = "order"
_SHOWN_DIGEST = 12
_UNEXPLAINED = (
    "the batches differ ({}), but the data do not: an environment variable, a seed or an order "
    "that was not recorded may be the cause"
)


def compare_data(before: Sequence[ExplainedRun], after: Sequence[ExplainedRun]) -> Findings:
    """Hold the data's fingerprints against each other, of the first run of each side.

    Equal data are ruled out only where all of them were looked at.
    """
    sides = [_take(side[0], "data") for side in (before, after)]
    if not sides[0] or not sides[1]:
        return Findings(unknown=(Note("data", "", _NO_DATA),))
    found, ruled_out, unknown = [], [], []
    for comparison in compare_fingerprints(*sides):
        if comparison.is_ruled_out:
            ruled_out.append(Note("data", _name(comparison), comparison.words))
        elif comparison.verdict in ("same", "unknown"):
            words = comparison.words
            if comparison.verdict == "same":
                words = f"{words}, which is only a part of it"
            unknown.append(Note("data", _name(comparison), words))
        else:
            found.append(_make_data_difference(comparison, sides))
    return Findings(_join_given(found), tuple(ruled_out), tuple(unknown))


def _join_given(found: Sequence[Difference]) -> tuple[Difference, ...]:
    """Tell samples with the data that they are of, where both differ: they are one cause.

    History has one digest of a key, the newest one: that of what came.
    """
    given = {each.place: each for each in found if not each.may_follow}
    out = {each.place: each for each in found}
    for place, of in given.items():
        came = out.get(f"{_SAMPLES}{place}")
        if came is None or came.before == _ORDER:
            continue
        words = f"{of.words}, and so were the samples"
        out[place] = replace(of, words=words, past=came.past, repeats=(*of.repeats, came.place))
        del out[came.place]
    return tuple(out.values())


def fold_streams(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """Tell batches that came in another order as what another seed does."""
    seeds = [each for each in differences if each.kind == "seed"]
    if not seeds:
        return tuple(differences)
    folded = [each for each in differences if each.may_follow and each.before == _ORDER]
    names = tuple(f"order of {each.place}" for each in folded)
    first = replace(seeds[0], repeats=(*seeds[0].repeats, *names))
    return tuple(first if each is seeds[0] else each for each in differences if each not in folded)


def set_unexplained_apart(findings: Findings) -> Findings:
    """Count batches that differ as unknown where nothing that is recorded can be their cause.

    Batches are made of data by code: where the data are known to be the same, they are what
    something else brought about. Another order says by itself that the data are the same.
    """
    origins = [each for each in findings.found if not each.may_follow and not each.is_aside]
    if any(not is_incidental(each.key) for each in origins):
        return findings
    unexplained = [
        each
        for each in findings.found
        if each.may_follow and (each.before == _ORDER or _has_same_data(each, findings))
    ]
    remarks = [Note("data", each.place, _UNEXPLAINED.format(each.words)) for each in unexplained]
    return replace(
        findings,
        found=tuple(each for each in findings.found if each not in unexplained),
        unknown=(*findings.unknown, *remarks),
    )


def _has_same_data(stream: Difference, findings: Findings) -> bool:
    """Whether the data that batches are of are known to be the same, or all data are."""
    same = {remark.place for remark in findings.ruled_out if remark.kind == "data"}
    if stream.place.removeprefix(_SAMPLES) in same:
        return True
    unsure = {remark.place for remark in findings.unknown if remark.kind == "data"}
    return any(not place.startswith(_SAMPLES) for place in same) and all(
        place.startswith(_SAMPLES) for place in unsure
    )


def include_outputs(
    divergence: FirstDivergence, before: Sequence[ExplainedRun], after: Sequence[ExplainedRun]
) -> FirstDivergence:
    """The divergence, with outputs that part sooner than any metric."""
    sides = [_take(side[0], "output") for side in (before, after)]
    if len(before) > 1 or len(after) > 1 or not sides[0] or not sides[1]:
        return divergence
    apart = [
        each
        for each in compare_fingerprints(*sides)
        if each.verdict in ("rounding", "different", "other_form") and each.step is not None
    ]
    first = min(apart, key=lambda each: each.step or 0, default=None)
    if first is None or first.step is None:
        return divergence
    if divergence.step is not None and divergence.step <= first.step:
        return divergence
    words = f"the output {first.key} diverges at step {first.step}: {first.words}"
    if divergence.step is not None:
        words += f"; {divergence.summary}"
    manner: DivergenceManner = "rounding" if first.verdict == "rounding" else "later"
    if first.step == 0 and manner == "later":
        manner = "at_once"
    return FirstDivergence(
        manner, first.step, "step", None, divergence.equal_points, None, divergence.step, words
    )


def _take(run: ExplainedRun, subject: str) -> list[FingerprintRecord]:
    return [record for record in run.fingerprints if record.subject == subject]


def _make_data_difference(
    comparison: FingerprintComparison, sides: Sequence[Sequence[FingerprintRecord]]
) -> Difference:
    is_stream = _is_stream(comparison)
    if comparison.verdict == "other_order":
        return Difference(
            "data", _name(comparison), _ORDER, "another order",
            words=comparison.words, may_follow=is_stream,
        )  # fmt: skip
    digests = [
        next((record.digest for record in side if _is_of(record, comparison)), ABSENT)
        for side in sides
    ]
    return Difference(
        "data",
        _name(comparison),
        digests[0][:_SHOWN_DIGEST],
        digests[1][:_SHOWN_DIGEST],
        words=comparison.words,
        may_follow=is_stream,
        past=(comparison.key, digests[0], digests[1]),
    )


def _name(comparison: FingerprintComparison) -> str:
    """What a reader tells it by: data that came may have the key of the file that they are of."""
    return f"{_SAMPLES}{comparison.key}" if _is_stream(comparison) else comparison.key


def _is_stream(found: FingerprintComparison | FingerprintRecord) -> bool:
    return found.level.startswith(_STREAM)


def _is_of(record: FingerprintRecord, comparison: FingerprintComparison) -> bool:
    """Whether this is the record of a side that the comparison has told different."""
    if record.key != comparison.key or _is_stream(record) != _is_stream(comparison):
        return False
    metadata: Mapping[str, Any] = record.metadata or {}
    place = metadata.get("pass") if _is_stream(record) else record.step
    return comparison.step is None or place == comparison.step
