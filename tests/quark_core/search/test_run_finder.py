"""What the store finds, and what it says where it cannot."""

import math
import subprocess
import sys
import threading

import pytest
from search_stores import BASE_US, Run, SearchStore

import quark
from quark_backends.store.databases.sqlite import connect, ensure_store
from quark_backends.store.reading.reader import StoreReader
from quark_core.backends.run_summary import MetricSummary
from quark_core.errors import RunNotFoundError, SchemaValidationError, SessionStoreError
from quark_core.runs.run_search import build_search

HOUR_US = 3_600_000_000


@pytest.fixture
def store():
    return SearchStore(
        [
            Run(
                "old",
                name="resnet baseline",
                tags=("baseline", "big"),
                config={"lr": 3e-4, "optimizer": {"name": "adam", "betas": [0.9, 0.99]}},
                created_us=BASE_US,
                newest_step=9,
                metrics={"val/loss": [0.9, 0.2], "acc_x40_1": [0.1, 0.8]},
            ),
            Run(
                "middle",
                status="failed",
                config={"lr": "auto", "amp": True},
                created_us=BASE_US + HOUR_US,
                ended_us=BASE_US + 2 * HOUR_US,
                metrics={"val/loss": [0.1, 0.5, math.nan]},
            ),
            Run("new", project="text", config={"lr": None}, created_us=BASE_US + 2 * HOUR_US),
            Run("gone", trashed=True, metrics={"val/loss": [0.0], "only/here": [1.0]}),
        ]
    )


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("val/loss < 0.3", ["old"]),
        ("not val/loss < 0.3", ["new", "middle"]),
        ("val/loss == null", ["new", "middle"]),
        ("count(val/loss) == null", ["new"]),
        ("min(val/loss) <= 0.1", ["middle"]),
        ("first(val/loss) > 0.5", ["old"]),
        ("max(val/loss) == 0.5", ["middle"]),
        ("count(val/loss) in (2, 3)", ["middle", "old"]),
        ("acc@1 > 0.5", ["old"]),
        ("acc_x40_1 > 0.5", ["old"]),
        ("config.lr == 3e-4", ["old"]),
        ("config.lr != 1", ["middle", "old"]),
        ("config.lr == null", ["new"]),
        ("config.lr == 'auto'", ["middle"]),
        ("config.amp == true", ["middle"]),
        ("config.amp == 1", []),
        ("config.optimizer.name in ('adam', 'sgd')", ["old"]),
        ("'da' in config.optimizer.name", ["old"]),
        ("config.optimizer.betas != null", ["old"]),
        ("config.optimizer.betas == '[0.9, 0.99]'", []),
        ("'big' in tags", ["old"]),
        ("'bi' in tags", []),
        ("'big' not in tags", ["new", "middle"]),
        ("tags == null", ["new", "middle"]),
        ("'BASE' in name", []),
        ("'base' in name", ["old"]),
        ("name != null and step > 3", ["old"]),
        ("status == 'failed' or project == 'text'", ["new", "middle"]),
        ("created <= '2026-01-01T01'", ["middle", "old"]),
        ("created > '2026-01-01T01'", ["new"]),
        ("created == '2026-01-01'", ["new", "middle", "old"]),
        ("duration >= 3600", ["middle"]),
        ("val/loss < 0.3 and config.lr == 3e-4 and 'baseline' in tags", ["old"]),
    ],
)
def test_what_is_found(store, where, found):
    assert store.search(where=where) == found


@pytest.mark.parametrize(
    ("order_by", "found"),
    [
        (None, ["new", "middle", "old"]),
        ("created", ["old", "middle", "new"]),
        ("val/loss", ["old", "new", "middle"]),
        ("-val/loss", ["old", "new", "middle"]),
        ("max(val/loss)", ["middle", "old", "new"]),
        ("max(val/loss) desc", ["old", "middle", "new"]),
        ("config.lr", ["old", "middle", "new"]),
        ("-config.lr", ["middle", "old", "new"]),
        (["project", "created"], ["new", "old", "middle"]),
        (("-project", "-created"), ["middle", "old", "new"]),
    ],
)
def test_the_order(store, order_by, found):
    assert store.search(order_by=order_by) == found


