import subprocess
import sys

import msgspec
import pytest

import quark
from quark.analysis.outputs import identify, open_analysis
from quark_backends.csv.backend import CsvBackend
from quark_core.backends.contract import BackendConfig
from quark_core.delivery.segments import Origin
from quark_core.delivery.stream import RunStream
from quark_core.errors import RunNotFoundError, SchemaValidationError, SessionStoreError
from quark_core.records import PhaseRecord
from quark_core.runs.open_run import OpenRun, open_runs
from quark_core.sessions.session import TrainingSession


def phase(name="stagnation"):
    return PhaseRecord(None, "", 0, 0, 0, 0, name, name.title(), "", 0, 9)


def start(path, **options):
    return quark.start_run(project="p", storage_dir=path, **options)


def log(session, count=5):
    metrics = quark.MetricsLogger(session)
    for step in range(count):
        metrics.log("train/loss", 1.0 / (step + 1), step=step)
    return metrics


def store(target, *names, replaces=True):
    return target.write("phases", replaces, {"phase": [phase(name) for name in names]})


def names(target):
    return list(target.read_outputs("phase", "phases")["phase_name"])


def test_of_an_open_run_what_was_just_logged_is_read(tmp_path):
    with start(tmp_path) as session:
        log(session, 7)
        data = open_analysis(session).load()
        assert len(data.metrics["train/loss"]) == 7
        assert not data.ended
        assert data.run_id == session.run_id


@pytest.mark.long
def test_the_configuration_comes_with_the_data(tmp_path):
    with start(tmp_path, config={"lr": 0.1}) as session:
        assert open_analysis(session).load().config == {"lr": 0.1}


@pytest.mark.parametrize("journal_only", ["0", "1"])
def test_every_state_of_a_run_takes_generations(tmp_path, monkeypatch, journal_only):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", journal_only)
    with start(tmp_path) as session:
        log(session)
        running = open_analysis(session)
        assert running.can_store
        assert store(running, "a") == 1
        assert names(running) == ["a"]
        assert store(open_analysis(session.context), "b") == 2
    ended = open_analysis(session)
    assert ended.load().ended
    assert len(ended.load().metrics["train/loss"]) == 5
    assert store(ended, "c") == 3
    assert store(open_analysis(session.context), "d") == 4
    looked_at = quark.open_run(session.run_id, tmp_path)
    assert store(open_analysis(looked_at), "e", replaces=False) == 5
    assert store(open_analysis(looked_at.context), "f", replaces=False) == 6
    assert names(ended) == names(open_analysis(looked_at)) == ["d", "e", "f"]
    assert looked_at.status == "completed"


def test_a_generation_without_outputs_hides_the_earlier_ones(tmp_path):
    with start(tmp_path) as session:
        target = open_analysis(session)
        store(target, "a")
        assert store(target) == 2
        assert names(target) == []


def test_records_come_back_under_the_identity_that_was_given_them(tmp_path):
    with start(tmp_path) as session:
        target = open_analysis(session)
        made = [phase("a"), phase("b")]
        number = target.write("phases", True, {"phase": made})
        expected = identify(made, session.run_id, "phases", number)
        assert target.read_outputs("phase", "phases").to_records() == expected
        assert [record.id for record in expected] == ["phases.1-phase-0", "phases.1-phase-1"]
    assert identify(made, "r", "phases", None)[1].id == "phases.0-phase-1"


@pytest.mark.long
def test_the_context_of_a_run_in_another_process_joins_nothing(tmp_path):
    script = (
        "import quark, sys; s = quark.start_run(project='p', storage_dir=sys.argv[1]);"
        "m = quark.MetricsLogger(s); m.log('train/loss', 2.0, step=0); s.flush();"
        "print(s.run_id, flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        run_id = other.stdout.readline().strip()
        context = quark.open_run(run_id, tmp_path).context
        target = open_analysis(context)
        assert not target.load().ended
        assert len(target.load().metrics["train/loss"]) == 1
        assert store(target, "a") == 1
        assert open_runs.attached == ()
        other.stdin.close()


def test_a_backend_that_only_reads_keeps_nothing(tmp_path):
    with start(tmp_path, backends="csv") as session:
        log(session)
        session.flush()
    reader = CsvBackend(BackendConfig(storage_dir=tmp_path, read_only=True))
    stream = RunStream(Origin(session.run_id))
    foreign = TrainingSession(OpenRun(session.context, stream, reader, refusal="only read"))
    target = open_analysis(foreign)
    assert not target.can_store
    assert len(target.load().metrics["train/loss"]) == 5
    assert store(target, "a") is None
    assert "CsvBackend" in target.refusal
    with pytest.raises(SessionStoreError, match="Use the return value of analyze"):
        target.read_outputs("phase", "phases")


def test_a_session_that_keeps_nothing_gives_no_data(tmp_path):
    with start(tmp_path, backends="none") as session:
        log(session)
        for given in (session, session.context):
            target = open_analysis(given)
            assert target.load().metrics == {}
            assert not target.can_store
            assert store(target, "a") is None
            assert names(target) == []


def test_a_store_that_may_only_be_read_leaves_the_outputs_unstored(tmp_path, monkeypatch, caplog):
    with start(tmp_path) as session:
        log(session)

    def refuse(choice, config):
        raise SessionStoreError(f"storage_dir {config.storage_dir} cannot be written")

    looked_at = quark.open_run(session.run_id, tmp_path)
    target = open_analysis(looked_at)
    monkeypatch.setattr("quark_core.runs.backend_choice.open_primary", refuse)
    assert target.can_store
    assert store(target, "a") is None
    assert not target.can_store
    assert "cannot be written" in target.refusal
    assert "returned but not stored" in caplog.text


@pytest.mark.long
def test_a_run_that_the_store_does_not_have_is_named(tmp_path):
    with start(tmp_path) as session:
        context = session.context
        other = quark.start_run(project="p", storage_dir=tmp_path / "elsewhere")
        other.end_run()

    moved = msgspec.structs.replace(context, storage_dir=tmp_path / "elsewhere")
    with pytest.raises(RunNotFoundError, match=context.run_id):
        open_analysis(moved)


@pytest.mark.parametrize("given", [None, "run", 3, object()])
def test_what_is_no_session_is_refused(given):
    with pytest.raises(SchemaValidationError, match="session must be"):
        open_analysis(given)
