"""Rows whose `_step`, W&B's own, is the step that the user logged, as long as steps ascend.

W&B takes a row for a step only while no row of that step or a later one was sent. So
what belongs to one step is joined before it goes out: rows of the newest two batches
of metrics are held, and lie in the mirror's state until they are seen in W&B's file.

What is no metric of rank 0 with a step rides in a row that has room for it, and has an
axis of its own there: epochs, other ranks, layers, findings about earlier steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from quark_backends.wandb.log_file import HISTORY_KEY
from quark_backends.wandb.media import Media, Rows
from quark_backends.wandb.state import WandbState

_MAX_RIDERS = 2000
# What finds no room near by is tried again among later rows.
_MAX_TRIES = 64
_LATER = ("quark/time", "quark/attempt")


class Histogram(msgspec.Struct, frozen=True, tag="histogram"):
    """A histogram on its way to W&B, which takes 512 bins at most."""

    counts: tuple[float, ...]
    edges: tuple[float, ...]


class Part(msgspec.Struct):
    """What one batch has for one row.

    Attributes:
        mark: `<writer>.<batch>.<part>`, by which it is found in W&B's file.
        values: Key -> value, axes included.
        axis: The key that is the x-axis of the part's keys; "" is W&B's own.
        step: The step whose row it asks for, or None.
        is_metric: Whether it is of metrics.
        replaces: Whether its values may take the place of those that a row has: counters,
            and the machine's values.
        epoch: The epoch, which is a step as long as a run has none.
        beside: The step that it was logged at or after, beside whose row it is best kept.
    """

    mark: str
    values: dict[str, int | float | str | Histogram | Media | Rows]
    axis: str
    step: int | None = None
    is_metric: bool = False
    replaces: bool = False
    epoch: int | None = None
    beside: int | None = None

    @property
    def attempt(self) -> Any:
        """The attempt that it is of."""
        return self.values.get("quark/attempt")


class StepRow(msgspec.Struct):
    """The parts that one row of W&B's is joined from, and its `_step`."""

    step: int
    parts: list[Part]


class _Held(msgspec.Struct):
    rows: list[StepRow] = []
    riders: list[Part] = []


def join_parts(parts: Sequence[Part]) -> dict[str, Any]:
    """The values of a row; the newest part has the last word."""
    values: dict[str, Any] = {}
    for part in parts:
        values.update(part.values)
    values[HISTORY_KEY] = " ".join(part.mark for part in parts)
    return values


