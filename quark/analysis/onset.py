"""Where a finding set in, and what may have changed there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from quark.analysis.case import Case
from quark.analysis.figures import Text
from quark.analysis.rule import Finding
from quark_core.records.kinds.findings import EvidenceRecord

CauseKind = Literal[
    "learning_rate", "weight_decay", "gradient_clipping", "loss_scale", "batch", "data"
]

_WINDOW_PART, _LEAST_WINDOW = 20, 10  # a twentieth of the run, and steps, before an onset


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What changed, or holds throughout, and brings a finding about.

    Attributes:
        kind: What it is a change of.
        text: One sentence, with its figures.
        check: What to do about it, in one sentence.
        evidence: The records that show it.
    """

    kind: CauseKind
    text: Text
    check: str
    evidence: EvidenceRecord


@dataclass(frozen=True)
class Onset:
    """Where a finding set in.

    Attributes:
        case: The run.
        rule_id: The rule that found it.
        finding: What it found.
        step: Its first step.
    """

    case: Case
    rule_id: str
    finding: Finding
    step: int

    @property
    def first(self) -> int:
        """The earliest step at which a change may have brought it about."""
        run = self.case.run
        window = max(_LEAST_WINDOW, (run.last_step or 0) // _WINDOW_PART, 2 * self.probe_gap)
        return max(0, self.step - window)

    @property
    def last(self) -> int:
        """The latest one: a change shows in the step that it is made at, or at the next probe."""
        return self.step + max(1, self.probe_gap if self.case.run.parameters else 0)

    @property
    def probe_gap(self) -> int:
        """Steps from probe to probe, 0 where nothing was probed."""
        steps = self.case.run.probe_steps
        return int(np.median(np.diff(steps))) if len(steps) > 1 else 0
