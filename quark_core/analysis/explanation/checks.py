"""The least runs that would settle it: the first side with one difference of the second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quark_core.analysis.explanation.differences import Difference
from quark_core.analysis.explanation.results import ABSENT, Cause, Check
from quark_core.analysis.explanation.traits import is_incidental
from quark_core.backends.contract import StoredRun
from quark_core.config.redaction import REDACTED
from quark_core.records.run_digests import is_seed

__all__ = ["DEFAULT_RUNS", "Exchange", "describe_check", "plan_checks", "plan_exchange"]

DEFAULT_RUNS = 3

_MOST_SINGLE = 3


@dataclass(frozen=True, slots=True)
class Exchange:
    """How a run is started that is the first side with one thing, or several, of the second.

    Attributes:
        places: What is exchanged.
        arguments: Arguments after the script, the seed left as it was.
        seed: Index in the arguments of the seed's text and that seed, or None where no
            argument gives one.
        variables: Variables of the environment to set, None to unset.
        files: Paths of the sources that are taken from the second side.
        refusal: Why it cannot be started, or None.
    """

    places: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    seed: tuple[int, int] | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    refusal: str | None = None


def plan_checks(causes: Sequence[Cause], sides: str, runs: int = DEFAULT_RUNS) -> tuple[Check, ...]:
    """What to run, the most likely cause first; with many, halves of them first.

    Args:
        causes: The causes, as they are ranked.
        sides: A run of each side, as they are given to `quark why`.
        runs: Runs of each.
    """
    wanted = [
        cause
        for cause in causes
        if cause.standing != "unlikely"
        and cause.kind in ("config", "code", "switch", "launch")
        and not is_incidental((cause.kind, cause.place))
    ]
    if not wanted:
        return ()
    command = f"quark why {sides} --check {runs}"
    if len(wanted) <= _MOST_SINGLE:
        return tuple(
            Check(cause.kind, cause.place, runs, describe_check((cause,), runs), command)
            for cause in wanted
        )
    half = (len(wanted) + 1) // 2
    return tuple(
        Check(
            part[0].kind,
            ", ".join(cause.place for cause in part),
            runs,
            describe_check(part, runs),
            command,
        )
        for part in (wanted[:half], wanted[half:])
    )


def describe_check(causes: Sequence[Cause | Difference], runs: int) -> str:
    """What would be run, in a few words."""
    said = [
        f"{cause.place} of the second" if cause.kind == "code" else f"{cause.place}={cause.after}"
        for cause in causes
    ]
    return f"{runs} run{'' if runs == 1 else 's'} of the first with {', '.join(said)}"


def plan_exchange(before: StoredRun, causes: Sequence[Cause | Difference]) -> Exchange:
    """How to start the first side with these of the second; a refusal says why it cannot be.

    A key of the configuration is set where the command line sets it: a run that is told to
    have another value, and does not, would be no evidence.
    """
    places = tuple(cause.place for cause in causes)
    environment = {} if before.environment is None else before.environment.values
    arguments = (environment.get("process") or {}).get("argv")
    if not isinstance(arguments, Sequence) or isinstance(arguments, str) or not arguments:
        return Exchange(places, refusal="how the first side was started was not recorded")
    given = [str(each) for each in arguments[1:]]
    if any(REDACTED in each for each in given):
        return Exchange(places, refusal="an argument of the first side was a secret, and not kept")
    variables: dict[str, str | None] = {}
    files: list[str] = []
    for cause in causes:
        refusal = None
        if cause.kind == "code":
            files.append(cause.place.partition(": ")[0])
        elif cause.kind in ("config", "launch"):
            refusal = _set_argument(given, cause)
        elif cause.kind == "switch" and "." not in cause.place:
            variables[cause.place] = None if cause.after == ABSENT else str(cause.after)
        else:
            refusal = f"{cause.kind} {cause.place} cannot be exchanged from outside"
        if refusal is not None:
            return Exchange(places, refusal=refusal)
    return Exchange(places, tuple(given), _find_seed(given), variables, tuple(files))


def _set_argument(given: list[str], cause: Cause | Difference) -> str | None:
    """Change one option in place; a reason where that cannot be done."""
    name = cause.place.removeprefix("argv ")
    if cause.after == ABSENT or isinstance(cause.after, (list, dict)):
        return f"{cause.place}: an argument cannot give {cause.after!r}"
    text = str(cause.after)
    index, joined = _find_option(given, name)
    if index is not None:
        if joined is not None:
            given[index] = f"{joined}={text}"
        elif index + 1 < len(given) and not isinstance(cause.after, bool):
            given[index + 1] = text
        else:
            return f"{cause.place}: its option takes no value"
        return None
    spelled = next((each for each in cause.repeats if each.startswith("argv ")), None)
    if spelled is None:
        return f"{cause.place} does not come from the command line, so it cannot be set from there"
    option = spelled.removeprefix("argv ")
    is_override = not any(each.startswith("--") for each in given) and "." in option
    given += [f"{option}={text}"] if is_override else [f"--{option}", text]
    return None


def _find_option(given: Sequence[str], name: str) -> tuple[int | None, str | None]:
    """Where an option stands, and what is before its `=` where it has one."""
    wanted = {_spell(name), _spell(name).rpartition(".")[2]}
    for index, text in enumerate(given):
        head, equals, _ = text.partition("=")
        if _spell(head) in wanted and (equals or text.startswith("-")):
            return index, head if equals else None
    return None, None


def _spell(name: str) -> str:
    return name.lstrip("+-").replace("-", "_").lower()


def _find_seed(given: Sequence[str]) -> tuple[int, int] | None:
    for index, text in enumerate(given):
        head, equals, value = text.partition("=")
        if not is_seed(_spell(head)):
            continue
        place = index if equals else index + 1
        number: Any = value if equals else given[place] if place < len(given) else ""
        if str(number).isdigit():
            return place, int(number)
    return None
