"""Records of what a run has beside metrics: telemetry, layers, parameters, batches, artifacts."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from quark_core.errors import SchemaValidationError
from quark_core.records.base import FieldRules, Record, StreamRecord
from quark_core.records.checks import check_histogram, check_key, check_places
from quark_core.records.json_object import JsonObject

TelemetryBoundary = Literal["step", "time"]
LayerSummaryType = Literal["activation", "gradient"]
HookDirection = Literal["forward", "backward"]
ParameterRole = Literal["weight", "bias", "other"]
"""The part that a parameter plays in its module."""

ParameterDistributionType = Literal["value", "gradient", "update"]
"""The tensor that a histogram of a parameter counts."""
ArtifactPayloadFormat = Literal["json", "text", "bytes"]


class GpuReading(Record, frozen=True, gc=False):
    """What one GPU of a node did at one moment; None where its driver gave no answer.

    Attributes:
        index: Its index at the driver (NVML), which CUDA_VISIBLE_DEVICES does not change.
        name: Its model.
        uuid: Its identity at the driver.
        utilization_percent: Share of the driver's last sample period in which
            a kernel ran, 0 to 100.
        memory_used_bytes, memory_total_bytes: Memory of the whole device, of all processes.
        memory_usage_percent: Used over total, 0 to 100.
        temperature_celsius: Of the chip.
        power_watts: Power drawn.
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_usage_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


class SystemTelemetryRecord(StreamRecord, frozen=True, gc=False):
    """Times of one step, with system metrics; unknown values are None.

    Attributes:
        boundary: `step` for a step, `time` for a moment.
        step: Step, or None.
        epoch: Epoch, or None.
        step_time_ms: Duration of the step in milliseconds.
        data_time_ms: Part of it until the batch was ready.
        compute_time_ms: Part of it after that.
        cpu_usage_percent: Use of all cores of the node, 0 to 100.
        ram_usage_percent: Memory in use on the node, 0 to 100.
        ram_used_bytes, ram_total_bytes: Memory of the node in bytes. Used is total minus available.
        process_cpu_percent: CPU use of this process and its workers; 100 is one core.
        process_rss_bytes: Resident memory of this process.
        worker_count: Number of child processes, such as DataLoader workers.
        workers_rss_bytes: Sum of their resident memory. Shared pages count for each process.
        gpu_index: Driver index of the GPU of the following fields.
        gpu_utilization_percent, gpu_memory_usage_percent: Use of the GPU and of its memory, 0 to
            100.
        gpu_memory_used_bytes, gpu_memory_total_bytes: Memory of the GPU in bytes.
        overflow_count: Number of steps with a gradient overflow so far.
        skipped_step_count: Number of skipped optimizer steps so far.
        gpus: All GPUs of the node.
        node: Host name.
        metadata: JSON values. `reading_age_ms` is the age of the system metrics, `unavailable` the
            reason for missing ones.
    """

    boundary: str
    step: int | None = None
    epoch: int | None = None
    step_time_ms: float | None = None
    data_time_ms: float | None = None
    compute_time_ms: float | None = None
    cpu_usage_percent: float | None = None
    ram_usage_percent: float | None = None
    ram_used_bytes: int | None = None
    ram_total_bytes: int | None = None
    process_cpu_percent: float | None = None
    process_rss_bytes: int | None = None
    worker_count: int | None = None
    workers_rss_bytes: int | None = None
    gpu_index: int | None = None
    gpu_utilization_percent: float | None = None
    gpu_memory_used_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None
    gpu_memory_usage_percent: float | None = None
    overflow_count: int = 0
    skipped_step_count: int = 0
    gpus: tuple[GpuReading, ...] | None = None
    node: str | None = None
    metadata: JsonObject | None = None

    KIND: ClassVar[str] = "telemetry"
    TABLE: ClassVar[str] = "telemetry"
    RULES: ClassVar[FieldRules] = FieldRules(
        words={"boundary": get_args(TelemetryBoundary)},
        finite=("step_time_ms", "data_time_ms", "compute_time_ms"),
        plain=(
            "gpus",
            "node",
        ),
    )


