"""Healthy trainings that are the fixed halves of faults of this family."""

from __future__ import annotations

from benchmarks.diagnosis.families.fifth_course import make_healthy
from benchmarks.diagnosis.families.fifth_faults_dynamics import (
    make_detached,
    make_lags,
    make_spoken,
)
from benchmarks.diagnosis.families.fifth_faults_records import (
    make_bare_norms,
    make_unfrozen,
)
from benchmarks.diagnosis.families.fifth_wrong import make_broadcast, make_poles

SCENARIOS = (
    # TrainCheck's pytorch-forum-84911, fixed.
    make_healthy("all_trained", make_bare_norms, "batch normalisation, everything trained"),
    # fastai #2133, fixed: the unfrozen layers come into the optimizer later.
    make_healthy("unfrozen_with_their_group", make_unfrozen, "still at first, then trained"),
    # PyTorch forum's detached encoder, fixed.
    make_healthy("encoder_attached", make_detached, "long flat start of a sequence model"),
    # wenet #2299, fixed: what cannot be aligned counts 0.
    make_healthy("infinities_zeroed", make_spoken, "some utterances count nothing"),
    # RoboVerse #814, fixed: only a reward is logged, and it is noisy.
    make_healthy("falls_count", make_poles, "a noisy reward and no loss", phases=False),
    # PyTorch's warning of target sizes, heeded.
    make_healthy("sizes_agree", make_broadcast, "mean square error of noisy hours"),
    # Stack Overflow's unscaled features, scaled.
    make_healthy("scaled_lags", make_lags, "a linear model, soon at its floor"),
)
