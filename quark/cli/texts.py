"""How values look in the terminal."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.text import Text

from quark_core.backend import StoredRun

__all__ = [
    "describe_age",
    "describe_duration",
    "describe_number",
    "describe_state",
    "find_duration_s",
]

_STYLES = {
    "completed": "green",
    "failed": "red",
    "interrupted": "yellow",
    "lost": "magenta",
    "running": "cyan",
}


def describe_state(state: str) -> Text:
    """A run's state in its colour."""
    return Text(state, style=_STYLES.get(state, ""))


def describe_number(value: float | None) -> str:
    """A metric's value in at most ten characters."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"
    return f"{value:.3e}"


def describe_duration(seconds: float) -> str:
    """A duration such as 4.2 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def find_duration_s(stored: StoredRun, last_metric_at: str | None = None) -> float:
    """How long a run took, or has taken, in seconds.

    Args:
        stored: The run.
        last_metric_at: When its newest metric was logged. A lost run counts to
            its last sign of life: this, or its last heartbeat.
    """
    end = stored.run.ended_at
    if end is None and stored.state == "lost":
        beats = [moment for moment in (stored.heartbeat_at, last_metric_at) if moment is not None]
        end = max(beats, key=datetime.fromisoformat, default=None)
    stop = datetime.now(UTC) if end is None else datetime.fromisoformat(end)
    return max(0.0, (stop - datetime.fromisoformat(stored.run.created_at)).total_seconds())


def describe_age(moment: str) -> str:
    """How long ago something was: just now, 5 min ago, 3 h ago, or a date."""
    age_s = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    if age_s < 60:
        return "just now"
    if age_s < 3600:
        return f"{int(age_s // 60)} min ago"
    if age_s < 86400:
        return f"{int(age_s // 3600)} h ago"
    return moment[:10]
