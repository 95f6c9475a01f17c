"""What differs between two sides, what is known to be the same, and what nobody knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quark.analysis.explanation.results import ABSENT, CauseKind, Remark
from quark.analysis.explanation.traits import (
    CODE_PLACE,
    INSTALLED,
    Place,
    RunTraits,
    encode_value,
    is_redacted,
)

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
    "seed": "no seed is in the configuration",
    "config": "no configuration was recorded",
    "code": "the sources were not kept",
    "launch": "how it was launched was not recorded",
    "switch": "no library was loaded whose switches are recorded",
    "package": "which packages were imported was not recorded",
    "hardware": "the machine was not recorded",
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
    ruled_out: tuple[Remark, ...] = ()
    unknown: tuple[Remark, ...] = ()


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
    remarks = [Remark(each.kind, each.place, "differs, but no run has read it") for each in unread]
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
    unknown: list[Remark] = []
    unused: list[str] = []
    for place in places:
        difference = _compare(place, before, after)
        if difference is not None and kind == "package" and place[1] in absent:
            if not _have_same_packages(everyone):
                unknown.append(Remark(kind, place[1], "imported on one side only"))
        elif difference is None:
            if any(is_redacted(run.values.get(place)) for run in everyone):
                unknown.append(Remark(kind, place[1], "a secret, whose value is not kept"))
        elif _is_missing(place, everyone):
            unknown.append(Remark(kind, place[1], "recorded on one side only"))
        elif kind == "package" and _is_unused(place[1], everyone):
            unused.append(place[1])
        else:
            found.append(_annotate(difference, everyone))
    if unused:
        words = "differs, and no run has imported it"
        unknown += [Remark(kind, name, words) for name in unused]
    if not all(kind in run.known for run in everyone):
        return Findings(tuple(found), (), (Remark(kind, "", _UNRECORDED[kind]), *unknown))
    if found or unknown or kind == "code":
        return Findings(tuple(found), (), tuple(unknown))
    return Findings((), (Remark(kind, "", _describe_same(kind, places, before)),), ())


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
        "hardware": "what is recorded of the machine is the same",
        "launch": "launched the same way",
    }
    return words.get(kind, "the same on both sides")