class LayerSummaryRecord(StreamRecord, frozen=True, gc=False):
    """Statistics of one activation or activation gradient of a module.

    Statistics are over the finite elements. They are None if there are none, or if they were not
    requested.

    Attributes:
        module_name: Qualified name of the module, without prefixes of wrappers.
        module_type: Class name of the module.
        summary_type: `activation` or `gradient`.
        hook_direction: `forward` or `backward`.
        call_index: Index of the module's call within the step, from 0. A gradient has the index of
            its forward call.
        element_count: Number of elements.
        step: Step, or None.
        epoch: Epoch, or None.
        tensor_shape: Shape, or None.
        mean: Mean.
        std: Square root of `variance`.
        norm: L2 norm.
        variance: Population variance.
        dead_unit_ratio: Share of units (channels, features) without any element above epsilon in
            magnitude, 0 to 1.
        saturation_ratio: Share of elements near an end of the module's range, 0 to 1.
        metadata: JSON values, or None.
        minimum, maximum: Smallest and largest element.
        zero_ratio: Share of elements not above epsilon in magnitude, 0 to 1. Epsilon is
            `dead_unit_epsilon` for activations and 0 for gradients.
        nan_count, inf_count: Number of NaN and of infinite elements.
        sample_variation_ratio: Share of an activation's energy that differs between samples, 0 to
            1. It is near 0 if all samples get the same output. Estimated from up to six evenly
            spaced samples and the first 1024 elements of each. None for gradients, without units or
            with one unit, with fewer than two samples, and for zero or non-finite samples. Also
            None for values measured on a device or in a compiled model.
    """

    module_name: str
    module_type: str
    summary_type: str
    hook_direction: str
    call_index: int
    element_count: int
    step: int | None = None
    epoch: int | None = None
    tensor_shape: tuple[int, ...] | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    variance: float | None = None
    dead_unit_ratio: float | None = None
    saturation_ratio: float | None = None
    metadata: JsonObject | None = None
    minimum: float | None = None
    maximum: float | None = None
    zero_ratio: float | None = None
    nan_count: int | None = None
    inf_count: int | None = None
    sample_variation_ratio: float | None = None

    KIND: ClassVar[str] = "layer"
    TABLE: ClassVar[str] = "layers"
    RULES: ClassVar[FieldRules] = FieldRules(
        names=("module_name",),
        words={
            "summary_type": get_args(LayerSummaryType),
            "hook_direction": get_args(HookDirection),
        },
        plain=(
            "module_type",
            "tensor_shape",
        ),
    )


class ParameterSummaryRecord(StreamRecord, frozen=True, gc=False):
    """Statistics of one parameter, its gradient and its last update.

    Statistics are over the finite elements. They are None if there was nothing to measure, such as
    no gradient. For a sharded parameter, they are those of the local shard.

    Attributes:
        module_name, module_type: Name and class of the module that holds it.
        parameter_name: Full name in the model.
        parameter_role: `weight`, `bias` or `other`.
        dtype: Data type, such as `float32`.
        element_count: Number of elements.
        requires_grad: Whether it is trained.
        in_optimizer: Whether the optimizer has it. None without an optimizer.
        step, epoch: Counters, or None.
        shape: Shape.
        value_mean, value_std, value_min, value_max, value_norm: Statistics of the values; the norm
            is the L2 norm.
        value_near_zero_ratio: Share of values within `near_zero_epsilon` of 0, from 0 to 1.
        gradient_mean, gradient_std, gradient_min, gradient_max, gradient_norm,
            gradient_near_zero_ratio: Statistics of the gradient.
        update_mean, update_std, update_min, update_max, update_norm: Statistics of the change by
            the last optimizer step.
        update_to_parameter_ratio: Norm of the update divided by the norm of the parameter before
            it.
        non_finite_value_count, non_finite_gradient_count: Number of NaN and infinite elements.
        optimizer_name: Class name of the optimizer.
        optimizer_group_index, optimizer_group_name: Parameter group.
        learning_rate, weight_decay: Values of the parameter group.
        metadata: JSON values, or None. `accumulated` is the number of micro-batches in the
            gradient, if known and above one.
    """

    module_name: str
    module_type: str
    parameter_name: str
    parameter_role: str
    dtype: str
    element_count: int
    requires_grad: bool = True
    in_optimizer: bool | None = None
    step: int | None = None
    epoch: int | None = None
    shape: tuple[int, ...] = ()
    value_mean: float | None = None
    value_std: float | None = None
    value_min: float | None = None
    value_max: float | None = None
    value_norm: float | None = None
    value_near_zero_ratio: float | None = None
    gradient_mean: float | None = None
    gradient_std: float | None = None
    gradient_min: float | None = None
    gradient_max: float | None = None
    gradient_norm: float | None = None
    gradient_near_zero_ratio: float | None = None
    update_mean: float | None = None
    update_std: float | None = None
    update_min: float | None = None
    update_max: float | None = None
    update_norm: float | None = None
    update_to_parameter_ratio: float | None = None
    non_finite_value_count: int | None = None
    non_finite_gradient_count: int | None = None
    optimizer_name: str | None = None
    optimizer_group_index: int | None = None
    optimizer_group_name: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    metadata: JsonObject | None = None

    KIND: ClassVar[str] = "parameter"
    TABLE: ClassVar[str] = "parameters"
    RULES: ClassVar[FieldRules] = FieldRules(
        names=("parameter_name",),
        words={"parameter_role": get_args(ParameterRole)},
        plain=(
            "module_name",
            "module_type",
            "dtype",
            "shape",
            "optimizer_name",
            "optimizer_group_name",
        ),
    )


