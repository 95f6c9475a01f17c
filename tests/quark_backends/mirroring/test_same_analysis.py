"""An analyzer finds the same in each backend that can be read, with each one's own settings."""

import math
import random
from importlib.util import find_spec

import pytest

import quark

if find_spec("mlflow") is None:
    pytest.skip("needs mlflow", allow_module_level=True)

# Its tables are made with calls that a newer SQLAlchemy advises against.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return f"mlflow:sqlite:///{tmp_path_factory.mktemp('mlflow') / 'm.db'}"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    # MLflow is imported once for all of these, and the end waits until it has everything.
    monkeypatch.setenv("QUARK_HELPER_PROCESSES", "0")
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "120")


@pytest.fixture
def begin(tmp_path, database):
    def start(**arguments):
        return quark.start_run(
            project=tmp_path.name,
            storage_dir=tmp_path,
            backends=["embedded", "csv", database],
            **arguments,
        )

    return start


def analyze(tmp_path, run_id, backend):
    run = quark.open_run(run_id, tmp_path, backend=backend)
    result = quark.AnalyzerEngine(run).analyze(store=False)
    return {
        "rules": result.to_dict()["rules"],
        "alerts": [
            (a.rule_id, a.severity, a.step, a.epoch, a.culprit, a.fact, a.inference)
            for a in result.alerts
        ],
        "scores": [(s.score_key, s.word, s.score, s.summary) for s in result.health_scores],
    }


def check_same(tmp_path, run_id, database):
    """The same from all; returns the ids of the rules that raised alerts."""
    found = analyze(tmp_path, run_id, None)
    for backend in ("csv", database):
        assert analyze(tmp_path, run_id, backend) == found
    return {alert[0] for alert in found["alerts"]}


@pytest.mark.long
def test_a_watched_model_of_which_a_layer_is_in_no_optimizer(begin, tmp_path, database):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Sigmoid(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 2)
    )
    optimizer = torch.optim.SGD([*net[0].parameters(), *net[3].parameters()], 0.1)
    inputs = torch.randn(64, 8)
    targets = (inputs.sum(1) > 0).long()
    with begin() as session, quark.MetricsLogger(session) as metrics:
        watch = quark.watch(session, net, optimizer)
        for step in range(100):
            watch.step(step)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
            metrics.log("train/loss", loss.item(), step=step)
    assert "stagnant_layers" in check_same(tmp_path, session.run_id, database)


@pytest.mark.long
def test_metrics_by_epoch_with_an_objective_in_the_configuration(begin, tmp_path, database):
    config = {"objective": {"metric": "val/quality", "mode": "max"}, "model": {"depth": 3}}
    draw = random.Random(0)
    with begin(config=config) as session, quark.MetricsLogger(session) as metrics:
        for step in range(400):
            epoch = step // 20
            metrics.log("train/loss", math.exp(-step / 80) + draw.random() / 50, step=step)
            if step % 20 == 19:
                metrics.log("val/loss", 0.5 + abs(epoch - 6) / 20, epoch=epoch)
                metrics.log("val/quality", 0.9 - epoch / 40, step=step, epoch=epoch)
    assert check_same(tmp_path, session.run_id, database)


@pytest.mark.long
def test_a_loss_that_becomes_infinite_and_a_run_that_fails(begin, tmp_path, database):
    session = begin(config={"lr": 10.0})
    with quark.MetricsLogger(session) as metrics:
        for step in range(60):
            metrics.log("train/loss", 2.0**step if step < 40 else math.inf, step=step)
            metrics.log("train/norm", math.nan if step > 50 else 1.0, step=step)
    session.end_run("failed")
    assert check_same(tmp_path, session.run_id, database)


def log(session, metrics, step, loss):
    """Log a step; some batches are kept for the epochs in them, and others not."""
    metrics.log("train/loss", loss, step=step)
    if step % 7 == 0:
        metrics.log("val/loss", loss / 2, step=step, epoch=step // 10)
    if step % 7 in (0, 6):
        session.flush()


@pytest.mark.long
@pytest.mark.parametrize("from_step", [None, 20])
def test_a_run_that_was_resumed_and_does_some_steps_again(begin, tmp_path, database, from_step):
    session = begin()
    metrics = quark.MetricsLogger(session)
    for step in range(40):
        log(session, metrics, step, 1.0 if step < 20 else 50.0)
    session.end_run("failed")
    again = quark.resume_run(
        run_id=session.run_id,
        storage_dir=tmp_path,
        backends=["embedded", "csv", database],
        from_step=from_step,
    )
    metrics = quark.MetricsLogger(again)
    for step in range(20, 200):
        log(again, metrics, step, math.exp(-step / 60))
    again.end_run()
    check_same(tmp_path, session.run_id, database)
    opened = quark.open_run(session.run_id, tmp_path, backend=database)
    read = quark.MetricsLogger(opened).read(metric_key="train/loss")
    assert [(one.step, one.value) for one in read] == [
        (step, 1.0 if step < 20 else math.exp(-step / 60)) for step in range(200)
    ]


@pytest.mark.long
def test_batches_and_telemetry(begin, tmp_path, database):
    draw = random.Random(0)
    with begin() as session, quark.DataDiagnostics(session) as batches:
        metrics, telemetry = quark.MetricsLogger(session), quark.SystemTelemetry(session)
        for step in range(120):
            telemetry.sample(step=step)
            loss = (9.0 if step % 30 == 5 else 1.0) + draw.random() / 10
            batches.log_batch(loss, step=step, labels=[0] * 30 + [1])
            metrics.log("train/loss", loss, step=step)
    check_same(tmp_path, session.run_id, database)


@pytest.mark.long
def test_a_run_that_mlflow_holds_whole_has_no_file_and_is_judged_the_same(
    begin, tmp_path, database
):
    with begin(config={"lr": 0.1, "name": "x", "deep": None}) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(200):
            metrics.log("train/loss", 1.0 + step / 100, step=step)
    assert check_same(tmp_path, session.run_id, database)
    run = quark.open_run(session.run_id, tmp_path, backend=database)
    mirrored = run.open_run.reader
    assert run.status == "completed"
    assert mirrored.load_run(session.run_id).environment.values["mlflow"]["status"] == "FINISHED"
