"""Arguments whose names say nothing: which only say what a setting says, and which are the seed.

One run cannot tell: `train.py 3` may give a seed, a rate or a width. All runs of a script can.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quark.analysis.explanation.traits import (
    Place,
    RunTraits,
    encode_seeds,
    list_seeds,
    read_seed,
)
from quark.analysis.run_arguments import says_value

if TYPE_CHECKING:
    from quark.analysis.explanation.history import PastRun

_LEAST_SEEDS = 3
"""Runs that must differ in a number alone before it is taken for the seed."""

_FOLLOWS = 0.899
"""Rank correlation from which on results follow a number, as they do a setting's."""

_UNNAMED = re.compile(r"argv (#\d+|[A-Za-z])$")
_ASSUMED = re.compile(r"(argument (\d+)|-(\w)) is taken for the seed")
_MOST_DIGITS = 20


def settle_arguments(runs: Sequence[PastRun]) -> list[PastRun]:
    """The runs with arguments folded into the settings that they set, and seeds known as seeds.

    An argument of one script says what a setting says where it does so in every run, with two
    values at least. A whole number without a name is taken for the seed where three runs or more
    differ in it alone, no seed is recorded, and their results do not rise or fall with it: by
    their ends and by the best of their curves. Where two arguments are like that, neither
    is. The traits say what was taken for granted.
    """
    by_script: dict[str, list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        if any(kind == "launch" and name.startswith("argv ") for kind, name in run.traits.values):
            by_script[run.traits.script].append(number)
    out = list(runs)
    for numbers in by_script.values():
        members = _fold([out[number] for number in numbers])
        for number, run in zip(numbers, _name_seed(members), strict=True):
            out[number] = run
    return out


def find_seed_argument(traits: RunTraits) -> str | None:
    """The argument of a run that was taken for its seed, as `parse_arguments` names it."""
    found = next(filter(None, map(_ASSUMED.match, traits.assumed)), None)
    return None if found is None else found[3] or f"#{found[2]}"


def _list_places(runs: Sequence[PastRun]) -> list[Place]:
    places = {place for run in runs for place in run.traits.values}
    return sorted(place for place in places if place[0] == "launch" and place[1][:5] == "argv ")


def _fold(runs: list[PastRun]) -> list[PastRun]:
    for place in _list_places(runs):
        having = [run.traits for run in runs if place in run.traits.values]
        texts = {text for each in having if isinstance(text := each.values[place], str)}
        if len(texts) < 2:
            continue
        setting = _find_setting(having, place)
        if setting is not None:
            runs = [_repeat(run, place, setting) for run in runs]
    return runs


def _find_setting(having: Sequence[RunTraits], place: Place) -> Place | None:
    """The only setting whose value the argument is in every run."""
    wanted = [key for key in having[0].values if key[0] in ("config", "seed")]
    for traits in having:
        text = traits.values[place]
        if not isinstance(text, str):
            return None
        wanted = [
            key for key in wanted if key in traits.values and says_value(text, traits.values[key])
        ]
        if not wanted:
            return None
    return wanted[0]


def _repeat(run: PastRun, place: Place, setting: Place) -> PastRun:
    if place not in run.traits.values:
        return run
    values = {key: value for key, value in run.traits.values.items() if key != place}
    return _exchange(run, values, repeats={**run.traits.repeats, place[1]: setting})


def _name_seed(runs: list[PastRun]) -> list[PastRun]:
    found = {
        place: count
        for place in _list_places(runs)
        if _UNNAMED.match(place[1]) and (count := _count_seeds(runs, place)) >= _LEAST_SEEDS
    }
    if len(found) != 1:
        return runs
    ((place, count),) = found.items()
    return [_take_for_seed(run, place, count) for run in runs]


def _count_seeds(runs: Sequence[PastRun], place: Place) -> int:
    """How many runs show that an argument is the seed; 0 where one shows that it is none."""
    having = [run for run in runs if place in run.traits.values]
    if not all(_is_whole(run.traits.values[place]) for run in having):
        return 0
    if any(list_seeds(run.traits.values) for run in having):
        return 0
    alike: dict[Hashable, dict[int, list[PastRun]]] = defaultdict(lambda: defaultdict(list))
    for run in having:
        if run.is_whole:
            alike[run.sign_rest(place)][int(run.traits.values[place])].append(run)
    count = 0
    for results in alike.values():
        if len(results) < _LEAST_SEEDS:
            continue
        if _follow(results):
            return 0
        count = max(count, len(results))
    return count


def _is_whole(text: Any) -> bool:
    return isinstance(text, str) and text.isdecimal() and len(text) <= _MOST_DIGITS


def _follow(results: Mapping[int, Sequence[PastRun]]) -> bool:
    """Whether the results rise or fall with the number."""
    signs = []
    for measure in (_take_end, _take_extreme):
        values = [float(np.mean(list(map(measure, results[each])))) for each in sorted(results)]
        if len(set(values)) == 1:
            return False
        ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable")
        signs.append(float(np.corrcoef(np.arange(len(values)), ranks)[0, 1]))
    return min(signs) >= _FOLLOWS or max(signs) <= -_FOLLOWS


def _take_end(run: PastRun) -> float:
    return run.value or 0.0


def _take_extreme(run: PastRun) -> float:
    return run.extreme if run.extreme is not None else _take_end(run)


def _take_for_seed(run: PastRun, place: Place, count: int) -> PastRun:
    text = run.traits.values.get(place)
    if text is None:
        return run
    values = {key: value for key, value in run.traits.values.items() if key != place}
    values["seed", place[1]] = read_seed(text)
    name = place[1].removeprefix("argv ")
    called = f"argument {name[1:]}" if name.startswith("#") else f"-{name}"
    words = (
        f"{called} is taken for the seed: {count} runs differ in it alone, and their results do "
        "not rise or fall with it. If it is a setting, put it into the configuration."
    )
    return _exchange(run, values, known=run.traits.known | {"seed"}, assumed=(words,))


def _exchange(run: PastRun, values: Mapping[Place, Any], **changes: Any) -> PastRun:
    origins = {**dict.fromkeys(values, "argv"), **run.traits.origins}
    traits = replace(run.traits, values=values, origins=origins, **changes)
    return replace(run, traits=traits, seed=encode_seeds(traits))
