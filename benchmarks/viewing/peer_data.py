"""Writes the same curves, or runs, in another tool's own form.

    python peer_data.py TOOL FOLDER CURVES POINTS RUNS

Runs in the interpreter that the tool is installed in, and imports nothing of Quark. It prints one
line of JSON: what the tool calls the run of the curves, and its project. With RUNS there are so
many runs of one point each, and no curves.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import sys
from pathlib import Path

PROJECT = "bench"


def list_keys(curves: int) -> list[str]:
    """Names in two groups, as pages fold longer ones."""
    half = curves // 2
    return [f"{'train' if place < half else 'val'}/metric{place % half}" for place in range(curves)]


def make_value(curve: int, step: int, points: int) -> float:
    """A loss with noise that each tool gets alike."""
    noise = math.sin(12.9898 * step + 78.233 * curve) * 43758.5453
    return 2.5 * math.exp(-5 * step / points) + 0.3 + 0.1 * (noise - math.floor(noise))


def write_tensorboard(folder: Path, curves: int, points: int, runs: int) -> dict[str, str]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    keys = list_keys(curves)
    for run in range(runs or 1):
        writer = EventFileWriter(str(folder / f"run{run}"), max_queue_size=100_000)
        for step in range(1 if runs else points):
            values = [
                Summary.Value(tag=key, simple_value=make_value(place, step + run, points))
                for place, key in enumerate(keys[:1] if runs else keys)
            ]
            writer.add_event(
                Event(wall_time=1.7e9 + step, step=step, summary=Summary(value=values))
            )
        writer.close()
    return {"run": "run0", "project": PROJECT}


def write_mlflow(folder: Path, curves: int, points: int, runs: int) -> dict[str, str]:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.create_experiment(PROJECT, artifact_location=str(folder / "artifacts"))
    if runs:
        for place in range(runs):
            run = client.create_run(experiment, run_name=f"run{place}").info.run_id
            client.log_metric(run, "train/metric0", make_value(0, place, runs), step=0)
            client.set_terminated(run)
        return {"run": run, "project": experiment}
    run = client.create_run(experiment).info.run_id
    keys = list_keys(curves)
    # Its own call stores the newest values; the points before go straight into its table, as one
    # call for each thousand of them would take minutes.
    last = points - 1
    client.log_batch(
        run,
        [
            Metric(key, make_value(place, last, points), last, last)
            for place, key in enumerate(keys)
        ],
    )
    connection = sqlite3.connect(folder / "mlflow.db")
    connection.executemany(
        "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) "
        "VALUES (?, ?, ?, ?, ?, 0)",
        (
            (key, make_value(place, step, points), step, run, step)
            for place, key in enumerate(keys)
            for step in range(last)
        ),
    )
    connection.commit()
    connection.close()
    client.set_terminated(run)
    return {"run": run, "project": experiment}


def write_trackio(folder: Path, curves: int, points: int, runs: int) -> dict[str, str]:
    os.environ["TRACKIO_DIR"] = str(folder)
    from trackio.sqlite_storage import SQLiteStorage

    keys = list_keys(curves)
    for run in range(runs or 1):
        rows = [
            {
                key: make_value(place, step + run, points)
                for place, key in enumerate(keys[:1] if runs else keys)
            }
            for step in range(1 if runs else points)
        ]
        SQLiteStorage.bulk_log(
            PROJECT, f"run{run}", rows, steps=list(range(len(rows))), run_id=f"id{run}"
        )
    return {"run": "run0", "project": PROJECT}


def write_aim(folder: Path, curves: int, points: int, runs: int) -> dict[str, str]:
    from aim import Repo, Run

    Repo.from_path(str(folder), init=True)
    keys = list_keys(curves)
    for place in range(runs or 1):
        run = Run(
            repo=str(folder),
            experiment=PROJECT,
            system_tracking_interval=None,
            log_system_params=False,
        )
        for step in range(1 if runs else points):
            for curve, key in enumerate(keys[:1] if runs else keys):
                run.track(make_value(curve, step + place, points), name=key, step=step)
        name = run.hash
        run.close()
    return {"run": str(name), "project": PROJECT}


def main() -> None:
    tool, folder, curves, points, runs = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6])
    folder.mkdir(parents=True, exist_ok=True)
    write = {
        "tensorboard": write_tensorboard,
        "mlflow": write_mlflow,
        "trackio": write_trackio,
        "aim": write_aim,
    }[tool]
    print(json.dumps(write(folder, curves, points, runs)))


if __name__ == "__main__":
    main()
