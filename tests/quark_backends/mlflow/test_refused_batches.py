"""A batch from the middle that MLflow has refused: offered again at its place, and never lost."""

import pytest

import quark
from quark_backends.mlflow.client import Server
from quark_core.delivery.sending import Quarantine
from quark_core.runs import recovery

# Its tables are made with calls that a newer SQLAlchemy advises against.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Refusing:
    """The store's own insert, and before it a rule that refuses points of one step."""

    def __init__(self, path):
        self.path = path

    def run(self, sql):
        import sqlite3
        from contextlib import closing

        with closing(sqlite3.connect(self.path, timeout=60)) as database, database:
            database.execute(sql)

    def begin(self, low, high):
        self.run(
            "CREATE TRIGGER refuses BEFORE INSERT ON metrics "
            f"WHEN NEW.step BETWEEN {low} AND {high} BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )

    def end(self):
        self.run("DROP TRIGGER refuses")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", ["minimal", "full"])
def test_it_is_kept_until_quark_sync_brings_it(tmp_path, monkeypatch, mlflow, level):
    from quark_backends.mlflow.client import Refused

    pytest.importorskip("sqlalchemy")
    path = tmp_path / "m.db"
    backend = f"mlflow:sqlite:///{path}?quark={level}"
    refusing = Refusing(path)
    log = Server.log_metrics

    def log_or_refuse(self, run_id, points):
        # The server of a database says 400 to what its rules refuse; SQLite's store does not.
        try:
            log(self, run_id, points)
        except Exception as error:
            if "refused" in str(error):
                raise Refused(str(error)) from error
            raise

    monkeypatch.setattr(Server, "log_metrics", log_or_refuse)
    session = quark.start_run(project="p", storage_dir=tmp_path, backends=["embedded", backend])
    metrics = quark.MetricsLogger(session)
    for part in range(3):
        if part == 1:
            refusing.begin(100, 199)
        for step in range(part * 100, part * 100 + 100):
            metrics.log("loss", float(step), step=step)
        session.flush()
        wait_for_mirror(session)
        if part == 1:
            refusing.end()
    session.end_run()
    place = tmp_path / ".quark" / "runs" / session.run_id / "quarantine"
    (lane,) = [folder for folder in place.iterdir() if list(folder.glob("*.batch"))]
    assert read_steps(session, tmp_path, backend) == [*range(100), *range(200, 300)]
    # Each time what is left is offered; where nothing has changed, it is refused again.
    refusing.begin(100, 199)
    assert all(result.delivered == 0 for result in recovery.sync(tmp_path))
    kept = [item.batch for item in Quarantine(lane, "mlflow").load()]
    assert sum(batch.count for batch in kept if batch.kind == "metric") == 100
    refusing.end()
    assert sum(result.delivered for result in recovery.sync(tmp_path)) == 100
    assert Quarantine(lane, "mlflow").load() == []
    assert sorted(read_steps(session, tmp_path, backend)) == list(range(300))
    assert list(recovery.sync(tmp_path)) == []


def wait_for_mirror(session):
    (lane,) = [each for each in session.open_run.stream._lanes if not each.primary]
    assert lane.wait_passed(session.open_run.stream._log.end, 200)


def read_steps(session, tmp_path, backend):
    opened = quark.open_run(session.run_id, tmp_path, backend=backend)
    return [point.step for point in quark.MetricsLogger(opened).read(metric_key="loss")]
