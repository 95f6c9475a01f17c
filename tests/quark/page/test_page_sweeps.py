"""What the page is told of sweeps, over a real store."""

import json
import time

import pytest
from page_client import log_plain_run
from page_sweeps import draw_trials, fill_sweep, make_worker, open_store, settle_all

import quark
from quark.page.routes import sweeps as desk
from quark_core.backends.coordination import NewTrial
from quark_core.records.sweeps import TrialResult

ME = "me@desk"


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A store with one sweep, which nobody writes to."""
    root = tmp_path_factory.mktemp("sweeps")
    return root, fill_sweep(root)


@pytest.fixture
def client(store, look):
    root, sweep_id = store
    found = look(root)
    found.sweep_id = sweep_id
    return found


def at_once(monkeypatch):
    monkeypatch.setattr(desk, "_AGAIN_S", 0.0)


def read_rows(told):
    return {row[0]: dict(zip(told["fields"], row, strict=True)) for row in told["rows"]}


def test_a_figure_that_comes_after_its_trial_has_ended_is_in_the_list(look, tmp_path, monkeypatch):
    monkeypatch.setattr("quark.page.routes.sweeps._UNSURE_S", 0.0)
    arguments = {"project": "p", "space": {"lr": (0.1, 0.9)}, "metric": "acc", "mode": "max"}
    with quark.sweep("late", storage_dir=tmp_path, **arguments) as sweep:
        client = look(tmp_path)
        trial = sweep.claim()
        with trial.start_run():
            pass
        assert client.json("/api/sweeps")["sweeps"][0]["best"] is None
        trial.take_result(0.5)
        trial.finish()
    assert client.json("/api/sweeps")["sweeps"][0]["best"]["value"] == 0.5


def test_the_list_says_how_far_each_is_and_what_is_best(client, store):
    root, sweep_id = store
    told = client.json("/api/sweeps")
    assert (told["count"], told["note"]) == (1, None)
    (sweep,) = told["sweeps"]
    assert (sweep["id"], sweep["name"], sweep["project"]) == (sweep_id, "lr-search", "p")
    assert sweep["counts"] == {
        "waiting": 2, "running": 3, "completed": 28, "pruned": 3, "failed": 4
    }  # fmt: skip
    assert (sweep["total"], sweep["planned"], sweep["search"]) == (40, 50, "random")
    assert sweep["metrics"] == [
        {"key": "val/acc", "name": "val/acc", "mode": "max", "written": "val/acc"}
    ]
    best = quark.sweep("lr-search", project="p", storage_dir=root).best
    assert sweep["best"] == {"number": best.number, "value": best.values[0], "run_id": None}
    assert client.json("/api/sweeps", project="p")["count"] == 1
    assert client.json("/api/sweeps", project="other")["count"] == 0


def test_a_sweep_has_its_trials_workers_and_leases(client):
    told = client.json(f"/api/sweeps/{client.sweep_id}")
    rows = read_rows(told)
    assert list(rows) == list(range(40))
    assert told["names"] == ["lr", "layers", "optimizer"]
    assert told["reset"] is True
    assert rows[3]["state"] == "failed"
    assert rows[3]["reason"] == "the training diverges"
    assert (rows[7]["state"], rows[7]["values"], rows[7]["step"]) == ("pruned", [0.5], 33)
    assert rows[0]["worker"] == "node-1 · 1000"
    assert told["sweep"]["space"]["lr"] == {
        "type": "uniform", "low": 1e-5, "high": 0.1, "log": True
    }  # fmt: skip
    assert [trial["number"] for trial in told["live"]] == [35, 36, 37]
    assert told["live_count"] == 3
    assert all(trial["lease_until"] > told["now"] for trial in told["live"])
    busy = [worker for worker in told["workers"] if worker["holds"]]
    assert sorted(number for worker in busy for number in worker["holds"]) == [35, 36, 37]
    assert sum(worker["ended"] for worker in told["workers"]) == 35
    assert told["left_out"] == 0


def test_who_follows_a_sweep_is_told_what_has_changed_and_nothing_else(tmp_path, look, monkeypatch):
    at_once(monkeypatch)
    sweep_id = fill_sweep(tmp_path, live=0)
    client = look(tmp_path)
    path = f"/api/sweeps/{sweep_id}"
    cursor = client.json(path)["cursor"]
    assert client.get(path, cursor=cursor).status_code == 204
    with open_store(tmp_path) as store:
        trial = store.claim_trial(sweep_id, request_id="x", worker=make_worker(9), lease_s=60.0)
        store.add_trials(sweep_id, draw_trials(1, 5), key="more")
    told = client.json(path, cursor=cursor)
    assert (told["reset"], list(read_rows(told))) == (False, [trial.number, 40])
    assert read_rows(told)[trial.number]["state"] == "running"
    # Somebody holds a trial: its lease may have been renewed, and no row is sent again.
    again = client.json(path, cursor=told["cursor"])
    assert (again["rows"], again["cursor"]) == ([], told["cursor"])
    with open_store(tmp_path) as store:
        store.settle_trial(
            sweep_id, trial.number, trial.token, TrialResult(state="completed", values=(0.9,)),
            lease_s=60.0,
        )  # fmt: skip
        # A new parameter is a new column: all rows are sent anew.
        store.add_trials(sweep_id, [NewTrial(parameters={"other": 1})], key="other")
    told = client.json(path, cursor=told["cursor"])
    assert (told["reset"], len(told["rows"])) == (True, 42)
    assert told["names"] == ["lr", "layers", "optimizer", "other"]
    for strange in ("", "x", "x.1", cursor.partition(".")[0], f"{cursor}x", "." * 50):
        assert client.json(path, cursor=strange)["reset"] is True


def test_a_sweep_that_is_not_there_is_told(client):
    for strange in ("s0000000000000000", "..%2fx", "a" * 200, "%00"):
        for rest in ("", "/verdict", "/importances"):
            assert "does not exist" in client.refused(404, f"/api/sweeps/{strange}{rest}")
    assert "method must be one of 'ranks'" in client.refused(
        400, f"/api/sweeps/{client.sweep_id}/importances", method="shap"
    )


def test_the_verdict_is_told_with_its_words(tmp_path, look):
    sweep_id = fill_seeds(tmp_path)
    client = look(tmp_path)
    told = client.json(f"/api/sweeps/{sweep_id}/verdict")
    (verdict,) = told["verdicts"]
    assert (verdict["verdict"], verdict["name"], told["front"]) == ("better", "val/acc", None)
    assert verdict["best"] in (0, 1, 2)
    assert verdict["noise"]["source"] == "sweep"
    assert client.json(f"/api/sweeps/{sweep_id}/verdict") == told


def complete(store, sweep_id, *values):
    settle_all(store, sweep_id, [TrialResult(state="completed", values=each) for each in values])


def fill_seeds(root, name="seeds"):
    """Three configurations with three seeds each, the first of which is the best."""
    with open_store(root) as store:
        definition = {"metric": "val/acc", "mode": "max"}
        sweep = store.open_sweep("p", name, definition, max_failures=1)
        trials = [NewTrial(parameters={"lr": lr, "seed": seed})
                  for lr in (1, 2, 3) for seed in range(3)]  # fmt: skip
        store.add_trials(sweep.id, trials, key="all")
        values = [
            1.0 - 0.1 * trial.parameters["lr"] + 0.001 * trial.parameters["seed"]
            for trial in trials
        ]
        complete(store, sweep.id, *((value,) for value in values))
    return sweep.id


def test_importances_are_told_by_the_name_of_their_method(client):
    told = client.json(f"/api/sweeps/{client.sweep_id}/importances")
    assert told["methods"][0] == "ranks"
    (found,) = told["importances"]
    assert found["method"] == "ranks"
    assert found["shares"][0][0] == "lr"
    assert found["count"] == 28


def test_of_several_metrics_the_front_is_told(tmp_path, look):
    with open_store(tmp_path) as store:
        definition = {"metric": ["acc", "ms"], "mode": ["max", "min"], "constraints": ["ms <= 9"]}
        sweep = store.open_sweep("p", "two", definition, max_failures=1)
        values = [(0.9, 5.0, -4.0), (0.8, 2.0, -7.0), (0.7, 6.0, -3.0), (0.99, 20.0, 11.0),
                  (0.8, 2.0, -7.0), (0.8, 1.0, -8.0)]  # fmt: skip
        store.add_trials(
            sweep.id, [NewTrial(parameters={"x": at}) for at in range(len(values))], key="all"
        )
        results = [
            TrialResult(state="completed", values=(acc, ms), constraints=(broken,))
            for acc, ms, broken in values
        ]
        settle_all(store, sweep.id, results)
    client = look(tmp_path)
    told = client.json(f"/api/sweeps/{sweep.id}/verdict")
    assert sorted(told["front"]) == [0, 5]
    assert [verdict["name"] for verdict in told["verdicts"]] == ["acc", "ms"]
    assert client.json("/api/sweeps")["sweeps"][0]["best"] is None


@pytest.mark.parametrize(
    ("origins", "rungs"),
    [
        (
            [{"rung": 0, "budget": 1}] * 3 + [{"rung": 1, "budget": 3, "parent": 2}],
            [(0, 1, 3, 3, 1, 0.3), (1, 3, 1, 1, 0, 0.4)],
        ),
        ([{}] * 4, []),
    ],
    ids=["halving", "none"],
)
def test_rungs_are_told_by_where_trials_come_from(tmp_path, look, origins, rungs):
    with open_store(tmp_path) as store:
        sweep = store.open_sweep("p", "r", {"metric": "a", "mode": "max"}, max_failures=1)
        trials = [NewTrial(parameters={"x": 1}, origin=origin) for origin in origins]
        store.add_trials(sweep.id, trials, key="all")
        complete(store, sweep.id, *((0.1 * (number + 1),) for number in range(len(trials))))
    told = look(tmp_path).json(f"/api/sweeps/{sweep.id}")["rungs"]
    names = ("rung", "budget", "trials", "ended", "went_on")
    assert [
        (*(rung[name] for name in names), pytest.approx(rung["best"])) for rung in told
    ] == rungs


def test_trials_that_stopped_early_are_counted_at_their_steps(client):
    (rung,) = client.json(f"/api/sweeps/{client.sweep_id}")["rungs"]
    assert (rung["budget"], rung["stopped"], rung["went_on"]) == (33, 3, 28)


def test_a_run_says_which_trial_it_has_and_that_it_was_superseded(tmp_path, look):
    space = {"lr": [0.1, 0.2]}
    sweep = quark.sweep("s", project="p", space=space, metric="val/acc", mode="max", search="grid",
                        storage_dir=tmp_path)  # fmt: skip
    trial = sweep.claim()
    with trial.start_run() as session:
        quark.MetricsLogger(session).log("val/acc", 0.5, step=1)
        client = look(tmp_path)
        told = client.json(f"/api/runs/{session.run_id}")["run"]["trial"]
        assert told == {"sweep_id": sweep.id, "sweep": "s", "number": 0, "token": 1,
                        "superseded": False}  # fmt: skip
    client.source.forget()
    row = read_rows(client.json(f"/api/sweeps/{sweep.id}"))[0]
    assert (row["run_id"], row["state"], row["values"]) == (session.run_id, "completed", [0.5])
    plain = log_plain_run(tmp_path, steps=1)
    assert client.json(f"/api/runs/{plain}")["run"]["trial"] is None


def test_a_sweep_is_paused_resumed_and_cancelled_by_who_may(tmp_path, look, monkeypatch):
    at_once(monkeypatch)
    sweep_id = fill_sweep(tmp_path)
    client = look(tmp_path, by=ME)
    path = f"/api/sweeps/{sweep_id}/state"
    for state in ("paused", "running", "paused"):
        answer = client.post(path, json.dumps({"state": state}).encode())
        assert answer.json()["sweep"]["state"] == state
        assert client.json(f"/api/sweeps/{sweep_id}")["sweep"]["state"] == state
        with open_store(tmp_path) as store:
            claimed = store.claim_trial(
                sweep_id, request_id=state, worker=make_worker(5), lease_s=60.0
            )
            assert (claimed is None) == (state == "paused")
    answer = client.post(path, b'{"state": "cancelled"}')
    assert answer.json()["sweep"]["state"] == "cancelled"
    assert answer.json()["sweep"]["counts"]["cancelled"] == 1
    again = client.post(path, b'{"state": "running"}')
    assert (again.status_code, bool(again.json()["error"]["message"])) == (400, True)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"state": "waiting"}', b'{"state": 1}', b'{"state": "paused", "x": 1}'],
)
def test_what_is_no_state_changes_nothing(tmp_path, look, body):
    sweep_id = fill_sweep(tmp_path, trials=4, live=0)
    client = look(tmp_path, by=ME)
    assert client.post(f"/api/sweeps/{sweep_id}/state", body).status_code == 400
    assert client.json(f"/api/sweeps/{sweep_id}")["sweep"]["state"] == "running"


def test_a_page_that_may_not_edit_changes_no_sweep(client):
    path = f"/api/sweeps/{client.sweep_id}/state"
    assert client.post(path, b'{"state": "paused"}').status_code in (403, 405)
    assert client.json(f"/api/sweeps/{client.sweep_id}")["sweep"]["state"] == "running"


@pytest.mark.parametrize(
    "forged",
    [{"quark-csrf": None}, {"quark-csrf": "x"}, {"origin": "http://evil.example"}],
    ids=["no token", "another token", "another origin"],
)
def test_a_forged_change_of_a_sweep_is_refused(tmp_path, look, forged):
    sweep_id = fill_sweep(tmp_path, trials=4, live=0)
    client = look(tmp_path, by=ME)
    answer = client.post(f"/api/sweeps/{sweep_id}/state", b'{"state": "paused"}', **forged)
    assert answer.status_code == 403
    assert client.json(f"/api/sweeps/{sweep_id}")["sweep"]["state"] == "running"


def test_another_backend_says_that_it_has_none(tmp_path, look):
    log_plain_run(tmp_path, steps=1, backends=["csv"])
    client = look(tmp_path, "csv")
    assert client.json("/api/about")["capabilities"]["sweeps"] is False
    told = client.json("/api/sweeps")
    assert (told["sweeps"], told["note"]) == ([], "this backend (csv) does not support sweeps")
    assert client.get("/api/sweeps/s0").status_code == 404


def test_whatever_a_store_holds_is_told_as_text(tmp_path, look):
    """A definition and an origin may be anybody's."""
    odd = {"metric": ["a\x1b[31m", 3, "x" * 5000, "val/acc"], "mode": "sideways", "space": [1],
           "constraints": {"a": 1}, "search": {"b": [1]}, "trials": "many", "budget": True,
           "lease_s": None}  # fmt: skip
    with open_store(tmp_path) as store:
        sweep = store.open_sweep("p", "odd\u202e", odd, max_failures=1)
        origin = {"rung": "a", "budget": [1], "parent": {}}
        parameters = {"__proto__": "x" * 5000, "n": {"a": [1, {"b": None}]}, "t": True}
        store.add_trials(sweep.id, [NewTrial(parameters=parameters, origin=origin)], key="a")
        odd_result = TrialResult(state="completed", values=(1e308, -1e308), reason=chr(27))
        settle_all(store, sweep.id, [odd_result])
    client = look(tmp_path)
    told = client.json(f"/api/sweeps/{sweep.id}")
    (row,) = read_rows(told).values()
    by_name = dict(zip(told["names"], row["parameters"], strict=True))
    assert by_name["__proto__"] == f"{'x' * 300}…"
    assert by_name["n"] == '{"a":[1,{"b":null}]}'
    assert row["values"] == [1e308, -1e308]
    assert told["sweep"]["metrics"][1]["key"] == ""
    assert client.json(f"/api/sweeps/{sweep.id}/verdict")["verdicts"][0]["verdict"] == "cannot_tell"
    assert client.json(f"/api/sweeps/{sweep.id}/importances")["importances"][0]["note"]
    assert client.json("/api/sweeps")["sweeps"][0]["best"] is None


@pytest.mark.long
def test_thousands_of_trials_are_read_once_for_all_who_look(tmp_path, look):
    sweep_id = fill_sweep(tmp_path, trials=1200, live=0)
    client = look(tmp_path)
    calls = []
    reader = client.source.reader
    read = reader.list_trials
    reader.list_trials = lambda *given, **named: calls.append(given) or read(*given, **named)
    begin_s = time.monotonic()
    path = f"/api/sweeps/{sweep_id}"
    told = client.json(path)
    assert len(told["rows"]) == 1200
    client.json(path)
    client.json(f"{path}/verdict")
    # Again only once what was read is no longer of a moment ago.
    assert len(calls) <= 1 + (time.monotonic() - begin_s) // desk._AGAIN_S
