"""Comparisons of runs and groups of runs: what tells them apart, their curves, and the verdict."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from quark.analysis.metric_roles import find_main_metric
from quark.page.pack import choose_floats, encode_pack
from quark.page.recent import Recent
from quark.page.routes.curves import (
    GROUP_AXES,
    CurveAsk,
    GroupCurve,
    RunCurve,
    join_attempts,
    merge_runs,
)
from quark.page.routes.parameters import MAX_RUNS, Parameters
from quark.page.routes.run_analysis import ComparedPair
from quark.page.routes.run_details import place_metric
from quark.page.routes.runs import describe_row, describe_standing
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records import parse_time
from quark_core.records.names import decode_name
from quark_core.records.runs import is_seed
from quark_core.runs.following import read_series_many
from quark_core.search.resolution import write_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark.analysis.comparison.changes import CodeComparison
    from quark.page.routes.analyses import AnalysisDesk
    from quark.page.routes.page_source import PageSource
    from quark.page.routes.run_analysis import RunAnalyzer
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.run_summary import MetricSummary, RunSummary, StoredRun

_MOST_SIDES = 50
_MOST_GROUP_KEYS = 10
_MOST_METRICS = 2_000
_MOST_SETTINGS = 200
_MOST_VALUES = 8
_NAME_CHARACTERS = 80
_ALL_BUT_SEED = "seed"
_GROUPS = "groups"


@dataclass(frozen=True, slots=True)
class Side:
    """A run, or a group of runs that are taken as repetitions of one another.

    Attributes:
        runs: Its runs, one or more.
        values: The settings that the group was made by, key -> value as text.
    """

    runs: tuple[RunSummary, ...]
    values: Mapping[str, str]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of its runs."""
        return tuple(run.run_id for run in self.runs)


def read_sides(
    source: PageSource, parameters: Parameters, *, may_be_known: bool = False
) -> list[Side]:
    """The sides that are asked for: `side=ID,ID` of each, or `run=ID` of all with `group=KEY`.

    `may_be_known`: what was read of the runs a moment ago is good enough.
    `group=seed` puts together what differs in seeds at most, `group=groups` runs of the same
    groups, `group=field.NAME` those of one value; any other key is one of the configuration.
    Without a group each run is a side.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    texts = parameters.get_texts("side", _MOST_SIDES)
    runs = parameters.get_texts("run", MAX_RUNS)
    keys = parameters.get_texts("group", _MOST_GROUP_KEYS)
    if texts and (runs or keys):
        raise SchemaValidationError("side cannot be combined with run and group")
    listed = [list(dict.fromkeys(filter(None, text.split(",")))) for text in texts]
    listed = [ids for ids in listed if ids] or [[run_id] for run_id in runs]
    count = len({run_id for ids in listed for run_id in ids})
    if not listed:
        raise SchemaValidationError("side, or run, must name the runs to compare")
    if count > MAX_RUNS:
        raise SchemaValidationError(f"side names {count} runs; at most {MAX_RUNS} can be compared")
    read = source.recall if may_be_known else source.summarize
    found = {run_id: read(run_id) for ids in listed for run_id in ids}
    if not keys:
        return [Side(tuple(found[run_id] for run_id in ids), {}) for ids in listed]
    return list(_group(list(found.values()), keys))


def _group(runs: Sequence[RunSummary], keys: Sequence[str]) -> Iterator[Side]:
    """Runs with the same values under the keys, in the order of their first."""
    grouped: dict[bytes, tuple[dict[str, str], list[RunSummary]]] = {}
    for run in runs:
        notes = _list_notes(run)
        values = {key: _show(notes.get(key)) for key in keys if key != _ALL_BUT_SEED}
        shared: dict[str, Any] = dict(values)
        if _ALL_BUT_SEED in keys:
            shared = _without_seeds(_flatten_config(run))
        name = msgspec.json.encode(shared, order="sorted", enc_hook=str)
        grouped.setdefault(name, (values, []))[1].append(run)
    for values, members in grouped.values():
        yield Side(tuple(members), values)


def _flatten_config(run: RunSummary) -> dict[str, Any]:
    from quark_core.search.evaluation import flatten_values

    return dict(flatten_values(run.config))


def _list_notes(run: RunSummary) -> dict[str, Any]:
    """What runs can be grouped by: groups, fields, and settings, which come first."""
    from quark_core.search.evaluation import flatten_values

    stored = run.stored
    return {
        **({_GROUPS: ", ".join(stored.run.groups)} if stored.run.groups else {}),
        **{f"field.{path}": value for path, value in flatten_values(stored.fields)},
        **_flatten_config(run),
    }


def _without_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not is_seed(key)}


def _show(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()


def describe_sides(
    source: PageSource, desk: AnalysisDesk, parameters: Parameters
) -> dict[str, Any]:
    """Sides with their runs, what differs in what was set, and the metrics that there are.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    sides = read_sides(source, parameters)
    runs = {run.run_id: run for side in sides for run in side.runs}
    settings = _compare_settings(source, sides)
    metrics = _list_metrics(sides)
    return {
        "sides": [
            {"name": name, "runs": list(side.ids), "values": dict(side.values)}
            for name, side in zip(_name_sides(sides, settings.differs), sides, strict=True)
        ],
        "runs": {
            run_id: {**describe_row(run.stored, run), **describe_standing(source, desk, run)}
            for run_id, run in runs.items()
        },
        "differs": settings.differs,
        "equal": settings.equal,
        "equal_count": settings.equal_count,
        "agreement": settings.agreement,
        "code_notes": settings.notes,
        "metrics": metrics[:_MOST_METRICS],
        "metric_count": len(metrics),
        "main": _find_main(runs.values()),
        "settings": _list_settings(runs.values()),
        "group_keys": _list_group_keys(runs.values()),
    }


