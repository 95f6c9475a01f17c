"""The earlier runs of a project, with their attributes and final values, and the last good one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import xor
from statistics import median
from typing import Any

import numpy as np

from quark.analysis.comparison.changes import says_value
from quark.analysis.config import ComparisonEngineConfig
from quark.analysis.explanation.run_attributes import (
    Place,
    RunTraits,
    describe_traits,
    encode_seeds,
    encode_value,
    is_incidental,
    list_seeds,
    read_seed,
    tells_runs_apart,
)
from quark.analysis.observations import format_number
from quark_core.backends.contract import SupportsRead
from quark_core.backends.run_pages import MOST_COLUMNS, MOST_PAGE_RUNS
from quark_core.backends.run_summary import MetricSummary, RunSummary, StoredRun
from quark_core.config.arguments import EXCHANGED_FIELD
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records.names import decode_name
from quark_core.records.runs import digest_config
from quark_core.runs.run_search import build_page_search, build_search, find_page, find_runs

# Arguments whose names say nothing: which only say what a setting says, and which are the seed.
#
# One run cannot tell: `train.py 3` may give a seed, a rate or a width. All runs of a script can.

_LEAST_SEEDS = 3
"""Runs that must differ in a number alone before it is taken for the seed."""

_FOLLOWS = 0.899
"""Rank correlation from which on results follow a number, as they do a setting's."""

_UNNAMED = re.compile(r"argv (#\d+|[A-Za-z])$")
_ASSUMED = re.compile(r"(argument (\d+)|-(\w)) is treated as the seed")
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
        f"{called} is treated as the seed: {count} runs differ only in it, and their results do "
        "not rise or fall with it. If it is not a seed, add it to the config."
    )
    return _exchange(run, values, known=run.traits.known | {"seed"}, assumed=(words,))


def _exchange(run: PastRun, values: Mapping[Place, Any], **changes: Any) -> PastRun:
    origins = {**dict.fromkeys(values, "argv"), **run.traits.origins}
    traits = replace(run.traits, values=values, origins=origins, **changes)
    return replace(run, traits=traits, seed=encode_seeds(traits))


_MOST_RUNS = 2_000
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class PastRun:
    """One run of the project.

    Attributes:
        run_id: The run.
        traits: What it was made of.
        value: The metric's last value, or None where it has none that is finite.
        first: Its first value, likewise.
        state: Its status, or lost.
        config_digest: Of its configuration without seeds, or None without one.
        seed: Its seeds as a text, or None.
        fields: What was noted of it.
        groups: The groups that it is in.
        started_at: When it began.
        extreme: The metric's smallest or largest value, whichever its end is nearer to.
    """

    run_id: str
    traits: RunTraits
    value: float | None
    first: float | None
    state: str
    config_digest: str | None
    seed: bytes | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    started_at: str = ""
    extreme: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it came to its end and has the metric."""
        return self.state == "completed" and self.value is not None

    def sign_rest(self, place: Place | None = None) -> frozenset[tuple[Place, bytes]]:
        """All that it was made of, seeds, names and one trait left out.

        Runs of which it is equal differ in that trait alone, as far as anything was recorded.
        """
        text = None if place is None else self.texts.get(place)
        return self._signed if text is None else self._signed.difference(((place, text),))

    def hash_rest(self, place: Place) -> int:
        """A number that is equal where `sign_rest` is, and hardly ever else; it is soon told."""
        text = self.texts.get(place)
        if text is None or not tells_runs_apart(place):
            return self._hashed
        return self._hashed ^ hash((place, text))

    @cached_property
    def texts(self) -> dict[Place, bytes]:
        """Each trait's value as `encode_value` has it."""
        return {place: encode_value(value) for place, value in self.traits.values.items()}

    @cached_property
    def _signed(self) -> frozenset[tuple[Place, bytes]]:
        return frozenset(item for item in self.texts.items() if tells_runs_apart(item[0]))

    @cached_property
    def _hashed(self) -> int:
        return reduce(xor, map(hash, self._signed), 0)


