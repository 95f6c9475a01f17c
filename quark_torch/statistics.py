"""Statistics of tensors, each element read once; knows no hooks, no modules and no records.

Every function may be called from any thread. None of them changes a tensor,
its version, its graph or the grad mode, and none raises: what cannot be
measured (meta and fake tensors, those inside of functorch's transforms,
memory that was freed) gives None.
"""

from __future__ import annotations

from quark_torch.device_probe import Probe, wait_for_probes
from quark_torch.histograms import Histogram, measure_histogram
from quark_torch.measuring import (
    UpdateStatistics,
    measure,
    measure_many,
    measure_update,
    measure_updates,
)
from quark_torch.partials import TensorStatistics, Wanted

__all__ = [
    "Histogram",
    "Probe",
    "TensorStatistics",
    "UpdateStatistics",
    "Wanted",
    "measure",
    "measure_histogram",
    "measure_many",
    "measure_update",
    "measure_updates",
    "wait_for_probes",
]
