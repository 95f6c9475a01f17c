"""The provenance of a run by digest, and its own measurements in windows."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from quark_core.errors import SchemaValidationError
from quark_core.records.base import FieldRules, StreamRecord
from quark_core.records.json_object import JsonObject

AggregateKeep = Literal["stat", "ring", "value", "series"]
"""How values may be asked to be kept; a series is metrics, and no aggregate."""

KeptAs = Literal["stat", "ring", "value", "timer"]
FingerprintSubject = Literal["code", "data", "output", "environment"]

SOURCES_KEY = "sources"
"""Key of the fingerprint of the subject code that stands for all sources of a run."""


class AggregateRecord(StreamRecord, frozen=True, gc=False):
    """Many values of one key, summed up over a window of time.

    Windows of one key add up: counts, means, squared deviations and buckets of several windows,
    ranks and attempts give those of all their values. `quark_core.runs.run_report` does that.

    Attributes:
        key: What was measured.
        keep: How it was asked to be kept; `timer` is `stat` of the seconds of blocks.
        unit: Unit of the values, such as `s`, or None.
        started_us: When the window began, in microseconds since the epoch; it ends at `time_us`.
        first_step, step: The steps that the window spans, or None where none was known. Like
            any record with a step it is hidden by a later attempt that begins at or before it.
        count: How many finite values came.
        mean: Their mean, or None without any.
        m2: Sum of their squared deviations from it, or None.
        low, high: The smallest and the largest of them, or None.
        first: The first value ever of the key in this process, in the window that has it, else
            None. Of a timer it is kept apart and is in no other figure.
        last: The newest one, or None.
        non_finite: How many values were NaN or infinite; they are in no figure.
        failed: Of a timer, how many blocks were left by an exception; they are in no figure.
        clock: Of a timer, what all its times were measured by: `wall_clock`, or `cuda_events`
            where the device was asked. Else None.
        buckets: Index of a bucket, as text, -> how many values fell into it, or None. Bucket i
            has magnitudes from 2**(i/8) on to below 2**((i+1)/8); the same with a leading `n` is
            for values below zero, `zero` for zeros. For a stat and a timer.
        values: The newest values of a ring, oldest first, or the value.
        places: Where the values of a ring were measured, as steps; none where one is not known.
    """

    key: str
    keep: str
    unit: str | None = None
    started_us: int = 0
    first_step: int | None = None
    step: int | None = None
    count: int = 0
    mean: float | None = None
    m2: float | None = None
    low: float | None = None
    high: float | None = None
    first: float | None = None
    last: float | None = None
    non_finite: int = 0
    failed: int = 0
    clock: str | None = None
    buckets: JsonObject | None = None
    values: tuple[float, ...] = ()
    places: tuple[int, ...] = ()

    KIND: ClassVar[str] = "aggregate"
    TABLE: ClassVar[str] = "aggregates"
    # Mirrors have curves of means; as every number's curve it would be noise.
    HAS_FIGURES: ClassVar[bool] = False
    RULES: ClassVar[FieldRules] = FieldRules(
        names=("key",),
        words={"keep": get_args(KeptAs)},
        plain=("unit", "clock"),
        labelled=("buckets",),
    )


class FingerprintRecord(StreamRecord, frozen=True, gc=False):
    """What something was when a run had it: equal digests of one level say that it was the same.

    Attributes:
        subject: code, data, output or environment.
        key: Which one, such as `sources`, `train_step` or `predictions`.
        digest: What tells it from others, in hexadecimal; its length is that of its level.
        level: How much of it was looked at, in a word: digests of two levels say nothing.
        step: Step counter, or None.
        sketch: Figures that say how far two are apart which are not the same, or None.
        metadata: JSON values, or None.
    """

    subject: str
    key: str
    digest: str
    level: str = "full"
    step: int | None = None
    sketch: JsonObject | None = None
    metadata: JsonObject | None = None

    KIND: ClassVar[str] = "fingerprint"
    TABLE: ClassVar[str] = "fingerprints"
    HAS_FIGURES: ClassVar[bool] = False
    RULES: ClassVar[FieldRules] = FieldRules(
        names=("key",),
        words={"subject": get_args(FingerprintSubject)},
        plain=("digest", "level"),
        labelled=("sketch",),
    )

    def check(self) -> None:
        """Refuse a fingerprint that says nothing."""
        if not self.digest or not self.level:
            raise SchemaValidationError("FingerprintRecord.digest and level must not be empty")