class ParameterDistributionRecord(StreamRecord, frozen=True, gc=False):
    """Histogram of one parameter, its gradient or its last update.

    Attributes:
        module_name, module_type: Name and class of the module that holds it.
        parameter_name: Full name in the model.
        parameter_role: `weight`, `bias` or `other`.
        distribution_type: `value`, `gradient` or `update`.
        sample_count: Number of finite elements in the bins.
        total_count: Number of elements of the tensor.
        step, epoch: Counters, or None.
        bin_edges: Edges in ascending order, one more than bins. A bin includes its left edge; the
            last bin includes both.
        counts: Number of elements per bin.
        metadata: JSON values, or None.
    """

    module_name: str
    module_type: str
    parameter_name: str
    parameter_role: str
    distribution_type: str
    sample_count: int
    total_count: int
    step: int | None = None
    epoch: int | None = None
    bin_edges: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    metadata: JsonObject | None = None

    KIND: ClassVar[str] = "parameter_distribution"
    TABLE: ClassVar[str] = "parameter_distributions"
    HAS_FIGURES: ClassVar[bool] = False
    RULES: ClassVar[FieldRules] = FieldRules(
        names=("parameter_name",),
        words={
            "parameter_role": get_args(ParameterRole),
            "distribution_type": get_args(ParameterDistributionType),
        },
        plain=(
            "module_name",
            "module_type",
            "bin_edges",
            "counts",
        ),
    )

    def check(self) -> None:
        """Reject edges and counts that do not form a histogram."""
        name = type(self).__name__
        check_histogram(self.bin_edges, self.counts, f"{name}.bin_edges", f"{name}.counts")


class BatchDiagnosticRecord(StreamRecord, frozen=True, gc=False):
    """Loss and composition of one training batch; samples are not stored.

    Attributes:
        loss: Loss of the batch; it may be NaN or infinite.
        step: Step, or None.
        epoch: Epoch, or None.
        batch_size: Number of samples, or None.
        sample_ids: IDs of the samples in order, or None.
        class_counts: Label as text -> number of samples, or None.
        sequence_lengths: Length of each sample in tokens, or None.
        metadata: JSON values, or None.
    """

    loss: float
    step: int | None = None
    epoch: int | None = None
    batch_size: int | None = None
    sample_ids: tuple[int | str, ...] | None = None
    class_counts: JsonObject | None = None
    sequence_lengths: tuple[int, ...] | None = None
    metadata: JsonObject | None = None

    KIND: ClassVar[str] = "batch"
    TABLE: ClassVar[str] = "batches"
    RULES: ClassVar[FieldRules] = FieldRules(
        finite=("loss",), plain=("sequence_lengths",), labelled=("class_counts",)
    )

    def check(self) -> None:
        """Reject invalid counts, and samples that do not match the batch size."""
        name = type(self).__name__
        for label, count in (self.class_counts or {}).items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise SchemaValidationError(
                    f"{name}.class_counts[{label!r:.60}] must be a non-negative integer, "
                    f"got {count!r:.40}"
                )
        size = self.batch_size
        for field in ("sample_ids", "sequence_lengths"):
            values = getattr(self, field)
            if values is not None and size is not None and len(values) != size:
                raise SchemaValidationError(
                    f"{name}.{field} has {len(values)} entries, but batch_size is {size}"
                )


class ArtifactRecord(StreamRecord, frozen=True, gc=False):
    """One stored artifact, with the place of its payload.

    Attributes:
        artifact_type: Type, such as `histogram` or `checkpoint_metadata`.
        artifact_key: Full name: `namespace/artifact_name` or a bare name.
        namespace: Key without its last segment, or None.
        artifact_name: Last segment of the key.
        payload_format: `json`, `text` or `bytes`.
        size_bytes: Size of the payload.
        sha256: SHA-256 of the payload, in hexadecimal.
        step: Step, or None.
        epoch: Epoch, or None.
        payload_relative_path: Path of the payload under the run's directory, or None if it could
            not be stored.
        metadata_relative_path: Path of this record as JSON, or None.
        metadata: JSON values, or None.
    """

    artifact_type: str
    artifact_key: str
    namespace: str | None
    artifact_name: str
    payload_format: str
    size_bytes: int
    sha256: str
    step: int | None = None
    epoch: int | None = None
    payload_relative_path: str | None = None
    metadata_relative_path: str | None = None
    metadata: JsonObject | None = None

    KIND: ClassVar[str] = "artifact"
    TABLE: ClassVar[str] = "artifacts"
    HAS_FIGURES: ClassVar[bool] = False
    RULES: ClassVar[FieldRules] = FieldRules(
        names=("artifact_type", "artifact_key"),
        words={"payload_format": get_args(ArtifactPayloadFormat)},
        plain=(
            "namespace",
            "artifact_name",
            "sha256",
            "payload_relative_path",
            "metadata_relative_path",
        ),
    )

    def check(self) -> None:
        """Reject a key that contradicts its parts, and paths outside the run's folder."""
        name = type(self).__name__
        check_key(name, "artifact", self.artifact_key, self.namespace, self.artifact_name)
        self.check_places()

    def check_places(self) -> None:
        """Reject an artifact whose hash, type, key or paths could name a file elsewhere.

        Each way into a store calls this. Code that writes files from records calls it again,
        because a store may be older or from another source.

        Raises:
            SchemaValidationError: One of them could.
        """
        check_places(
            type(self).__name__,
            self.sha256,
            self.artifact_type,
            self.artifact_key,
            ("payload_relative_path", self.payload_relative_path),
            ("metadata_relative_path", self.metadata_relative_path),
        )
