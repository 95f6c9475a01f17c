"""Which process of a distributed launch this is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["RankInfo", "detect_rank"]

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


def _read(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else None
