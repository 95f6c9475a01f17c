"""Only rank 0 keeps anything; the other ranks' calls are accepted and touch no file."""

import json
import os

import pytest
from kit.programs import run_code

import quark

PROGRAM = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import quark
    with quark.start_run(project="p", storage_dir=sys.argv[1], backends="csv") as session:
        with quark.MetricsLogger(session) as metrics, quark.EventLogger(session) as events:
            record = metrics.log("m", 1.0, step=0)
            metrics.log_many({"m": 2.0}, step=1)
            events.log("e")
            session.add_tag("t")
            session.add_log("x")
            reads = [len(metrics.flush()), len(metrics.read()), len(events.read())]
            try:
                metrics.log("m", 1.0)
            except quark.SchemaValidationError:
                misuse = True
print(json.dumps({
    "run_id": session.run_id, "status": session.status, "reads": reads, "misuse": misuse,
    "lanes": len(session.report_delivery().lanes), "rank": record.rank,
    "warnings": [str(one.message) for one in caught],
}))
"""


def run(storage_dir, **environment):
    done = run_code(PROGRAM, storage_dir, env={**os.environ, **environment})
    return json.loads(done.stdout)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "launcher",
    [
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"},
        {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
    ],
    ids=lambda launcher: next(iter(launcher)),
)
def test_other_ranks_touch_nothing(tmp_path, launcher):
    found = run(tmp_path, **launcher)
    assert list(tmp_path.iterdir()) == []
    assert found["run_id"] is None
    assert found["reads"] == [0, 0, 0]
    assert found["lanes"] == 0
    assert found["misuse"] is True
    assert found["rank"] > 0
    assert found["status"] == "completed"
    (warning,) = found["warnings"]
    assert "QUARK_RUN_ID" in warning


@pytest.mark.long
def test_all_ranks_know_the_run_id_where_it_is_given(tmp_path):
    shared = {"QUARK_RUN_ID": "launch-17", "WORLD_SIZE": "2"}
    other = run(tmp_path, RANK="1", **shared)
    assert (other["run_id"], other["warnings"]) == ("launch-17", [])
    assert list(tmp_path.iterdir()) == []
    zero = run(tmp_path, RANK="0", **shared)
    assert (zero["run_id"], zero["warnings"], zero["lanes"]) == ("launch-17", [], 2)
    assert zero["reads"] == [2, 2, 3]
    assert quark.open_run("launch-17", tmp_path).status == "completed"


def test_a_given_run_id_that_exists_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_RUN_ID", "again")
    with quark.start_run(project="p", storage_dir=tmp_path):
        pass
    with pytest.raises(quark.InvalidRunStateError, match="run_id"):
        quark.start_run(project="p", storage_dir=tmp_path)


@pytest.mark.parametrize("run_id", ["a/b", "../x", "x" * 129, "sp ace", ".hidden"])
def test_a_given_run_id_that_could_not_name_a_folder_is_refused(tmp_path, monkeypatch, run_id):
    monkeypatch.setenv("QUARK_RUN_ID", run_id)
    with pytest.raises(quark.SchemaValidationError, match="QUARK_RUN_ID"):
        quark.start_run(project="p", storage_dir=tmp_path)
