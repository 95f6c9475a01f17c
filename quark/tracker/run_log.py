"""Puts a tracker's calls into a run."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from quark_core.config.redaction import cut_text
from quark_core.errors import (
    SchemaValidationError,
    SessionStoreError,
    StopRequested,
    TrainingHalted,
)
from quark_core.records import ConfigSnapshot
from quark_core.records.json_object import normalize_json
from quark_core.records.names import MAX_NAME_LENGTH, encode_name
from quark_core.runs.config_reading import change_config, read_config
from quark_core.runs.step_counters import read_step
from quark_core.sessions.session import TrainingSession
from quark_core.writers.artifacts import ArtifactStore
from quark_core.writers.events import EventLogger
from quark_core.writers.metrics import MetricsLogger
from quark_core.writers.scalars import to_float

_MAX_TEXT = 10_000
_MAX_DEPTH = 16


def split_values(metrics: Mapping[Any, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Part a row into numbers and the rest.

    Truth values are 0 and 1, arrays of one element that element; what stands
    in a mapping has its name before it, with a slash. A number whose name no
    store could hold is among the rest.

    Returns:
        Name -> number, and name -> JSON value of everything else.
    """
    numbers: dict[str, float] = {}
    others: dict[str, Any] = {}
    _split(metrics, "", numbers, others, 0)
    return numbers, others


def snapshot_values(metrics: Mapping[Any, Any]) -> dict[str, Any]:
    """A row for another thread: numbers of arrays and tensors are read now, the rest stays."""
    row: dict[str, Any] = {}
    for name, value in metrics.items():
        plain = type(value) in (float, int, bool, str) or not hasattr(value, "item")
        number = None if plain else _find_number(value)
        row[name] = value if number is None else number
    return row


def settle_table(
    columns: Sequence[Any], data: Iterable[Iterable[Any]]
) -> tuple[list[str], list[list[Any]]]:
    """A table that a run takes: names that differ, rows of one length, JSON values.

    A name that repeats has a number behind it; a row that is too short is
    filled with None, and columns are added for one that is too long. What is
    no JSON value becomes its text.
    """
    rows = [[_settle(value) for value in row] for row in data]
    names: list[str] = []
    width = max([len(columns), *map(len, rows)])
    for place in range(width):
        name = str(columns[place]) if place < len(columns) else f"column_{place}"
        names.append(name if name not in names else f"{name}.{place}")
    return names, [row + [None] * (width - len(row)) for row in rows]


def _split(
    metrics: Mapping[Any, Any],
    prefix: str,
    numbers: dict[str, float],
    others: dict[str, Any],
    depth: int,
) -> None:
    for given, value in metrics.items():
        name = f"{prefix}{given}"
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            _split(value, f"{name}/", numbers, others, depth + 1)
            continue
        number = _find_number(value)
        longest = max(len(name), len(encode_name(name)))
        if number is None or not name.strip("/ \t\r\n") or longest > MAX_NAME_LENGTH:
            others[name] = _settle(value)
        else:
            numbers[name] = number


def _find_number(value: Any) -> float | None:
    if isinstance(value, (str, bytes)) or value is None:
        return None
    if isinstance(value, bool):
        return float(value)
    try:
        return to_float(value, "value", "tracker.log")
    except SchemaValidationError:
        pass
    try:
        # An array of one element; numpy's own truth values.
        item = value.item()
    except Exception:  # noqa: BLE001 - a foreign object may raise anything
        return None
    return float(item) if isinstance(item, (bool, int, float)) else None


def _settle(value: Any) -> Any:
    try:
        settled = normalize_json(value, "value")
    except Exception:  # noqa: BLE001 - as above
        settled = _spell(value)
    return cut_text(settled, _MAX_TEXT) if isinstance(settled, str) else settled


def _spell(value: Any) -> str:
    try:
        return str(value).encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - as above
        return f"<{type(value).__name__}>"


VALUES_EVENT = "tracker_values"
"""Type of the event that has what was logged and is no number."""

_NUMBERS = frozenset({float, int})
_MAX_STEP = 2**63 - 1
_WATCH_OPTIONS = (
    *("optimizer", "every_n_steps", "layers", "parameters", "distributions", "telemetry"),
    *("include_types", "include_name_patterns"),
)


