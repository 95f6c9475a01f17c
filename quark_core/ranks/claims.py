"""How the ranks of a launch agree on a run: the leader claims it in a file, the others look.

The files lie in `storage_dir/.quark/launches`, one for each run of a launch.
There is no lock and no collective: a claim appears whole, by a link or a
rename, and whoever looks for one stops after a time. An older claim of the
same key is told from this launch's own by the restart count, by whether the
run was ended or its leader is gone, and by its age against that of the process
that looks, both by the clock of the file system.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from pathlib import Path

import msgspec
import xxhash

from quark_core.config.arguments import check_run_id
from quark_core.errors import SchemaValidationError
from quark_core.ranks.launches import Launch
from quark_core.system.folders import decode_foreign, read_plain_file
from quark_core.system.process import ProcessIdentity, current_process, find_age_s, is_alive

_log = logging.getLogger("quark")

_KEPT_S = 30 * 86400.0
_POLL_S = 0.02
_SLOW_POLL_S = 0.2
# How finely times of files are told, and of processes; some file systems count seconds.
_FINE_GRAIN_S = 0.05
_COARSE_GRAIN_S = 1.1
# A rank of another node may begin so much later than the one that claims.
_SKEW_S = 60.0

_counts: Counter[tuple[str, str]] = Counter()


class Claim(msgspec.Struct, frozen=True):
    """What the leader of a launch says of a run.

    Attributes:
        run_id: The run.
        attempt: Its attempt.
        restart: The launcher's count of restarts.
        process: The leader.
        node_key: The leader's agent, where that is known.
        ended: Whether the leader has ended the run.
        is_done: Whether it is an earlier run, which has done what this launch would do.
    """

    run_id: str
    attempt: int
    restart: int
    process: ProcessIdentity
    node_key: str | None = None
    ended: bool = False
    is_done: bool = False


class RunClaims:
    """The claims of one run of a launch: its first under a name, or its second, and so on.

    Args:
        storage_dir: The storage root, which the ranks share if they can.
        launch: The launch.
        name: What the ranks call the run, such as its project.

    Attributes:
        launch: The launch.
        name: The name, with the run's place among those of this process.
        is_first: Whether it is the first of this process under that name.
    """

    def __init__(self, storage_dir: Path, launch: Launch, name: str) -> None:
        order = _counts[launch.key, name]
        _counts[launch.key, name] += 1
        self.launch = launch
        self.is_first = order == 0
        self.name = f"{name}\0{order}"
        self._folder = storage_dir / ".quark" / "launches"
        self._path = self._place(launch.key)
        self._own: Claim | None = None

    @property
    def derived_run_id(self) -> str | None:
        """The id that all ranks can work out by themselves, or None."""
        return self.launch.derive_run_id(self.name)

    def find_restarted(self) -> Claim | None:
        """The claim of this launch's earlier attempt, where the restart count says so."""
        paths = [self._path]
        if self.launch.node_key is not None:
            # The port at which the ranks meet, and so the key, may change with a restart.
            paths.insert(0, self._place(self.launch.node_key))
        for path in paths:
            claim = _load(path)
            if claim is not None and not claim.is_done and self._is_earlier(claim):
                return claim
        return None

    def find_rival(self) -> Claim | None:
        """The claim of another living process of this host that leads the same launch now."""
        claim = _load(self._path)
        if claim is None or claim.ended or claim.restart != self.launch.restart:
            return None
        own = current_process()
        return claim if claim.process != own and is_alive(claim.process) else None

    @property
    def is_used(self) -> bool:
        """Whether there is a claim under this key, of whatever launch."""
        return _load(self._path) is not None

    def claim(
        self, run_id: str, attempt: int, *, replaces: bool = True, is_done: bool = False
    ) -> bool:
        """Say which run it is, if that can be said; whether no other process was first.

        Args:
            run_id: The run.
            attempt: Its attempt.
            replaces: Whether a claim that is there is replaced.
            is_done: Whether it is an earlier run, and there is nothing to do.
        """
        claim = Claim(
            run_id,
            attempt,
            self.launch.restart,
            current_process(),
            self.launch.node_key,
            is_done=is_done,
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._prune()
            done = _save(self._path, claim, replaces=replaces)
            node_key = self.launch.node_key
            if done and node_key is not None and node_key != self.launch.key:
                _save(self._place(node_key), claim, replaces=True)
        except OSError as error:
            _log.debug("run %s is not announced to the other ranks: %s", run_id, error)
            return True
        if done:
            self._own = claim
        return done

    def end(self) -> None:
        """Say that the run is over: a later launch with the same key must not join it."""
        claim, self._own = self._own, None
        if claim is None:
            return
        ended = msgspec.structs.replace(claim, ended=True)
        node_key = self.launch.node_key or self.launch.key
        for path in {self._path, self._place(node_key)}:
            with contextlib.suppress(OSError):
                if _load(path) == claim:
                    _save(path, ended, replaces=True, changed_ns=path.stat().st_mtime_ns)

    def wait(self, timeout_s: float) -> Claim | None:
        """The leader's claim of this launch; None where there is none in time."""
        deadline = time.monotonic() + timeout_s
        poll_s = _POLL_S
        while True:
            remaining_s = deadline - time.monotonic()
            claim = self._look(is_last=remaining_s <= 0)
            if claim is not None or remaining_s <= 0:
                return claim
            time.sleep(min(poll_s, remaining_s))
            poll_s = min(poll_s * 1.2, _SLOW_POLL_S)

    def _look(self, *, is_last: bool) -> Claim | None:
        try:
            # Listing makes a network file system look again for what was not there.
            if self._path.name not in os.listdir(self._folder):
                return None
            changed = self._path.stat()
            age_s = _measure_now(self._folder) - changed.st_mtime
        except OSError:
            return None
        claim = _load(self._path)
        if claim is None or claim.restart != self.launch.restart:
            return None
        own_age_s = find_age_s()
        is_coarse = changed.st_mtime_ns % 10**9 == 0
        if age_s <= own_age_s + (_COARSE_GRAIN_S if is_coarse else _FINE_GRAIN_S):
            return claim
        # It was there before this process: an earlier launch's, unless this rank is late.
        if claim.ended:
            return None
        alive = is_alive(claim.process)
        if alive is not None:
            return claim if alive else None
        if self.launch.is_exact:
            return claim
        return claim if is_last and age_s <= own_age_s + _SKEW_S else None

    def _is_earlier(self, claim: Claim) -> bool:
        launch = self.launch
        if claim.restart >= launch.restart:
            return False
        if launch.is_exact or launch.node_key is None or claim.node_key is None:
            return True
        # An agent of this host with another folder is another launch; of another, it moved.
        same_host = claim.process.host == current_process().host
        return claim.node_key == launch.node_key or not same_host

    def _place(self, key: str) -> Path:
        digest = xxhash.xxh3_64_hexdigest(f"{key}\0{self.name}".encode("utf-8", "replace"))
        return self._folder / f"{digest}.json"

    def _prune(self) -> None:
        oldest = time.time() - _KEPT_S
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def _load(path: Path) -> Claim | None:
    try:
        claim = decode_foreign(read_plain_file(path), Claim)
        # Folders are named by it.
        check_run_id(claim.run_id)
    except (OSError, msgspec.DecodeError, SchemaValidationError):
        return None
    return claim


def _save(path: Path, claim: Claim, *, replaces: bool, changed_ns: int | None = None) -> bool:
    """Put a claim in its place, whole; whether it is there, and not another one."""
    scratch = path.with_name(f".{path.stem}-{os.urandom(4).hex()}")
    scratch.write_bytes(msgspec.json.encode(claim))
    try:
        if changed_ns is not None:
            os.utime(scratch, ns=(changed_ns, changed_ns))
        if replaces:
            os.replace(scratch, path)
        else:
            _add(scratch, path)
    except FileExistsError:
        return False
    finally:
        scratch.unlink(missing_ok=True)
    return True


def _add(scratch: Path, path: Path) -> None:
    try:
        os.link(scratch, path)
    except FileExistsError:
        raise
    except OSError:
        # A file system without links; who reads half of it looks again.
        with path.open("xb") as file:
            file.write(scratch.read_bytes())


def _measure_now(folder: Path) -> float:
    """The time by the clock of the folder's file system, which may be another host's."""
    probe = folder / f".{os.urandom(6).hex()}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
