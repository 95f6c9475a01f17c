"""The launch of this process, by what its launcher says; no network is asked.

A launch is one start of a job on all of its ranks, with its restarts. Its
ranks share a key; where nothing else can ever have that key, it is exact:

    launcher            key                                           exact
    torchrun, one node  the agent's own folder (TORCHELASTIC_ERROR_FILE)  yes
    torchrun, several   run id, master's address and port, SLURM job      no
    SLURM (srun)        cluster, job, step                                yes
    Open MPI            PMIX_NAMESPACE, or job id and address of mpirun   yes
    PMI, by hand        job id; master's address and port; parent         no

A torchrun id may be "none" and ports repeat, so a key that is not exact is
believed only together with the time of a claim; see `launch_claims`.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from quark_core.config import settings
from quark_core.config.arguments import check_run_id
from quark_core.errors import SchemaValidationError
from quark_core.system.folders import decode_foreign, read_plain_file
from quark_core.system.process import ProcessIdentity, current_process, find_age_s, is_alive

# In this order: a launcher inside a batch job (torchrun inside SLURM) knows better.
_LAUNCHERS = (
    ("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("slurm", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("pmi", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Place of a process in its launch.

    Attributes:
        rank: Global rank, 0 where there is one process.
        local_rank: Rank on this host.
        world_size: Number of processes, at least 1.
        source: Where it was found: torch.distributed, torchrun, slurm,
            openmpi, pmi, or "single process".
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    source: str = "single process"


def detect_rank(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Find the rank: torch.distributed where it runs, else the launcher's variables.

    Never imports torch: a process group exists only where it is imported.
    A variable that is no number is passed over.
    """
    environ = os.environ if environ is None else environ
    local = _read(environ, "LOCAL_RANK")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank = int(distributed.get_rank())
        return RankInfo(
            rank,
            rank if local is None else local,
            int(distributed.get_world_size()),
            "torch.distributed",
        )
    for source, rank_name, local_name, size_name in _LAUNCHERS:
        found = _read(environ, rank_name)
        if found is None:
            continue
        local = _read(environ, local_name)
        size = _read(environ, size_name)
        return RankInfo(found, found if local is None else local, max(size or 0, found + 1), source)
    return RankInfo()


def leave_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that is no rank of this one's launch, but may start one."""
    said = {name for launcher in _LAUNCHERS for name in launcher[1:]}
    said |= {"MASTER_ADDR", "MASTER_PORT"}
    return {
        name: value
        for name, value in environ.items()
        if name not in said and not name.startswith("TORCHELASTIC_")
    }


