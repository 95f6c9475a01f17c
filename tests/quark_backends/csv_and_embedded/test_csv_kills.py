"""The CSV mirror, killed at every step that it takes on the disk, has every row once afterwards."""

import csv
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from quark_backends.csv.backend import CsvBackend
from quark_core.backends.contract import BackendConfig, Batch, Payload
from quark_core.records import ArtifactRecord
from quark_core.records.query import Query
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker

ALL = Query()
TABLE = json.dumps({"columns": ["n"], "rows": [[1], [2]]}).encode()
SHA256 = hashlib.sha256(TABLE).hexdigest()

# Ends itself at the n-th call that changes the disk.
KILLED = """
import os, pathlib, sys
sys.path.insert(0, sys.argv[3])
import test_csv_kills as scene
left = int(sys.argv[2])
def dying(act):
    def step(*arguments, **keywords):
        global left
        left -= 1
        if left == 0:
            os._exit(9)
        return act(*arguments, **keywords)
    return step
for name in ("replace", "ftruncate", "write", "fsync", "symlink", "link", "unlink"):
    setattr(os, name, dying(getattr(os, name)))
scene.write_all(pathlib.Path(sys.argv[1]))
os._exit(0)
"""


def configure(place):
    return BackendConfig(
        storage_dir=place, run_id="run0", location="out", options={"publish": "seen"}
    )


def make_batches():
    maker = BatchMaker("run0")
    record = ArtifactRecord(
        *("run0", "writer0", 0, 0, 0, FIRST_TIME_US),
        *("table", "eval/t", "eval", "t", "json", len(TABLE), SHA256),
        payload_relative_path="artifacts/table/eval/t/step-1.json",
        metadata_relative_path="artifacts/table/eval/t/step-1.metadata.json",
    )
    return [
        maker.start(),
        maker.metrics(("a", 0, 1.0), ("b", 0, 2.0)),
        maker.batch([record]),
        maker.metrics(("a", 1, 3.0), ("c", 1, 4.0)),
        maker.lifecycle(("status", {"status": "completed"})),
    ]


def write_all(place):
    source = place / "source"
    source.write_bytes(TABLE)
    backend = CsvBackend(configure(place))
    for batch in load_batches(place):
        if batch.kind == "artifact":
            backend.put_payload(
                Payload(run_id="run0", sha256=SHA256, size_bytes=len(TABLE), path=source)
            )
        backend.write(batch)
    backend.close()


def load_batches(place):
    """The same bytes in every process, as a journal has them."""
    return msgspec.msgpack.decode((place / "batches").read_bytes(), type=list[Batch])


def read_table(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def assert_all_is_there_once(place):
    backend = CsvBackend(
        BackendConfig(storage_dir=place, location="out", run_id="run0", read_only=True)
    )
    for batch in load_batches(place):
        if batch.kind == "artifact":
            assert backend.read("run0", "artifact", ALL).to_records() == tuple(batch.to_records())
    values = backend.read("run0", "metric", ALL)["value"].tolist()
    assert values == [1.0, 2.0, 3.0, 4.0]
    assert backend.read("run0", "lifecycle", ALL).count == 3
    assert backend.load_run("run0").run.status == "completed"
    with backend.open_payload("run0", SHA256) as file:
        assert file.read() == TABLE
    folder = place / "out" / "run0"
    assert (folder / "artifacts/table/eval/t/step-1.json").read_bytes() == TABLE
    expected = [["step", "a", "b", "c"], ["0", "1.0", "2.0", ""], ["1", "3.0", "", "4.0"]]
    assert read_table(place / "seen" / "metrics.csv") == expected
    assert read_table(place / "seen" / "eval" / "t.csv") == [["n"], ["1"], ["2"]]
    assert json.loads((place / "seen" / "config.json").read_text()) == {"lr": 0.1}


@pytest.mark.long
def test_a_kill_at_every_step_on_the_disk(tmp_path):
    batches = msgspec.msgpack.encode(make_batches())
    step, ended = 0, False
    while not ended:
        step += 1
        place = tmp_path / str(step)
        place.mkdir()
        (place / "batches").write_bytes(batches)
        arguments = [str(place), str(step), str(Path(__file__).parent)]
        done = subprocess.run(
            [sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 9), done.stderr
        ended = done.returncode == 0
        if not ended:
            # The lane begins again with the first batch that it saw no reply to, or before it.
            write_all(place)
        assert_all_is_there_once(place)
    assert step > 30
