"""The oracles of the third family: what each fault must have done, against its twin."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmarks.diagnosis.families.third_course import Build, Course, Notes, attend, attend_twice
from benchmarks.diagnosis.measuring import doubt, smooth
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth

Judge = Callable[[Course, Course], Truth]
_MUTE = (
    "vanishing_gradients",
    "stagnant_layers",
    "plateau",
    "update_ratio",
    "activation_collapse",
)
_WRECK = (*_MUTE, "exploding_gradients", "loss_spike", "divergence", "non_finite_values")


def fault(name: str, build: Build, judge: Judge) -> Scenario:
    """A scenario whose fault is recorded and whose twin is trained beside it."""

    def train(recorder: Recorder, draw: Draw) -> Truth:
        return judge(*attend_twice(build, recorder, draw))

    return Scenario(name=f"third/{name}", kind="fault", train=train)


def healthy(
    name: str,
    build: Callable[[Draw], Course],
    *,
    gain: float = 0.3,
    tolerated: tuple[str, ...] = (),
) -> Scenario:
    """A scenario that learns; `gain` is the share of the first loss that must go.

    Of losses that may be negative the share is of the absolute first loss.
    """

    def train(recorder: Recorder, draw: Draw) -> Truth:
        course = build(draw)
        return _judge_health(course, attend(course, recorder), gain, tolerated)

    return Scenario(name=f"third/healthy/{name}", kind="healthy", train=train)


def _judge_health(course: Course, notes: Notes, gain: float, tolerated: tuple[str, ...]) -> Truth:
    start, end = notes.exam[0], notes.end(notes.exam)
    best = float(np.min(smooth(notes.exam)))
    told = f"exam {start:.4g} -> best {best:.4g} -> {end:.4g}; fit {notes.fit[0]:.4g} -> "
    told += f"{notes.end(notes.fit):.4g}"
    if notes.broken_at is not None or not math.isfinite(end):
        return doubt(f"{told}: not finite")
    if not start - end > gain * abs(start):
        return doubt(f"{told}: did not learn")
    rise = (end - best) / max(start - best, 1e-12)
    if rise > 0.1:
        return doubt(f"{told}: got worse again")
    still = [
        name
        for name, parameter in course.model.named_parameters()
        if parameter.requires_grad and parameter.dim() > 1 and notes.moved(name) < 1e-6
    ]
    if still:
        return doubt(f"{told}: never moved: {still}")
    forbidden: tuple[str, ...] = ("divergence",)
    if rise > 0.03:
        tolerated = (*tolerated, "overfitting_onset")
    else:
        forbidden = (*forbidden, "overfitting_onset")
    return Truth(kind="healthy", tolerated=tolerated, phases_forbidden=forbidden, reason=told)


def judge_explosion(course: Course, twin: Course) -> Truth:
    """Gradients many times those of the twin, and the training is hurt."""
    ours, theirs = course.notes.norms[course.onset :], twin.notes.norms[course.onset :]
    times = [a / (b + 1e-12) if math.isfinite(a) else math.inf for a, b in zip(ours, theirs)]  # noqa: B905
    early = float(np.sort(times[:40])[-4])
    told = f"gradients up to {early:.3g} times the twin's; {_compare(course, twin)}"
    if early < 15 or not _hurt(course, twin):
        return doubt(told)
    return _fault(course, "exploding_gradients", _WRECK, told)


def judge_vanishing(course: Course, twin: Course) -> Truth:
    """The victims' gradients are a trifle beside those of the twin, which learns better."""
    part = course.victims[0]
    ours = course.notes.typical(course.notes.rms, part, course.onset)
    theirs = twin.notes.typical(twin.notes.rms, part, course.onset)
    told = f"gradient of {part}: {ours:.3g}, twin {theirs:.3g}; {_compare(course, twin)}"
    if not ours < 2e-3 * theirs or not _hurt(course, twin) or not _learned(twin):
        return doubt(told)
    culprits = _list_modules(course)
    return _fault(course, "vanishing_gradients", _MUTE, told, culprits=culprits)


