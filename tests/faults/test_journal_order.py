"""Where the journal is the store, it matters which one is played first."""

import os

import pytest
from kit.programs import run_code

import quark
from quark_core.runs import recovery

PROGRAM = """
import os, sys, warnings
warnings.simplefilter("ignore")
import quark
with quark.start_run(project="p", storage_dir=sys.argv[1]) as session:
    metrics = quark.MetricsLogger(session)
    metrics.log("m", 0.0, step=0)
    children = []
    for number in range(1, 7):
        child = os.fork()
        if child == 0:
            metrics.log("m", float(number), step=number)
            metrics.close()
            session.open_run.end_stream("done", 5.0)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    print(session.run_id)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_children_of_a_run_are_played_after_its_start(tmp_path, monkeypatch):
    done = run_code(PROGRAM, tmp_path, env={**os.environ, "QUARK_JOURNAL_ONLY": "1"})
    run_id = done.stdout.strip()

    def read():
        session = quark.open_run(run_id, storage_dir=tmp_path)
        return sorted(r.value for r in quark.MetricsLogger(session).read())

    everything = [float(number) for number in range(7)]
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    assert read() == everything
    # The same journals, brought to where a database may be used.
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "0")
    results = recovery.sync(tmp_path)
    assert all(not result.quarantined for result in results)
    assert read() == everything