def _name_sides(sides: Sequence[Side], differs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each side is called: by what it was grouped by, its run's name, or what differs."""
    names = [_name_side(side, number, differs) for number, side in enumerate(sides)]
    counted = Counter(names)
    # Two of one name are told apart by the id of their first run.
    return [
        name if counted[name] == 1 else f"{name} {side.ids[0][:8]}"
        for name, side in zip(names, sides, strict=True)
    ]


def _name_side(side: Side, number: int, differs: Sequence[Mapping[str, Any]]) -> str:
    if side.values:
        name = ", ".join(f"{key}={value}" for key, value in side.values.items())
        return name[:_NAME_CHARACTERS]
    if len(side.runs) == 1:
        return side.runs[0].stored.run.name or side.ids[0][:12]
    told = [
        f"{each['path']}={_show(each['values'][number][0])}"
        for each in differs
        if each["section"] == "config" and len(each["values"][number]) == 1
    ]
    name = ", ".join(told[:2]) or side.runs[0].stored.run.name or side.ids[0][:12]
    return name[:_NAME_CHARACTERS]


@dataclass(frozen=True, slots=True)
class _Held:
    """A run whose code is compared."""

    stored: StoredRun
    reader: SupportsRead


@dataclass(frozen=True, slots=True)
class _Settings:
    """What was set on the sides.

    Attributes:
        differs, equal: Rows of what is not the same on every side, and of what is.
        equal_count: How much is the same.
        agreement: That nothing differs, and in what that was looked at; notes on the code.
    """

    differs: list[dict[str, Any]]
    equal: list[dict[str, Any]]
    equal_count: int
    agreement: str
    notes: list[str]


def _compare_settings(source: PageSource, sides: Sequence[Side]) -> _Settings:
    """What is not the same on every side, what is, and what nobody knows."""
    from quark.analysis.comparison.changes import compare_code, list_agreeing, list_settings
    from quark.analysis.comparison.summary import describe_agreement

    runs = [
        [_Held(source.load_run(run_id), source.reader) for run_id in side.ids] for side in sides
    ]
    listed = [[list_settings(run.stored) for run in side] for side in runs]
    differs: list[dict[str, Any]] = []
    equal: list[dict[str, Any]] = []
    equal_count = 0
    codes = [compare_code(side, runs[0]) for side in runs[1:]]
    for section in ("config", "code", "environment"):
        if section == "code":
            differs += _tell_code(codes, runs)
        paths = sorted({path for side in listed for run in side for path in run[section]})
        for path in paths:
            values = [
                {_encode(run[section], path): run[section].get(path) for run in side}
                for side in listed
            ]
            seed = section != "environment" and is_seed(path.removeprefix("argv "))
            if all(found.keys() == values[0].keys() for found in values[1:]) and (
                len(values[0]) == 1 or seed
            ):
                equal_count += 1
                if len(equal) < _MOST_SETTINGS:
                    equal.append({"section": section, "path": path, "value": _first(values[0])})
            elif len(differs) < _MOST_SETTINGS:
                differs.append(
                    {
                        "section": section,
                        "path": path,
                        "values": [list(found.values())[:_MOST_VALUES] for found in values],
                        "counts": [len(found) for found in values],
                        "is_seed": seed,
                    }
                )
    told = differs if len(sides) != 2 else [row for row in differs if not _repeats(row, differs)]
    stored = [[run.stored for run in side] for side in runs]
    sections = {row["section"] for row in told if not row["is_seed"]}
    agreeing = list_agreeing(stored, sections, all(code.agrees for code in codes))
    return _Settings(
        told,
        equal,
        equal_count,
        describe_agreement(agreeing),
        list(dict.fromkeys(note for code in codes for note in code.list_notes())),
    )


def _tell_code(codes: Sequence[CodeComparison], runs: Sequence[Sequence[_Held]]) -> list[Any]:
    """Rows of the code: functions of two sides, of more which sides are of other code."""
    from quark.analysis.comparison.changes import SOURCES, list_code_changes

    if len(codes) == 1:
        found = [
            (each.path, [each.primary, each.reference]) for each in list_code_changes(codes[0])
        ]
    elif any(code.manner in ("changed", "digests", "varies") for code in codes):
        held = [sorted({str(run.stored.digests.code)[:12] for run in side}) for side in runs]
        found = [(SOURCES, held)]
    else:
        found = []
    rows = []
    for path, sides in found[:_MOST_SETTINGS]:
        values = [each if isinstance(each, list) else [each] for each in sides]
        rows.append(
            {
                "section": "code",
                "path": path,
                "values": [each[:_MOST_VALUES] for each in values],
                "counts": [len(each) for each in values],
                "is_seed": False,
            }
        )
    return rows


def _repeats(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a row only says what another one says, as the argument of a setting does."""
    from quark.analysis.comparison.changes import repeats_setting
    from quark.analysis.comparison.results import ChangeDiff

    changes = [
        ChangeDiff(
            each["section"], each["path"], "changed", *(each["values"][n][0] for n in (0, 1))
        )
        for each in (row, *rows)
        if each["counts"] == [1, 1]
    ]
    return row["counts"] == [1, 1] and repeats_setting(changes[0], changes[1:])


def _first(values: Mapping[bytes, Any]) -> Any:
    return next(iter(values.values()))


def _encode(settings: Mapping[str, Any], path: str) -> bytes:
    if path not in settings:
        return b""
    return msgspec.json.encode(settings[path], order="sorted", enc_hook=str)


def _list_metrics(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Every metric of any side with its last values, those of all sides first."""
    found: dict[str, list[list[float | None]]] = {}
    for number, side in enumerate(sides):
        for run in side.runs:
            for key, metric in run.metrics.items():
                if key not in found:
                    found[key] = [[] for _ in sides]
                found[key][number].append(_read_last(metric))
    rows: list[dict[str, Any]] = []
    for key, lasts in found.items():
        name = decode_name(key)
        rows.append(
            {
                "key": key,
                "name": name,
                "written": write_name("metric", key),
                "group": name.rpartition("/")[0],
                "sides": sum(bool(values) for values in lasts),
                "last": [_average(values) for values in lasts],
                "count": [len(values) for values in lasts],
            }
        )
    rows.sort(key=lambda row: (-row["sides"], place_metric(row["name"], row["group"])))
    return rows


def _read_last(metric: MetricSummary) -> float | None:
    return float("nan") if metric.last is None and metric.count else metric.last


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _find_main(runs: Any) -> str | None:
    """The metric that most of the runs are judged by."""
    counted = Counter(main.key for run in runs if (main := find_main_metric(run)) is not None)
    return max(counted, key=lambda key: (counted[key], key), default=None)


def _list_settings(runs: Any) -> list[dict[str, str]]:
    """What can stand on an axis, with its name as a search writes it."""
    plain = {
        key
        for run in runs
        for key, value in _flatten_config(run).items()
        if isinstance(value, (bool, float, str))
    }
    written = ((key, write_name("config", key)) for key in sorted(plain))
    found = [{"name": key, "written": text} for key, text in written if _can_be_asked(text)]
    return found[:_MOST_SETTINGS]


def _can_be_asked(written: str) -> bool:
    """Whether the language has a form for a name: with a backtick in it there is none."""
    from quark_core.search.parser import parse_column

    try:
        parse_column(written, "column")
    except SchemaValidationError:
        return False
    return True


def _list_group_keys(runs: Any) -> list[str]:
    """Settings that part the runs into more than one group, and not into single runs alone."""
    seen: dict[str, set[str]] = {}
    listed = [_list_notes(run) for run in runs]
    for key in {key for config in listed for key in config}:
        seen[key] = {_show(config.get(key)) for config in listed}
    return sorted(key for key, values in seen.items() if len(values) > 1)[:_MOST_SETTINGS]


def pack_group_curves(source: PageSource, parameters: Parameters) -> bytes:
    """The curves of some metrics, one of each side; with `members=1` also those of its runs.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    sides = read_sides(source, parameters, may_be_known=True)
    ask = CurveAsk.read(parameters, GROUP_AXES, of_group=True)
    keys, entries = ask.query.keys, ask.query.entries or 0
    if not keys:
        raise SchemaValidationError("key must name a metric")
    shows_runs = parameters.get_flag("members")
    listed: list[dict[str, Any]] = []
    columns: dict[str, NDArray[Any]] = {}
    for number, side in enumerate(sides):
        read = [_read_run(source, run, ask) for run in side.runs]
        for key in keys:
            runs = {
                run.run_id: found[key]
                for run, found in zip(side.runs, read, strict=True)
                if key in found
            }
            if not runs:
                continue
            said = {"key": key, "name": decode_name(key), "side": number, "runs": len(runs)}
            _lay_out(merge_runs(list(runs.values()), entries), said, listed, columns)
            if shows_runs and len(runs) > 1:
                for run_id, curve in runs.items():
                    _lay_out(merge_runs([curve], entries), {**said, "run": run_id}, listed, columns)
    return encode_pack({"curves": listed}, columns)


def _read_run(source: PageSource, run: RunSummary, ask: CurveAsk) -> dict[str, RunCurve]:
    """What a run has of the metrics within a window."""
    logged = tuple(key for key in ask.query.keys if key in run.metrics)
    if not logged:
        return {}
    found = read_series_many(source.reader, run.run_id, replace(ask.query, keys=logged))
    curves: dict[str, list[Any]] = {}
    for curve in found.curves:
        curves.setdefault(curve.key, []).append(curve)
    start_us = parse_time(run.stored.run.created_at)
    joined = {key: join_attempts(each, ask.x, start_us) for key, each in curves.items()}
    return {key: curve for key, curve in joined.items() if curve is not None}


def _lay_out(
    curve: GroupCurve,
    said: Mapping[str, Any],
    listed: list[dict[str, Any]],
    columns: dict[str, NDArray[Any]],
) -> None:
    place = len(listed)
    bad = int(curve.non_finite.sum())
    listed.append({**said, "points": curve.points, "exact": curve.exact, "non_finite": bad})
    dtype = choose_floats(curve.low, curve.high)
    columns[f"{place}.step"] = curve.x.astype("f8")
    columns[f"{place}.mean"] = curve.mean.astype(dtype)
    if said["runs"] > 1 or not curve.exact:
        columns[f"{place}.low"] = curve.low.astype(dtype)
        columns[f"{place}.high"] = curve.high.astype(dtype)
    if said["runs"] > 1:
        columns[f"{place}.count"] = curve.count.astype("f4")
    if bad:
        columns[f"{place}.non_finite"] = curve.non_finite.astype("f4")


_log = logging.getLogger("quark")

_MOST_KEPT = 32
_MOST_WAITING = 16
_MOST_LAYERS = 60
_DIRECTIONS = ("at_least", "at_most")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is compared, as it was when it was asked for: how far each run was."""

    pair: ComparedPair
    of: tuple[tuple[str, str | None], ...]


class ComparisonDesk:
    """Has sides compared, and keeps what was found; every method may be called from any thread.

    Nothing is stored with the runs. Of a run that goes on it is computed anew when it is asked
    for and the run has gone on.

    Args:
        source: What is looked at.
        desk: Whose analyzer compares.
    """

    def __init__(self, source: PageSource, desk: AnalysisDesk) -> None:
        self._source = source
        self._desk = desk
        self._lock = threading.Lock()
        self._found = Recent[_Asked, dict[str, Any]](_MOST_KEPT)
        self._waiting: set[_Asked] = set()

    def tell(self, parameters: Parameters) -> dict[str, Any]:
        """What `ComparisonEngine` says of the first side against the second, or that it computes.

        Raises:
            SchemaValidationError: A bad parameter, or not two sides.
            RunNotFoundError: There is no such run.
        """
        return self._tell(parameters, lambda sides: _pair(sides, target=_read_target(parameters)))

    def explain(self, parameters: Parameters) -> dict[str, Any]:
        """Why the first side is not as the second is, or that it computes; `metric=KEY` names one.

        Raises:
            SchemaValidationError: A bad parameter, or not two sides.
            RunNotFoundError: There is no such run.
        """
        metric = parameters.get_text("metric")
        return self._tell(parameters, lambda sides: _pair(sides, explains=True, metric=metric))

    def _tell(
        self, parameters: Parameters, make_pair: Callable[[Sequence[Side]], ComparedPair]
    ) -> dict[str, Any]:
        sides = read_sides(self._source, parameters)
        if len(sides) != 2:
            raise SchemaValidationError(f"side must name two sides, got {len(sides)}")
        asked = _Asked(make_pair(sides), _mark(sides))
        with self._lock:
            found = self._found.get(asked)
            if found is not None:
                self._found.move_to_end(asked)
                return found
            is_new = asked not in self._waiting and len(self._waiting) < _MOST_WAITING
            if is_new:
                self._waiting.add(asked)
        if is_new:
            self._desk.submit(lambda analyzer: self._compare(asked, analyzer))
        return {"state": "computing", "result": None, "note": None}

    def _compare(self, asked: _Asked, analyzer: RunAnalyzer) -> None:
        """On the thread of the analyses."""
        try:
            result = analyzer.compare(asked.pair)
            if not asked.pair.explains:
                result = _bound(result)
            found = {"state": "computed", "result": result, "note": None}
        except QuarkError as error:
            found = {"state": "failed", "result": None, "note": str(error)}
        except Exception as error:  # noqa: BLE001 - a plugin's rule may raise anything
            _log.exception("runs %s cannot be compared", ", ".join(asked.pair.primary))
            note = f"{type(error).__name__}: {error}"
            found = {"state": "failed", "result": None, "note": note}
        with self._lock:
            self._found[asked] = found
            self._waiting.discard(asked)


def _pair(sides: Sequence[Side], **options: Any) -> ComparedPair:
    return ComparedPair(sides[0].ids, sides[1].ids, **options)


def _read_target(parameters: Parameters) -> tuple[str, str, float] | None:
    """`target=KEY` with `direction=at_least|at_most` and `value=NUMBER`."""
    key = parameters.get_text("target")
    if key is None:
        return None
    direction = parameters.get_word("direction", "at_most", _DIRECTIONS)
    text = parameters.get_text("value") or ""
    try:
        value = float(text)
    except ValueError:
        raise SchemaValidationError(f"value must be a number, got {text!r:.40}") from None
    return key, direction, value


def _mark(sides: Sequence[Side]) -> tuple[tuple[str, str | None], ...]:
    return tuple((run.state, run.last_metric_at) for side in sides for run in side.runs)


def _bound(result: dict[str, Any]) -> dict[str, Any]:
    """A result with names decoded, and of thousands of layers only those that differ most."""
    for diff in result["metric_diffs"]:
        diff["name"] = decode_name(diff["metric_key"])
    for name in ("layer_summary_diffs", "parameter_diffs"):
        diffs: list[Mapping[str, Any]] = list(result[name])
        result[f"{name}_count"] = len(diffs)
        # What is not finite came as a text.
        diffs.sort(key=lambda diff: (not diff["notable"], -abs(float(diff["log_ratio"] or 0.0))))
        result[name] = diffs[:_MOST_LAYERS]
    return result
