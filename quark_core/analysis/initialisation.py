"""What the first summaries of parameters say of how weights began."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quark_core.analysis.histories import LayerHistory, ParameterHistory

__all__ = ["LATEST_STEP", "find_equal_weights"]

LATEST_STEP = 50
"""Of a first probe that still shows the initialisation."""

_EQUAL = 0.01  # deviation over mean: drawn weights have a mean of hardly anything
_LEAST_ELEMENTS = 8
_MIXING = ("Linear", "Conv1d", "Conv2d", "Conv3d", "RNN", "GRU", "LSTM", "RNNCell", "GRUCell",
           "LSTMCell")  # fmt: skip


def find_equal_weights(
    parameters: Mapping[str, ParameterHistory], activations: Mapping[str, LayerHistory]
) -> list[ParameterHistory]:
    """Hidden weights that train and began all as one number other than zero.

    Units with equal weights give the same and get the same gradients: they stay one unit. The last
    layer is left out, as labels tell its units apart, and so are zeros, from which adapters and
    branches begin on purpose.

    Args:
        parameters: Of the run, in the order of their first records.
        activations: Of the run, likewise; where there are none, the last weights are those
            of the last record.
    """
    weights = [
        item
        for item in parameters.values()
        if item.role == "weight" and item.kind.startswith(_MIXING) and len(item)
    ]
    called = [name for name in activations if any(item.module_name == name for item in weights)]
    last = called[-1] if called else (weights[-1].module_name if weights else None)
    return [item for item in weights if item.module_name != last and _is_equal(item)]


def _is_equal(item: ParameterHistory) -> bool:
    first = int(item.step[0])
    count, mean, deviation = (
        float(item[name][0]) for name in ("element_count", "value_mean", "value_std")
    )
    if first > LATEST_STEP or not item.requires_grad or not count >= _LEAST_ELEMENTS:
        return False
    return bool(np.isfinite(mean)) and mean != 0.0 and deviation <= _EQUAL * abs(mean)
