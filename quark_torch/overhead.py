"""How much of the training time probing takes."""

from __future__ import annotations

__all__ = ["Overhead"]

_WARM_UP_PROBES = 3
_COUNTED_PROBES = 20
_LIMIT_PERCENT = 5.0


class Overhead:
    """Holds the time that probes took against the time that went by.

    The first probes are left out, which load and compile things. What is
    between two probes counts, so that it is the share at the cadence used.
    """

    def __init__(self) -> None:
        self._probes = 0
        self._began_ns = 0
        self._spent_ns = 0
        self._is_news = False
        self._percent: float | None = None

    def begin_probe(self, now_ns: int) -> None:
        """A probe begins: what went by since an earlier one began is training and probing."""
        if self._probes == _WARM_UP_PROBES:
            self._began_ns = now_ns
        elif self._probes >= _WARM_UP_PROBES + _COUNTED_PROBES and self._percent is None:
            training_ns = now_ns - self._began_ns - self._spent_ns
            self._percent = 100.0 * self._spent_ns / max(1, training_ns)
            self._is_news = True

    def end_probe(self, spent_ns: int) -> None:
        """A probe has ended, and took so long."""
        if self._percent is None and self._probes >= _WARM_UP_PROBES:
            self._spent_ns += spent_ns
        self._probes += 1

    def percent_too_much(self) -> float | None:
        """The share of the training time in percent where it is over 5; told once."""
        percent, self._is_news = (self._percent if self._is_news else None), False
        return percent if percent is not None and percent > _LIMIT_PERCENT else None
