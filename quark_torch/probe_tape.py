"""What the hooks of one probed step share, and how compiled hooks are had."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from quark_torch.kernel_reading import read_result
from quark_torch.kernels.loader import find_probing
from quark_torch.layer_recording import LayerReading, LayerRecording
from quark_torch.partials import Wanted

if TYPE_CHECKING:
    pass

__all__ = ["OF_GRADIENTS", "PlainTape", "TapeReading", "find_hooks"]

_log = logging.getLogger("quark.torch")
OF_GRADIENTS = Wanted(near_zero=0.0)
_REGISTERING = {"_backward_hooks", "OrderedDict", "grad_fn", "_register_hook_dict", "requires_grad"}

class PlainTape:
    """Counters of a probed step, as the compiled tape has them too.

    Attributes:
        is_open: Whether hooks still take anything.
        spent_ns: Time that the hooks took.
        calls: Calls of modules that were seen.
        saw_backward: Whether gradients came since the last forward.
        micro_batch: How many backward passes came before this forward.
    """

    __slots__ = ("calls", "is_open", "micro_batch", "saw_backward", "spent_ns")

    def __init__(self) -> None:
        self.is_open = True
        self.spent_ns = 0
        self.calls = 0
        self.saw_backward = False
        self.micro_batch = 0

    def close(self) -> None:
        """Take no more."""
        self.is_open = False


class TapeReading:
    """Makes the records of what compiled hooks have read, after the step."""

    __slots__ = ("_moment", "_recording", "tape")

    def __init__(self, recording: LayerRecording, moment: tuple[int, int | None]) -> None:
        self._recording = recording
        self._moment = moment
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
            None,
            time_us,
        )
        self._recording._put(reading, found)


@functools.cache
def find_hooks() -> Any:
    """The compiled hooks, ready for this PyTorch; or None."""
    probing = find_probing()
    if probing is None:
        return None
    try:
        _prepare(probing)
    except Exception as error:  # noqa: BLE001 - a PyTorch that nobody has seen yet; Python does it
        _log.debug("The compiled hooks are not for this PyTorch: %s", error)
        return None
    return probing


def _prepare(probing: Any) -> None:
    missing = _REGISTERING - set(torch.Tensor.register_hook.__code__.co_names)
    if missing:
        raise RuntimeError(f"Tensor.register_hook is another one, without {missing}")
    probing.prepare(
        torch.Tensor.__dlpack_c_exchange_api__,
        torch.Tensor,
        torch.Tensor.is_neg,
        torch._C._get_tracing_state,
        torch._C._functorch.peek_interpreter_stack,
        torch._C._is_torch_function_mode_enabled,
        torch._C._current_graph_task_id,
        torch.is_grad_enabled,
        OrderedDict,
    )
    tensor = torch.zeros(2, 3, device="cpu", dtype=torch.float32)
    if probing.look(tensor) != (tensor.data_ptr(), 6, 0, (2, 3)):
        raise RuntimeError("tensors are seen wrongly")
