"""Why a fault set in: what changed in the data and the config where it did.

Rules say what goes wrong; here the learning rate, weight decay, clipping, the
loss's scale, batches and data are read for why. A cause is told only where it
changed at the onset, or holds throughout, and could bring the fault about.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import SMALLEST, Curve, LayerHistory, spread
from quark.analysis.metric_roles import find_learning_rate
from quark.analysis.observations import (
    Figure,
    Source,
    Text,
    at_step,
    combine_norms,
    keep_figures,
    observe,
    say,
)
from quark.analysis.rule import Finding
from quark_core.records.kinds.findings import EvidenceRecord

CauseKind = Literal[
    "learning_rate", "weight_decay", "gradient_clipping", "loss_scale", "batch", "data"
]

_WINDOW_PART, _LEAST_WINDOW = 20, 10  # a twentieth of the run, and steps, before an onset


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What changed, or holds throughout, and brings a finding about.

    Attributes:
        kind: What it is a change of.
        text: One sentence, with its figures.
        check: What to do about it, in one sentence.
        evidence: The records that show it.
    """

    kind: CauseKind
    text: Text
    check: str
    evidence: EvidenceRecord


@dataclass(frozen=True)
class Onset:
    """Where a finding set in.

    Attributes:
        case: The run.
        rule_id: The rule that found it.
        finding: What it found.
        step: Its first step.
    """

    case: Case
    rule_id: str
    finding: Finding
    step: int

    @property
    def first(self) -> int:
        """The earliest step at which a change may have brought it about."""
        run = self.case.run
        window = max(_LEAST_WINDOW, (run.last_step or 0) // _WINDOW_PART, 2 * self.probe_gap)
        return max(0, self.step - window)

    @property
    def last(self) -> int:
        """The latest one: a change shows in the step that it is made at, or at the next probe."""
        return self.step + max(1, self.probe_gap if self.case.run.parameters else 0)

    @property
    def probe_gap(self) -> int:
        """Steps from probe to probe, 0 where nothing was probed."""
        steps = self.case.run.probe_steps
        return int(np.median(np.diff(steps))) if len(steps) > 1 else 0


_NEAR_STEPS = 2  # before an onset: a bad batch acts at once
_ODD = 4.0  # times what batches had before
_LEAST_BEFORE = 5  # batches that say what is usual
_DEVIATIONS = 10.0  # of a figure of the data, beyond which it has changed
_LEAST_CHANGE = 0.5  # of its level
_MOST_SAMPLES, _SAMPLE_CHARACTERS = 5, 40
_DATA = re.compile(r"(^|/)(data|input|inputs|batch|features|pixels|tokens)([/_.]|$)")
_NO_DATA = re.compile(r"time|_ms$|_s$|loss|size")


def find_broken_batch(onset: Onset) -> Iterator[Cause]:
    """A batch that held NaN or infinite values.

    The first layer shows it: it has no weights, or they are known to have been finite, or what is
    not finite are all units of some samples, where broken weights would break some units of all.
    """
    run = onset.case.run
    layers = [item for item in run.activations.values() if len(item)]
    holders = {item.module_name for item in run.parameters.values()}
    if not layers:
        return
    first = min(layers, key=lambda item: item.order)
    count = np.nan_to_num(first["nan_count"]) + np.nan_to_num(first["inf_count"])
    rows = np.flatnonzero(count > 0)
    if not len(rows) or not onset.first <= int(first.step[rows[0]]) <= onset.last:
        return
    row, step = int(rows[0]), int(first.step[rows[0]])
    if row == 0 and len(rows) == len(first):
        return
    is_sample = _are_whole_samples(onset, first, row)
    if first.name in holders and not is_sample and not _were_weights_finite(onset, step):
        return
    field = "nan_count" if first["nan_count"][row] > 0 else "inf_count"
    broken = onset.case.measure("activation", first.name, "value", field, first=step, last=step)
    yield Cause(
        kind="batch",
        text=say(
            "The batch at step {step} held {what} values: {name}, the first layer, gives {count} "
            "of them.",
            step=at_step(step), what="NaN" if field == "nan_count" else "infinite",
            name=first.name, count=broken.whole,
        ),
        check="Look at the samples of this batch and at what prepares them.",
        evidence=observe("layer", first.name, "values of its output that are not finite",
                         broken.value, 0.0, step),
    )  # fmt: skip


def _are_whole_samples(onset: Onset, first: LayerHistory, row: int) -> bool:
    """Whether values that are not finite are those of single samples, and not of single units."""
    bias = onset.case.run.parameters.get(f"{first.name}.bias")
    loss = onset.case.train_loss
    step = int(first.step[row])
    if bias is None or (loss is not None and not np.isfinite(loss.value[loss.step < step]).all()):
        return False
    units = int(np.nan_to_num(bias["element_count"])[0])
    elements = int(first["element_count"][row])
    count = int(np.nan_to_num(first["nan_count"][row]) + np.nan_to_num(first["inf_count"][row]))
    if units <= 1 or elements <= units or not 0 < count < elements:
        return False
    return count % units == 0 and count % (elements // units) != 0


def _were_weights_finite(onset: Onset, step: int) -> bool:
    """Whether the weights that a step began with are known to have been finite.

    They were seen right before it, or they are so after it.
    """
    seen = False
    for item in onset.case.run.parameters.values():
        near = (item.step == step - 1) | (item.step == step)
        counts = np.nan_to_num(item["non_finite_value_count"][near])
        if len(counts) and counts[0] > 0:
            return False
        seen |= bool(len(counts))
    return seen


def find_odd_batch(onset: Onset) -> Iterator[Cause]:
    """A batch that differs from those before it: its loss, its longest sequence, its size."""
    run = onset.case.run
    if not run.batches.count:
        return
    for field, words in (
        ("loss", "a loss"), ("sequence_lengths", "a sequence"), ("batch_size", "a size"),
    ):  # fmt: skip
        source = Source("batch", "", field)
        steps, values = onset.case.read(source)
        near = np.flatnonzero((steps >= onset.step - _NEAR_STEPS) & (steps <= onset.step + 1))
        before = values[(steps < onset.step - _NEAR_STEPS) & np.isfinite(values)]
        if not len(near) or len(before) < _LEAST_BEFORE:
            continue
        usual = float(np.median(before))
        bad = near[~np.isfinite(values[near])] if field == "loss" else near[:0]
        worst = int(bad[0]) if len(bad) else int(near[int(np.nanargmax(values[near]))])
        step = int(steps[worst])
        is_odd = field == "loss" and not np.isfinite(values[worst])
        if not is_odd and not (usual > 0 and values[worst] >= _ODD * usual):
            continue
        named = _name_samples(onset, step)
        common = onset.case.measure_before(source, step)
        own = onset.case.measure_source(source, "highest", first=step, last=step)
        what = (
            say("a loss that is not finite")
            if is_odd
            else say("{words} of {own}", words=words, own=own)
        )
        yield Cause(
            kind="batch",
            text=say("The batch at step {step} had {what}, those before it of {common} "
                     "(median){named}.", step=at_step(step), what=what, common=common,
                     named=say("; its samples: {ids}", ids=named) if named else say("")),
            check="Look at the samples of this batch.",
            evidence=observe("batch", field, say("{words} of that batch", words=words), own.value,
                             common.value, step),
        )  # fmt: skip
        return


def find_changed_data(onset: Onset) -> Iterator[Cause]:
    """A logged figure of the data that left its level at the onset."""
    run = onset.case.run
    for key, curve in run.metrics.items():
        named = _DATA.search(key.lower()) and not key.startswith("system/")
        if named and not _NO_DATA.search(key.lower()) and curve.unit == "step":
            step = _find_shift(onset, curve.finite)
            if step is None:
                continue
            source = Source("metric", key, "value")
            before = onset.case.measure_before(source, step)
            after = onset.case.measure_source(source, "value", first=step, last=step)
            yield Cause(
                kind="data",
                text=say("The data changed: {key} went from {before} to {after} at step {step}.",
                         key=key, before=before, after=after, step=at_step(step)),
                check="Look at what the loader gives from that step on.",
                evidence=observe("metric", key, "after the change", after.value, before.value,
                                 step),
            )  # fmt: skip
            return


def _find_shift(onset: Onset, curve: Curve) -> int | None:
    """The first step near the onset at which a figure is far out of its level before."""
    before = curve.value[curve.step < onset.first]
    if len(before) < _LEAST_BEFORE:
        return None
    level = float(np.median(before))
    least = max(_DEVIATIONS * spread(before), _LEAST_CHANGE * abs(level))
    near = (curve.step >= onset.first) & (curve.step <= onset.last)
    rows = np.flatnonzero(near & (np.abs(curve.value - level) > least))
    return int(curve.step[rows[0]]) if len(rows) else None


def _name_samples(onset: Onset, step: int) -> str:
    """The ids of the samples of a batch, as many as a text can hold; empty where not known."""
    rows = onset.case.run.batches
    places = np.flatnonzero(rows["step"] == step)
    ids = rows["sample_ids"][int(places[0])] if len(places) else None
    return ", ".join(str(item)[:_SAMPLE_CHARACTERS] for item in (ids or ())[:_MOST_SAMPLES])


Floats = NDArray[np.float64]

_JUMP = 3.0  # times, from one point to the next: no usual schedule rises so fast
_FALL = 0.2  # likewise downward, of what stalls
_GROWN, _STILL_GROWS = 10.0, 1.2  # times since its lowest, and within the window
_CLEARLY = 2.0  # times another change, to be told in its place
_NOTHING = 1e-7  # a rate below it moves no weight in float32
_SHRUNK = 0.5  # of a weight's norm that is left
_DECAYED = 0.35  # rate times decay times steps: a third of a weight is gone by it
_DECAY_LEAST = 1e-12  # in place of a decay of nothing
_STEADY = 0.01  # by which norms that were clipped to one limit differ
_CLIPPED_SHARE, _LEAST_PROBES = 0.8, 5  # of the probes that have that norm
_SCALE_FALL = 0.13  # of a loss's scale: three overflows
_ADAPTIVE = ("Ada", "NAdam", "RAdam", "RMS", "Lion", "Sparse")  # the size does not matter to them
_SKIPPED = 0.3  # share of the steps

_CLIP = re.compile(r"clip(ped|ping)?[_-]?(frac|fraction|share|ratio|rate)$")
_SCALE = re.compile(r"(loss|grad|gradient|amp)[/_-]?scaler?$|(^|/)scaler?$")


@dataclass(frozen=True)
class _Change:
    """Two neighbouring values of a setting, and their steps."""

    source: Source
    before: int
    at: int
    size: float


def find_raised_rate(onset: Onset) -> Iterator[Cause]:
    """A learning rate that jumped at the onset, or had grown tenfold by then and still grew."""
    sources = _list_settings(onset.case, "learning_rate")
    change = _find_change(onset, sources, rises=True)
    check = "Look at what sets the learning rate there: schedule, warm-up, parameter groups."
    if change is not None:
        yield _tell_change(onset, change, "learning_rate", "learning rate", check)
        return
    for source in sources:
        steps, values = _read_known(onset, source, onset.last)
        if len(values) < 2 or not values.min() > 0:
            continue
        now, near = float(values[-1]), values[steps >= onset.first]
        lowest = int(np.argmin(values))
        if now >= _GROWN * values[lowest] and now > _STILL_GROWS * float(near[0]):
            change = _Change(source, int(steps[lowest]), int(steps[-1]), now / values[lowest])
            yield _tell_change(onset, change, "learning_rate", "learning rate", check)
            return


def find_lowered_rate(onset: Onset) -> Iterator[Cause]:
    """A learning rate that fell to a fifth and less at the onset, or is next to nothing."""
    sources = _list_settings(onset.case, "learning_rate")
    check = "Look at the schedule: it takes the rate away while there is something to learn."
    change = _find_change(onset, sources, rises=False)
    if change is not None:
        yield _tell_change(onset, change, "learning_rate", "learning rate", check)
        return
    for source in sources:
        _, values = _read_known(onset, source, None)
        if len(values) and float(values.max()) <= _NOTHING:
            highest = onset.case.measure_source(source, "highest")
            yield Cause(
                kind="learning_rate",
                text=say("The learning rate{where} is {never}{highest}{all}.",
                         where=_tell_where(source), highest=highest,
                         never=say("never above " if highest.value else ""),
                         all=say("" if highest.value else " throughout")),
                check="Raise the learning rate.",
                evidence=observe(source.kind, source.name, "highest learning rate",
                                 highest.value, _NOTHING),
            )  # fmt: skip
            return


def find_decay(onset: Onset) -> Iterator[Cause]:
    """A weight decay that jumped at the onset, or shrinks a weight to half and less."""
    sources = [
        item for item in _list_settings(onset.case, "weight_decay") if item.kind == "parameter"
    ]
    change = _find_change(onset, sources, rises=True, least=_DECAY_LEAST)
    check = "Lower the weight decay; leave biases and the scales of norms out of it."
    if change is not None:
        yield _tell_change(onset, change, "weight_decay", "weight decay", check)
        return
    run, worst, left = onset.case.run, "", _SHRUNK
    for name, item in run.parameters.items():
        norms = item["value_norm"]
        rates = item["learning_rate"] * item["weight_decay"]
        known = np.isfinite(norms) & np.isfinite(rates)
        if item.role != "weight" or known.sum() < 2 or not norms[known][0] > 0:
            continue
        steps = item.step[known]
        decayed = float(np.median(rates[known])) * float(steps[-1] - steps[0])
        remaining = float(norms[known][-1] / norms[known][0])
        if decayed >= _DECAYED and remaining < left:
            worst, left = name, remaining
    if not worst:
        return
    before = onset.case.measure("parameter", worst, "first value", "value_norm")
    after = onset.case.measure("parameter", worst, "value", "value_norm")
    rate = onset.case.measure("parameter", worst, "median", "learning_rate")
    decay = onset.case.measure("parameter", worst, "median", "weight_decay")
    yield Cause(
        kind="weight_decay",
        text=say(
            "Weight decay shrinks the weights: at a rate of {rate} a decay of {decay} takes "
            "{share} of them in each step, and the norm of {name} went from {before} to {after}.",
            rate=rate, decay=decay, share=(rate * decay).percent, name=worst, before=before,
            after=after,
        ),
        check=check,
        evidence=observe("parameter", worst, say("norm, {before} at first", before=before),
                         after.value, before.value),
    )  # fmt: skip


def find_clipping(onset: Onset) -> Iterator[Cause]:
    """Gradients that are clipped at nearly every step, by a logged share or by their norm."""
    run = onset.case.run
    for key, curve in run.metrics.items():
        if _CLIP.search(key.lower()) and len(curve.finite):
            share = onset.case.measure("metric", key, "median")
            if share.value >= _CLIPPED_SHARE:
                yield Cause(
                    kind="gradient_clipping",
                    text=say("{key} is {share} (median): gradients are clipped at nearly every "
                             "step.", key=key, share=share),
                    check="Raise the limit of the clipping to the usual norm of the gradients.",
                    evidence=observe("metric", key, "median share of clipped steps", share.value,
                                     _CLIPPED_SHARE),
                )  # fmt: skip
                return
    clipped = _find_clipped_norm(onset.case)
    if clipped is not None:
        norm, step = clipped
        yield Cause(
            kind="gradient_clipping",
            text=say("All gradients together have a norm of {norm} at step {step}, and the same "
                     "at nearly every probe: they are clipped to it.", norm=norm,
                     step=at_step(step)),
            check="Raise the limit of the clipping to the usual norm of the gradients.",
            evidence=observe("parameters", "gradient_norm", "norm of all gradients", norm.value),
        )  # fmt: skip


def find_loss_scale(onset: Onset) -> Iterator[Cause]:
    """A loss's scale that fell by overflows before the onset, or steps that were skipped."""
    run = onset.case.run
    for key, curve in run.metrics.items():
        if not _SCALE.search(key.lower()):
            continue
        known = curve.finite.between(None, onset.last)
        if len(known) < 2 or not known.value.max() > 0:
            continue
        top = int(np.argmax(known.value))
        if float(known.value[-1]) > _SCALE_FALL * float(known.value[top]):
            continue
        change = _Change(
            Source("metric", key, "value"), int(known.step[top]), int(known.step[-1]),
            float(known.value[top]) / max(float(known.value[-1]), SMALLEST),
        )  # fmt: skip
        yield _tell_change(
            onset, change, "loss_scale", "loss scale",
            "Numbers overflow: lower the rate, clip, or give this part a wider number format.",
        )  # fmt: skip
        return
    skipped = onset.case.measure_curve("skipped_step_count", "highest").whole
    steps = onset.case.measure_curve("skipped_step_count", "count")
    if skipped.value > _SKIPPED * max(steps.value, 1.0):
        yield Cause(
            kind="loss_scale",
            text=say("The optimizer skipped {skipped} steps of {steps} that were timed, for "
                     "overflows.", skipped=skipped, steps=steps),
            check="Numbers overflow at this scale of the loss: lower the scale or the rate.",
            evidence=observe("telemetry", "skipped_step_count", "skipped steps", skipped.value,
                             _SKIPPED * steps.value),
        )  # fmt: skip


def _list_settings(case: Case, field: str) -> list[Source]:
    """Where a setting is recorded: the metric of the rate, then one parameter of each course."""
    out = []
    curve = find_learning_rate(case.run.metrics) if field == "learning_rate" else None
    if curve is not None and curve.unit == "step":
        out.append(Source("metric", curve.key, "value"))
    seen: set[bytes] = set()
    for name, item in case.run.parameters.items():
        course = item[field].tobytes() + item.step.tobytes()
        if np.isfinite(item[field]).any() and course not in seen:
            seen.add(course)
            out.append(Source("parameter", name, field))
    return out


def _read_known(onset: Onset, source: Source, last: int | None) -> tuple[NDArray[np.int64], Floats]:
    """Finite values of a setting up to a step."""
    steps, values = onset.case.read(source)
    kept = np.isfinite(values)
    if last is not None:
        kept &= steps <= last
    return steps[kept], values[kept]


def _find_change(
    onset: Onset, sources: list[Source], *, rises: bool, least: float = SMALLEST
) -> _Change | None:
    """The largest change from one value to the next at the onset; None where all are small."""
    best: _Change | None = None
    for source in sources:
        steps, values = _read_known(onset, source, onset.last)
        for row in np.flatnonzero(steps >= onset.first).tolist():
            # A warm-up begins at nothing: what it rises from is no setting.
            if row == 0 or (values[row - 1] <= 0 and least == SMALLEST):
                continue
            grown = max(float(values[row]), least) / max(float(values[row - 1]), least)
            size = grown if rises else 1.0 / grown
            # What is shown at every step says best when it changed: it comes first.
            if size >= (_JUMP if rises else 1.0 / _FALL) and (
                best is None or size > _CLEARLY * best.size
            ):
                best = _Change(source, int(steps[row - 1]), int(steps[row]), size)
    return best


def _tell_change(onset: Onset, change: _Change, kind: CauseKind, words: str, check: str) -> Cause:
    source = change.source
    before, after = (
        onset.case.measure_source(source, "value", first=step, last=step)
        for step in (change.before, change.at)
    )
    at = (
        say("at step {step}", step=at_step(change.at))
        if change.at - change.before <= 1
        else say("from step {before} to {at}", before=at_step(change.before),
                 at=at_step(change.at))
    )  # fmt: skip
    return Cause(
        kind=kind,
        text=say("The {words}{where} went from {before} to {after} {at}.", words=words,
                 where=_tell_where(source), before=before, after=after, at=at),
        check=check,
        evidence=observe(source.kind, source.name, f"{words} after the change",
                         after.value, before.value, change.before, change.at),
    )  # fmt: skip


def _tell_where(source: Source) -> Text:
    if source.kind == "metric":
        return say(" ({key})", key=source.name)
    return say(" of {name}", name=source.name)


def _find_clipped_norm(case: Case) -> tuple[Figure, int] | None:
    """The norm of all gradients together and a step that has it, where nearly all probes do."""
    trained = {
        name: item
        for name, item in case.run.parameters.items()
        if np.nan_to_num(item["gradient_norm"]).any()
    }
    if any((item.optimizer or "").startswith(_ADAPTIVE) for item in trained.values()):
        return None
    squares: dict[int, float] = {}
    for item in trained.values():
        for step, norm in zip(item.step.tolist(), item["gradient_norm"].tolist(), strict=True):
            squares[step] = squares.get(step, 0.0) + norm * norm
    norms = np.sqrt(np.array(list(squares.values())))
    if len(norms) < _LEAST_PROBES or not np.median(norms) > 0:
        return None
    is_near = np.abs(norms - np.median(norms)) <= _STEADY * np.median(norms)
    if is_near.mean() < _CLIPPED_SHARE:
        return None
    step = list(squares)[int(np.flatnonzero(is_near)[-1])]
    parts = [
        case.measure("parameter", name, "value", "gradient_norm", first=step, last=step)
        for name in trained
    ]
    known = [part for part in parts if np.isfinite(part.value)]
    return combine_norms(known), step


_BREAKS = (
    "exploding_gradients", "divergence", "loss_spike", "non_finite_values", "activation_collapse",
    "update_ratio",
)  # fmt: skip
_STALLS = (
    "plateau", "vanishing_gradients", "stagnant_layers", "activation_collapse", "update_ratio",
    "optimizer_not_stepping", "mostly_frozen",
)  # fmt: skip

_LOOKS: Sequence[tuple[Callable[[Onset], Iterator[Cause]], tuple[str, ...]]] = (
    (find_broken_batch, _BREAKS),
    (find_raised_rate, _BREAKS),
    (find_lowered_rate, _STALLS),
    (find_decay, (*_STALLS, *_BREAKS)),
    (find_clipping, _STALLS),
    (find_loss_scale, (*_STALLS, *_BREAKS)),
    (find_odd_batch, _BREAKS),
    (find_changed_data, (*_BREAKS, "constant_inputs", "overfitting_onset")),
)
"""What is looked for, the surest first, and the rules whose findings it may bring about."""

_MOST_TOLD = 2


def find_causes(
    case: Case, rule_id: str, finding: Finding, step: int | None = None
) -> tuple[Cause, ...]:
    """What brought a finding about, the surest first; empty where nothing says.

    Args:
        case: The run.
        rule_id: The rule that found it.
        finding: What it found.
        step: Where it, or what follows from it, set in; by default its own first step.
    """
    begin = finding.step if step is None else step
    if begin is None:
        return ()
    onset = Onset(case, rule_id, finding, begin)
    found = [cause for look, rules in _LOOKS if rule_id in rules for cause in look(onset)]
    return tuple({cause.kind: cause for cause in reversed(found)}.values())[::-1]


def explain_finding(case: Case, rule_id: str, finding: Finding, step: int | None = None) -> Finding:
    """The finding with what brought it about in its texts and its evidence; see `find_causes`."""
    causes = find_causes(case, rule_id, finding, step)[:_MOST_TOLD]
    if not causes:
        return finding
    fact, check = keep_figures(finding.fact), keep_figures(finding.suggested_check)
    for cause in causes:
        fact = say("{fact} {cause}", fact=fact, cause=cause.text)
    for cause in reversed(causes):
        check = say("{first} {check}", first=keep_figures(cause.check), check=check)
    return replace(
        finding,
        fact=fact,
        suggested_check=check,
        evidence=(*finding.evidence, *(cause.evidence for cause in causes)),
        causes=tuple(cause.kind for cause in causes),
    )
