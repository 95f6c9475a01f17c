"""The tape that the hooks of one probed step share, and hooks that leave it to compiled code."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from quark_torch.layers.recording import GradientScale, LayerReading, LayerRecording
from quark_torch.measuring.kernel_reading import read_result
from quark_torch.measuring.partials import Wanted

OF_GRADIENTS = Wanted(near_zero=0.0)


class PlainTape:
    """Counters of a probed step, as the compiled tape has them too.

    Attributes:
        is_open: Whether hooks still take anything.
        spent_ns: Time that the hooks took.
        calls: Calls of modules that were seen.
        saw_backward: Whether gradients came since the last forward.
        micro_batch: How many backward passes came before this forward.
        evaluations: Calls that were left out, because they are no training.
        surplus: Calls that were left out, because their module had too many.
        late: Gradients that came after the step.
    """

    __slots__ = (
        "calls",
        "evaluations",
        "is_open",
        "late",
        "micro_batch",
        "saw_backward",
        "spent_ns",
        "surplus",
    )

    def __init__(self) -> None:
        self.is_open = True
        self.spent_ns = 0
        self.calls = 0
        self.saw_backward = False
        self.micro_batch = 0
        self.evaluations = self.surplus = self.late = 0

    def close(self) -> None:
        """Take no more."""
        self.is_open = False


class TapeReading:
    """Makes the records of what compiled hooks have read, after the step."""

    __slots__ = ("_moment", "_recording", "_scale", "tape")

    def __init__(
        self, recording: LayerRecording, moment: tuple[int, int | None], scale: GradientScale
    ) -> None:
        self._recording = recording
        self._moment = moment
        self._scale = scale
        self.tape: Any = None

    def __call__(self, number: int) -> None:
        """Make the record of a row of the tape."""
        (
            site,
            is_forward,
            call_index,
            micro_batch,
            backward_index,
            time_us,
            shape,
            element_count,
            units,
            result,
        ) = self.tape.read(number)
        wanted = OF_GRADIENTS
        if is_forward:
            # Of the units it matters only whether they were wanted.
            wanted = Wanted(site.near_zero, site.saturation)
        found = read_result(result, element_count, None if units < 0 else units, wanted)
        if found is None:
            return
        reading = LayerReading(
            self._recording,
            site.identity,
            "forward" if is_forward else "backward",
            self._moment,
            call_index,
            shape,
            None,
            micro_batch,
            backward_index,
            None if is_forward else self._scale,
            time_us,
        )
        self._recording._put(reading, found)


_is_compiling = torch.compiler.is_compiling


class InertHook:
    """What a copy or a pickle of a model has in the place of a hook; does nothing."""

    def __call__(self, *_: object, **__: object) -> None:
        """Do nothing."""


@functools.cache
def make_hook_types(hooks: Any) -> tuple[Any, Any]:
    """As `ForwardHook` and `GradientHook` of `probes`, which ask compiled code first.

    They are Python's all the same, since dynamo has to see what they do: nothing.
    """

    class TapedForwardHook(hooks.Call):  # type: ignore[misc]
        __slots__ = ()

        def __call__(self, module: nn.Module, _args: object, output: object) -> None:
            if _is_compiling():
                return
            try:
                if self.take(module, output):
                    return
            except Exception as error:  # noqa: BLE001 - it must not reach the user's forward
                self.probed.fail(self.site, "forward hook", error)
                return
            self.probed.see_output(self.site, module, output)

        def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
            return InertHook()

        def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
            return InertHook, ()

    class TapedGradientHook(hooks.Gradient):  # type: ignore[misc]
        __slots__ = ()

        def __call__(self, gradient: Tensor) -> None:
            if _is_compiling():
                return
            try:
                if self.take(gradient):
                    return
            except Exception as error:  # noqa: BLE001 - it must not reach the user's backward
                self.probed.fail(self.site, "gradient hook", error)
                return
            self.probed.see_gradient(
                self.site, gradient, self.call_index, None, self.micro_batch, self.count_firing()
            )

        def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
            return InertHook()

        def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
            return InertHook, ()

    return TapedForwardHook, TapedGradientHook
