"""The loop over a sweep that a service keeps."""

import pytest
from service_fixtures import serving
from sweep_training import train

import quark


@pytest.mark.long
def test_workers_of_a_service_share_a_sweep(tmp_path, monkeypatch, open_sweep):
    folder = tmp_path / "service"
    folder.mkdir()
    with serving(folder) as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default"))
        sweep = open_sweep(
            search="asha", trials=5, budget=9, space={"lr": quark.uniform(0, 1)}, seed=3
        )
        other = open_sweep(
            search="asha", trials=5, budget=9, space={"lr": quark.uniform(0, 1)}, seed=3,
            storage_dir=tmp_path / "elsewhere",
        )  # fmt: skip
        held = other.claim()
        for trial in sweep:
            train(trial, steps=9)
            if trial.number == 3:
                train(held, steps=9)
        trials = other.trials()
        assert {trial.state for trial in trials} == {"completed", "pruned"}
        assert [trial.token for trial in trials] == [1] * 5
        assert other.best == sweep.best
        assert sweep.is_over
        sweep.close()
        other.close()
