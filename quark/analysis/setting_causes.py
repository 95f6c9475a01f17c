"""Settings of the optimizer that changed where a fault set in, or were wrong throughout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.case import Case
from quark.analysis.curves import SMALLEST
from quark.analysis.figures import (
    Figure,
    Source,
    Text,
    at_step,
    combine_norms,
    measure,
    measure_curve,
    measure_source,
    read_source,
    say,
)
from quark.analysis.metric_roles import find_learning_rate
from quark.analysis.observations import observe
from quark.analysis.onset import Cause, CauseKind, Onset

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
            highest = measure_source(onset.case.run, source, "highest")
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
    before = measure(run, "parameter", worst, "first value", "value_norm")
    after = measure(run, "parameter", worst, "value", "value_norm")
    rate = measure(run, "parameter", worst, "median", "learning_rate")
    decay = measure(run, "parameter", worst, "median", "weight_decay")
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
            share = measure(run, "metric", key, "median")
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
    skipped = measure_curve(run, "skipped_step_count", "highest").whole
    steps = measure_curve(run, "skipped_step_count", "count")
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
    steps, values = read_source(onset.case.run, source)
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
    run, source = onset.case.run, change.source
    before, after = (
        measure_source(run, source, "value", first=step, last=step)
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
        measure(case.run, "parameter", name, "value", "gradient_norm", first=step, last=step)
        for name in trained
    ]
    known = [part for part in parts if np.isfinite(part.value)]
    return combine_norms(known), step
