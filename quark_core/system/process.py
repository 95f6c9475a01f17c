"""This process and others: identity, life, forks, and kills for lack of memory.

Also keeps forks away from imports that threads of ours are at. A lock that
Python holds for a module while one thread imports it is held for ever in a
child that is forked meanwhile, so that the child's own import of the module
never returns. Training forks (data loaders do), and our threads import late, so
a fork waits for the import.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quark_core.records.runs import RunEnding

_log = logging.getLogger("quark")

# How often the kernel has killed a process of this one's cgroup because memory ran out.
#
# To a process that is killed so it is a SIGKILL. The counter of its cgroup rises by one, and stays
# as long as the cgroup does: whoever looks on the same machine later can compare.

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


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process, told apart from any other that ever had its pid.

    Attributes:
        host: Host, boot and pid namespace: where `pid` means something.
        pid: Process id.
        started: Start time of the process as the system counts it, "" if unknown.
        image: Where its program lies in memory, "" if unknown: `os.execv` keeps pid and
            start time, and leaves nothing of the process that was.
        memory_kills: What the counter of its cgroup said, where that was noted of it.
    """

    host: str
    pid: int
    started: str
    image: str = ""
    memory_kills: MemoryKills | None = None


def current_process() -> ProcessIdentity:
    """Identity of this process."""
    pid = os.getpid()
    state = _read_state(pid)
    return ProcessIdentity(_host(), pid, *(state[1:] if state else ("", "")))


def is_alive(identity: ProcessIdentity) -> bool | None:
    """Whether the process runs; None where it lies on a host that cannot be asked from here."""
    if identity.host != _host():
        return None
    state = _read_state(identity.pid)
    if state is None or state[0] == "Z" or state[1] != identity.started:
        return False
    return "" in (state[2], identity.image) or state[2] == identity.image


def find_age_s() -> float:
    """How long ago this process was started, in seconds; of no clock that anybody can set."""
    state = _read_state(os.getpid())
    uptime = _read_text("/proc/uptime").partition(" ")[0]
    try:
        if state is not None and uptime and hasattr(os, "sysconf"):
            ticks_per_s: int = os.sysconf("SC_CLK_TCK")
            return max(0.0, float(uptime) - int(state[1]) / ticks_per_s)
    except (ValueError, OSError):
        pass
    import psutil

    return max(0.0, time.time() - float(psutil.Process().create_time()))


@lru_cache(maxsize=1)
def _host() -> str:
    boot_id = _read_text("/proc/sys/kernel/random/boot_id")
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return "|".join((platform.node(), boot_id, namespace))


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _read_state(pid: int) -> tuple[str, str, str] | None:
    """State letter, start time and image of a process, or None if there is none."""
    if os.path.exists("/proc/self/stat"):
        text = _read_text(f"/proc/{pid}/stat")
        # The command's name stands in parentheses and may hold anything.
        fields = text.rpartition(")")[2].split()
        if len(fields) <= 25:
            return None
        # Of another user's process both addresses read as 0 or 1.
        addresses = fields[23], fields[25]
        known = all(int(address) > 1 for address in addresses)
        return fields[0], fields[19], "-".join(addresses) if known else ""
    import psutil

    try:
        process = psutil.Process(pid)
        state = "Z" if process.status() == psutil.STATUS_ZOMBIE else "R"
        return state, f"{process.create_time():.2f}", ""
    except psutil.Error:
        return None


LOST_AFTER_S = 60.0
"""A run of another host is lost after this long without a heartbeat; they come every 10 s."""


