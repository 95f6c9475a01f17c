"""Binds a run of this process to its trial, and watches the metrics of the sweep.

A trial is held by a loop over a sweep (`current_trial`), or it is named by QUARK_TRIAL, as
`quark sweep run` sets it. The first run that begins meanwhile is the trial's.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from math import inf, isfinite
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from quark_core.config import settings
from quark_core.delivery.channel import MetricKey
from quark_core.records import MetricRecord
from quark_core.runs.open_run import OpenRun, RunDraft, RunExtension

if TYPE_CHECKING:
    from quark.sweeps.trial import Trial
    from quark_core.records import RunStatus
    from quark_core.sessions.session import TrainingSession

_MOST_WAITING = 100_000
_MOST_SHAPES = 1_000

# The keys of a row, and of each watched metric in it its index there and its place here.
_Shape: TypeAlias = tuple[tuple[MetricKey, ...], tuple[tuple[int, int], ...]]


class MetricWatch:
    """Keeps the newest value of some metrics, and notes when their first one reaches a rung.

    Noting takes no lock, but at a rung, and makes no system call. Several threads may log; the
    newest value of a metric is the one that came last.

    Args:
        keys: Stored keys of the metrics; the first one is the one that rungs are about.
        rungs: Rising steps; None for each step that is logged.
        on_rung: Called where a rung was reached, by the thread that has logged; or None.

    Attributes:
        newest: The newest value of each metric; None where there is none or it is not finite.
        step: The highest step of any of them, or None.
        waiting: Rungs that were reached and nobody has looked at, with the values there.
    """

    def __init__(
        self,
        keys: Sequence[str],
        rungs: Sequence[int] | None,
        on_rung: Callable[[], None] | None = None,
    ) -> None:
        self.newest: list[float | None] = [None] * len(keys)
        self.step: int | None = None
        self.waiting: deque[tuple[int, tuple[float | None, ...]]] = deque(maxlen=_MOST_WAITING)
        self._places = {key: place for place, key in enumerate(keys)}
        self._shapes: dict[int, _Shape] = {}
        self._rungs = None if rungs is None else deque(rungs)
        self._on_rung = on_rung
        self._reaching = threading.Lock()
        self._next: float = -1 if rungs is None else inf
        if self._rungs:
            self._next = self._rungs[0]

    def install(self, run: OpenRun) -> None:
        """See what is logged in this process from now on, by loggers that are made later."""
        channel = run.stream.channel(MetricRecord.KIND)
        channel.append = self.wrap(channel.append)

    def wrap(self, append: Callable[[Any], None]) -> Callable[[Any], None]:
        """What takes an item of the stream, and looks at it behind that."""
        places, note, shapes = self._places, self._note, self._shapes

        def see(item: Any) -> None:
            append(item)
            if type(item) is tuple:
                _, _, step, epoch, keys, values = item
                known = shapes.get(id(keys))
                if known is None or known[0] is not keys:
                    known = self._learn_shape(keys)
                for index, place in known[1]:
                    note(place, values[index], epoch if step is None else step)
            else:
                watched = places.get(item.metric_key)
                if watched is not None:
                    step = item.step
                    note(watched, item.value, item.epoch if step is None else step)

        return see

    def _learn_shape(self, keys: tuple[MetricKey, ...]) -> _Shape:
        """Where metrics stand in rows of these keys; the first one last, as it may reach a rung.

        A logger has one tuple of keys for all rows of a shape. It is kept here, so that no other
        object gets its id.
        """
        found = ((index, self._places.get(key.metric_key)) for index, key in enumerate(keys))
        seen = [(index, place) for index, place in found if place is not None]
        seen.sort(key=itemgetter(1), reverse=True)
        if len(self._shapes) >= _MOST_SHAPES:
            self._shapes.clear()
        shape = self._shapes[id(keys)] = (keys, tuple(seen))
        return shape

    def note(self, values: Sequence[float | None], step: int) -> None:
        """Note values that somebody reports, the first one last: the rung is about all of them."""
        for place in reversed(range(len(values))):
            value = values[place]
            if value is not None:
                self._note(place, value, step)

    def _note(self, place: int, value: float, step: int | None) -> None:
        self.newest[place] = value if isfinite(value) else None
        if step is None:
            return
        if self.step is None or step > self.step:
            self.step = step
        if place == 0 and step >= self._next:
            self._reach(step)

    def _reach(self, step: int) -> None:
        values = tuple(self.newest)
        if self._rungs is None:
            self._next = step + 1
            self.waiting.append((step, values))
        else:
            with self._reaching:
                while self._rungs and step >= self._rungs[0]:
                    self.waiting.append((self._rungs.popleft(), values))
                self._next = self._rungs[0] if self._rungs else inf
        if self._on_rung is not None:
            self._on_rung()


current_trial: ContextVar[Trial | None] = ContextVar("quark_current_trial", default=None)
"""The trial that is being worked at here, or None."""


class TrialBinding(RunExtension):
    """What the run of a trial asks of it.

    Args:
        trial: The trial.
    """

    is_announced = False

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def describe_start(self) -> Mapping[str, Any]:
        """The claim by which the trial is held."""
        claim = self.trial.claim
        said = {"sweep_id": claim.sweep_id, "number": claim.number, "token": claim.token}
        return {"trial": said}

    def describe_end(self, run: OpenRun, status: RunStatus) -> Mapping[str, Any]:
        """The result of the trial; nothing where the status says it all."""
        told = self.trial.tell(run, status)
        return {} if told is None else {"trial": told}

    def summarize(self) -> str:
        """The result of the trial in a line."""
        return self.trial.describe_end()

    def catches(self, error: BaseException) -> bool:
        """Whether an error only ends this trial, and nothing beyond its run."""
        return self.trial.ends_by(error)


def bind_draft(draft: RunDraft) -> None:
    """Make a run that begins now the run of the trial that is held here, if there is one.

    Raises:
        SchemaValidationError: QUARK_TRIAL names no trial of the store.
        SessionStoreError: The store cannot say.
    """
    trial = _find_trial(draft.storage_dir)
    if trial is None or trial.is_taken:
        return
    draft.extensions[TrialBinding] = TrialBinding(trial)
    draft.launch_key = trial.claim.to_text()
    if draft.storage_dir is None:
        draft.storage_dir = trial.storage_dir
    if draft.config is not None:
        draft.config = trial.join_config(draft.config)
        draft.objective = draft.objective or trial.objective
        draft.groups = tuple(sorted({*draft.groups, trial.group}))


def _find_trial(storage_dir: str | Path | None) -> Trial | None:
    trial = current_trial.get()
    text = "" if trial is not None else os.environ.get(settings.TRIAL, "").strip()
    if not text:
        return trial
    from quark.sweeps.sweep import open_given_trial

    return open_given_trial(text, storage_dir)


def find_bound_trial(session: TrainingSession) -> Trial | None:
    """The trial that a session's run is of, or None."""
    found = session.extensions.get(TrialBinding)
    return found.trial if isinstance(found, TrialBinding) else None
