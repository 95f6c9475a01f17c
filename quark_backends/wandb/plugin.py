"""Declares the W&B mirror."""

from __future__ import annotations

from quark_backends.declaration import declare, load_late, open_late
from quark_core.api import BackendDefinition, Capability, TrackerForm

_open = open_late(__name__, "quark_backends.wandb.backend:WandbBackend")

quark_register_backends = declare(
    BackendDefinition(
        name="wandb",
        summary="a run of Weights & Biases: wandb, or wandb:ENTITY/PROJECT?mode=offline",
        open=_open,
        capabilities=frozenset({Capability.IDEMPOTENT, Capability.GROUPS, Capability.ARTIFACTS}),
        own_process=False,
        needs=("wandb",),
        install='pip install "quark-tracker[wandb]"',
        describe_run=load_late("quark_backends.wandb.tracker_backend:describe_run"),
        tracker=TrackerForm(
            make=load_late("quark_backends.wandb.tracker_backend:WandbBackend"),
            project_variables=("WB_PROJECT", "WANDB_PROJECT", "WB_PROJECT_NAME"),
            is_default=True,
        ),
    )
)