def test_ties_are_newest_first_whatever_the_direction():
    store = SearchStore([Run(f"run{n}", created_us=BASE_US + n // 2, attempt=1) for n in range(4)])
    assert store.search(order_by="attempt") == ["run3", "run2", "run1", "run0"]
    assert store.search(order_by="-attempt") == ["run3", "run2", "run1", "run0"]


def test_project_and_limit(store):
    assert store.search(project="vision") == ["middle", "old"]
    assert store.search(project="vision", order_by="created", limit=1) == ["old"]
    assert store.search(limit=0) == []
    assert store.search(project="absent") == []


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"limit": 2},
        {"limit": 0},
        {"project": "vision"},
        {"project": "absent"},
        {"project": "vision", "archived": True, "limit": 3},
    ],
)
def test_the_newest_are_the_runs_that_a_search_by_their_age_finds(store, asked):
    store.add(Run("twin", created_us=BASE_US, metrics={"val/loss": [math.inf, 0.5]}))
    store.add(Run("filed", created_us=BASE_US + 1))
    store.connection.execute("UPDATE run SET archived_us = 1 WHERE id = 'filed'")
    newest = store.finder.search(build_search(**asked))
    assert newest == store.finder.search(build_search(**asked, order_by="-created"))
    assert [list(run.metrics) for run in newest] == [sorted(run.metrics) for run in newest]


def test_a_search_loads_no_sqlalchemy(tmp_path):
    quark.start_run(project="p", storage_dir=tmp_path).end_run()
    script = (
        "import sys, quark\n"
        f"(run,) = quark.search_runs(project='p', storage_dir={str(tmp_path)!r})\n"
        "assert run.stored.state == 'completed'\n"
        f'found = quark.search_runs(where="name == null", storage_dir={str(tmp_path)!r})\n'
        "assert [each.run_id for each in found] == [run.run_id]\n"
        "assert 'sqlalchemy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_what_a_summary_holds(store):
    (run,) = store.finder.search(build_search(where="id == 'old'"))
    assert run == store.finder.summarize("old")
    assert (run.run_id, run.state, run.newest_step) == ("old", "completed", 9)
    assert run.stored.run.tags == ("baseline", "big")
    assert run.config["optimizer"] == {"name": "adam", "betas": [0.9, 0.99]}
    assert list(run.metrics) == ["acc_x40_1", "val/loss"]
    assert run.metrics == {
        "acc_x40_1": MetricSummary(
            key="acc_x40_1", count=2, non_finite=0, first=0.1, last=0.8, low=0.1, high=0.8,
            last_step=1,
        ),
        "val/loss": MetricSummary(
            key="val/loss", count=2, non_finite=0, first=0.9, last=0.2, low=0.2, high=0.9,
            last_step=1,
        ),
    }  # fmt: skip
    assert run.to_dict()["metrics"]["val/loss"]["low"] == 0.2
    assert "0.2" in repr(run.metrics)
    with pytest.raises(KeyError):
        run.metrics["absent"]
    (half,) = store.finder.search(build_search(where="id == 'middle'"))
    assert (half.metrics["val/loss"].last, half.metrics["val/loss"].non_finite) == (None, 1)
    assert store.finder.summarize("new").metrics == {}


def test_an_unknown_run_has_no_summary(store):
    with pytest.raises(RunNotFoundError, match="absent"):
        store.finder.summarize("absent")
    assert store.finder.summarize("gone").run_id == "gone"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"where": "id == 'a' or val/los < 1"}, "where, column 14: no run has the metric"),
        ({"where": "val/los < 1"}, "the nearest names are val/loss"),
        ({"where": "lr < 1"}, "the nearest names are config.lr"),
        ({"where": "zzz < 1"}, "the names are acc@1, val/loss"),
        ({"where": "Val/Loss < 1"}, "val/loss"),
        ({"where": "config.LR < 1"}, "column 1: no run has the config key"),
        ({"where": "config.zzz < 1"}, "config.lr"),
        ({"order_by": "-min(loss)"}, "order_by, column 6: no run has the metric 'loss'"),
        ({"where": "config.amp == true", "project": "text"}, "config.lr"),
        ({"where": "val/loss < 1", "project": "text"}, "no run has a metric"),
        # What only a run in the trash has is out of sight.
        ({"where": "only/here == 1"}, "no run has the metric"),
    ],
)
def test_an_unknown_name_is_pointed_at(store, arguments, message):
    with pytest.raises(SchemaValidationError) as caught:
        store.search(**arguments)
    head, line, mark = str(caught.value).split("\n")
    assert message in head
    assert set(mark.strip()) == {"^"}
    assert len(mark) <= len(line)


