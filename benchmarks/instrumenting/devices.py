"""Where a benchmark computes, and when that is done."""

from __future__ import annotations

from collections.abc import Callable

import torch


def why_not_there(device: str) -> str | None:
    """Why nothing can be measured on a device, or None where it can."""
    if not device.startswith("cuda") or torch.cuda.is_available():
        return None
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"PyTorch {torch.__version__} (built for {built}) finds no CUDA device here"


def find_wait(device: str) -> Callable[[], None]:
    """What waits until a device has done all that it was given; the CPU has when a call returns."""
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None
