"""How often the kernel has killed a process of this one's cgroup because memory ran out.

To a process that is killed so it is a SIGKILL. The counter of its cgroup rises by one, and stays
as long as the cgroup does: whoever looks on the same machine later can compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

CGROUPS = Path("/sys/fs/cgroup")
_COUNTER = "oom_kill"


class MemoryKills(msgspec.Struct, frozen=True):
    """A counter as it was at some moment.

    Attributes:
        path: The file that has it.
        count: What it said.
    """

    path: str
    count: int


def find_memory_kills(places: Path = Path("/proc/self/cgroup")) -> MemoryKills | None:
    """The counter of this process's cgroup, or None where there is none to see.

    Args:
        places: The file that says which cgroups the process is in.
    """
    for path in _list_files(places):
        count = _read(path)
        if count is not None:
            return MemoryKills(str(path), count)
    return None


def count_more_kills(before: MemoryKills) -> int:
    """By how much a counter has risen; 0 where its cgroup is gone, and nobody can say."""
    path = Path(before.path)
    # A run's records may be anybody's: no other file is opened for them.
    if ".." in path.parts or not path.is_relative_to(CGROUPS):
        return 0
    count = _read(path)
    return 0 if count is None else max(0, count - before.count)


def renew_process(process: dict[str, Any], beat: Mapping[str, Any]) -> dict[str, Any]:
    """Update the stored process of a run from a heartbeat.

    Args:
        process: The process, as the `start` of the run described it.
        beat: The data of the heartbeat, with the newest count of kills for lack of memory.
    """
    try:
        kills = msgspec.convert(beat["memory_kills"], MemoryKills)
    except (KeyError, msgspec.ValidationError):
        return process
    return {**process, "memory_kills": msgspec.to_builtins(kills)}


def _list_files(places: Path) -> Iterator[Path]:
    """The files that may have it: of the cgroup, or as a container sees its own."""
    try:
        lines = places.read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if number == "0" and not controllers:
            mount, name = CGROUPS, "memory.events"
        elif "memory" in controllers.split(","):
            mount, name = CGROUPS / controllers, "memory.oom_control"
        else:
            continue
        yield mount / place.lstrip("/") / name
        yield mount / name


def _read(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == _COUNTER:
                return int(value)
    except (OSError, ValueError):
        return None
    return None
