"""A run's id and step travel in a checkpoint."""

import json

import pytest

import quark
from quark_core.errors import SchemaValidationError
from quark_core.records.schema import CURRENT_SCHEMA_VERSION


def test_a_resumed_run_goes_on_where_its_checkpoint_is(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(10):
            metrics.log("loss", float(step), step=step)
            if step == 5:
                state = json.loads(json.dumps(session.state_dict(step=step)))
        session.end_run("interrupted")
    assert state == {
        "run_id": session.run_id,
        "attempt": 0,
        "step": 5,
        "schema_version": CURRENT_SCHEMA_VERSION,
    }
    with quark.resume_run(run_id=state["run_id"], storage_dir=tmp_path, state=state) as resumed:
        metrics = quark.MetricsLogger(resumed)
        metrics.log("loss", 60.0, step=6)
        assert [r.value for r in metrics.read()] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 60.0]


@pytest.mark.long
def test_a_state_without_a_step_hides_nothing(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=9)
        state = session.state_dict()
        session.end_run("failed")
    with quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, state=state) as resumed:
        assert len(quark.MetricsLogger(resumed).read()) == 1


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ("abc", "^state must be what"),
        ({}, "^state must be what"),
        ({"run_id": "another"}, "^state is of run 'another', not of run_id"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path, state, named):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        session.end_run("interrupted")
    with pytest.raises(SchemaValidationError, match=named):
        quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, state=state)


def test_a_bad_step_is_refused(tmp_path):
    with (
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        pytest.raises(SchemaValidationError, match=r"^step must"),
    ):
        session.state_dict(step=-1)
