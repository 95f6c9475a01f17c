"""Curves of a run, windows of them, and what comes while the page looks on."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_client import split_curves
from tiers import count_examples

import quark

DEADLINE_S = 60


def log_values(folder, values, *, key="train/loss", steps=None, **arguments):
    session = quark.start_run(project="p", storage_dir=folder, **arguments)
    with session, quark.MetricsLogger(session) as metrics:
        for place, value in enumerate(values):
            metrics.log(key, value, step=place if steps is None else steps[place])
    return session.run_id


def test_a_curve_that_fits_is_exact(plain):
    head, curves = plain.curves(plain.run_id, "train/loss", "val/acc@1", "val/acc_x40_1", "gone")
    assert head["missing"] == ["gone"]
    assert list(curves) == ["train/loss", "val/acc_x40_1"]
    (loss,) = curves["train/loss"]
    assert (loss["exact"], loss["points"], loss["attempt"], loss["rank"]) == (True, 50, 0, None)
    assert loss["step"].tolist() == list(range(50))
    assert np.array_equal(loss["mean"], (1 / np.arange(1, 51)).astype("f4"))

    assert loss["low"] == [1 / 50, 49]
    assert loss["high"] == [1.0, 0]
    assert curves["val/acc_x40_1"][0]["name"] == "val/acc@1"


def test_a_spike_of_one_point_is_in_its_band(tmp_path, look):
    values = np.ones(20_000)
    values[12_345] = 400.0
    values[12_400] = -7.0
    run_id = log_values(tmp_path, values.tolist())
    head, columns = look(tmp_path).pack(
        f"/api/runs/{run_id}/series", key="train/loss", entries=100, extremes=1
    )
    (said,) = head["curves"]
    assert (said["exact"], said["points"]) == (False, 20_000)
    assert said["high"] == [400.0, 12_345]
    assert said["low"] == [-7.0, 12_400]
    place = int(columns["0.high"].argmax())
    assert columns["0.high"][place] == 400.0
    assert columns["0.high_step"][place] == 12_345
    assert columns["0.low"].min() == -7.0
    assert len(columns["0.step"]) <= 100


def test_windows_are_of_steps_epochs_or_seconds(plain):
    _, curves = plain.curves(plain.run_id, "train/loss", low=10, high=19)
    assert curves["train/loss"][0]["step"].tolist() == list(range(10, 20))
    _, curves = plain.curves(plain.run_id, "train/loss", low=10.2, high=19.9)
    assert curves["train/loss"][0]["step"].tolist() == list(range(11, 20))
    _, whole = plain.curves(plain.run_id, "train/loss", x="time")
    times = whole["train/loss"][0]["time"]
    assert np.all(np.diff(times) >= 0)
    assert abs(times[0] - time.time()) < 3600
    _, some = plain.curves(plain.run_id, "train/loss", x="time", low=times[30])
    assert len(some["train/loss"][0]["step"]) <= 21
    head, _ = plain.curves(plain.run_id, "train/loss", low=1000)
    assert (head["missing"], head["curves"]) == ([], [])


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"key": []}, "key"),
        ({"key": [f"k{n}" for n in range(51)]}, "key"),
        ({"key": "k", "entries": 4001}, "entries"),
        ({"key": "k", "low": "x"}, "low"),
        ({"key": "k", "high": "-1"}, "high"),
        ({"key": "k", "low": "nan"}, "low"),
        ({"key": "k", "low": "inf"}, "low"),
        ({"key": "k", "low": 5, "high": 4}, "low"),
        ({"key": "k", "x": "hours"}, "x"),
        ({"key": "k", "ranks": "some"}, "ranks"),
        ({"key": "k", "attempts": "some"}, "attempts"),
        ({"key": "k" * 300}, "key"),
    ],
)
def test_a_bad_parameter_is_named(plain, parameters, named):
    assert named in plain.refused(400, f"/api/runs/{plain.run_id}/series", **parameters)


@pytest.fixture(scope="session")
def drawn_store(tmp_path_factory):
    """A run of 3,000 points, one in fifty of them not finite."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal(3_000) * 10.0 ** rng.integers(-3, 4, 3_000)
    values[rng.integers(0, 3_000, 60)] = np.nan
    folder = tmp_path_factory.mktemp("drawn")
    return folder, log_values(folder, values.tolist()), values


