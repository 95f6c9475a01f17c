"""Declares the TensorBoard mirror."""

from __future__ import annotations

from quark_backends.declaration import declare, open_late
from quark_core.api import BackendDefinition, Capability

_open = open_late(__name__, "quark_backends.tensorboard.backend:TensorboardBackend")

quark_register_backends = declare(
    BackendDefinition(
        name="tensorboard",
        summary="event files for TensorBoard, in the run's folder or tensorboard:DIR",
        open=_open,
        capabilities=frozenset({Capability.IDEMPOTENT, Capability.GROUPS, Capability.ARTIFACTS}),
        stays_inside=True,
        needs=("tensorboard",),
        install='pip install "quark-tracker[tensorboard]"',
    )
)
