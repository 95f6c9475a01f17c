"""Which launch this process belongs to, by what its launcher says; nothing is asked of a network.

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

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from quark_core.system.process import current_process

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
