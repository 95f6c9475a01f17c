"""The product without one of its features, on a store that has records of all kinds.

A feature is removed as it would be without its distribution: no process loads its entry point,
and where nothing imports its modules any more, none can be imported.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from quark_core.hookspecs import PLUGIN_GROUP
from quark_core.records import RECORD_TYPES

pytestmark = pytest.mark.long

PAGE_TESTS = Path(__file__).parents[1] / "quark" / "page"
FEATURES = {
    point.name: point.value.removesuffix(".plugin")
    for point in entry_points(group=PLUGIN_GROUP)
    if point.value.startswith("quark")
}
# Commands and pages import modules of analysis: what the main metric of a run is, how it is shown.
WITHOUT_MODULES = {"configuration", "notifications", "provenance", "sweeps"}
# Python runs a module of this name at the start of each process, helper processes included.
BLOCKER = """
import importlib.metadata as metadata
import os
import sys

find_all = metadata.entry_points
blocked = os.environ.get("BLOCKED_PLUGIN")

def find(**chosen):
    hidden = ("quark.plugins", blocked)
    return metadata.EntryPoints(p for p in find_all(**chosen) if (p.group, p.name) != hidden)

metadata.entry_points = find

class Finder:
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(os.environ["BLOCKED_MODULE"] + "."):
            raise ModuleNotFoundError(f"{name} is not installed")

if os.environ.get("BLOCKED_MODULE"):
    sys.meta_path.insert(0, Finder())
"""
FILLED = """
import sys
import quark
from quark_core.records import RECORD_TYPES
from quark_core.testing.fakes import make_samples

ALERT = {"title": "Slow", "message": "the loader waits"}
with quark.start_run(project="p", storage_dir=".", name="old", config={"lr": 0.1}) as session:
    metrics = quark.MetricsLogger(session)
    for step in range(50):
        metrics.log("loss", 1 / (step + 1), step=step)
    session.fingerprint("weights", {"w": [1.0, 2.0]}).wait()
    quark.EventLogger(session).log("alert_raised", severity="error", payload=ALERT)
    for kind in RECORD_TYPES:
        if kind != "lifecycle":
            session.write(make_samples(kind, session.run_id))
quark.AnalyzerEngine(session).analyze()
print(session.run_id)
"""
USED = """
import json, os, sys
from pathlib import Path

import quark
from click.testing import CliRunner
from page_client import PageClient
from quark.cli.main import cli
from quark.page.routes.page_source import open_source
from quark_core.backends.registry import default_registry
from quark_core.records import RECORD_TYPES
from quark_core.records.query import Query

old, blocked = sys.argv[1], os.environ["BLOCKED_PLUGIN"]
assert blocked not in [name for name, _ in default_registry()._manager.list_name_plugin()]

ALERT = {"title": "Slow", "message": "the loader waits"}
with quark.start_run(project="p", storage_dir=".", backends="csv", config={"lr": 0.2}) as session:
    metrics = quark.MetricsLogger(session)
    for step in range(50):
        metrics.log("loss", 1 / (step + 1), step=step)
    quark.EventLogger(session).log("alert_raised", severity="error", payload=ALERT)
assert session.report_delivery().complete
new = session.run_id
assert quark.open_run(new, ".").status == "completed"

reader = quark.open_run(old, ".").open_run
print(json.dumps({kind: reader.read(kind, Query()).count for kind in RECORD_TYPES}))

for run in (old, new):
    commands = ["runs"], ["show", run], ["export", run, "--format", "jsonl", "-o", f"out_{run}"]
    for command in (*commands, ["doctor"], ["sync"], ["logs", run], ["du"]):
        done = CliRunner().invoke(cli, command)
        # Nothing was printed of a run, perhaps.
        assert done.exit_code == 0 or command[0] == "logs", (command, done.output, done.exception)
        assert done.exception is None or isinstance(done.exception, SystemExit), command

client = PageClient(open_source(Path("."), None))
for run in (old, new):
    assert client.json(f"/api/runs/{run}")["run"]["id"] == run
    client.json(f"/api/runs/{run}/events", limit=10)
    client.curves(run, "loss")
client.json("/api/runs")
client.app.state.page.desk.close(60)
client.app.state.page.tables.close()
client.source.close()
"""


def run_python(folder, code, *arguments, blocked="", module=""):
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(BLOCKER)
    path = os.pathsep.join([str(site), str(PAGE_TESTS), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "BLOCKED_PLUGIN": blocked}
    environment["BLOCKED_MODULE"] = module
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store with one run that has records of all kinds."""
    folder = tmp_path_factory.mktemp("filled")
    return folder, run_python(folder, FILLED).split()[-1]


@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_the_product_works_without_a_feature(tmp_path, filled, feature):
    folder, run_id = filled
    shutil.copytree(folder / ".quark", tmp_path / ".quark")
    module = FEATURES[feature] if feature in WITHOUT_MODULES else ""
    told = run_python(tmp_path, USED, run_id, blocked=feature, module=module)
    counts = json.loads(told.splitlines()[0])
    assert all(counts[kind] > 0 for kind in RECORD_TYPES if kind != "lifecycle"), counts
