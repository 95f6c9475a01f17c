"""The oracles of the second family: what each kind of fault must have done to count as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.diagnosis.families.second_evidence import Lesson, Trace, conduct
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth

if TYPE_CHECKING:
    from benchmarks.diagnosis.recorder import Recorder

Build = Callable[[Draw, bool], Lesson]
Judge = Callable[[Trace, Trace], Truth]

_BREAKAGE = (
    "exploding_gradients",
    "loss_spike",
    "divergence",
    "update_ratio",
    "non_finite_values",
    "activation_collapse",
    "plateau",
)
_SILENCE = ("vanishing_gradients", "stagnant_layers", "plateau", "update_ratio")


def _conduct_from_seed(build: Build, draw: Draw, faulty: bool, recorder: Recorder | None) -> Trace:
    # Init and batches of both twins come from the same numbers.
    torch.manual_seed(draw.torch_seed)
    return conduct(build(draw, faulty), recorder)


def fault(name: str, build: Build, judge: Judge) -> Scenario:
    """A scenario with the fault recorded and its twin trained beside it."""

    def train(recorder: Recorder, draw: Draw) -> Truth:
        trace = _conduct_from_seed(build, draw, True, recorder)
        return judge(trace, _conduct_from_seed(build, draw, False, None))

    return Scenario(name=f"second/{name}", kind="fault", train=train)


def sound(
    name: str,
    build: Callable[[Draw], Lesson],
    *,
    share: float = 0.8,
    phases_expected: tuple[str, ...] = (),
    rising: bool = False,
) -> Scenario:
    """A healthy scenario: by its end the noise-free loss is below `share` of the first.

    With `rising` the shown losses rise by design, so that phases are not judged.
    """

    def train(recorder: Recorder, draw: Draw) -> Truth:
        trace = conduct(build(draw), recorder)
        return judge_health(trace, share, phases_expected, rising=rising)

    return Scenario(name=f"second/healthy/{name}", kind="healthy", train=train)


def _side_effects(trace: Trace) -> tuple[str, ...]:
    """What is true of the run beside its fault: it may have been learned by heart as well."""
    held, trained = [*trace.held.values()], [*trace.trained.values()]
    if not np.isfinite(held).all() or len(trained) != len(held):
        return ()
    lowest = int(np.argmin(held))
    learned = trained[-1] < 0.95 * trained[lowest]
    return ("overfitting_onset",) if learned and trace.last > 1.03 * held[lowest] else ()


def _settle(
    confirmed: bool,
    rule: str,
    reason: str,
    trace: Trace,
    *,
    tolerated: tuple[str, ...] = (),
    culprits: tuple[str, ...] = (),
    onset: int | None = None,
    phases: tuple[str, ...] = (),
    forbidden: tuple[str, ...] = (),
) -> Truth:
    if not confirmed:
        return Truth(kind="unclear", reason=f"{rule} not confirmed: {reason}")
    return Truth(
        kind="fault",
        expected=(rule,),
        tolerated=tuple(other for other in (*tolerated, *_side_effects(trace)) if other != rule),
        culprits=culprits,
        onset_step=trace.lesson.onset if onset is None else onset,
        phases_expected=phases,
        phases_forbidden=forbidden,
        reason=reason,
    )


def _finite(values: list[float]) -> list[float]:
    return [value for value in values if np.isfinite(value)]


def judge_health(
    trace: Trace, share: float, phases: tuple[str, ...] = (), *, rising: bool = False
) -> Truth:
    """Healthy: all finite, learned, and the last loss near the best one."""
    first, last, best = trace.first, trace.last, trace.best
    spread = abs(first - best) + 1e-12
    learned = best <= first - (1 - share) * abs(first)
    kept = last <= best + 0.15 * spread and last <= best + 0.25 * abs(best) + 0.02 * spread
    reason = f"held-out loss {first:.4g} -> {last:.4g}, best {best:.4g}"
    if trace.first_bad_step is not None or not learned or not kept:
        return Truth(kind="unclear", reason=f"healthy not confirmed: {reason}")
    forbidden = () if rising else ("divergence", "overfitting_onset")
    return Truth(kind="healthy", phases_expected=phases, phases_forbidden=forbidden, reason=reason)


def _hurt(trace: Trace, twin: Trace, factor: float) -> bool:
    return not np.isfinite(trace.last) or trace.last > factor * twin.last


def judge_explosion(*culprits: str, factor: float = 10.0, from_start: bool = False) -> Judge:
    """Gradients grow by the factor after the onset, or over the twin's, and training suffers."""

    def judge(trace: Trace, twin: Trace) -> Truth:
        onset, steps = trace.lesson.onset, trace.lesson.steps
        after = trace.total_gradients(onset, steps)
        usual = twin.total_gradients(0, steps) if from_start else trace.total_gradients(0, onset)
        base = float(np.median(_finite(usual) or [np.nan]))
        known = _finite(after)
        # The ninth decile: an explosion lasts, one bad batch does not.
        high = float(np.quantile(known, 0.9)) if len(known) == len(after) else float("inf")
        confirmed = high > factor * base and _hurt(trace, twin, 1.3)
        return _settle(
            confirmed,
            "exploding_gradients",
            f"gradient norm {base:.3g} -> {high:.3g}, loss {trace.last:.3g} with the fault, "
            f"{twin.last:.3g} without",
            trace,
            tolerated=(*_BREAKAGE, "vanishing_gradients", "stagnant_layers"),
            culprits=culprits,
        )

    return judge


