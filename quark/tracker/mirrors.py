"""Quark's mirrors by the names that a tracker's users know them by."""

from quark.tracker.multiplexer import Tracker
from quark_backends.csv.tracker_backend import CSVBackend
from quark_backends.mlflow.tracker_backend import MLflowBackend
from quark_backends.wandb.tracker_backend import WandbBackend

__all__ = ["CSVBackend", "MLflowBackend", "Tracker", "WandbBackend"]