def _read(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else None


_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0")  # noqa: S104 - compared, never bound


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a job.

    Attributes:
        source: torchrun, slurm, openmpi, pmi or environment.
        key: What all its ranks share.
        restart: How often the launcher has started it again.
        is_exact: Whether no other launch has this key.
        node_key: What only the processes of one agent share, where that is known.
        requeues: How often the batch job around it has been started again, which
            makes a new launch of it, unless it is the job that starts the ranks.
    """

    source: str
    key: str
    restart: int
    is_exact: bool
    node_key: str | None = None
    requeues: int = 0

    def derive_run_id(self, name: str) -> str | None:
        """The id of a run of this launch, the same on all ranks; None where the key is not exact.

        Args:
            name: Which run of the launch.
        """
        return _digest("run", self.key, name) if self.is_exact else None


def find_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """The launch of this process; None where no launcher says anything that ranks share.

    A launcher inside a batch job knows better than the job, as in `detect_rank`.
    """
    environ = os.environ if environ is None else environ
    for find in (_find_torchrun, _find_slurm, _find_openmpi, _find_pmi, _find_by_hand):
        launch = find(environ)
        if launch is not None:
            return launch
    return None


def _find_torchrun(environ: Mapping[str, str]) -> Launch | None:
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    restart = _read_count(environ, "TORCHELASTIC_RESTART_COUNT")
    requeues = _read_count(environ, "SLURM_RESTART_COUNT")
    agent = _find_agent_folder(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    node_key = None
    if agent is not None:
        # The folder's name is random, and outlives restarts.
        node_key = _digest("torchrun", current_process().host, agent)
    one_node = environ.get("GROUP_WORLD_SIZE") == "1" or (
        "LOCAL_WORLD_SIZE" in environ and environ["LOCAL_WORLD_SIZE"] == environ.get("WORLD_SIZE")
    )
    if one_node and node_key is not None:
        return Launch("torchrun", node_key, restart, True, node_key, requeues)
    shared = (run_id, *_read_master(environ), environ.get("SLURM_JOB_ID", ""))
    key = _digest("torchrun", *shared)
    return Launch("torchrun", key, restart, False, node_key, requeues)


def _find_agent_folder(error_file: str) -> str | None:
    """The folder that an agent makes for itself: FOLDER/attempt_0/1/error.json."""
    parents = Path(error_file).parents
    if len(parents) < 4 or not parents[1].name.startswith("attempt_"):
        return None
    return str(parents[2])


def _find_slurm(environ: Mapping[str, str]) -> Launch | None:
    job, rank = environ.get("SLURM_JOB_ID"), environ.get("SLURM_PROCID")
    if not job or rank is None:
        return None
    step = environ.get("SLURM_STEP_ID", "")
    size = environ.get("WORLD_SIZE", "")
    # Processes that one task has started and numbered are not the step's tasks.
    by_srun = bool(step) and ("RANK" not in environ or size == environ.get("SLURM_NTASKS", size))
    shared = [environ.get("SLURM_CLUSTER_NAME", ""), job, step if by_srun else ""]
    if not by_srun:
        shared += _read_master(environ)
    restart = _read_count(environ, "SLURM_RESTART_COUNT")
    return Launch("slurm", _digest("slurm", *shared), restart, by_srun)


def _find_openmpi(environ: Mapping[str, str]) -> Launch | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    space = environ.get("PMIX_NAMESPACE", "")
    job = environ.get("OMPI_MCA_ess_base_jobid", "")
    place = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if space or (job and place):
        shared = (space,) if space else (job, place)
        return Launch("openmpi", _digest("openmpi", *shared), 0, True)
    sizes = ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE")
    return _find_by_parent("openmpi", job, environ, sizes)


def _find_pmi(environ: Mapping[str, str]) -> Launch | None:
    if "PMI_RANK" not in environ:
        return None
    job = environ.get("PMI_JOBID") or environ.get("PMI_KVSNAME") or ""
    return _find_by_parent("pmi", job, environ, ("MPI_LOCALNRANKS", "PMI_SIZE"))


def _find_by_parent(
    source: str, job: str, environ: Mapping[str, str], sizes: tuple[str, str]
) -> Launch | None:
    """By a job's id, and on one node by the process that has started all ranks."""
    local, size = (environ.get(name) for name in sizes)
    parent = ""
    if local is not None and local == size and not job:
        parent = f"{current_process().host}|{os.getppid()}"
    if not job and not parent and not environ.get("MASTER_PORT"):
        return None
    return Launch(source, _digest(source, job, parent, *_read_master(environ)), 0, False)


def _find_by_hand(environ: Mapping[str, str]) -> Launch | None:
    """Ranks that somebody has numbered, by the address at which they meet."""
    if not environ.get("MASTER_PORT"):
        return None
    job = environ.get("SLURM_JOB_ID", "")
    return Launch("environment", _digest("environment", job, *_read_master(environ)), 0, False)


def _read_master(environ: Mapping[str, str]) -> tuple[str, str]:
    address = environ.get("MASTER_ADDR", "")
    if not address or address.startswith(_LOOPBACK):
        # It means this host, and another one's is another launch.
        address = platform.node()
    return address, environ.get("MASTER_PORT", "")


def _read_count(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0


def _digest(*parts: str) -> str:
    return xxhash.xxh3_64_hexdigest("\0".join(parts).encode("utf-8", "surrogateescape"))


_MAX_RANK = 10**7
_ENTRY = re.compile(r"(\d{1,8})(?:-(\d{1,8}))?")
_FORMS = '"zero", "all", or ranks such as [0, 8] or "0,8-11"'


@dataclass(frozen=True, slots=True)
class RankChoice:
    """Some ranks, or all of them.

    Attributes:
        spans: First and last rank of each span, sorted; None for all ranks.
    """

    spans: tuple[tuple[int, int], ...] | None

    def includes(self, rank: int) -> bool:
        """Whether a rank is one of them."""
        if self.spans is None:
            return True
        return any(first <= rank <= last for first, last in self.spans)

    @property
    def leader(self) -> int:
        """The lowest of them: it alone starts, describes and ends the run."""
        return 0 if self.spans is None else self.spans[0][0]

    @property
    def is_one(self) -> bool:
        """Whether it is a single rank."""
        return self.spans is not None and len(self.spans) == 1 and len(set(self.spans[0])) == 1

    def __str__(self) -> str:
        if self == RANK_ZERO:
            return "zero"
        if self.spans is None:
            return "all"
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.spans)


RANK_ZERO = RankChoice(((0, 0),))
ALL_RANKS = RankChoice(None)


def choose_ranks(ranks: object) -> RankChoice | None:
    """What a session was asked for: the argument, else QUARK_RANKS; None where neither says.

    Raises:
        SchemaValidationError: Neither a word nor ranks; the message names which of the two.
    """
    if ranks is not None:
        return parse_ranks(ranks, "ranks")
    given = os.environ.get(settings.RANKS, "").strip()
    return parse_ranks(given, settings.RANKS) if given else None


def parse_ranks(ranks: object, argument: str) -> RankChoice:
    """The choice that a word, a text such as "0,8-11" or an iterable of ranks stands for.

    Raises:
        SchemaValidationError: None of these, or no rank at all.
    """
    if isinstance(ranks, RankChoice):
        return ranks
    if isinstance(ranks, str):
        return _parse_text(ranks, argument)
    if isinstance(ranks, Iterable):
        return _join_spans([(rank, rank) for rank in _check_ranks(ranks, argument)], argument)
    raise SchemaValidationError(f"{argument} must be {_FORMS}, not {type(ranks).__name__}")


def _parse_text(text: str, argument: str) -> RankChoice:
    word = text.strip().lower()
    if word in ("zero", "all"):
        return RANK_ZERO if word == "zero" else ALL_RANKS
    spans = []
    # A plus in a URI's parameter is a space, and a comma would end an entry of QUARK_BACKENDS.
    for entry in re.split(r"[\s,;+]+", word):
        match = _ENTRY.fullmatch(entry)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise SchemaValidationError(f"{argument} must be {_FORMS}, got {text!r:.60}")
        spans.append((int(match[1]), int(match[2] or match[1])))
    return _join_spans(spans, argument)


def _check_ranks(ranks: Iterable[object], argument: str) -> list[int]:
    found = []
    for index, rank in enumerate(ranks):
        try:
            number = -1 if isinstance(rank, bool) else int(operator.index(rank))  # type: ignore[arg-type]
        except TypeError:
            number = -1
        if not 0 <= number <= _MAX_RANK:
            raise SchemaValidationError(
                f"{argument}[{index}] must be a rank from 0 to {_MAX_RANK}, got {rank!r:.60}"
            )
        found.append(number)
    return found


def _join_spans(spans: list[tuple[int, int]], argument: str) -> RankChoice:
    if not spans:
        raise SchemaValidationError(f"{argument} contains no rank; it must be {_FORMS}")
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return RankChoice(tuple(joined))


# How the ranks of a launch agree on a run: the leader claims it in a file, the others look.
#
# The files lie in `storage_dir/.quark/launches`, one for each run of a launch.
# There is no lock and no collective: a claim appears whole, by a link or a
# rename, and whoever looks for one stops after a time. An older claim of the
# same key is told from this launch's own by the restart count, by whether the
# run was ended or its leader is gone, and by its age against that of the process
# that looks, both by the clock of the file system.

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
            _log.debug("run %s cannot be announced to the other ranks: %s", run_id, error)
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