def load_history(
    reader: SupportsRead,
    project: str,
    metric_key: str | None,
    data_keys: Sequence[str] = (),
) -> list[PastRun]:
    """The newest runs of a project, newest first, without reading a point.

    Args:
        reader: The store.
        project: The project.
        metric_key: The metric whose ends are wanted, as it is stored.
        data_keys: Fingerprints of data that tell runs apart.

    Raises:
        SessionStoreError: The store cannot be read.
    """
    found = find_runs(reader, build_search(project=project, limit=_MOST_RUNS))
    data = _load_data(reader, project, data_keys)
    return settle_arguments([_make(each, metric_key, data.get(each.run_id, {})) for each in found])


def _load_data(
    reader: SupportsRead, project: str, keys: Sequence[str]
) -> dict[str, dict[Place, Any]]:
    """Digests of the data by run; nothing where the store cannot be asked for them."""
    out: dict[str, dict[Place, Any]] = {}
    columns = [f"fingerprint.{key}" for key in keys[:MOST_COLUMNS] if _PLAIN.fullmatch(key)]
    after: str | None = None
    while columns and len(out) < _MOST_RUNS:
        try:
            page = find_page(
                reader,
                build_page_search(
                    project=project, columns=columns, limit=MOST_PAGE_RUNS, after=after
                ),
            )
        except SchemaValidationError:
            return {}
        for row in page.rows:
            out[row.run_id] = {
                ("data", column.partition(".")[2]): value
                for column, value in zip(columns, row.values, strict=True)
                if value is not None
            }
        after = page.next
        if after is None:
            break
    return out


def _make(summary: RunSummary, metric_key: str | None, data: Mapping[Place, Any]) -> PastRun:
    stored = summary.stored
    traits = describe_traits(stored)
    if data:
        traits = replace(traits, values={**traits.values, **data})
    metric = None if metric_key is None else summary.metrics.get(metric_key)
    return PastRun(
        summary.run_id,
        traits,
        None if metric is None else metric.last,
        None if metric is None else metric.first,
        stored.state,
        find_config_digest(stored),
        encode_seeds(traits),
        stored.fields,
        stored.run.groups,
        stored.run.created_at,
        None if metric is None else _find_extreme(metric),
    )


def _find_extreme(metric: MetricSummary) -> float | None:
    bounds = [bound for bound in (metric.low, metric.high) if bound is not None]
    if metric.last is None or not bounds:
        return None
    last = metric.last
    return min(bounds, key=lambda bound: abs(bound - last))


def find_config_digest(stored: StoredRun) -> str | None:
    """The digest of a run's configuration, or None where it has none."""
    if stored.digests.config is not None or stored.config is None or not stored.config.values:
        return stored.digests.config
    return digest_config(stored.config.values)


_MOST_LOOKED_AT = 8
"""Runs whose findings are read, and made where none are stored."""

_DEVIATIONS = 2.0
_NORMAL = 1.4826  # deviations of a normal law in its median distance from the median
_LEAST_RUNS = 3


class NothingGotWorseError(RunNotFoundError):
    """A run is better than all earlier ones of its configuration: none is its last good one."""


@dataclass(frozen=True, slots=True)
class RunInQuestion:
    """The run that is held against its last good one.

    Attributes:
        run_id: The run.
        started_at: When it began.
        digest: Of its configuration, seeds aside, or None.
        metric_key: The metric that it is about, or None.
        direction: higher or lower where one is better, else none.
        store: The store, in words.
    """

    run_id: str
    started_at: str
    digest: str | None
    metric_key: str | None
    direction: str
    store: str = "this store"


