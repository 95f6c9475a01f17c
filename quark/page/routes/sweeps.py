"""A sweep and its trials as the page has them: rows, who holds what, rungs, the front."""

from __future__ import annotations

import math
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from quark.analysis.metric_roles import find_best_trial, list_objectives, pick_comparable
from quark.page.recent import Recent
from quark.page.routes.page_source import SweepReader
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records.json_object import encode_json
from quark_core.records.names import decode_name
from quark_core.runs.reading import encode_key
from quark_core.search.resolution import write_name

if TYPE_CHECKING:
    from quark.page.routes.page_source import PageSource
    from quark.page.routes.parameters import Parameters
    from quark_core.backends.run_summary import StoredRun
    from quark_core.records.json_object import JsonObject
    from quark_core.records.sweeps import StoredSweep, StoredTrial

_MOST_WORKERS = 100
_MOST_RUNGS = 50
_MOST_FRONT = 500
_TEXT = 300

TRIAL_FIELDS = (
    "number",
    "state",
    "token",
    "failures",
    "losses",
    "run_id",
    "values",
    "constraints",
    "step",
    "reason",
    "claimed_at",
    "settled_at",
    "rung",
    "budget",
    "parent",
    "worker",
    "parameters",
)
"""What a row of a trial has, in this order."""


def describe_sweep(sweep: StoredSweep) -> dict[str, Any]:
    """A sweep as a row of the list."""
    counts = read_counts(sweep)
    definition = sweep.definition
    return {
        "id": sweep.id,
        "project": sweep.project,
        "name": sweep.name,
        "state": sweep.state,
        "is_done": sweep.is_done,
        "search": _show(definition.get("search")),
        "metrics": [_describe_metric(*each) for each in list_objectives(definition)],
        "counts": counts,
        "total": sum(counts.values()),
        "planned": _take_number(definition.get("trials")),
        "created_at": sweep.created_at,
        "updated_at": sweep.updated_at,
    }


def describe_definition(sweep: StoredSweep) -> dict[str, Any]:
    """What a sweep was opened with; what was defined wrongly is let go, as anybody may have."""
    definition = sweep.definition
    space = definition.get("space")
    constraints = definition.get("constraints")
    return {
        "budget": _take_number(definition.get("budget")),
        "max_failures": _take_number(definition.get("max_failures")),
        "lease_s": _take_number(definition.get("lease_s")),
        "seed": _take_number(definition.get("seed")),
        "stop": definition.get("stop") is True,
        "stop_broken": definition.get("stop_broken") is True,
        "constraints": [_show(each) for each in constraints[:50]]
        if isinstance(constraints, (list, tuple))
        else [],
        "space": {
            name: {
                "type": _show(each.get("type")),
                "low": _take_number(each.get("low")),
                "high": _take_number(each.get("high")),
                "log": each.get("log") is True,
            }
            for name, each in space.items()
            if isinstance(each, Mapping)
        }
        if isinstance(space, Mapping)
        else {},
    }


def describe_trial(trial: StoredTrial, names: Sequence[str]) -> tuple[Any, ...]:
    """A trial as a row of `TRIAL_FIELDS`, its parameters in the order of `names`."""
    origin = trial.origin
    return (
        trial.number,
        trial.state,
        trial.token,
        trial.failures,
        trial.losses,
        trial.run_id,
        None if trial.values is None else list(trial.values),
        None if trial.constraints is None else list(trial.constraints),
        trial.step,
        None if trial.reason is None else trial.reason[:_TEXT],
        trial.claimed_at,
        trial.settled_at,
        _take_number(origin.get("rung")),
        _take_number(origin.get("budget")),
        _take_number(origin.get("parent")),
        _name_worker(trial.worker),
        [_show(trial.parameters.get(name)) for name in names],
    )


def describe_live(trial: StoredTrial) -> dict[str, Any]:
    """Who holds a trial, and for how long."""
    return {
        "number": trial.number,
        "state": trial.state,
        "run_id": trial.run_id,
        "worker": _name_worker(trial.worker),
        "claimed_at": trial.claimed_at,
        "lease_until": trial.lease_until,
        "token": trial.token,
        "failures": trial.failures,
        "losses": trial.losses,
    }


