"""Declares the CSV mirror."""

from __future__ import annotations

from quark_backends.declaration import declare, load_late, open_late
from quark_core.api import (
    BackendDefinition,
    Capability,
    RankPolicy,
    TrackerForm,
)

_open = open_late(__name__, "quark_backends.csv.backend:CsvBackend")

quark_register_backends = declare(
    BackendDefinition(
        name="csv",
        summary="records of every kind as CSV and JSON, in the run's folder or csv:DIR",
        open=_open,
        capabilities=frozenset(
            {
                Capability.READ,
                Capability.IDEMPOTENT,
                Capability.GROUPS,
                Capability.ARTIFACTS,
            }
        ),
        rank_policy=RankPolicy.SESSION,
        stays_inside=True,
        own_process=False,
        describe_run=load_late("quark_backends.csv.tracker_backend:describe_run"),
        tracker=TrackerForm(make=load_late("quark_backends.csv.tracker_backend:make_backend")),
    )
)
