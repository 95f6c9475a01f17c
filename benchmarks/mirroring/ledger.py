"""What a training has logged, in shared memory, so that a kill leaves it whole."""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from pathlib import Path

STEP_KEYS = (
    "train/loss",
    "train/accuracy",
    "train/grad norm",
    "val/AR@100",
    "top 5 %",
    "损失",
    "_private",
    "odd//path:x",
    "edge",
)
"""Logged at every step; `edge` is NaN, infinite, huge or tiny now and then."""

EPOCH_KEYS = ("epoch/loss", "epoch/mean@1")
"""Logged with an epoch and no step."""

EPOCH_STEPS = 50
KEYS = STEP_KEYS + EPOCH_KEYS

Point = tuple[str, str, int, str]
"""Key, axis (step or epoch), place on it, value as `spell` says."""

Points = Counter[Point]
"""How often each point is somewhere."""

_HEAD = struct.Struct("<qq")
_ROW = struct.Struct(f"<{len(KEYS)}d")


def spell(value: float) -> str:
    """A value as text, bit by bit; any NaN is `nan`."""
    return repr(float(value))


class Ledger:
    """A row of values per step, and how many steps were begun and done.

    A step is begun when its row is here and done when every call that logs
    it has returned. What is between was in flight when the process died.

    Args:
        path: The file, made where it is not there.
        steps: How many rows it has at most.
    """

    def __init__(self, path: Path, steps: int) -> None:
        if not path.exists():
            with path.open("wb") as file:
                file.truncate(_HEAD.size + steps * _ROW.size)
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 0)

    @property
    def begun(self) -> int:
        """Steps whose values are here."""
        return int(_HEAD.unpack_from(self._shared)[0])

    @property
    def done(self) -> int:
        """Steps whose calls have returned."""
        return int(_HEAD.unpack_from(self._shared)[1])

    def begin(self, step: int, values: dict[str, float]) -> None:
        """Note what a step is about to log."""
        row = [values.get(key, 0.0) for key in KEYS]
        _ROW.pack_into(self._shared, _HEAD.size + step * _ROW.size, *row)
        _HEAD.pack_into(self._shared, 0, step + 1, self.done)

    def finish(self, step: int) -> None:
        """Note that a step was logged."""
        _HEAD.pack_into(self._shared, 0, self.begun, step + 1)

    def list_points(self, step: int) -> list[Point]:
        """The points of a step."""
        row = _ROW.unpack_from(self._shared, _HEAD.size + step * _ROW.size)
        values = dict(zip(KEYS, map(spell, row), strict=True))
        found: list[Point] = [(key, "step", step, values[key]) for key in STEP_KEYS]
        if step % EPOCH_STEPS == EPOCH_STEPS - 1:
            epoch = step // EPOCH_STEPS
            found += [(key, "epoch", epoch, values[key]) for key in EPOCH_KEYS]
        return found
