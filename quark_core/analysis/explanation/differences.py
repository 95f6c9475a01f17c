"""What differs between two sides, and what of it is known to be the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quark_core.analysis.explanation.results import ABSENT, CauseKind, Remark
from quark_core.analysis.explanation.sides import ExplainedRun
from quark_core.analysis.explanation.traits import Place, RunTraits, encode_value, is_redacted

__all__ = ["Difference", "Differences", "find_differences"]

_KINDS: tuple[CauseKind, ...] = (
    "seed",
    "data",
    "config",
    "code",
    "launch",
    "switch",
    "package",
    "hardware",
)
_UNRECORDED: dict[CauseKind, str] = {
    "seed": "no seed is in the configuration",
    "data": "no fingerprint of the data was recorded",
    "config": "no configuration was recorded",
    "code": "the sources were not kept, so that code may differ",
    "launch": "how it was launched was not recorded",
    "switch": "the libraries' switches were not recorded",
    "package": "the versions of packages were not recorded",
    "hardware": "the machine was not recorded",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs.

    Attributes:
        kind, place: Which.
        before, after: Its values; lists where the runs of a side differ.
        is_clean: Whether all runs of a side agree, and none has the other side's value.
        repeats: What says the same again.
        words: What is to be said of it besides, such as how many lines.
    """

    kind: CauseKind
    place: str
    before: Any
    after: Any
    is_clean: bool = True
    repeats: tuple[str, ...] = ()
    words: str = ""

    @property
    def key(self) -> Place:
        """Kind and place."""
        return self.kind, self.place


@dataclass(frozen=True, slots=True)
class Differences:
    """All of it.

    Attributes:
        found: What differs.
        ruled_out: What is known to be the same.
        unknown: What a side did not record.
    """

    found: tuple[Difference, ...]
    ruled_out: tuple[Remark, ...]
    unknown: tuple[Remark, ...]


def find_differences(before: Sequence[ExplainedRun], after: Sequence[ExplainedRun]) -> Differences:
    """Hold two sides against each other, by what they were made of and by their records.

    Seeds are left out where a side has several runs: they are what its runs differ in.
    """
    everyone = [*before, *after]
    found = _compare_traits([run.traits for run in before], [run.traits for run in after])
    return _rule_out_unread(found, [run.read_keys for run in everyone])


def _rule_out_unread(
    differences: Differences, reads: Sequence[Mapping[str, bool] | None]
) -> Differences:
    """A key of the configuration that no run has read is no cause, whatever it says."""
    if any(read is None for read in reads):
        return differences
    unread = [
        each
        for each in differences.found
        if each.kind in ("config", "seed")
        and not any(read.get(each.place, False) for read in reads if read is not None)
        and any(each.place in read for read in reads if read is not None)
    ]
    remarks = [
        Remark(each.kind, each.place, "differs, but neither run has read it") for each in unread
    ]
    return replace(
        differences,
        found=tuple(each for each in differences.found if each not in unread),
        ruled_out=(*differences.ruled_out, *remarks),
    )


def _compare_traits(before: Sequence[RunTraits], after: Sequence[RunTraits]) -> Differences:
    everyone = [*before, *after]
    several = len(before) > 1 or len(after) > 1
    found: list[Difference] = []
    unknown: list[Remark] = []
    ruled_out: list[Remark] = []
    for kind in _KINDS:
        places = sorted({place for run in everyone for place in run.values if place[0] == kind})
        is_known = all(kind in run.known for run in everyone)
        if kind == "seed" and several:
            continue
        told = len(found) + len(unknown)
        for place in places:
            difference = _compare(place, before, after)
            if difference is not None and _is_missing(place, everyone, is_known=is_known):
                unknown.append(Remark(kind, place[1], "recorded on one side only"))
            elif difference is not None:
                found.append(difference)
            elif any(is_redacted(run.values.get(place)) for run in everyone):
                unknown.append(Remark(kind, place[1], "a secret, whose value is not kept"))
        if not is_known:
            unknown.append(Remark(kind, "", _UNRECORDED[kind]))
        elif len(found) + len(unknown) == told:
            ruled_out.append(Remark(kind, "", _describe_same(kind, places, before)))
    return Differences(tuple(_add_repeats(found, everyone)), tuple(ruled_out), tuple(unknown))


def _is_missing(place: Place, runs: Sequence[RunTraits], *, is_known: bool) -> bool:
    """Whether a run lacks it and that may be because nobody wrote it down."""
    return not is_known and any(place not in run.values for run in runs)


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


def _add_repeats(found: Sequence[Difference], runs: Sequence[RunTraits]) -> list[Difference]:
    """Tell with each difference what only says it again."""
    out = []
    for difference in found:
        names = {
            name for run in runs for name, place in run.repeats.items() if place == difference.key
        }
        out.append(
            Difference(
                difference.kind,
                difference.place,
                difference.before,
                difference.after,
                difference.is_clean,
                (*difference.repeats, *sorted(names)),
                difference.words,
            )
        )
    return out


def _describe_same(kind: CauseKind, places: Sequence[Place], side: Sequence[RunTraits]) -> str:
    if kind == "seed" and places:
        value = side[0].values.get(places[0])
        return f"{msgspec.json.encode(value).decode()} on both sides"
    count = len(places)
    words = {
        "config": f"{count} keys, all of one value" if count else "no keys",
        "code": "all sources of the project that were kept are the same",
        "package": f"{count} packages, all of one version",
        "switch": f"{count} switches, all the same",
        "hardware": "what is recorded of the machine is the same",
        "launch": "launched the same way",
    }
    return words.get(kind, "the same on both sides")
