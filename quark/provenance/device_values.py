"""Tensors on a device, taken so that nobody waits for the device where the call is made."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, cast

_MOST_ITEMS = 10_000
_MOST_DEPTH = 16
_MOST_CLONED_BYTES = 256 * 1024 * 1024


def has_device_values(value: object) -> bool:
    """Whether a value is a tensor on a device, or a container that has one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return False
    waiting, left = [(value, 0)], _MOST_ITEMS
    while waiting and left > 0:
        one, depth = waiting.pop()
        left -= 1
        if isinstance(one, torch.Tensor):
            if one.device.type not in ("cpu", "meta"):
                return True
        elif depth < _MOST_DEPTH:
            waiting.extend((item, depth + 1) for item in _list_items(one))
    return False


def _list_items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value[:_MOST_ITEMS])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, one.name) for one in dataclasses.fields(value)]
    return []


def detach_device_values(value: Any) -> Callable[[], Any] | None:
    """Take a value as it is now, without a wait; what is returned gives it, on the CPU.

    Tensors on a device are copied there, in the order of the device's work, and brought over by
    whoever calls what is returned. Arrays and tensors of the CPU are copied.

    Returns:
        None where it is too large (256 MB) to be copied, or a graph is being captured.
    """
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    taken = _Taking(torch)
    snapshot = taken.take(value, 0)
    if snapshot is _TOO_LARGE or taken.is_too_large:
        return None
    event = None
    if taken.device is not None and taken.device.type == "cuda":
        with torch.cuda.device(taken.device):
            event = torch.cuda.Event()
            event.record()

    def bring_over() -> Any:
        if event is None:
            return _bring_over(snapshot, torch)
        with torch.cuda.device(taken.device):
            event.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                return _bring_over(snapshot, torch)

    return bring_over


_TOO_LARGE = object()


class _Taking:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._left_bytes = _MOST_CLONED_BYTES
        self._left_items = _MOST_ITEMS
        self.is_too_large = False
        self.device: Any = None

    def take(self, value: Any, depth: int) -> Any:
        self._left_items -= 1
        if self._left_items < 0 or depth > _MOST_DEPTH:
            self.is_too_large = True
            return _TOO_LARGE
        if isinstance(value, self._torch.Tensor):
            return self._clone(value)
        if type(value).__module__ == "numpy" and hasattr(value, "nbytes"):
            self._spend(int(value.nbytes))
            return _TOO_LARGE if self.is_too_large else value.copy()
        kind = type(value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return kind(*(self.take(item, depth + 1) for item in value))
        if kind in (list, tuple):
            return kind(self.take(item, depth + 1) for item in value)
        if isinstance(value, dict) and not dataclasses.is_dataclass(value):
            twin = copy.copy(value)
            for key, item in value.items():
                twin[key] = self.take(item, depth + 1)
            return twin
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            twin = copy.copy(cast("Any", value))
            for one in dataclasses.fields(value):
                taken = self.take(getattr(value, one.name), depth + 1)
                object.__setattr__(twin, one.name, taken)
            return twin
        return value

    def _clone(self, tensor: Any) -> Any:
        if tensor.device.type == "meta":
            return tensor
        self._spend(tensor.numel() * tensor.element_size())
        if self.is_too_large:
            return _TOO_LARGE
        if tensor.device.type != "cpu":
            self.device = tensor.device
        return tensor.detach().clone()

    def _spend(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes
        self.is_too_large = self.is_too_large or self._left_bytes < 0


def _bring_over(value: Any, torch: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device.type in ("cpu", "meta") else value.cpu()
    kind = type(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*(_bring_over(item, torch) for item in value))
    if kind in (list, tuple):
        return kind(_bring_over(item, torch) for item in value)
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _bring_over(value[key], torch)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            object.__setattr__(value, one.name, _bring_over(getattr(value, one.name), torch))
    return value