def test_where_there_are_no_runs_nothing_is_unknown():
    assert SearchStore([]).search(where="val/loss < 1 and config.x == 1", order_by="loss") == []
    trash = SearchStore([Run("gone", trashed=True)])
    assert trash.search(where="val/loss < 1") == []


def test_values_are_bound_and_never_become_sql(store):
    evil = "x'; DROP TABLE run; --"
    store.add(Run("evil", name=evil, tags=(evil,), config={evil: evil}, metrics={evil: [1.0]}))
    quoted = '"' + evil + '"'
    for where in (f"name == {quoted}", f"{quoted} in tags", f"{quoted} in name"):
        assert store.search(where=where) == ["evil"]
    assert store.search(where=f"config.`{evil}` == {quoted}") == ["evil"]
    assert store.search(where=f"`{evil}` == 1", order_by=f"-`{evil}`") == ["evil"]
    assert len(store.search()) == 4


def test_a_running_run_is_lost_where_its_process_is_gone():
    running = {"status": "running", "ended_us": None}
    store = SearchStore(
        [
            Run("here", **running, alive=True),
            Run("away", **running),
            Run("silent", **running, heartbeat_us=BASE_US + 5_000_000),
            Run("done"),
        ]
    )
    assert store.search(where="state == 'running'") == ["here"]
    assert store.search(where="state == 'lost'") == ["silent", "away"]
    assert store.search(where="state != 'lost'", order_by="id") == ["done", "here"]
    assert store.search(where="status == 'running'", order_by="state") == ["silent", "away", "here"]
    # A lost one counts to its last heartbeat.
    assert store.search(where="duration in (5, 30)", order_by="duration") == ["silent", "away"]


@pytest.mark.long
def test_pages_beyond_the_parameters_of_one_statement():
    count = 1201
    metrics = {f"m{n}": [float(n)] for n in range(3)}
    store = SearchStore(
        [Run(f"run{n}", created_us=BASE_US + n, metrics=metrics) for n in range(count)]
    )
    found = store.finder.search(build_search(order_by="created"))
    assert [run.run_id for run in found] == [f"run{n}" for n in range(count)]
    assert all(run.metrics["m2"].last == 2.0 for run in found)


def test_forty_names_in_one_search():
    names = [f"m{n}" for n in range(40)]
    store = SearchStore([Run("run", metrics={name: [1.0] for name in names})])
    assert store.search(where=" and ".join(f"{name} == 1" for name in names)) == ["run"]


def test_threads_may_search_at_once(tmp_path):
    layout = ensure_store(tmp_path)
    finder = StoreReader(lambda: connect(layout, read_only=True))
    found, errors = [], []

    def search():
        try:
            found.extend(finder.search(build_search(where="state == 'lost'")) for _ in range(20))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    finder.close()
    assert errors == []
    assert found == [[]] * 80
    assert finder.search(build_search()) == []
    finder.close()


def test_each_search_sees_what_was_written_before_it(tmp_path):
    layout = ensure_store(tmp_path)
    writing = connect(layout)
    finder = StoreReader(lambda: connect(layout, read_only=True))
    assert finder.search(build_search()) == []
    writing.execute(
        "INSERT INTO project (id, name, root_path, created_us, updated_us)"
        " VALUES ('p', 'p', '/', 0, 0)"
    )
    writing.execute(
        "INSERT INTO run (id, project_id, status, attempt, run_path, strict_mode, tags, process,"
        " created_us, updated_us, heartbeat_us) VALUES ('run', 'p', 'completed', 0, '/', 0, '[]',"
        """ '{"host": "h", "pid": 1, "started": ""}', 0, 0, 0)"""
    )
    assert [run.run_id for run in finder.search(build_search())] == ["run"]
    # No read transaction is left open, which would keep the log from being emptied.
    assert writing.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
    finder.close()
    writing.close()


def test_a_store_that_cannot_be_read_is_a_store_error(store):
    store.connection.execute("DROP TABLE run_metric")
    with pytest.raises(SessionStoreError, match="run_metric"):
        store.search(where="val/loss < 1")
    # The connection is as good as before.
    assert store.finder.search(build_search(where="config.lr == 1", limit=0)) == []
