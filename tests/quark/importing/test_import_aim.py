"""A repository of the real Aim, where that is installed."""

import pytest

import quark

aim = pytest.importorskip("aim")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]


def test_everything_comes_once(tmp_path, take, read_points, store):
    run = aim.Run(
        repo=str(tmp_path), experiment="exp", system_tracking_interval=None, log_system_params=False
    )
    run.name, run.description = "r1", "a note"
    run.add_tag("base")
    run["hparams"] = {"lr": 0.1, "password": "hunter2hunter2"}
    for step in range(20):
        run.track(1 / (step + 1), name="loss", step=step, context={"subset": "train"})
    run.track(aim.Distribution([1.0, 2.0, 3.0], bin_count=5), name="dist", step=1)
    run.track(aim.Text("hello"), name="txt", step=2)
    run.close()
    (taken,) = take("aim", tmp_path)
    assert (taken["name"], taken["project"]) == ("r1", "exp")
    found = read_points(taken["run_id"], "train/loss")
    assert [(step, value) for step, value, _ in found] == [(s, 1 / (s + 1)) for s in range(20)]
    opened = quark.open_run(taken["run_id"], storage_dir=store)
    assert opened.context.run.status == "completed"
    artifacts = quark.ArtifactStore(opened)
    (histogram,) = artifacts.read(artifact_type="histogram")
    assert sum(artifacts.load(histogram)["counts"]) == 3
    (again,) = take("aim", tmp_path)
    assert (again["points"], again["files"]) == (0, 0)


def test_a_folder_without_a_repository_is_refused(tmp_path, store):
    from quark.importing.neutral_run import ImportFailure
    from quark.importing.sources.aim import find_runs

    with pytest.raises(ImportFailure, match="not contain an Aim repository"):
        next(find_runs(tmp_path))