class RunLog:
    """The run's side of a tracker. Every method may be called from any thread.

    Rows wait for their commit here, and rows without a step get the one after
    the row before.

    Args:
        session: The run.
    """

    def __init__(self, session: TrainingSession) -> None:
        self.session = session
        self._metrics = MetricsLogger(session)
        self._events = EventLogger(session)
        self._artifacts = ArtifactStore(session)
        # Reentrant: a signal handler may log while its thread does.
        self._lock = threading.RLock()
        # Rows that wait for a commit, each with the step that it was given; no two share a name.
        self._waiting: list[tuple[int | None, dict[Any, Any]]] = []
        self._next_step = 0
        self._last_step: int | None = None
        self._watch: Any = None
        self._config: ConfigSnapshot | None = None

    def log(self, metrics: Mapping[str, Any], step: Any, commit: bool) -> None:
        """Put a row into the run, or let it wait.

        Raises:
            QuarkError: The run takes no more.
            TypeError: `metrics` is no mapping.
        """
        if type(step) is not int or step < 0 or step > _MAX_STEP:
            step = self._find_step(metrics, step)
        with self._lock:
            if commit and not self._waiting:
                self._write(metrics, step)
                return
            if not isinstance(metrics, Mapping):
                raise TypeError(f"metrics must be a mapping, not {type(metrics).__name__}")
            row = dict(metrics)
            try:
                if not self._fits(row, step):
                    self._write_waiting(joined=False)
            finally:
                self._waiting.append((step, row))
            if commit:
                self._write_waiting(joined=True)

    def commit(self) -> None:
        """Write the rows that wait for a commit that has not come, each as its own."""
        with self._lock:
            self._write_waiting(joined=False)

    def _fits(self, row: Mapping[Any, Any], step: int | None) -> bool:
        """Whether a row may go into one with those that wait, and nothing of them is lost."""
        return all(
            None in (step, its_step) or step == its_step for its_step, _ in self._waiting
        ) and not any((row.keys() & waits.keys()) - {"step"} for _, waits in self._waiting)

    def _write_waiting(self, *, joined: bool) -> None:
        """Write the rows that wait.

        Args:
            joined: Whether they are one row, since the last of them commits it; else a row
                without a step only goes into one before it that has a step.
        """
        waiting, self._waiting = self._waiting, []
        rows: list[tuple[int | None, dict[Any, Any]]] = []
        for step, row in waiting:
            if rows and (joined or (rows[-1][0] is not None and step in (None, rows[-1][0]))):
                before, known = rows[-1]
                rows[-1] = before if step is None else step, {**known, **row}
            else:
                rows.append((step, row))
        failure: Exception | None = None
        for step, row in rows:
            try:
                self._write(row, step)
            except (StopRequested, TrainingHalted):
                raise
            except Exception as error:  # noqa: BLE001 - the other rows must still be written
                failure = failure or error
        if failure is not None:
            raise failure

    def log_config(self, config: object) -> None:
        """Merge into the run's configuration, redacted; the newest value of a key stands.

        Raises:
            SchemaValidationError: No config.
        """
        snapshot = read_config(config)
        with self._lock:
            known = self._load_config()
            raw = None
            if snapshot.raw is not None or (known is not None and known.raw is not None):
                before = {} if known is None else dict(known.raw or known.values)
                raw = {**before, **(snapshot.raw or snapshot.values)}
            values = {**({} if known is None else known.values), **snapshot.values}
            notes = list(dict.fromkeys((*(() if known is None else known.notes), *snapshot.notes)))
            data = {"values": values, "notes": notes, **({} if raw is None else {"raw": raw})}
            after = ConfigSnapshot.from_data(data)
            if known is None:
                after = msgspec.structs.replace(after, origins=snapshot.origins)
            else:
                after = change_config(known, after, [snapshot], "log_config")
            self._config = after
            self.session.open_run.emit_lifecycle("config", after.to_data())

    def log_table(self, key: str, columns: Sequence[Any], data: Iterable[Iterable[Any]]) -> None:
        """Keep a table as an artifact at the newest step."""
        names, rows = settle_table(columns, data)
        _despite_warnings(
            self._artifacts.log_table, str(key), rows, columns=names, step=self._last_step
        )

    def log_image(self, key: str, image: Any, caption: str | None) -> None:
        """Keep an image as an artifact at the newest step."""
        metadata = None if caption is None else {"caption": str(caption)}
        _despite_warnings(
            self._artifacts.log_image, str(key), image, step=self._last_step, metadata=metadata
        )

    def log_file(self, label: str, path: Path) -> None:
        """Keep a file as the artifact `label/file name`, or all files of a folder."""
        if path.is_dir():
            files = [(f"{label}/{p.relative_to(path).as_posix()}", p) for p in _walk(path)]
        else:
            files = [(f"{label}/{path.name}", path)]
        for name, file in files:
            _despite_warnings(self._artifacts.log_file, file, name=name, step=self._last_step)

    def watch(self, model: Any, **options: Any) -> Any:
        """Watch a model; each committed row ends a step and begins the next one.

        Raises:
            ImportError: torch is not installed.
            QuarkError: The model cannot be watched.
        """
        # By name: the core does not know torch, and most scripts that come here have it.
        watch = import_module("quark_torch.watching").watch
        frequency = options.pop("log_freq", None)
        if frequency is not None:
            options.setdefault("every_n_steps", frequency)
        if options.get("log") == "parameters":
            options.setdefault("layers", False)
        chosen = {name: options[name] for name in _WATCH_OPTIONS if name in options}
        with self._lock:
            self._close_watch()
            self._watch = watch(self.session, model, **chosen)
            self._watch.step(self._next_step)
            return self._watch

    def become_child(self) -> None:
        """This process was forked: what waits is the parent's, and so is what watches."""
        self._lock = threading.RLock()
        self._waiting = []
        self._watch = None

    def close(self) -> None:
        """Write what waits; the run itself goes on."""
        with self._lock:
            try:
                self.commit()
            finally:
                self._close_watch()

    def _write(self, metrics: Mapping[str, Any], step: int | None) -> None:
        chosen = self._next_step if step is None else step
        try:
            # The writer would leave out what is no number, which is an event here.
            is_plain = _NUMBERS.issuperset(map(type, metrics.values()))
            if is_plain:
                _despite_warnings(self._metrics.log_many, metrics, step=chosen)
        except (SchemaValidationError, AttributeError):
            is_plain = False
        if not is_plain:
            self._write_mixed(metrics, chosen)
        before, self._last_step = self._last_step, chosen
        self._next_step = chosen + 1
        if self._watch is not None:
            # Rows of every tenth step: the next one is ten steps later.
            ahead = 1 if before is None or chosen <= before else chosen - before
            try:
                self._watch.step(chosen + ahead)
            except Exception:
                self._watch = None
                raise

    def _write_mixed(self, metrics: Mapping[str, Any], step: int) -> None:
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics must be a mapping, not {type(metrics).__name__}")
        numbers, others = split_values(metrics)
        if numbers:
            _despite_warnings(self._metrics.log_many, numbers, step=step)
        if others:
            self._events.log(VALUES_EVENT, step=step, payload={"values": others})

    def _find_step(self, metrics: Mapping[str, Any], step: Any) -> int | None:
        """A step that is given in some other way, or that stands among the values."""
        is_given = step is not None
        if not is_given and isinstance(metrics, Mapping):
            step = metrics.get("step")
        try:
            return read_step(self.session.open_run, step)
        except SchemaValidationError:
            if is_given:
                raise SchemaValidationError(
                    f"step must be a non-negative integer, got {step!r:.60}; the row was not stored"
                ) from None
            return None

    def _load_config(self) -> ConfigSnapshot | None:
        known = self._config
        run = self.session.open_run
        if known is None and run.reader is not None and self.session.run_id is not None:
            try:
                run.flush()
                known = run.reader.load_run(self.session.run_id).config
            except SessionStoreError:
                # What was there stays in the attempt's first snapshot.
                known = None
        return known

    def _close_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            # The step that the last row has begun is broken off: it never took place.
            watch.__exit__(InterruptedError, InterruptedError(), None)


def _despite_warnings(act: Callable[..., object], *arguments: Any, **keywords: Any) -> None:
    """Call, again where warnings are errors: an odd name is warned of before anything is kept."""
    try:
        act(*arguments, **keywords)
    except Warning:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            act(*arguments, **keywords)


def _walk(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