@settings(max_examples=count_examples(150))
@given(st.integers(0, 3_200), st.integers(0, 3_200), st.integers(1, 400))
def test_low_and_high_of_any_window_are_those_of_its_points(
    drawn_store, window_client, a, b, entries
):
    low, high = min(a, b), max(a, b)
    _, run_id, values = drawn_store
    _, curves = window_client.curves(run_id, "train/loss", low=low, high=high, entries=entries)
    inside = values[low : high + 1]
    if not len(inside):
        assert curves == {}
        return
    (curve,) = curves["train/loss"]
    assert curve["points"] == len(inside)
    assert curve["non_finite"] == int(np.isnan(inside).sum()) or isinstance(
        curve["non_finite"], np.ndarray
    )
    finite = inside[np.isfinite(inside)]
    if len(finite):
        assert _get_head(curve, "low")[0] == finite.min()
        assert _get_head(curve, "high")[0] == finite.max()


def _get_head(curve, name):
    return curve["said"][name]


@pytest.fixture
def window_client(drawn_store, look):
    client = look(drawn_store[0])

    def curves(run_id, *keys, **parameters):
        head, columns = client.pack(f"/api/runs/{run_id}/series", key=list(keys), **parameters)
        found = split_curves(head, columns)
        for its in found.values():
            for curve in its:
                curve["said"] = next(c for c in head["curves"] if c["key"] == curve["key"])
                curve["non_finite"] = curve["said"]["non_finite"]
        return head, found

    client.curves = curves
    return client


@pytest.mark.parametrize("values", [[1.0], [float("nan")], [float("inf")] * 3, [1e39, 2e39]])
def test_runs_of_one_point_and_of_none_that_is_finite(tmp_path, look, values):
    run_id = log_values(tmp_path, values)
    client = look(tmp_path)
    head, columns = client.pack(f"/api/runs/{run_id}/series", key="train/loss")
    (said,) = head["curves"]
    assert said["points"] == len(values)
    assert said["non_finite"] == int((~np.isfinite(values)).sum())
    finite = [value for value in values if np.isfinite(value)]
    assert said["low"] == ([min(finite), 0] if finite else None)
    if not finite:
        assert np.isnan(columns["0.mean"]).all()
        assert columns["0.non_finite"].tolist() == [1] * len(values)
        assert columns["0.non_finite_step"].tolist() == list(range(len(values)))
    run = client.json(f"/api/runs/{run_id}")
    assert run["metrics"]["rows"][0][3] == len(values)


def test_steps_that_go_back_are_sorted_within_an_attempt(tmp_path, look):
    steps = [0, 1, 2, 5, 6, 3, 4]
    run_id = log_values(tmp_path, [float(step) for step in steps], steps=steps)
    _, curves = look(tmp_path).curves(run_id, "train/loss")
    (curve,) = curves["train/loss"]
    assert curve["step"].tolist() == sorted(steps)
    assert curve["mean"].tolist() == sorted(map(float, steps))


def test_each_attempt_is_a_curve_of_its_own(tmp_path, look):
    run_id = log_values(tmp_path, [1.0] * 10)
    session = quark.resume_run(run_id=run_id, storage_dir=tmp_path, reopen=True, from_step=5)
    with session, quark.MetricsLogger(session) as metrics:
        for step in range(5, 12):
            metrics.log("train/loss", 2.0, step=step)
    client = look(tmp_path)
    _, curves = client.curves(run_id, "train/loss")
    shown = [(c["attempt"], c["step"].tolist()) for c in curves["train/loss"]]
    assert shown == [(0, list(range(5))), (1, list(range(5, 12)))]
    _, curves = client.curves(run_id, "train/loss", attempts="all")
    assert [c["points"] for c in curves["train/loss"]] == [10, 7]
    attempts = client.json(f"/api/runs/{run_id}")["attempts"]
    assert [(a["attempt"], a["from_step"], a["state"]) for a in attempts] == [
        (0, None, "completed"),
        (1, 5, "completed"),
    ]


def test_metrics_over_epochs_are_not_cut_by_a_window_of_steps(tmp_path, look):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session, quark.MetricsLogger(session) as metrics:
        for epoch in range(4):
            metrics.log("val/loss", 1.0 / (epoch + 1), epoch=epoch)
            metrics.log("train/loss", 1.0, step=epoch * 100)
    client = look(tmp_path)
    for window in ({}, {"low": 100, "high": 200}):
        _, curves = client.curves(session.run_id, "val/loss", **window)
        (curve,) = curves["val/loss"]
        assert (curve["unit"], curve["step"].tolist()) == ("epoch", [0.0, 1.0, 2.0, 3.0])