def judge_stagnation(course: Course, twin: Course) -> Truth:
    """The victims stand still while the rest moves, and move in the twin."""
    names = [n for n in course.notes.first if any(part in n for part in course.victims)]
    shared = [n for n in names if n in twin.notes.first and n.endswith("weight")]
    ours = max(course.notes.moved(n) for n in names)
    theirs = min(twin.notes.moved(n) for n in shared)
    rest = max(course.notes.moved(n) for n in course.notes.first if n not in names)
    told = f"{names[0]}... moved {ours:.3g}, in the twin {theirs:.3g}, the rest {rest:.3g}"
    if ours > 1e-6 or theirs < 1e-3 or rest < 1e-3:
        return doubt(told)
    tolerated = ("vanishing_gradients", "update_ratio", "plateau")
    return _fault(course, "stagnant_layers", tolerated, told, culprits=_list_modules(course))


def judge_collapse(course: Course, twin: Course) -> Truth:
    """What `dissect` measures, a share of what is gone, is near 1 and small in the twin."""
    ours, theirs = course.notes.measured, twin.notes.measured
    told = f"collapsed {ours:.3f}, twin {theirs:.3f}; {_compare(course, twin)}"
    hurt = _hurt(course, twin) and _learned(twin)
    if not ours > 0.8 or not theirs < 0.55 or not hurt:
        return doubt(told)
    return _fault(course, "activation_collapse", _WRECK, told)


def judge_overfitting(course: Course, _twin: Course) -> Truth:
    """New data get worse for long while training data get better."""
    notes = course.notes
    exam, fit = smooth(notes.exam), smooth(notes.fit)
    at = int(np.argmin(exam))
    gained = exam[0] - exam[at]
    told = f"exam {exam[0]:.4g} -> {exam[at]:.4g} at {notes.looks[at]} -> {exam[-1]:.4g}; "
    told += f"fit then {fit[at]:.4g}, at the end {fit[-1]:.4g}"
    late = at > 0.8 * len(exam)
    rise = exam[-1] - exam[at]
    if late or rise < 0.15 * gained or rise < 0.1 * abs(exam[at]) or fit[-1] >= fit[at]:
        return doubt(told)
    course.onset = notes.looks[at]
    phases = ("overfitting_onset",)
    return _fault(course, "overfitting_onset", ("vanishing_gradients",), told, phases=phases)


def judge_runtime(course: Course, twin: Course) -> Truth:
    """The same steps take much longer than the twin's."""
    ours = np.array([whole for whole, _, _ in course.notes.times[course.onset :]])
    theirs = np.array([whole for whole, _, _ in twin.notes.times[course.onset :]])
    factor = float(ours[3:].sum() / theirs[3:].sum())
    told = f"{factor:.2f} times the twin's time from step {course.onset} on"
    if factor < 1.35:
        return doubt(told)
    return _fault(course, "runtime_bottleneck_risk", (), told)


def judge_non_finite(course: Course, twin: Course) -> Truth:
    """Something is not finite, and nothing in the twin."""
    at = course.notes.broken_at
    if at is None or twin.notes.broken_at is not None:
        return doubt(f"broken at {at}, twin at {twin.notes.broken_at}")
    course.onset = at
    return _fault(course, "non_finite_values", _WRECK, f"not finite from step {at} on")


def judge_spike(course: Course, twin: Course) -> Truth:
    """The loss leaps far above what it was, and comes back near to the twin's."""
    losses, at = np.array(course.notes.losses), course.onset
    before = losses[max(0, at - 15) : at]
    usual, spread = float(np.median(before)), float(before.std()) + 1e-12
    peak = float(np.max(losses[at : at + 20]))
    back = course.notes.end(course.notes.fit)
    told = f"loss {usual:.3g} (deviation {spread:.2g}), peak {peak:.3g}; {_compare(course, twin)}"
    if not (peak > 2.0 * usual and peak > usual + 6 * spread) or back > 0.3 * peak:
        return doubt(told)
    exam, wanted = course.notes.end(course.notes.exam), twin.notes.end(twin.notes.exam)
    if exam > wanted + 0.4 * (twin.notes.exam[0] - wanted):
        return doubt(f"{told}: did not come back")
    tolerated = ("exploding_gradients", "divergence", "update_ratio", "activation_collapse")
    return _fault(course, "loss_spike", tolerated, told)