def list_workers(trials: Sequence[StoredTrial]) -> list[dict[str, Any]]:
    """Who has trials now or had some, those who hold one first, then the newest."""
    found: dict[bytes, dict[str, Any]] = {}
    for trial in trials:
        name = _name_worker(trial.worker)
        if name is None or trial.worker is None:
            continue
        # Processes of one number may be of other boots, or of other containers.
        worker = found.setdefault(
            encode_json(trial.worker),
            {"worker": name, "holds": [], "ended": 0, "last_at": None, "lease_until": None},
        )
        if trial.state == "running":
            worker["holds"].append(trial.number)
            worker["lease_until"] = max(worker["lease_until"] or "", trial.lease_until or "")
        elif trial.is_final:
            worker["ended"] += 1
        worker["last_at"] = max(worker["last_at"] or "", trial.claimed_at or "")
    ordered = sorted(found.values(), key=lambda each: each["last_at"], reverse=True)
    ordered.sort(key=lambda each: not each["holds"])
    return ordered[:_MOST_WORKERS]


def list_rungs(sweep: StoredSweep, trials: Sequence[StoredTrial]) -> list[dict[str, Any]]:
    """How trials are spread over the rungs: by where they come from, else by where they ended."""
    objectives = list_objectives(sweep.definition)
    is_max = bool(objectives) and objectives[0][1] == "max"
    rungs: dict[tuple[float, float], list[StoredTrial]] = {}
    for trial in trials:
        rung = _take_number(trial.origin.get("rung"))
        if rung is not None:
            budget = _take_number(trial.origin.get("budget"))
            rungs.setdefault((rung, -1.0 if budget is None else budget), []).append(trial)
    if rungs:
        parents = Counter(_take_number(trial.origin.get("parent")) for trial in trials)
        return [
            {
                "rung": rung,
                "budget": None if budget < 0 else budget,
                "trials": len(members),
                "ended": sum(trial.is_final for trial in members),
                "went_on": sum(bool(parents[trial.number]) for trial in members),
                "stopped": sum(trial.state == "pruned" for trial in members),
                "best": _find_extreme(members, is_max=is_max),
            }
            for (rung, budget), members in sorted(rungs.items())[:_MOST_RUNGS]
        ]
    stopped = Counter(
        trial.step for trial in trials if trial.state == "pruned" and trial.step is not None
    )
    steps = sorted(stopped)[:_MOST_RUNGS]
    ended = [trial for trial in trials if trial.step is not None and trial.is_final]
    return [
        {
            "rung": place,
            "budget": step,
            "trials": sum(trial.step >= step for trial in ended if trial.step is not None),
            "ended": sum(trial.step == step for trial in ended),
            "went_on": sum(trial.step > step for trial in ended if trial.step is not None),
            "stopped": stopped[step],
            "best": None,
        }
        for place, step in enumerate(steps)
    ]


def _find_extreme(trials: Sequence[StoredTrial], *, is_max: bool) -> float | None:
    values = [
        trial.values[0]
        for trial in trials
        if trial.values and trial.values[0] is not None and math.isfinite(trial.values[0])
    ]
    return (max if is_max else min)(values, default=None)


def find_front(sweep: StoredSweep, trials: Sequence[StoredTrial]) -> list[int] | None:
    """Trials that none is better than in all metrics; None where there is one metric."""
    import numpy as np

    objectives = list_objectives(sweep.definition)
    if len(objectives) < 2:
        return None
    signs = np.array([1.0 if mode == "max" else -1.0 for _, mode in objectives])
    found = [
        (trial.number, trial.values)
        for trial in pick_comparable(sweep, trials)
        if trial.values is not None
        and len(trial.values) == len(signs)
        and all(value is not None and math.isfinite(value) for value in trial.values)
    ]
    if not found:
        return []
    table = np.array([values for _, values in found], dtype=np.float64) * signs
    order = np.lexsort([-table[:, column] for column in reversed(range(table.shape[1]))])
    front: list[int] = []
    for at in order:
        # Whoever is better in all comes before it, in this order.
        kept = table[front]
        if not ((kept >= table[at]).all(axis=1) & (kept > table[at]).any(axis=1)).any():
            front.append(int(at))
    return [found[at][0] for at in front[:_MOST_FRONT]]