class LivePage:
    """Follows a run as the page does, and joins what comes."""

    def __init__(self, client, run_id, *keys):
        self.client, self.run_id, self.keys = client, run_id, keys
        self.said = []
        self.read()

    def read(self):
        head, columns = self.client.pack(
            f"/api/runs/{self.run_id}/series", key=list(self.keys), entries=4000
        )
        self.cursor = head["cursor"]
        self.steps = {key: [] for key in self.keys}
        self._add(head, columns)

    def _add(self, head, columns):
        for place, curve in enumerate(head["curves"]):
            self.steps[curve["key"]] += columns[f"{place}.step"].astype(int).tolist()

    def poll(self):
        answer = self.client.get(
            f"/api/runs/{self.run_id}/changes", cursor=self.cursor, key=list(self.keys)
        )
        if answer.status_code == 204:
            return
        assert answer.status_code == 200, answer.text
        from quark.page.pack import decode_pack

        head, columns = decode_pack(answer.content)
        if head["reset"]:
            self.read()
            return
        self.cursor = head["cursor"]
        self.said.append(head)
        self._add(head, columns)

    def follow(self, until):
        end = time.monotonic() + DEADLINE_S
        while not until(self):
            assert time.monotonic() < end, self.steps
            self.poll()


def test_base_and_tail_meet_exactly(tmp_path, look):
    """No point is there twice, and none is missing, wherever the page begins to look."""
    session = quark.start_run(project="p", storage_dir=tmp_path)
    total = 1_500
    halfway, go_on = threading.Event(), threading.Event()

    def train():
        with quark.MetricsLogger(session) as metrics:
            for step in range(total):
                metrics.log("train/loss", 1.0 / (step + 1), step=step)
                if step % 3 == 0:
                    metrics.log("val/loss", 1.0, step=step)
                if step == 400:
                    halfway.set()
                    go_on.wait(DEADLINE_S)

    with session:
        training = threading.Thread(target=train)
        training.start()
        halfway.wait(DEADLINE_S)
        client = look(tmp_path)
        page = LivePage(client, session.run_id, "train/loss", "val/loss")
        go_on.set()
        training.join()
        page.follow(
            lambda p: len(p.steps["train/loss"]) >= total and len(p.steps["val/loss"]) >= 500
        )
        assert page.steps["train/loss"] == list(range(total))
        assert page.steps["val/loss"] == list(range(0, total, 3))
    page.follow(lambda p: any(head["run"]["state"] == "completed" for head in p.said))
    assert page.said[-1]["run"]["newest_step"] == total - 1


def test_nothing_new_is_204(plain):
    head, _ = plain.curves(plain.run_id, "train/loss")
    for _ in range(3):
        answer = plain.get(
            f"/api/runs/{plain.run_id}/changes", cursor=head["cursor"], key="train/loss"
        )
        assert answer.status_code == 204
        assert answer.content == b""
    run = plain.json(f"/api/runs/{plain.run_id}")
    answer = plain.get(f"/api/runs/{plain.run_id}/changes", cursor=run["cursor"])
    assert answer.status_code in (200, 204)


def test_equal_moments_have_equal_cursors(plain):
    first, _ = plain.curves(plain.run_id, "train/loss")
    second, _ = plain.curves(plain.run_id, "val/acc@1")
    assert first["cursor"] == second["cursor"]


@pytest.mark.parametrize("cursor", ["", "x", "eAE", "AAAA", "%00", "e" * 17_000])
def test_a_cursor_that_is_none_is_refused(plain, cursor):
    path = f"/api/runs/{plain.run_id}/changes"
    assert "cursor" in plain.refused(400, path, cursor=cursor, key="train/loss")


def test_a_cursor_of_another_run_is_refused(tmp_path, look, plain):
    other = log_values(tmp_path, [1.0])
    client = look(tmp_path)
    cursor = plain.curves(plain.run_id, "train/loss")[0]["cursor"]
    assert "cursor" in client.refused(400, f"/api/runs/{other}/changes", cursor=cursor)


def test_a_resumed_run_is_read_anew(tmp_path, look):
    run_id = log_values(tmp_path, [1.0] * 10)
    client = look(tmp_path)
    page = LivePage(client, run_id, "train/loss")
    session = quark.resume_run(run_id=run_id, storage_dir=tmp_path, reopen=True, from_step=5)
    with session, quark.MetricsLogger(session) as metrics:
        for step in range(5, 8):
            metrics.log("train/loss", 2.0, step=step)
    page.follow(lambda p: p.steps["train/loss"] == list(range(8)))
