"""Plugins installed as distributions on the path of a process of its own, which trains."""

import json
import os
import subprocess
import sys

import pytest

import quark


@pytest.fixture
def install(tmp_path):
    """Puts a plugin on the path as the distribution that brings it would be."""
    site = tmp_path / "site"

    def put(distribution, entry_point, source):
        module = distribution.replace("-", "_")
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        group = f"[quark.backends]\n{entry_point} = {module}:plugin\n"
        (info / "entry_points.txt").write_text(group)

    put.site = site
    return put


@pytest.fixture
def run_python(tmp_path, install):
    """Runs a script in a process that has the plugins; returns how it ended."""

    def run(code, *arguments, **variables):
        path = os.pathsep.join([str(install.site), *filter(None, sys.path)])
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "QUARK_EXIT_TIMEOUT_SECONDS": "30",
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=200,
        )

    return run


TRAINING = """
import json, logging, sys, time
import quark

logging.basicConfig(format="%(levelname)s %(message)s")
with quark.start_run(project="p", storage_dir=sys.argv[1], backends=sys.argv[2]) as session:
    metrics = quark.MetricsLogger(session)
    for step in range(100):
        metrics.log("m", float(step), step=step)
    metrics.flush()
    # A helper process takes its time to start, on a machine with much to do.
    until = time.monotonic() + 60
    while any(l.backend == "good" and not l.delivered for l in session.report_delivery().lanes):
        assert time.monotonic() < until
        time.sleep(0.02)
lanes = {lane.backend: lane.delivered for lane in session.report_delivery().lanes}
complete = [lane.backend for lane in session.report_delivery().lanes if lane.complete]
print(json.dumps([session.run_id, complete]))
"""


@pytest.fixture
def train(tmp_path, run_python):
    """Trains in a process that has the plugins; returns its run, what was complete, its stderr."""

    def run(backends, *, expect=0, **variables):
        done = run_python(TRAINING, tmp_path, backends, **variables)
        assert done.returncode == expect, done.stderr
        if expect:
            return done.stderr
        run_id, complete = json.loads(done.stdout)
        opened = quark.open_run(run_id, tmp_path)
        assert opened.status == "completed"
        assert len(quark.MetricsLogger(opened).read(metric_key="m")) == 100
        lines = (tmp_path / ".quark" / "runs" / run_id / "csv" / "metrics_long.csv").read_text()
        assert lines.count("\n") == 101
        return complete, done.stderr

    return run
