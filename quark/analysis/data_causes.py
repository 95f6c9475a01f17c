"""What was fed where a fault set in: batches that are broken or odd, and data that changed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from quark.analysis.curves import Curve, spread
from quark.analysis.figures import (
    Source,
    at_step,
    measure,
    measure_before,
    measure_source,
    read_source,
    say,
)
from quark.analysis.histories import LayerHistory
from quark.analysis.observations import observe
from quark.analysis.onset import Cause, Onset

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
    broken = measure(run, "activation", first.name, "value", field, first=step, last=step).whole
    yield Cause(
        kind="batch",
        text=say(
            "The batch at step {step} held {what} values: {name}, the first layer, gives {count} "
            "of them.",
            step=at_step(step), what="NaN" if field == "nan_count" else "infinite",
            name=first.name, count=broken,
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
        steps, values = read_source(run, source)
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
        common = measure_before(run, source, step)
        own = measure_source(run, source, "highest", first=step, last=step)
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
            before = measure_before(run, source, step)
            after = measure_source(run, source, "value", first=step, last=step)
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
