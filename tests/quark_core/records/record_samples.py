"""One record of every type that the codec and the schema know by hand."""

from quark_core.records import (
    ConfigSnapshot,
    EnvironmentSnapshot,
    EventRecord,
    LifecycleRecord,
    MetricRecord,
    ProjectRecord,
    RunRecord,
)
from quark_core.records.json_object import JsonObject

TIME_US = 1_778_146_200_000_001
TIME = "2026-05-07T09:30:00.000001Z"
HEAD = ("r1", "w1", 0, 3, 7, TIME_US)

METRIC = MetricRecord(
    *HEAD, "train/loss", "train", "loss", 0.5, 10, 1, "per batch", JsonObject({"lr": [0.1, None]})
)
EVENT = EventRecord(
    *HEAD, "checkpoint_saved", "info", 10, 1, "done", JsonObject({"files": {"model": "m.pt"}})
)
LIFECYCLE = LifecycleRecord(*HEAD, "tag", JsonObject({"tag": "good"}))
PROJECT = ProjectRecord("p1", "vision", "/data/runs", TIME, TIME)
RUN = RunRecord(
    id="r1",
    project_id="p1",
    project_name="vision",
    status="running",
    parent_run_id=None,
    lineage_root_run_id="r1",
    resume_count=0,
    run_path="/data/runs/r1",
    git_commit=None,
    strict_mode=False,
    tags=("baseline", "good"),
    attempt=0,
    name="first",
    notes=None,
    created_at=TIME,
    updated_at=TIME,
    ended_at=None,
)
CONFIG = ConfigSnapshot(JsonObject({"model": {"depth": 4}}), ("config.x was kept as its repr",))
ENVIRONMENT = EnvironmentSnapshot(JsonObject({"python": {"version": "3.11.7"}}))
ALL = [METRIC, EVENT, LIFECYCLE, PROJECT, RUN, CONFIG, ENVIRONMENT]