def read_counts(sweep: StoredSweep) -> dict[str, int]:
    """How many trials there are in each state that has some."""
    return {
        str(state): count
        for state, count in sweep.counts.items()
        if isinstance(count, int) and not isinstance(count, bool) and count > 0
    }


def _name_worker(worker: JsonObject | None) -> str | None:
    """Host and process; the host is its name before whatever tells boots apart."""
    if not worker:
        return None
    host, pid = str(worker.get("host")).partition("|")[0], worker.get("pid")
    return clip(host if pid is None else f"{host} · {pid}")


def _take_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None


def _show(value: object) -> Any:
    """A value as a cell: numbers, truth values and null as they are, all else as a short text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return clip(value)
    return clip(msgspec.json.encode(value).decode("utf-8", "replace"))


def clip(text: str) -> str:
    """A text of at most 300 characters."""
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}…"


def _describe_metric(name: str, mode: str) -> dict[str, Any]:
    """A metric: its key, what it is called, and as a search writes it."""
    try:
        key = encode_key(name, "metric")
    except SchemaValidationError:
        # Nothing was ever logged under what is no name.
        return {"key": "", "name": clip(name), "mode": mode, "written": ""}
    return {
        "key": key,
        "name": decode_name(key),
        "mode": mode,
        "written": write_name("metric", key),
    }


_MOST_LISTED = 200
_MOST_TRIALS = 10_000
_MOST_READ = 20_000
_MOST_KNOWN = 16
_MOST_BEST = 512
_MOST_LIVE = 200
_MOST_NAMES = 200
_MOST_FILLED = 500
_AGAIN_S = 0.7
_UNSURE_S = 5.0
_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")


def is_sweep_id(text: str) -> bool:
    """Whether a sweep can have this id."""
    return _ID.fullmatch(text) is not None


class NoSuchSweep(Exception):
    """There is no such sweep; the message is for people."""


@dataclass(slots=True)
class _Known:
    """A sweep as it was when it was read last, and when each row of it became as it is.

    Attributes:
        mark: Tells this table from any other that its cursors may be of.
        version: Rises whenever something has changed.
        names: The parameters, in the order of their columns.
        rows, changed: The rows, and the version since which each is so.
        read_s: When the store was asked last.
    """

    mark: str = field(default_factory=lambda: secrets.token_hex(6))
    version: int = 0
    sweep: StoredSweep | None = None
    trials: Sequence[StoredTrial] = ()
    names: tuple[str, ...] = ()
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    read_s: float = -math.inf


class SweepDesk:
    """What is told of sweeps; every method may be called from any thread.

    Rows of trials are kept, so that who follows a sweep is told only what has changed.

    Args:
        source: What is looked at.
    """

    def __init__(self, source: PageSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._known = Recent[str, _Known](_MOST_KNOWN)
        # The best of each, and until when that may be said again.
        self._best = Recent[tuple[str, bytes], tuple[dict[str, Any] | None, float]](_MOST_BEST)
        self._said = Recent[tuple[Any, ...], dict[str, Any]](4 * _MOST_KNOWN)

    @property
    def _reader(self) -> SweepReader | None:
        reader: object = self._source.reader
        return reader if isinstance(reader, SweepReader) else None

    def forget(self) -> None:
        """Read everything anew: something was changed."""
        with self._lock:
            for known in self._known.values():
                known.read_s = -math.inf

    def list_all(self, parameters: Parameters) -> dict[str, Any]:
        """The newest sweeps, of one project where it is named.

        Raises:
            SchemaValidationError: A bad parameter.
            SessionStoreError: The store cannot be read.
        """
        reader = self._reader
        if reader is None:
            note = f"this backend ({self._source.backend}) does not support sweeps"
            return {"sweeps": [], "count": 0, "note": note}
        project = parameters.get_text("project")
        found = reader.list_sweeps(project)
        left = _MOST_READ
        said = []
        for sweep in found[:_MOST_LISTED]:
            total = sum(read_counts(sweep).values())
            best = None
            if total <= left:
                left -= total
                best = self._find_best(reader, sweep)
            said.append({**describe_sweep(sweep), "best": best})
        return {"sweeps": said, "count": len(found), "note": None}

    def tell(self, sweep_id: str, parameters: Parameters) -> dict[str, Any] | None:
        """A sweep with its trials; with a cursor what has changed since, or None for nothing.

        Raises:
            NoSuchSweep: There is none of this id.
            SessionStoreError: The store cannot be read.
        """
        cursor = parameters.get_text("cursor") or ""
        with self._lock:
            known = self._read(sweep_id)
            mark, _, version = cursor.partition(".")
            since = int(version) if mark == known.mark and version.isdecimal() else -1
            # Leases change without a word, as long as somebody has one.
            live = [trial for trial in known.trials if trial.state in ("running", "suspended")]
            if since == known.version and not live:
                return None
            rows = [
                row
                for row, changed in zip(known.rows, known.changed, strict=True)
                if changed > since
            ]
            sweep, trials, names = known.sweep, known.trials, known.names
            cursor = f"{known.mark}.{known.version}"
        assert sweep is not None
        best = find_best_trial(sweep, trials)
        return {
            "cursor": cursor,
            "reset": since < 0,
            "now": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            "sweep": {**describe_sweep(sweep), **describe_definition(sweep)},
            "names": names,
            "fields": TRIAL_FIELDS,
            "rows": rows,
            "live": [describe_live(trial) for trial in live[:_MOST_LIVE]],
            "live_count": len(live),
            "workers": list_workers(trials),
            "rungs": list_rungs(sweep, trials),
            "best": None if best is None else best.number,
            "left_out": max(0, sum(read_counts(sweep).values()) - len(trials)),
        }

    def judge(self, sweep_id: str) -> dict[str, Any]:
        """Whether the best is really the best, of each metric; and of several the front.

        Raises:
            NoSuchSweep: There is none of this id.
            SessionStoreError: The store cannot be read.
        """
        sweep, trials, key = self._take(sweep_id, "verdict")
        found = self._find_said(key)
        if found is not None:
            return found
        from quark.analysis.sweep_analysis import judge_sweep

        verdicts = judge_sweep(sweep, trials, self._source.reader)
        said = {
            "verdicts": [
                {**verdict.to_dict(), "name": decode_name(verdict.metric)} for verdict in verdicts
            ],
            "front": find_front(sweep, trials),
        }
        return self._keep_said(key, said)

    def weigh(self, sweep_id: str, parameters: Parameters) -> dict[str, Any]:
        """How much each parameter matters, for each metric.

        Raises:
            NoSuchSweep: There is none of this id.
            SchemaValidationError: A bad parameter.
            SessionStoreError: The store cannot be read.
        """
        from quark.analysis.sweep_analysis import measure_importances

        methods = ("ranks", *(("ped_anova",) if find_spec("optuna") else ()))
        method = parameters.get_word("method", "ranks", methods)
        sweep, trials, key = self._take(sweep_id, method)
        found = self._find_said(key)
        if found is not None:
            return found
        measured = measure_importances(sweep, trials, method)
        said = {
            "methods": methods,
            "importances": [
                {
                    **each.to_dict(),
                    "name": decode_name(each.metric),
                    "shares": [[clip(name), share] for name, share in each.shares.items()],
                }
                for each in measured
            ],
        }
        return self._keep_said(key, said)

    def _take(
        self, sweep_id: str, what: str
    ) -> tuple[StoredSweep, Sequence[StoredTrial], tuple[Any, ...]]:
        with self._lock:
            known = self._read(sweep_id)
            assert known.sweep is not None
            done = sum(trial.is_final for trial in known.trials)
            return known.sweep, known.trials, (sweep_id, what, known.mark, done)

    def _find_said(self, key: tuple[Any, ...]) -> dict[str, Any] | None:
        with self._lock:
            return self._said.get(key)

    def _keep_said(self, key: tuple[Any, ...], said: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._said[key] = said
        return said

    def _read(self, sweep_id: str) -> _Known:
        """The sweep as it is now, or was a moment ago; with the lock held."""
        reader = self._reader
        if reader is None or not is_sweep_id(sweep_id):
            raise NoSuchSweep(f"the sweep {sweep_id!r:.120} does not exist")
        known = self._known.get(sweep_id)
        if known is not None and time.monotonic() - known.read_s < _AGAIN_S:
            return known
        try:
            sweep = reader.load_sweep(sweep_id)
        except SchemaValidationError as error:
            raise NoSuchSweep(str(error)) from None
        trials = self._fill(known, sweep, reader.list_trials(sweep_id, limit=_MOST_TRIALS))
        known = self._known[sweep_id] = known or _Known()
        _renew(known, sweep, trials)
        known.read_s = time.monotonic()
        return known

    def _fill(
        self, known: _Known | None, sweep: StoredSweep, trials: Sequence[StoredTrial]
    ) -> Sequence[StoredTrial]:
        """Trials with the figures of their runs, where these have completed without a word."""
        before = {} if known is None else {trial.number: trial for trial in known.trials}
        bare = [trial for trial in trials if trial.state == "completed" and trial.values is None]
        asked = []
        found: dict[int, StoredTrial] = {}
        for trial in bare[:_MOST_FILLED]:
            old = before.get(trial.number)
            if old is not None and old.values is not None and old.token == trial.token:
                found[trial.number] = old
            else:
                asked.append(trial)
        if not asked and not found:
            return trials
        from quark.sweeps.definition import SweepDefinition, fill_values

        try:
            definition = SweepDefinition.build(sweep.definition)
        except SchemaValidationError:
            return trials
        store: Any = self._source.reader
        found.update({trial.number: trial for trial in fill_values(store, asked, definition)})
        return [found.get(trial.number, trial) for trial in trials]

    def _find_best(self, reader: SweepReader, sweep: StoredSweep) -> dict[str, Any] | None:
        """The best trial, of one metric; it is looked for again once trials have ended."""
        if len(list_objectives(sweep.definition)) != 1:
            return None
        key = (sweep.id, encode_json(sweep.counts))
        with self._lock:
            known, until_s = self._best.get(key, (None, -math.inf))
            if time.monotonic() < until_s:
                return known
        trials = reader.list_trials(sweep.id, limit=_MOST_TRIALS)
        trial = find_best_trial(sweep, trials)
        # The figure of a completed trial may come after its state, which changes no count.
        is_sure = all(each.values for each in trials if each.state == "completed")
        until_s = math.inf if is_sure else time.monotonic() + _UNSURE_S
        best = None
        if trial is not None and trial.values is not None:
            best = {"number": trial.number, "value": trial.values[0], "run_id": trial.run_id}
        with self._lock:
            self._best[key] = best, until_s
        return best


def describe_run_trial(source: PageSource, stored: StoredRun) -> dict[str, Any] | None:
    """Which trial of which sweep a run has, or None.

    The sweep's name is null where the store does not tell it.
    """
    claim = stored.trial
    if claim is None:
        return None
    name = None
    reader: object = source.reader
    if isinstance(reader, SweepReader):
        try:
            name = reader.load_sweep(claim.sweep_id).name
        except (SchemaValidationError, SessionStoreError):
            name = None
    return {
        "sweep_id": claim.sweep_id,
        "sweep": name,
        "number": claim.number,
        "token": claim.token,
        "superseded": stored.superseded,
    }


def _renew(known: _Known, sweep: StoredSweep, trials: Sequence[StoredTrial]) -> None:
    names = dict.fromkeys(name for trial in trials for name in trial.parameters)
    kept = tuple(names)[:_MOST_NAMES]
    if known.sweep is not None and (kept != known.names or len(trials) < len(known.rows)):
        # Columns moved, or it is another sweep of the same name: nothing before counts.
        known.mark, known.rows, known.changed = secrets.token_hex(6), [], []
    version = known.version + 1
    rows = [describe_trial(trial, kept) for trial in trials]
    has_changed = known.sweep != sweep
    for at, row in enumerate(rows):
        if at == len(known.rows):
            known.rows.append(row)
            known.changed.append(version)
            has_changed = True
        elif known.rows[at] != row:
            known.rows[at] = row
            known.changed[at] = version
            has_changed = True
    known.sweep, known.trials, known.names = sweep, trials, kept
    if has_changed:
        known.version = version