def find_loss(status: str, process: ProcessIdentity | None, heartbeat_us: int) -> RunEnding | None:
    """Why a run whose status says running is lost, or None where it is not.

    On this host the process is looked at; a pid of another host means
    nothing here, so there the age of the heartbeat decides.
    """
    if status != "running":
        return None
    age_s = time.time() - heartbeat_us / 1e6
    alive = None if process is None else is_alive(process)
    if alive:
        return None
    if alive is None:
        if age_s <= LOST_AFTER_S:
            return None
        return RunEnding("vanished", f"no heartbeat from its host for {age_s:.0f} s")
    assert process is not None
    gone, beat = f"process {process.pid} has ended", f"last heartbeat {max(0.0, age_s):.0f} s ago"
    more = 0 if process.memory_kills is None else count_more_kills(process.memory_kills)
    if not more:
        return RunEnding("vanished", f"{gone}; {beat}")
    return RunEnding(
        "out_of_memory",
        f"{gone}, and memory ran out: its cgroup's counter oom_kill rose by {more}; {beat}",
    )


def find_lost_reason(status: str, process: ProcessIdentity | None, heartbeat_us: int) -> str | None:
    """The message of `find_loss`, or None."""
    loss = find_loss(status, process, heartbeat_us)
    return None if loss is None else loss.message


# A fork in the middle of an import of its own must not wait for ever.
_FORK_TIMEOUT_S = 5.0

# A signal handler may import what the code that it has stopped is importing.
_guard = threading.RLock()
_held = threading.local()


def find_module_file(module: object) -> str | None:
    """Where a module says that it comes from; without running anything of its own."""
    try:
        names: Any = object.__getattribute__(module, "__dict__")
        path = names.get("__file__") if isinstance(names, Mapping) else None
    except Exception:  # noqa: BLE001 - a module may be of any type
        return None
    # What is read from a pipe calls its file `<stdin>`.
    if type(path) is not str or not path or "\0" in path or path.startswith("<"):
        return None
    return path if os.path.isabs(path) else os.path.abspath(path)


@contextmanager
def importing() -> Iterator[None]:
    """Let forks of this process wait while a thread of a plugin imports a module.

    Use it as `with importing():` around imports and starts of processes that happen on a thread
    other than the user's. A child that is forked in the middle of an import could never import.
    """
    with _guard:
        yield


class ForkGate:
    """Lets no fork into what a child must not have a copy of half done; several may be in it.

    SQLite notes in the memory of the process which locks it holds: to a child that is forked while
    a thread writes, the store seems to be locked for ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0

    def enter(self) -> None:
        """Keep forks waiting from now on; waits for one that is being made."""
        with self._changed:
            self._inside += 1

    def leave(self) -> None:
        """End what `enter` has begun."""
        with self._changed:
            # In a child that was forked all the same nobody has entered.
            self._inside = max(0, self._inside - 1)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Wait until nobody is inside, or for so long, and let nobody in until it is opened.

        Returns:
            Whether it is closed; then the same thread has to open it.
        """
        is_closed = self._changed.acquire(timeout=timeout_s)
        if is_closed:
            self._changed.wait_for(lambda: not self._inside, timeout_s)
        return is_closed

    def open(self) -> None:
        """Let in again, after the fork, what this thread has closed."""
        self._changed.release()


writing_gate = ForkGate()
"""Around what is written to a store in a file."""

_WRITE_TIMEOUT_S = 2.0


def _before() -> None:
    _held.guard = _guard.acquire(timeout=_FORK_TIMEOUT_S)
    _held.gate = writing_gate.close(_WRITE_TIMEOUT_S)


def _after_in_parent() -> None:
    if _held.gate:
        writing_gate.open()
    if _held.guard:
        _guard.release()


def _after_in_child() -> None:
    # Whoever held the lock has not come along.
    global _guard
    _guard = threading.RLock()
    writing_gate.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )


def start_thread(
    target: Callable[..., object], *, name: str, args: tuple[Any, ...] = ()
) -> threading.Thread | None:
    """Start a daemon thread; None where there is none to spare, or the process ends."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        _log.debug("the thread %s cannot be started: %s", name, error)
        return None
    return thread


_Member = TypeVar("_Member")


def list_members(members: weakref.WeakSet[_Member]) -> list[_Member]:
    """The members of a set, while other threads may add and take out some; never raises for that.

    Iterating over a WeakSet is Python code that may be interrupted after each member, and raises
    RuntimeError where the set has changed meanwhile.
    """
    while True:
        try:
            return list(members)
        except RuntimeError:
            continue
