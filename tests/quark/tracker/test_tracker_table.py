"""Every test that the table beside this file names is there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
REFERENCE = Path(__file__).parent / "ezpz_behaviors.md"


def test_the_tests_in_the_table_exist():
    named = set(re.findall(r"`(test_\w+)`", REFERENCE.read_text()))
    there = set()
    for folder in (
        "quark/tracker",
        "quark_backends/csv_and_embedded",
        "quark_backends/mlflow",
        "quark_backends/wandb",
    ):
        for path in (TESTS / folder).glob("test_*.py"):
            there.update(re.findall(r"^def (test_\w+)\(", path.read_text(), re.M))
    assert named - there == set()
    assert len(named) > 40


def test_the_table_has_all_that_there_is():
    names = (
        *("setup_tracker", "register_backend", "Tracker", "TrackerBackend", "NullTracker"),
        *("CSVBackend", "WandbBackend", "MLflowBackend", "log", "log_config", "log_table"),
        *("log_image", "log_artifacts", "watch", "finish", "get_backend", "wandb_run"),
        *("mlflow_run", "run_url", "WB_PROJECT", "WANDB_PROJECT", "WB_PROJECT_NAME"),
        *("EZPZ_TRACKER_BACKENDS", "EZPZ_TRACKERS", "MLFLOW_EXPERIMENT_NAME"),
        *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_INSECURE_TLS"),
        *("AMSC_API_KEY", "AM_SC_API_KEY"),
    )
    lines = REFERENCE.read_text().splitlines()
    firsts = [row.split(" | ")[0] for row in lines if row.startswith("| ")]
    told = set(re.findall(r"\w+", " ".join(firsts)))
    assert set(names) - told == set()
