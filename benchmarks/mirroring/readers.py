"""Every point of a run, as each tool's own reader has it."""

from __future__ import annotations

import csv
import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import quark
from mirroring.ledger import EPOCH_KEYS, KEYS, Point, Points, spell
from quark_core.records.names import decode_name

_BLOCK_BYTES = 32768
_LARGEST_FLOAT32 = 3.4028234663852886e38


def read_embedded(folder: Path, run_id: str, _uri: str) -> Points:
    """Through Quark's reader."""
    columns = quark.MetricsLogger(quark.open_run(run_id, folder)).columns(all_attempts=True)
    names = [decode_name(key) for key in columns["metric_key"].tolist()]
    places = zip(columns["step"].tolist(), columns["epoch"].tolist(), strict=True)
    return Counter(
        (name, *(("epoch", epoch) if step < 0 else ("step", step)), spell(value))
        for name, (step, epoch), value in zip(names, places, columns["value"].tolist(), strict=True)
    )


def read_csv(folder: Path, run_id: str, _uri: str) -> Points:
    """Through Python's csv module; keys stand there as Quark stores them."""
    path = folder / ".quark" / "runs" / run_id / "csv" / "metrics_long.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return Counter(
            (
                decode_name(row["key"]),
                *(("step", int(row["step"])) if row["step"] else ("epoch", int(row["epoch"]))),
                spell(float(row["value"])),
            )
            for row in csv.DictReader(file)
        )


def read_mlflow(_folder: Path, run_id: str, uri: str) -> Points:
    """Through MlflowClient, page by page; names by the map among the run's artifacts."""
    from mlflow import MlflowClient

    client: Any = MlflowClient(tracking_uri=uri)
    experiments = [one.experiment_id for one in client.search_experiments()]
    runs = client.search_runs(experiments, f"tags.`quark.run_id` = '{run_id}'")
    assert len(runs) == 1, f"{len(runs)} MLflow runs mirror {run_id}"
    mlflow_id = runs[0].info.run_id
    names = json.loads(
        Path(client.download_artifacts(mlflow_id, "quark/name_map.json")).read_text()
    )
    keys = {name: decode_name(key) for key, name in names["metrics"].items()}
    found: Points = Counter()
    for name in runs[0].data.metrics:
        if keys.get(name, name) not in KEYS:
            continue
        token = None
        while True:
            page = client._tracking_client.store.get_metric_history(
                mlflow_id, name, max_results=1000, page_token=token
            )
            key = keys.get(name, name)
            found.update((key, _axis(key), one.step, spell(one.value)) for one in page)
            token = page.token
            if not token:
                break
    return found


def read_wandb(folder: Path, run_id: str, _uri: str) -> Points:
    """Out of W&B's own files, through its own classes of records."""
    run_path = folder / ".quark" / "runs" / run_id
    paths = sorted(
        path
        for path in run_path.glob("mirrors/wandb/*/wandb/*run-*/*.wandb")
        if "latest" not in str(path)
    )
    records = [record for path in paths for record in _read_records(path)]
    axes = _find_axes(records)
    known = {f"key{key}" if key.startswith("_") else key: key for key in KEYS}
    found: Points = Counter()
    for record in records:
        if record.WhichOneof("record_type") != "history":
            continue
        row = {
            item.key or "/".join(item.nested_key): _parse(item.value_json)
            for item in record.history.item
        }
        for name, value in row.items():
            if name in known:
                # Whatever else stands in the row: where W&B draws it, its definition says.
                axis = axes.get(name) or axes.get("*") or "_step"
                place = "epoch" if axis == "quark/epoch" else "step"
                found[known[name], place, int(row.get(axis, -1)), spell(value)] += 1
    return found


def read_tensorboard(folder: Path, run_id: str, _uri: str) -> Points:
    """Through EventAccumulator; each attempt has a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root = folder / ".quark" / "runs" / run_id / "tensorboard"
    found: Points = Counter()
    for place in sorted({path.parent for path in root.rglob("*tfevents*")}):
        # Zero keeps every point; purging would take what another attempt logged again.
        read: Any = EventAccumulator(
            str(place), size_guidance={"scalars": 0, "tensors": 1}, purge_orphaned_data=False
        ).Reload()
        for key in read.Tags()["scalars"]:
            if key in KEYS:
                found.update(
                    (key, _axis(key), one.step, spell(one.value)) for one in read.Scalars(key)
                )
    return found


READERS: Mapping[str, Callable[[Path, str, str], Points]] = {
    "embedded": read_embedded,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
    "csv": read_csv,
    "tensorboard": read_tensorboard,
}
"""Backend -> reads a run, given the storage root, its id and MLflow's URI."""


def read_everywhere(folder: Path, run_id: str, uri: str) -> dict[str, Points]:
    """A run's points in each backend."""
    return {name: read(folder, run_id, uri) for name, read in READERS.items()}


def expect(backend: str, point: Point) -> Point:
    """A point as a backend must have it: what is different by design is said here.

    MLflow has no infinity (it is NaN there, and a tag says which) and its
    SQLite no zero below zero; TensorBoard has float32 alone.
    """
    key, axis, place, text = point
    value = float(text)
    if backend == "mlflow" and math.isinf(value):
        value = math.nan
    elif backend == "mlflow" and value == 0.0:
        value = 0.0
    elif backend == "tensorboard" and math.isfinite(value):
        if abs(value) > _LARGEST_FLOAT32:
            value = math.copysign(math.inf, value)
        else:
            (value,) = struct.unpack("<f", struct.pack("<f", value))
    return key, axis, place, spell(value)


def _axis(key: str) -> str:
    return "epoch" if key in EPOCH_KEYS else "step"


def _find_axes(records: Sequence[Any]) -> dict[str, str]:
    """Key or pattern -> its axis, as the newest definition has it."""
    return {
        record.metric.name or record.metric.glob_name: record.metric.step_metric
        for record in records
        if record.WhichOneof("record_type") == "metric" and record.metric.step_metric
    }


def _read_records(path: Path) -> Iterator[Any]:
    """The records in one of W&B's files, which are logs in LevelDB's format."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < 7:
            position += left
            continue
        _, size_bytes, kind = struct.unpack_from("<IHB", data, position)
        position += 7 + size_bytes
        if position > len(data) or kind == 0:
            break
        parts += data[position - size_bytes : position]
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def _parse(text: str) -> Any:
    # W&B writes a float without a fraction as an integer, its sign included.
    return json.loads(text, parse_int=lambda digits: -0.0 if digits == "-0" else int(digits))
