"""What the first summaries of parameters say of how weights began."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quark.analysis.histories import LayerHistory, ParameterHistory

LATEST_STEP = 50
"""Of a first probe that still shows the initialisation."""

_EQUAL = 0.01  # deviation over mean: drawn weights have a mean of hardly anything
_LEAST_ELEMENTS = 8
_LEAST_DRAWN = 64  # elements, with fewer of which extremes say little
_CENTRED = 4.0  # standard errors of the mean of a draw
_UNIFORM, _LIKE_UNIFORM = 3.0**0.5, 0.07  # bound over deviation, and share it may differ by
_NORMALS = (0.02, 1.0)  # deviations of normal draws that do not depend on the size of a layer
_DRAWN_ERRORS = 3.0  # standard errors of the deviation of a draw
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


def is_as_drawn(item: ParameterHistory, outputs: float | None = None) -> bool:
    """Whether weights are, from their first summary to the last, as a framework draws them.

    A uniform draw ends at the root of three deviations on both sides, which weights that were
    trained leave; a normal one has the deviation of its scheme (of its fan, where that is
    known) and about the extremes of so many draws.

    Args:
        item: A parameter.
        outputs: How many outputs its layer has, or None where that is not known.
    """
    count, mean, deviation, lowest, highest, norm = (
        float(item[name][0])
        for name in ("element_count", "value_mean", "value_std", "value_min", "value_max",
                     "value_norm")
    )  # fmt: skip
    if not count >= _LEAST_DRAWN or not deviation > 0 or not lowest < 0 < highest:
        return False
    if float(item["value_norm"][-1]) != norm or float(item["value_max"][-1]) != highest:
        return False
    if abs(mean) > _CENTRED * deviation / count**0.5:
        return False
    ends = np.array([-lowest, highest]) / deviation
    if bool((np.abs(ends / _UNIFORM - 1.0) <= _LIKE_UNIFORM).all()):
        return True
    schemes = list(_NORMALS)
    if outputs:
        inputs = count / outputs
        schemes += [(2.0 / inputs) ** 0.5, inputs**-0.5, (2.0 / (inputs + outputs)) ** 0.5]
    error = _DRAWN_ERRORS / (2.0 * count) ** 0.5
    # Half of the largest of n draws lie above this, and hardly any two above it by a third.
    usual = (2.0 * np.log(count)) ** 0.5
    is_of_scheme = any(abs(deviation / each - 1.0) <= error for each in schemes)
    return is_of_scheme and bool(((ends > usual / 1.5) & (ends < usual * 1.5)).all())
