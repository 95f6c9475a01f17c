"""What differs in the data of two sides, as far as fingerprints were noted of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quark.analysis.explanation.differences import Difference, Findings
from quark.analysis.explanation.results import ABSENT, Parting, PartingManner, Remark
from quark.analysis.explanation.sides import ExplainedRun
from quark.analysis.explanation.traits import is_incidental
from quark.provenance.fingerprint_comparison import (
    FingerprintComparison,
    compare_fingerprints,
)
from quark_core.records.kinds.provenance import FingerprintRecord

_UNRECORDED = "no fingerprint of the data was noted: session.fingerprint_data, quark.watch_data"
_STREAM = "stream"
_SAMPLES = "samples of "
_ORDER = "order"
_SHOWN_DIGEST = 12
_UNEXPLAINED = (
    "the batches differ ({}), the data do not: an environment variable, a seed or an order that "
    "was not recorded may be the cause"
)


def compare_data(before: Sequence[ExplainedRun], after: Sequence[ExplainedRun]) -> Findings:
    """Hold the data's fingerprints against each other, of the first run of each side.

    Equal data are ruled out only where all of them were looked at.
    """
    sides = [_take(side[0], "data") for side in (before, after)]
    if not sides[0] or not sides[1]:
        return Findings(unknown=(Remark("data", "", _UNRECORDED),))
    found, ruled_out, unknown = [], [], []
    for comparison in compare_fingerprints(*sides):
        if comparison.is_ruled_out:
            ruled_out.append(Remark("data", _name(comparison), comparison.words))
        elif comparison.verdict in ("same", "unknown"):
            words = comparison.words
            if comparison.verdict == "same":
                words = f"{words}, which is not all of it"
            unknown.append(Remark("data", _name(comparison), words))
        else:
            found.append(_make(comparison, sides))
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
        words = f"{of.words}, and so were the samples that came"
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
    remarks = [Remark("data", each.place, _UNEXPLAINED.format(each.words)) for each in unexplained]
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
    parting: Parting, before: Sequence[ExplainedRun], after: Sequence[ExplainedRun]
) -> Parting:
    """The parting, with outputs that part sooner than any metric."""
    sides = [_take(side[0], "output") for side in (before, after)]
    if len(before) > 1 or len(after) > 1 or not sides[0] or not sides[1]:
        return parting
    apart = [
        each
        for each in compare_fingerprints(*sides)
        if each.verdict in ("rounding", "different", "other_form") and each.step is not None
    ]
    first = min(apart, key=lambda each: each.step or 0, default=None)
    if first is None or first.step is None:
        return parting
    if parting.step is not None and parting.step <= first.step:
        return parting
    words = f"the output {first.key} parts at step {first.step}: {first.words}"
    if parting.step is not None:
        words += f"; {parting.summary}"
    manner: PartingManner = "rounding" if first.verdict == "rounding" else "later"
    if first.step == 0 and manner == "later":
        manner = "at_once"
    return Parting(
        manner, first.step, "step", None, parting.equal_points, None, parting.step, words
    )


def _take(run: ExplainedRun, subject: str) -> list[FingerprintRecord]:
    return [record for record in run.fingerprints if record.subject == subject]


def _make(
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
