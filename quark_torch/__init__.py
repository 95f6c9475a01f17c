"""PyTorch instrumentation: layers by hooks, parameters by snapshots, statistics in one read."""

from quark_core.api import guard_logger

__all__: list[str] = []

guard_logger("quark.torch")