def find_good_run(
    history: Sequence[PastRun], asked: RunInQuestion, is_critical: Callable[[str], bool]
) -> PastRun:
    """The newest earlier run of the same configuration that was good.

    A good run has all of these:

    - it began before the run in question;
    - it completed, and has the metric;
    - its metric ends as well as that of half of such runs, and no worse than that of the run in
      question, as far as seeds go: by two deviations between them, or the share within which
      results count as equivalent, whichever is more;
    - nothing critical was found in it;
    - it was not made to check a cause.

    One of the same seed goes before others.

    Args:
        history: Runs of the project, newest first.
        asked: The run in question.
        is_critical: Whether something critical is known of a run, or its health is.

    Raises:
        NothingGotWorseError: All earlier ones ended worse than the run in question.
        RunNotFoundError: There is none; the message says what to do.
    """
    run_id, metric_key = asked.run_id, asked.metric_key
    name_it = f"name the run to compare with: quark why OTHER {run_id}"
    if asked.digest is None:
        raise RunNotFoundError(
            f"run {run_id} has no config, so similar runs cannot be found; {name_it}"
        )
    own = next((run for run in history if run.run_id == run_id), None)
    alike = _find_alike(history, asked, own)
    if not alike:
        raise RunNotFoundError(
            f"no other run in {asked.store} has the config of {run_id}, apart from seeds; {name_it}"
        )
    said = f"the config of {run_id}, apart from seeds"
    earlier = [run for run in alike if run.started_at < asked.started_at]
    if not earlier:
        raise RunNotFoundError(
            f"{_count(alike)} {said}, but none started before it, so it has no last good run; "
            f"{name_it}"
        )
    whole = [run for run in earlier if run.is_whole]
    if not whole:
        named = "a metric" if metric_key is None else decode_name(metric_key)
        raise RunNotFoundError(
            f"{_count(earlier, 'earlier')} {said}, but none completed with {named}; {name_it}"
        )
    good = _take_good(whole, asked, own)
    good.sort(key=lambda run: own is None or own.seed is None or run.seed != own.seed)
    for run in good[:_MOST_LOOKED_AT]:
        if not is_critical(run.run_id):
            return run
    raise RunNotFoundError(
        f"{_count(whole, 'earlier')} {said} and completed, but each that ended well has a "
        f"critical alert, such as {good[0].run_id} (quark analyze {good[0].run_id}); {name_it}"
    )


def _count(runs: Sequence[PastRun], word: str = "other") -> str:
    return f"1 {word} run has" if len(runs) == 1 else f"{len(runs)} {word} runs have"


def _find_alike(
    history: Sequence[PastRun], asked: RunInQuestion, own: PastRun | None
) -> list[PastRun]:
    settings = None if own is None else _list_settings(own)
    return [
        run
        for run in history
        if run.run_id != asked.run_id
        and run.config_digest is not None
        and EXCHANGED_FIELD not in run.fields
        and (run.config_digest == asked.digest or _list_settings(run) == settings)
    ]


def _list_settings(run: PastRun) -> dict[str, bytes]:
    """A configuration without seeds, and without what only names a run, such as `--name`."""
    return {
        place[1]: encode_value(value)
        for place, value in run.traits.values.items()
        if place[0] == "config" and not is_incidental(place)
    }


def _take_good(runs: Sequence[PastRun], asked: RunInQuestion, own: PastRun | None) -> list[PastRun]:
    """Those that ended well, newest first, of whole runs."""
    sign = {"higher": 1.0, "lower": -1.0}.get(asked.direction)
    if sign is None or asked.metric_key is None:
        return list(runs)
    ends = {run.run_id: sign * (run.value or 0.0) for run in runs}
    ranked = sorted(ends.values(), reverse=True)
    least = ranked[(len(ranked) - 1) // 2]
    if own is not None and own.value is not None:
        bound = sign * own.value - _allow(ranked, own.value)
        if ranked[0] < bound:
            best = max(runs, key=lambda run: ends[run.run_id])
            raise NothingGotWorseError(
                f"{asked.run_id} ended with {decode_name(asked.metric_key)} "
                f"{format_number(own.value)}, better than all earlier runs of its config (the "
                f"best, {best.run_id}, with {format_number(best.value or 0.0)}), so no result got "
                f"worse. To explain why it is better, run: quark why {best.run_id} {asked.run_id}"
            )
        least = max(least, bound)
    return [run for run in runs if ends[run.run_id] >= least]


def _allow(ends: Sequence[float], value: float) -> float:
    """By how much results of one configuration may differ and be as good as one another."""
    spread = 0.0
    if len(ends) >= _LEAST_RUNS:
        middle = median(ends)
        spread = _DEVIATIONS * _NORMAL * median(abs(end - middle) for end in ends)
    return max(spread, ComparisonEngineConfig().relative_tolerance * abs(value))
