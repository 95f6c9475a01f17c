"""Mirrors of Quark by the names that trackers use; a mirror that stands alone needs `Tracker`."""

from quark.tracker.tracker import Tracker as Tracker
from quark_backends.csv.tracker_backend import CSVBackend as CSVBackend
from quark_backends.mlflow.tracker_backend import MLflowBackend as MLflowBackend
from quark_backends.wandb.tracker_backend import WandbBackend as WandbBackend
