"""The least runs that would settle it: the first side with one difference of the second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quark.analysis.comparison.changes import list_command, parse_arguments, spell_argument
from quark.analysis.explanation.differences import Difference
from quark.analysis.explanation.results import ABSENT, Cause, Check, Effect
from quark.analysis.explanation.run_attributes import is_incidental
from quark.provenance.sources import SourceSnapshot
from quark_core.backends.run_summary import StoredRun
from quark_core.config.redaction import REDACTED
from quark_core.records.runs import is_seed

DEFAULT_RUNS = 3

_MOST_SINGLE = 6
"""Causes that are exchanged one by one; of more, halves are exchanged first."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """How a run is started that is the first side with one thing, or several, of the second.

    Attributes:
        places: What is exchanged.
        arguments: Arguments after the script, the seed left as it was.
        seed: Which argument gives the seed, what stands before it there, and that seed; None
            where no argument gives one.
        variables: Variables of the environment to set, None to unset.
        code: What is taken of the sources of the second side: path -> names of functions, "" for
            the rest of a module or for a file as a whole.
        refusal: Why it cannot be started, or None.
    """

    places: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    seed: tuple[int, str, int] | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    code: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refusal: str | None = None


def plan_checks(
    causes: Sequence[Cause],
    sides: str,
    runs: int = DEFAULT_RUNS,
    *,
    can_run: Callable[[Sequence[Cause]], bool] = lambda _: True,
) -> tuple[Check, ...]:
    """What to run, the most likely cause first; with many, halves of them first.

    Args:
        causes: The causes, as they are ranked.
        sides: A run of each side, as they are given to `quark why`.
        runs: Runs of each.
        can_run: Whether runs with these causes exchanged can be started.
    """
    command = f"quark why {sides} --check {runs}"
    return tuple(
        Check(
            part[0].kind,
            join_places(part),
            runs,
            describe_check(part, runs),
            command,
        )
        for part in split_causes(list_checkable(causes))
        if can_run(part)
    )


def refuse_sources(kept: SourceSnapshot) -> str | None:
    """Why the first side cannot be started again out of its sources, or None."""
    if kept.main is None or kept.entry != "script":
        begun = kept.entry or "something unknown"
        return f"it was started as {begun}, but only scripts can be started again"
    altered = [file.path for file in kept.files if file.reason is not None]
    return f"some sources have changed since the run: {', '.join(altered[:5])}" if altered else None


def list_checkable(causes: Sequence[Cause]) -> list[Cause]:
    """The causes that a run can tell of, and that are not unlikely already."""
    return [
        cause
        for cause in causes
        if cause.standing != "unlikely"
        and cause.kind in ("config", "code", "switch", "launch")
        and not is_incidental((cause.kind, cause.place))
    ]


def split_causes(causes: Sequence[Cause]) -> list[Sequence[Cause]]:
    """One by one, or halves where they are too many for that."""
    if len(causes) <= _MOST_SINGLE:
        return [(cause,) for cause in causes]
    half = (len(causes) + 1) // 2
    return [causes[:half], causes[half:]]


def join_places(causes: Sequence[Cause | Difference]) -> str:
    """What several causes are called together: a run notes it of what was exchanged in it."""
    return ", ".join(cause.place for cause in causes)


def tell_checks(causes: Sequence[Cause], checked: Mapping[str, Effect]) -> str | None:
    """What runs that differ in one thing each have said, or that they did not tell; or None.

    Args:
        causes: What may be to blame, as it is ranked with these runs as evidence.
        checked: What was exchanged in runs -> its effect; of several things their places joined.
    """
    own = [cause for cause in causes if cause.place in checked]
    joint = [place for place in checked if place not in {cause.place for cause in causes}]
    if not own and not joint:
        return None
    guilty = [cause.place for cause in own if cause.standing == "probable"]
    cleared = [cause.place for cause in own if cause.standing == "unlikely"]
    open_ = [cause.place for cause in own if cause.standing == "possible"]
    unchecked = [cause.place for cause in list_checkable(causes) if cause.place not in checked]
    said = []
    if guilty:
        verb = "causes" if len(guilty) == 1 else "cause"
        said.append(f"{', '.join(guilty)} alone {verb} the change")
    if cleared:
        said.append(f"{', '.join(cleared)} alone {'does' if len(cleared) == 1 else 'do'} not")
    if open_:
        said.append(f"{', '.join(open_)}: these runs are inconclusive")
    if unchecked:
        said.append(f"{', '.join(unchecked)} was not run alone")
    if not guilty:
        said.append("so the cause is not isolated")
        said += [f"together, {place}: {_tell_effect(checked[place])}" for place in joint]
    return f"By runs that differ in one setting each: {'; '.join(said)}."


def _tell_effect(effect: Effect) -> str:
    told = f"{effect.difference:+.3g}"
    if effect.low is None or effect.high is None:
        return told
    return f"{told} ({effect.low:.3g} to {effect.high:.3g})"


def describe_check(causes: Sequence[Cause | Difference], runs: int) -> str:
    """What would be run, in a few words."""
    said = [
        f"{cause.place} of the second" if cause.kind == "code" else f"{cause.place}={cause.after}"
        for cause in causes
    ]
    return f"{runs} run{'' if runs == 1 else 's'} of the first with {', '.join(said)}"


def plan_exchange(
    before: StoredRun, causes: Sequence[Cause | Difference], seed: str | None = None
) -> Exchange:
    """How to start the first side with these of the second; a refusal says why it cannot be.

    A key of the configuration is set where the command line sets it: a run that is told to
    have another value, and does not, would be no evidence.

    Args:
        before: A run of the first side.
        causes: What is exchanged.
        seed: The argument that is taken for the seed, where its name does not say so.
    """
    places = tuple(cause.place for cause in causes)
    arguments = list_command(before)
    if not arguments:
        return Exchange(places, refusal="how the first side was started was not recorded")
    given = arguments[1:]
    if any(REDACTED in each for each in given):
        return Exchange(places, refusal="an argument of the first side was a secret, not stored")
    variables: dict[str, str | None] = {}
    code: dict[str, tuple[str, ...]] = {}
    for cause in causes:
        refusal = None
        if cause.kind == "code":
            path, _, name = cause.place.partition(": ")
            code[path] = (*code.get(path, ()), name)
        elif cause.kind in ("config", "launch"):
            refusal = _set_argument(given, cause)
        elif cause.kind == "switch" and "." not in cause.place:
            variables[cause.place] = None if cause.after == ABSENT else str(cause.after)
        else:
            refusal = f"{cause.kind} {cause.place} cannot be set from outside"
        if refusal is not None:
            return Exchange(places, refusal=refusal)
    return Exchange(places, tuple(given), _find_seed(given, seed), variables, code)


def _set_argument(given: list[str], cause: Cause | Difference) -> str | None:
    """Change one option in place; a reason where that cannot be done."""
    spelled = [each.removeprefix("argv ") for each in cause.repeats if each.startswith("argv ")]
    name = cause.place.removeprefix("argv ")
    if cause.after == ABSENT or isinstance(cause.after, (list, dict)):
        return f"{cause.place}: the command line cannot set {cause.after!r}"
    text = str(cause.after)
    wanted = {spell_argument(each) for each in (name, name.rpartition(".")[2], *spelled)}
    found = next(
        (each for each in parse_arguments(given) if spell_argument(each.name) in wanted), None
    )
    if found is not None:
        if found.text is None or (isinstance(cause.after, bool) and not found.prefix):
            return f"{cause.place}: its option accepts no value"
        given[found.index] = f"{found.prefix}{text}"
        return None
    if not spelled:
        return f"{cause.place} does not come from the command line, so it cannot be set from there"
    option = spelled[0]
    if option.startswith("#"):
        return f"{cause.place} is a positional argument that the first side does not have"
    is_override = not any(each.startswith("--") for each in given) and "." in option
    given += [f"{option}={text}"] if is_override else [f"--{option}", text]
    return None


def _find_seed(given: Sequence[str], seed: str | None) -> tuple[int, str, int] | None:
    for each in parse_arguments(given):
        is_one = is_seed(each.name) if seed is None else each.name == seed
        if is_one and each.text is not None and each.text.isdecimal():
            return each.index, each.prefix, int(each.text)
    return None
