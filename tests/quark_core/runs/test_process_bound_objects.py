"""Sessions and writers belong to their process, strict runs tell what went wrong at their end."""

import copy
import math
import pickle

import pytest

import quark
from quark_core.errors import InvalidRunStateError, SchemaValidationError, SessionStoreError


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickling_says_what_to_do(session, act):
    for thing in (session, quark.MetricsLogger(session), quark.ArtifactStore(session)):
        with pytest.raises(TypeError, match=r"session\.context"):
            act(thing)
    assert pickle.loads(pickle.dumps(session.context)) == session.context


def test_a_flag_that_is_no_bool_is_refused(tmp_path):
    with pytest.raises(SchemaValidationError, match=r"^strict_mode must be True or False"):
        quark.start_run(project="p", storage_dir=tmp_path, strict_mode="no")
    assert not (tmp_path / ".quark").exists()


def test_an_unknown_severity_is_refused_when_reading(session):
    with pytest.raises(SchemaValidationError, match=r"^severity must be one of debug"):
        quark.EventLogger(session).read(severity="warn")


def test_resuming_hints_at_runs_that_may_be_meant(session, tmp_path):
    with pytest.raises(quark.InvalidRunStateError, match=f"{session.run_id} is alive in this"):
        quark.resume_run(run_id=session.run_id[:6], storage_dir=tmp_path)
    with pytest.raises(quark.RunNotFoundError, match=f"near it: {session.run_id}"):
        quark.resume_run(run_id=f"{session.run_id[:8]}-", storage_dir=tmp_path)


@pytest.mark.long
def test_batches_that_are_not_finite_can_be_written_again(session, tmp_path):
    diagnostics = quark.DataDiagnostics(session)
    diagnostics.log_batch(math.nan, step=1)
    diagnostics.log_batch(0.5, step=2)
    records = diagnostics.read(include_non_finite=True)
    with quark.start_run(project="copy", storage_dir=tmp_path) as other:
        assert other.write(records) == 2
        found = quark.DataDiagnostics(other).read(include_non_finite=True)
    assert [str(record.loss) for record in found] == ["nan", "0.5"]


def test_a_handler_of_a_run_that_is_over_is_refused(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    session.end_run()
    with pytest.raises(InvalidRunStateError, match=r"^LoggingHandler: the run has ended"):
        quark.LoggingHandler(session)


def test_closing_in_strict_mode_waits_for_the_primary(tmp_path, monkeypatch):
    with quark.start_run(project="p", storage_dir=tmp_path, strict_mode=True) as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("m", 1.0, step=0)
        session.flush()
        backend = session.open_run.reader

        def refuse(batches):
            raise quark.SessionStoreError("planted failure")

        monkeypatch.setattr(backend, "write_group", refuse)
        metrics.log("m", 2.0, step=1)
        with pytest.raises(SessionStoreError, match="planted failure"):
            metrics.close()
        monkeypatch.undo()
