"""The compiled hooks and readings of `kernels/probing.c`, made ready for this PyTorch."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from typing import Any

import torch

from quark_torch.kernels.loader import find_probing

_log = logging.getLogger("quark.torch")
_REGISTERING = {"_backward_hooks", "OrderedDict", "grad_fn", "_register_hook_dict", "requires_grad"}


@functools.cache
def find_hooks() -> Any:
    """The compiled hooks, ready for this PyTorch; or None."""
    probing = find_probing()
    if probing is None:
        return None
    try:
        _prepare(probing)
    except Exception as error:  # noqa: BLE001 - a PyTorch that nobody has seen yet; Python does it
        _log.debug("The compiled hooks do not support this PyTorch: %s", error)
        return None
    return probing


def _prepare(probing: Any) -> None:
    missing = _REGISTERING - set(torch.Tensor.register_hook.__code__.co_names)
    if missing:
        raise RuntimeError(f"Tensor.register_hook is different, without {missing}")
    probing.prepare(
        torch.Tensor.__dlpack_c_exchange_api__,
        torch.Tensor,
        torch.nn.Parameter,
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
        raise RuntimeError("tensors are read incorrectly")