class StepRows:
    """Joins parts to rows of ascending steps.

    Args:
        state: Says what was sent, and keeps what is held from process to process.
    """

    def __init__(self, state: WandbState) -> None:
        self._state = state
        held = msgspec.msgpack.decode(state.held, type=_Held) if state.held else _Held()
        self._rows = {row.step: row for row in sorted(held.rows, key=lambda row: row.step)}
        self._riders = held.riders
        self._keys = {row.step: _find_keys(row.parts) for row in held.rows}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not self._rows and not self._riders

    def save(self) -> None:
        """Put what is held into the state."""
        held = _Held(list(self._rows.values()), self._riders)
        self._state.held = b"" if self.is_empty else msgspec.msgpack.encode(held)

    def drop_found(self, marks: set[str]) -> None:
        """Forget parts that are in W&B's file already."""
        for step, row in list(self._rows.items()):
            left = [part for part in row.parts if part.mark not in marks]
            if len(left) < len(row.parts):
                self._note_sent(step)
                del self._rows[step], self._keys[step]
                # Its row is there, without them: see `add`.
                self._riders = [*left, *self._riders]
        self._riders = [part for part in self._riders if part.mark not in marks]

    def note_found(self, part: Part) -> None:
        """A part that comes again is in W&B's file already, and so is the row of its step."""
        if part.is_metric and part.step is not None:
            self._state.has_steps = True
            self._note_sent(part.step)

    def add(self, parts: Sequence[Part]) -> str | None:
        """Take a batch's parts; returns why W&B's own steps cannot go on, None where they can.

        In either case nothing is lost: what is held has all of them.
        """
        newest: int | None = None
        for part in parts:
            newest = part.step if part.is_metric and part.step is not None else newest
            part.beside = part.step if part.step is not None else newest
            self._add(part)
        metric_steps = [part.step for part in parts if part.is_metric and part.step is not None]
        if metric_steps:
            self._state.newest_steps = [*self._state.newest_steps[-1:], min(metric_steps)]
        self._seat_riders()
        for part in self._riders:
            if part.is_metric and part.step is not None:
                sent = self._state.sent_step
                late = f"step {part.step} came after step {sent}"
                return late if part.step < sent else f"step {part.step} came twice"
        if len(self._riders) > _MAX_RIDERS:
            return "more came beside its steps than their rows have room for"
        return None

    def release(self) -> Iterator[StepRow]:
        """The rows that nothing is expected for any more, in order."""
        newest = self._state.newest_steps
        if len(newest) < 2:
            return
        for step in list(self._rows):
            if step < newest[0] and len(self._rows) > 1:
                yield self._take(step)

    def flush(self) -> Iterator[StepRow]:
        """Everything, in order."""
        for step in list(self._rows):
            yield self._take(step)
        while self._riders:
            row = StepRow(self._state.sent_step + 1, [])
            keys: set[str] = set()
            left: list[Part] = []
            for part in self._riders:
                if _fits(part, row.parts, keys):
                    row.parts.append(part)
                    keys |= part.values.keys()
                else:
                    left.append(part)
            self._riders = left
            self._note_sent(row.step)
            yield row

    def give_up(self) -> list[Part]:
        """Everything that is held, part by part, for rows that have no step."""
        parts = [part for row in self._rows.values() for part in row.parts] + self._riders
        self._rows, self._riders, self._keys = {}, [], {}
        return parts

    def _add(self, part: Part) -> None:
        step = part.step
        if part.is_metric and step is not None:
            self._state.has_steps = True
        elif part.is_metric and part.epoch is not None and not self._state.has_steps:
            step = part.epoch
        elif step not in self._rows:
            step = None
        if step is None or step <= self._state.sent_step:
            self._riders.append(part)
            return
        if step not in self._rows:
            is_last = not self._rows or step > next(reversed(self._rows))
            self._rows[step], self._keys[step] = StepRow(step, []), set()
            if not is_last:
                self._rows = dict(sorted(self._rows.items()))
        if _fits(part, self._rows[step].parts, self._keys[step]):
            self._seat(part, self._rows[step])
        else:
            self._riders.append(part)

    def _seat(self, part: Part, row: StepRow) -> None:
        row.parts.append(part)
        self._keys[row.step] |= part.values.keys()

    def _seat_riders(self) -> None:
        """Give riders the nearest row that has room for them."""
        left = []
        steps = list(self._rows)
        for part in self._riders:
            if part.is_metric and part.step is not None:
                left.append(part)  # it asked for a row that it cannot have
                continue
            for step in islice(_order(steps, part.beside), _MAX_TRIES):
                if _fits(part, self._rows[step].parts, self._keys[step]):
                    self._seat(part, self._rows[step])
                    break
            else:
                left.append(part)
        self._riders = left

    def _take(self, step: int) -> StepRow:
        row = self._rows.pop(step)
        del self._keys[step]
        self._note_sent(step)
        return row

    def _note_sent(self, step: int) -> None:
        self._state.sent_step = max(self._state.sent_step, step)


def _order(steps: list[int], beside: int | None) -> Iterator[int]:
    """Steps, which ascend, in the order in which they are tried for a rider."""
    start = len(steps) if beside is None else bisect_left(steps, beside)
    yield from steps[start:]
    yield from reversed(steps[:start])


def _find_keys(parts: Sequence[Part]) -> set[str]:
    return {key for part in parts for key in part.values}


def _fits(part: Part, parts: Sequence[Part], keys: set[str]) -> bool:
    """Whether a row takes a part: no other value, and no other place on an axis, is lost."""
    if parts and parts[0].attempt != part.attempt:
        return False
    for key in part.values.keys() & keys:
        if key in _LATER or part.replaces:
            continue
        if key not in ("quark/step", "quark/epoch", part.axis):
            return False
        if any(other.values.get(key, part.values[key]) != part.values[key] for other in parts):
            return False
    return True
