"""Text samples: what a model was asked, what it said, and what that was worth."""

from __future__ import annotations

from typing import ClassVar

from quark_core.records.base import FieldRules, StreamRecord
from quark_core.records.json_object import JsonObject


class SampleRecord(StreamRecord, frozen=True, gc=False):
    """One row of text samples or rollouts.

    Attributes:
        set_name: Name of the set, such as `eval/generations`.
        prompt: Input of the model, or None.
        completion: Output of the model, or None.
        reward: Reward; it may be NaN, or None.
        step: Step, or None.
        epoch: Epoch, or None.
        columns: Other columns: strings, numbers, booleans or small JSON values, or None.
        cut: Column -> original number of characters, for texts that were truncated.
    """

    set_name: str
    prompt: str | None = None
    completion: str | None = None
    reward: float | None = None
    step: int | None = None
    epoch: int | None = None
    columns: JsonObject | None = None
    cut: JsonObject | None = None

    KIND: ClassVar[str] = "sample"
    TABLE: ClassVar[str] = "samples"
    # Many rows have one step: as points of a curve they would say nothing.
    HAS_FIGURES: ClassVar[bool] = False
    RULES: ClassVar[FieldRules] = FieldRules(names=("set_name",), labelled=("cut",))