def judge_vanishing(near: str, far: str, *culprits: str, factor: float = 1e3) -> Judge:
    """The float64 gradient of `far` (from the loss) over that of `near` (or the last) is tiny."""

    def judge(trace: Trace, twin: Trace) -> Truth:
        last = near or [*trace.ladder][-1]
        ratio = trace.ladder[far] / (trace.ladder[last] + 1e-300)
        usual = twin.ladder[far] / (twin.ladder[last] + 1e-300)
        confirmed = ratio * factor < usual and ratio < 2e-3 and _hurt(trace, twin, 1.15)
        return _settle(
            confirmed,
            "vanishing_gradients",
            f"gradient of {far} over {last}: {ratio:.3g} against {usual:.3g} of the twin, loss "
            f"{trace.last:.3g} against {twin.last:.3g}",
            trace,
            tolerated=(*_SILENCE, "activation_collapse"),
            culprits=culprits,
        )

    return judge


def judge_stagnation(prefix: str, *culprits: str, zero: bool = False) -> Judge:
    """The weights under the prefix stand still since the onset; the twin's and the others move."""

    def judge(trace: Trace, twin: Trace) -> Truth:
        still, twins = trace.moved(prefix, "middle"), twin.moved(prefix, "middle")
        others = max(
            trace.moved(name, "middle") for name in trace.end if not name.startswith(prefix)
        )
        confirmed = still < 1e-6 and twins > 1e-2 and others > 1e-3
        return _settle(
            confirmed,
            "stagnant_layers",
            f"{prefix} moved by {still:.2g} since the onset, {twins:.2g} in the twin, "
            f"the others by {others:.2g}",
            trace,
            tolerated=("update_ratio", "plateau", *(("vanishing_gradients",) if zero else ())),
            culprits=culprits or (prefix,),
        )

    return judge


def judge_collapse(*culprits: str, low: float = 0.85) -> Judge:
    """Most units of a layer say nothing any more, the twin's do, and the loss is worse for it."""

    def judge(trace: Trace, twin: Trace) -> Truth:
        shares, twins = [*trace.dead.values()][-3:], [*twin.dead.values()][-3:]
        share, usual = float(np.median(shares)), float(np.median(twins))
        confirmed = share >= low and usual <= low - 0.25 and _hurt(trace, twin, 1.15)
        return _settle(
            confirmed,
            "activation_collapse",
            f"collapsed share {share:.2f} against {usual:.2f} of the twin, loss "
            f"{trace.last:.3g} against {twin.last:.3g}",
            trace,
            tolerated=(*_BREAKAGE, *_SILENCE),
            culprits=culprits,
        )

    return judge


def judge_overfitting(rise: float = 0.12) -> Judge:
    """Held-out loss well above its own minimum while the loss on training data went on falling."""

    def judge(trace: Trace, twin: Trace) -> Truth:
        steps, held = [*trace.held], [*trace.held.values()]
        lowest = int(np.argmin(held))
        trained = [*trace.trained.values()]
        grown = trace.last / held[lowest] - 1
        fallen = 1 - trained[-1] / trained[lowest]
        early = lowest <= 0.7 * len(held)
        confirmed = grown > rise and fallen > 0.1 and early and held[lowest] < held[0]
        return _settle(
            confirmed and np.isfinite(trace.last),
            "overfitting_onset",
            f"held-out loss {grown:+.0%} since its minimum at step {steps[lowest]}, "
            f"training loss {-fallen:+.0%}; twin at {twin.last:.3g}, run at {trace.last:.3g}",
            trace,
            onset=steps[lowest],
            phases=("overfitting_onset",),
            forbidden=("divergence",),
        )

    return judge


def judge_runtime(*culprits: str, lost: float = 0.3) -> Judge:
    """Since the onset the run takes longer than its twin by this share of its own time."""

    def judge(trace: Trace, twin: Trace) -> Truth:
        onset = trace.lesson.onset
        slow = sum(times[0] for times in trace.times[onset:])
        usual = sum(times[0] for times in twin.times[onset:])
        share = 1 - usual / slow
        return _settle(
            share > lost,
            "runtime_bottleneck_risk",
            f"{share:.0%} of the time since step {onset} is lost",
            trace,
            culprits=culprits,
        )

    return judge


def judge_nonfinite(*culprits: str) -> Judge:
    """Something is NaN or infinite from some step on, nothing in the twin."""

    def judge(trace: Trace, twin: Trace) -> Truth:
        bad = trace.first_bad_step
        clean = twin.first_bad_step is None and np.isfinite(twin.last)
        return _settle(
            bad is not None and bool(clean),
            "non_finite_values",
            f"first non-finite parameter or gradient near step {bad}; twin at {twin.last:.3g}",
            trace,
            tolerated=(*_BREAKAGE, *_SILENCE),
            culprits=culprits,
            onset=bad,
        )

    return judge


def judge_plateau(fall: float = 0.05, *, also: tuple[str, ...] = ()) -> Judge:
    """The noise-free loss hardly falls in the whole run; the twin's does.

    Args:
        fall: Share by which it may fall.
        also: Rules that are for what brings it about.
    """

    def judge(trace: Trace, twin: Trace) -> Truth:
        share, usual = 1 - trace.best / trace.first, 1 - twin.last / twin.first
        truth = _settle(
            share < fall and usual > 0.25,
            "plateau",
            f"held-out loss falls by {share:.1%} at best, by {usual:.0%} in the twin",
            trace,
            tolerated=(*_SILENCE, "activation_collapse"),
            onset=0,
            phases=("stagnation",),
        )
        if truth.kind != "fault":
            return truth
        return replace(truth, expected=(*truth.expected, *also))

    return judge
