"""A process that is killed while it stores: whatever is listed loads, with its hash."""

import random
import signal
import subprocess
import sys
import time

import pytest
from payload_tools import list_objects, sha256

import quark
from quark_core.runs import recovery

PROGRAM = """
import os, random, sys, threading, quark
session = quark.start_run(project="killed", storage_dir=sys.argv[1])
artifacts = quark.ArtifactStore(session)
chance = random.Random(int(sys.argv[2]))
path = sys.argv[1] + f"/file{sys.argv[2]}"
print(session.run_id, flush=True)
def work():
    step = 0
    while True:
        artifacts.store("small", "thread", {"n": step, "noise": os.urandom(8).hex()}, step=step)
        step += 1
threading.Thread(target=work, daemon=True).start()
step = 0
while True:
    data = os.urandom(int(4 ** chance.uniform(0, 11)))
    if step % 3:
        record = artifacts.store("blob", "main", data, step=step)
    else:
        with open(path, "wb") as file:
            file.write(data)
        record = artifacts.store_file("blob", "main", path, step=step)
    step += 1
    if step % 7 == 0:
        artifacts.flush()
        print(step, record.sha256, flush=True)
"""


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(6))
def test_every_listed_artifact_loads(tmp_path, seed):
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
    )
    run_id = child.stdout.readline().strip()
    time.sleep(random.Random(seed).uniform(0.1, 0.6))
    child.send_signal(signal.SIGKILL)
    flushed = [line.split() for line in child.communicate()[0].splitlines()]
    recovery.sync(tmp_path)
    assert recovery.survey(tmp_path) == []

    session = quark.open_run(run_id, tmp_path)
    artifacts = quark.ArtifactStore(session)
    listed = artifacts.read()
    for record in listed:
        with artifacts.open(record) as file:
            assert sha256(file.read()) == record.sha256
        assert sha256((session.run_path / record.payload_relative_path).read_bytes())
        assert record.payload_format == "json" or "media_type" in record.metadata
    for name in ("main", "thread"):
        steps = [record.step for record in artifacts.read(artifact_key=name)]
        assert steps == list(range(len(steps)))
    kept = {record.sha256 for record in listed}
    main = [record.step for record in artifacts.read(artifact_key="main")]
    for step, digest in flushed:
        assert digest in kept
        assert len(main) >= int(step)
    # What has a name of an object is one, also where its record was never made.
    for digest, path in list_objects(session).items():
        assert sha256(path.read_bytes()) == digest
    with quark.resume_run(run_id=run_id, storage_dir=tmp_path) as resumed:
        again = quark.ArtifactStore(resumed)
        assert again.load(again.store("blob", "main", b"after", step=len(main))) == b"after"
        assert len(again.read()) == len(listed) + 1