def judge_divergence(course: Course, twin: Course) -> Truth:
    """The loss without noise climbs away and does not return; the twin's falls."""
    fit = smooth(course.notes.fit)
    best, end = float(fit.min()), float(fit[-1])
    told = f"fit {fit[0]:.4g} -> {best:.4g} -> {end:.4g}; {_compare(course, twin)}"
    theirs = smooth(twin.notes.fit)
    climbed = not end < best + 0.5 * abs(theirs[0] - theirs.min()) and not end < 1.5 * best
    if not climbed or theirs[-1] > 0.8 * theirs[0]:
        return doubt(told)
    return _fault(course, "divergence", _WRECK, told, phases=("divergence",))


def judge_plateau(course: Course, twin: Course) -> Truth:
    """Nothing is learned of what the twin learns."""
    exam, other = course.notes.exam, twin.notes.exam
    gained, theirs = exam[0] - course.notes.end(exam), other[0] - twin.notes.end(other)
    told = f"gained {gained:.4g}, twin {theirs:.4g} of {other[0]:.4g}"
    if not gained < 0.15 * theirs or theirs < 0.3 * abs(other[0]):
        return doubt(told)
    return Truth(
        kind="fault",
        expected=("plateau",),
        tolerated=_MUTE[:2] + _MUTE[3:],
        onset_step=course.onset,
        phases_forbidden=("rapid_learning", "divergence"),
        reason=told,
    )


def judge_update(course: Course, twin: Course) -> Truth:
    """The victims' updates are far from the twin's for their weights, and it is hurt."""
    part = course.victims[0]
    ours = course.notes.typical(course.notes.ratios, part, course.onset)
    theirs = twin.notes.typical(twin.notes.ratios, part, course.onset)
    told = f"updates of {part}: {ours:.3g}, twin {theirs:.3g}; {_compare(course, twin)}"
    off = ours / (theirs + 1e-15)
    if not (off > 20 or off < 0.01) or not _hurt(course, twin):
        return doubt(told)
    tolerated = tuple(rule for rule in _WRECK if rule != "update_ratio")
    return _fault(course, "update_ratio", tolerated, told, culprits=_list_modules(course))


def _fault(
    course: Course,
    rule: str,
    tolerated: tuple[str, ...],
    reason: str,
    *,
    culprits: tuple[str, ...] = (),
    phases: tuple[str, ...] = (),
) -> Truth:
    return Truth(
        kind="fault",
        expected=(rule,),
        tolerated=tuple(other for other in tolerated if other != rule),
        culprits=culprits,
        onset_step=course.first_step + course.onset,
        phases_expected=phases,
        reason=reason,
    )


def _list_modules(course: Course) -> tuple[str, ...]:
    return tuple(
        name
        for name, module in course.model.named_modules()
        if name
        and any(part in f"{name}." for part in course.victims)
        and any(True for _ in module.parameters())
    )


def _hurt(course: Course, twin: Course) -> bool:
    ours, theirs = course.notes.end(course.notes.exam), twin.notes.end(twin.notes.exam)
    return not ours < theirs + 0.15 * (twin.notes.exam[0] - theirs)


def _learned(course: Course) -> bool:
    exam = course.notes.exam
    return exam[0] - course.notes.end(exam) > 0.2 * abs(exam[0])


def _compare(course: Course, twin: Course) -> str:
    ours, theirs = course.notes.end(course.notes.exam), twin.notes.end(twin.notes.exam)
    return f"exam {twin.notes.exam[0]:.4g} -> {ours:.4g}, twin {theirs:.4g}"
