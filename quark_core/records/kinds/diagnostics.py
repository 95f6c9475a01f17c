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
    """What a step took, and what the machine did meanwhile. What is not known is None.

    Attributes:
        boundary: `step` where it belongs to a step, `time` where only to a moment.
        step: Step counter, or None.
        epoch: Epoch counter, or None.
        step_time_ms: Milliseconds of the whole step.
        data_time_ms: Of them, until the batch was ready.
        compute_time_ms: Of them, from then on.
        cpu_usage_percent: All cores of the node, 0 to 100.
        ram_usage_percent: Memory in use on the node, 0 to 100.
        ram_used_bytes, ram_total_bytes: The same in bytes; used is total less available.
        process_cpu_percent: This process and its workers; 100 is one whole core.
        process_rss_bytes: Resident memory of this process.
        worker_count: Processes under this one, such as those of a DataLoader.
        workers_rss_bytes: Their resident memory together; pages that they share count for each.
        gpu_index: The GPU that the next fields are of, at the driver.
        gpu_utilization_percent, gpu_memory_used_bytes, gpu_memory_total_bytes,
        gpu_memory_usage_percent: As in `GpuReading`.
        overflow_count: Steps with a gradient overflow so far.
        skipped_step_count: Optimizer steps skipped so far.
        gpus: Every GPU of the node.
        node: Name of the host.
        metadata: JSON values; `reading_age_ms` says how old the machine's
            figures were, `unavailable` why some are missing.
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
    """Statistics of what one call of one module gave, or of its gradient.

    Statistics are over the finite elements; None where there is none, or
    where they were not asked for.

    Attributes:
        module_name: Qualified name of the module, without the prefixes of wrappers.
        module_type: Name of its class.
        summary_type: activation or gradient.
        hook_direction: forward or backward.
        call_index: 0 for the module's first call of the step, and so on; a
            gradient has that of the call which it is of.
        element_count: Elements of the tensor.
        step: Step counter, or None.
        epoch: Epoch counter, or None.
        tensor_shape: Shape of the tensor, or None.
        mean: Sum of the elements over their number.
        std: Square root of `variance`.
        norm: Euclidean: square root of the sum of squares.
        variance: Mean squared distance from the mean (of the population, not a sample).
        dead_unit_ratio: Share of units (channels, features) none of whose
            elements exceeds the epsilon in magnitude, 0 to 1.
        saturation_ratio: Share of elements near an end of their module's
            range, 0 to 1.
        metadata: JSON values, or None.
        minimum, maximum: Smallest and largest element.
        zero_ratio: Share of elements that do not exceed the epsilon in
            magnitude, 0 to 1. The epsilon is the `dead_unit_epsilon` of an
            activation, and 0 of a gradient: of one only exact zeros count.
        nan_count, inf_count: Elements that are NaN, or infinite.
        sample_variation_ratio: Share of an activation's energy that differs
            between samples, 0 to 1: over each position of a sample, the sum of
            the variances between samples over that of the mean squares; near
            0 where all samples get the same output. A sample is what lies
            before the units in memory: a row of a batch, a token, or a pixel
            of channels_last. It is from at most six samples, evenly spaced,
            and the first 1024 elements of each. None of gradients; where there
            are no units or only one, or fewer than two samples; where what
            was sampled is all zero or not all finite; and of what was
            measured on a device or inside of a compiled model.
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
    """Statistics of one parameter of a model, of its gradient and of its last update.

    Every statistic is over the finite elements; None where there was nothing
    to measure, such as no gradient. Of a sharded parameter all of it is of the
    local shard.

    Attributes:
        module_name, module_type: The module that holds it, by name and class.
        parameter_name: Its full name in the model.
        parameter_role: weight, bias or other.
        dtype: Such as `float32`.
        element_count: Number of elements.
        requires_grad: Whether it is trained at all.
        in_optimizer: Whether the optimizer has it; None without an optimizer.
        step, epoch: Counters, or None.
        shape: Its shape.
        value_mean, value_std, value_min, value_max, value_norm: Of its elements;
            the norm is the Euclidean one.
        value_near_zero_ratio: Share of elements within the near-zero epsilon, 0 to 1.
        gradient_mean, gradient_std, gradient_min, gradient_max, gradient_norm,
        gradient_near_zero_ratio: Of its gradient.
        update_mean, update_std, update_min, update_max, update_norm: Of what the
            optimizer's last step added to it.
        update_to_parameter_ratio: Norm of the update over norm of the parameter before it.
        non_finite_value_count, non_finite_gradient_count: Elements that are NaN or infinite.
        optimizer_name: Class of the optimizer.
        optimizer_group_index, optimizer_group_name: Its group there.
        learning_rate, weight_decay: The group's.
        metadata: JSON values, or None; `accumulated` says how many
            micro-batches the gradient sums up, where it is known and more than one.
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
    """A histogram of one parameter, of its gradient or of its last update.

    Attributes:
        module_name, module_type: The module that holds it, by name and class.
        parameter_name: Its full name in the model.
        parameter_role: weight, bias or other.
        distribution_type: value, gradient or update.
        sample_count: Finite elements that were counted into bins.
        total_count: Elements that the tensor has.
        step, epoch: Counters, or None.
        bin_edges: One more than there are bins, ascending. A bin holds its left
            edge and not its right, the last one both.
        counts: Sampled elements in each bin.
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
        """Refuse edges and counts that are no histogram."""
        name = type(self).__name__
        check_histogram(self.bin_edges, self.counts, f"{name}.bin_edges", f"{name}.counts")


class BatchDiagnosticRecord(StreamRecord, frozen=True, gc=False):
    """One training batch: what it cost and what was in it, without any sample itself.

    Attributes:
        loss: The batch's loss; not finite only where the data was not.
        step: Step counter, or None.
        epoch: Epoch counter, or None.
        batch_size: Number of samples, or None.
        sample_ids: Ids of the samples, in their order, or None.
        class_counts: Label as text -> number of samples, or None.
        sequence_lengths: Length of each sample in tokens, in their order, or None.
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
        """Refuse counts that count nothing, and samples that are not those of the batch."""
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
    """One stored artifact: what it is and where its payload lies.

    Attributes:
        artifact_type: Such as `histogram` or `checkpoint_metadata`.
        artifact_key: Full name, `namespace/artifact_name` or a bare name.
        namespace: All of the key before its last segment, or None.
        artifact_name: Last segment of the key.
        payload_format: json, text or bytes.
        size_bytes: Length of the payload.
        sha256: Its SHA-256, in hexadecimal.
        step: Step counter, or None.
        epoch: Epoch counter, or None.
        payload_relative_path: Where the payload lies under the run's directory;
            None where it could not be kept.
        metadata_relative_path: Where this record lies beside it, as JSON; likewise.
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
        """Refuse a key that does not agree with its parts, and places elsewhere."""
        name = type(self).__name__
        check_key(name, "artifact", self.artifact_key, self.namespace, self.artifact_name)
        self.check_places()

    def check_places(self) -> None:
        """Refuse an artifact whose hash, type, key or paths could name a file elsewhere.

        Every way into a store asks this; whoever makes files of records asks again, since a
        store may be older than that, or somebody else's.

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
