"""A training whose store is backed up meanwhile, and the commands that do it."""

import time

from click.testing import CliRunner

from quark.cli.main import cli

# Says after each tenth step what the store has acknowledged: the step, and each artifact's hash.
TRAINING = """
import hashlib, json, os, sys, time, quark
storage_dir, told = sys.argv[1:3]
session = quark.start_run(project="p", storage_dir=storage_dir, config={"lr": 0.1})
metrics = quark.MetricsLogger(session)
artifacts = quark.ArtifactStore(session)
hashes = {}
step = 0
while True:
    metrics.log("loss", float(step), step=step)
    step += 1
    if step % 10 == 0:
        payload = os.urandom(20_000)
        record = artifacts.store("bytes", "weights", payload, step=step)
        session.flush("stored")
        hashes[record.id] = hashlib.sha256(payload).hexdigest()
        with open(told + ".new", "w") as file:
            json.dump({"run_id": session.run_id, "steps": step, "hashes": hashes}, file)
        os.rename(told + ".new", told)
    time.sleep(0.0005)
"""


def call(*arguments, expected=0):
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == expected, result.output
    return result.output


def wait_until(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
