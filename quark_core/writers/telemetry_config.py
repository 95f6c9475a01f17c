"""What SystemTelemetry measures, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quark_core.errors import SchemaValidationError
from quark_core.records.query import check_index
from quark_core.writers.device_timing import find_device_index
from quark_core.writers.scalars import to_amount

_MIN_INTERVAL_S = 0.01
_MAX_INTERVAL_S = 86_400.0


@dataclass(frozen=True, slots=True)
class SystemTelemetryConfig:
    """Configuration of `SystemTelemetry`.

    Attributes:
        sample_every_n_steps: `record_step` and `start_step` record the steps
            that this divides; overflows and skipped steps are counted on all.
        emit_scalar_metrics: Mirror the fields of a record that belongs to a
            step or an epoch into metrics such as `system/runtime/step_time_ms`.
        capture_cpu: Read CPU, RAM, and this process with its workers.
        capture_gpu: Read the GPUs.
        gpu_index: The driver's index of the GPU that stands in the record's own
            fields; by default the first that this process sees, or the one of
            its local rank where it sees so many. CUDA_VISIBLE_DEVICES is
            followed, with its integers taken as the driver's indexes.
        sample_interval_s: Seconds between the readings of the background
            sampler, 0.01 to 86400; one sampler serves the process, at the
            smallest interval that any SystemTelemetry wants.
        device: The device that trains, a torch device or its name. For a CUDA
            device `start_step` measures by events on its current stream, and
            its number chooses the GPU where `gpu_index` does not. torch is not
            imported for it.
        every_rank: Read the machine on each rank that keeps records, not only
            in the process of local rank 0 of each node.

    Raises:
        SchemaValidationError: A bad value; the message names the field.
    """

    sample_every_n_steps: int = 1
    emit_scalar_metrics: bool = True
    capture_cpu: bool = True
    capture_gpu: bool = True
    gpu_index: int | None = None
    sample_interval_s: float = 1.0
    device: Any = None
    every_rank: bool = False

    def __post_init__(self) -> None:
        every = check_index(self.sample_every_n_steps, "sample_every_n_steps")
        if not every:
            raise SchemaValidationError("sample_every_n_steps must be a positive integer")
        for name in ("emit_scalar_metrics", "capture_cpu", "capture_gpu", "every_rank"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise SchemaValidationError(
                    f"{name} must be True or False, not a {type(value).__name__}"
                )
        interval_s = to_amount(self.sample_interval_s, "sample_interval_s", "SystemTelemetryConfig")
        if not _MIN_INTERVAL_S <= interval_s <= _MAX_INTERVAL_S:
            raise SchemaValidationError(
                f"sample_interval_s must be from {_MIN_INTERVAL_S} to {_MAX_INTERVAL_S:g} seconds, "
                f"got {interval_s!r}"
            )
        find_device_index(self.device)
        # Plain numbers, whatever they came as.
        object.__setattr__(self, "sample_every_n_steps", every)
        object.__setattr__(self, "gpu_index", check_index(self.gpu_index, "gpu_index"))
        object.__setattr__(self, "sample_interval_s", interval_s)
