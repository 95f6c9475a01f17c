"""Runs that have something for every part of the page, in any backend."""

import random

import pytest
from machine_runs import log_batches, make_telemetry
from page_client import wait_for_analysis, wait_for_verdict

import quark
from quark_core.records import LayerSummaryRecord
from quark_core.records.base import start_fields

STEPS = 60


def log_everything(root, run_id, *, lr=0.1, seed=0, backends=None):
    """A run with metrics, layers, telemetry, batches, events, a picture, a table and a text."""
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUARK_RUN_ID", run_id)
        session = quark.start_run(
            project="all", name=run_id, storage_dir=root, tags=["whole"], backends=backends,
            config={"lr": lr, "seed": seed, "model": {"width": 8}},
        )  # fmt: skip
    with session, quark.MetricsLogger(session) as metrics:
        for step in range(STEPS):
            value = lr + 2 * 0.9**step + chance.gauss(0, 0.002)
            metrics.log_many({"train/loss": value, "val/loss": value + 0.1}, step=step)
        session.write([make_layer(step) for step in range(STEPS)])
        session.write([make_telemetry(0, step) for step in range(STEPS)])
        log_batches(session)
        session.add_log("half way", step=STEPS // 2)
        with quark.ArtifactStore(session) as artifacts:
            drawing = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><path/></svg>'
            artifacts.store("figure", "drawing", drawing, step=3)
            artifacts.store("note", "words", "some words")
            artifacts.log_table(
                "scores", [[row, row / 2] for row in range(300)], columns=["a", "b"]
            )
    return session.run_id


def make_layer(step):
    return LayerSummaryRecord(
        *start_fields(None), "blocks.0", "Linear", "gradient", "backward", 0, 100, step,
        norm=1.0 + step / 100, mean=0.0, std=0.1, nan_count=0, inf_count=0,
    )  # fmt: skip


def read_all(client, run_id, other_id):
    """Ask for every part of the page of a run and its comparison, none of which may fail."""
    run = client.json(f"/api/runs/{run_id}")
    analysis = wait_for_analysis(client, run_id)
    metrics = [row[0] for row in run["metrics"]["rows"]]
    found = {
        "about": client.json("/api/about"),
        "listed": [row["id"] for row in client.json("/api/runs")["rows"]],
        "standings": client.json("/api/standings", run=[run_id, other_id])["standings"],
        "run": run,
        "analysis": analysis,
        "curves": client.curves(run_id, *metrics[:10])[1],
        "events": client.json(f"/api/runs/{run_id}/events")["events"],
        "artifacts": client.json(f"/api/runs/{run_id}/artifacts")["artifacts"],
        "batches": client.json(f"/api/runs/{run_id}/batches")["summary"],
        "system": client.pack(f"/api/runs/{run_id}/system")[0],
        "layers": client.pack(f"/api/runs/{run_id}/grid", **GRADIENTS)[0],
    }
    client.pack("/api/sparks", run=[run_id, other_id])
    client.json("/api/names")
    changed = client.get(f"/api/runs/{run_id}/changes", cursor=run["cursor"], key=metrics[:1])
    assert changed.status_code in (200, 204)
    found["tables"] = {}
    for row in found["artifacts"]:
        if row["url"] is not None:
            assert len(client.get(f"/{row['url']}").content) == row["size_bytes"]
        if row["table"] is not None:
            asked = {"sha256": row["sha256"], "kind": row["table"]}
            found["tables"][row["name"]] = client.json(f"/api/runs/{run_id}/table", **asked)
    sides = [run_id, other_id]
    found["sides"] = client.json("/api/compare", run=sides)
    client.pack("/api/compare/curves", side=sides, key=metrics[:1])
    found["verdict"] = wait_for_verdict(client, side=sides)
    return found


GRADIENTS = {"kind": "layer", "field": "norm", "summary": "gradient"}
