"""Without the plugin provenance a run is recorded and read; what needs the plugin says so."""

import os
import subprocess
import sys

PROGRAM = """
import sys

# Nobody may import the room, and the registry finds no such plugin.
sys.modules["quark.provenance"] = None
import quark_core.backends.registry as registry

find_points = registry.entry_points
registry.entry_points = lambda **chosen: [
    point for point in find_points(**chosen) if point.name != "provenance"
]

import quark
from quark_core.errors import QuarkError

with quark.start_run(project="p", storage_dir=sys.argv[1], config={"rate": 0.1}) as session:
    quark.MetricsLogger(session).log("loss", 1.0, step=0)
    for method, given in (
        (session.fingerprint, ("key", 1)),
        (session.fingerprint_data, ("key", [1])),
        (session.watch_data, ([1],)),
    ):
        try:
            method(*given)
        except QuarkError as error:
            assert "the feature 'provenance' of Quark is not installed" in str(error), error
        else:
            raise AssertionError(method)
    session.open_run.background.join()

run = quark.open_run(session.run_id, sys.argv[1])
assert run.status == "completed"
stored = run.open_run.reader.load_run(session.run_id)
values = stored.environment.values
assert values["python"] and values["host"] and values["process"]["argv"], values
assert values["packages"]["numpy"] and "gpus" in values, values
assert "git" in values and "imported" not in values, values
assert stored.digests.environment
assert quark.series(run, "loss").points == 1
loaded = [name for name in sys.modules if name.startswith("quark.provenance.")]
assert not loaded, loaded
"""


def test_a_run_is_recorded_and_read_without_the_plugin(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "QUARK_EXIT_TIMEOUT_SECONDS": "60"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
