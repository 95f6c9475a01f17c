"""What was read of the machine at one moment, and which part of it is this process's.

CUDA numbers the GPUs that CUDA_VISIBLE_DEVICES leaves, the driver (NVML) numbers
all of them. CUDA_DEVICE_ORDER is not looked at: integers in CUDA_VISIBLE_DEVICES
are taken as the driver's, which is what CUDA_DEVICE_ORDER=PCI_BUS_ID makes them,
and what they are anyway where all GPUs of a node are of one model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from quark_core.records import GpuReading


@dataclass(frozen=True, slots=True)
class ProcessorReading:
    """Processors, memory and processes; the figures are those of `SystemTelemetryRecord`.

    Attributes:
        unavailable: Why some of them are None, or None.
    """

    cpu_usage_percent: float | None = None
    ram_usage_percent: float | None = None
    ram_used_bytes: int | None = None
    ram_total_bytes: int | None = None
    process_cpu_percent: float | None = None
    process_rss_bytes: int | None = None
    worker_count: int | None = None
    workers_rss_bytes: int | None = None
    unavailable: str | None = None


@dataclass(frozen=True, slots=True)
class GpusReading:
    """Every GPU that the driver shows to this process.

    Attributes:
        gpus: In the order of the driver's indexes; None where none could be read.
        unavailable: Why `gpus` is None, or None.
        gaps: Driver's index of a GPU -> why its utilization or memory is None.
        mig_parents: Identity of a MIG device -> driver's index of the GPU it is a part of.
    """

    gpus: tuple[GpuReading, ...] | None = None
    unavailable: str | None = None
    gaps: Mapping[int, str] = field(default_factory=dict)
    mig_parents: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HardwareReading:
    """A reading of the whole machine.

    Attributes:
        taken_at_s: When, by `time.monotonic`.
        processor: None where it was not asked for.
        gpus: None where they were not asked for.
        traffic: Figures of disks and network by name; None where they were not asked for.
    """

    taken_at_s: float
    processor: ProcessorReading | None = None
    gpus: GpusReading | None = None
    traffic: Mapping[str, float] | None = None


# In the order of quark_core.ranks.launches: a launcher inside a batch job knows better.
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
)
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def find_local_rank(environ: Mapping[str, str] | None = None) -> int:
    """Rank of this process on its node, by the launcher's variables; 0 where none says.

    The global rank never stands in for it: on a second node no process would be 0.
    """
    environ = os.environ if environ is None else environ
    for name in _LOCAL_RANKS:
        value = environ.get(name, "")
        if value.isascii() and value.isdigit():
            return int(value)
    return 0


def choose_gpu(
    reading: GpusReading,
    *,
    gpu_index: int | None,
    device_index: int | None,
    environ: Mapping[str, str] | None = None,
) -> tuple[int | None, str | None]:
    """The driver's index of the GPU that is meant, or None and why there is none.

    Args:
        reading: The GPUs there are.
        gpu_index: The driver's index, where the user gave one.
        device_index: CUDA's index, where the user gave a device; else it is the
            local rank where so many GPUs are visible, else 0.
        environ: The process's variables.
    """
    environ = os.environ if environ is None else environ
    gpus = reading.gpus or ()
    indexes = [gpu.index for gpu in gpus]
    if not indexes:
        return None, reading.unavailable or "the driver shows no GPU"
    if gpu_index is not None:
        if gpu_index in indexes:
            return gpu_index, None
        return None, f"gpu_index {gpu_index} does not exist; the driver shows {_list(indexes)}"
    visible = environ.get(_VISIBLE)
    if visible is not None:
        indexes = _find_visible(visible, reading)
        if not indexes:
            return None, f"{_VISIBLE}={visible!r} shows this process no GPU of the driver's"
    if device_index is not None:
        if device_index < len(indexes):
            return indexes[device_index], None
        return None, f"device index {device_index} does not exist; visible are {_list(indexes)}"
    rank = find_local_rank(environ)
    return indexes[rank if rank < len(indexes) else 0], None


def _find_visible(visible: str, reading: GpusReading) -> list[int]:
    """Driver's indexes in CUDA's order; as in CUDA, the first bad entry ends the list."""
    found: list[int] = []
    for entry in visible.split(","):
        index = _find_entry(entry.strip(), reading)
        if index is None:
            break
        found.append(index)
    return found


def _find_entry(entry: str, reading: GpusReading) -> int | None:
    gpus = reading.gpus or ()
    if entry.isascii() and entry.isdigit():
        return next((gpu.index for gpu in gpus if gpu.index == int(entry)), None)
    if entry.startswith("MIG-"):
        parents = [at for mig, at in reading.mig_parents.items() if mig.startswith(entry)]
        if parents:
            return parents[0]
        # The older form names the GPU itself: MIG-GPU-<uuid>/<instance>/<instance>.
        entry = entry.removeprefix("MIG-").partition("/")[0]
    if not entry.startswith("GPU-"):
        return None
    meant = [gpu.index for gpu in gpus if gpu.uuid is not None and gpu.uuid.startswith(entry)]
    return meant[0] if len(meant) == 1 else None


def _list(indexes: list[int]) -> str:
    return f"{len(indexes)} GPU{'s' if len(indexes) > 1 else ''}: {', '.join(map(str, indexes))}"
