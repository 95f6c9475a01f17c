"""Real small trainings, each changed in one way: what explain_change makes of it."""

import pytest
from small_training import Training

import quark

SEEDS = range(4)


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    made = Training(tmp_path_factory.mktemp("small"))
    made.seeds = [made.run("--seed", str(seed)) for seed in SEEDS]
    return made


@pytest.fixture
def changed(training):
    """Changes a file for one run, which it makes, and puts it back."""
    kept = {path: path.read_bytes() for path in training.folder.iterdir() if path.is_file()}
    yield training
    for path, data in kept.items():
        path.write_bytes(data)


def explain(training, run):
    return quark.explain_change(training.seeds[0], run, "val/loss", storage_dir=training.store)


def first(result):
    return result.causes[0].kind, result.causes[0].place, result.causes[0].standing


@pytest.mark.long
def test_a_key_is_named_and_its_argument_is_folded_into_it(training):
    found = explain(training, training.run("--lr", "0.001"))
    assert found.verdict == "worse"
    assert first(found) == ("config", "lr", "probable")
    (check,) = found.checks
    assert check.command == f"quark why {found.before.run_id} {found.after.run_id} --check 3"
    assert found.causes[0].repeats == ("argv lr",)
    assert len(found.causes) == 1
    assert {"code", "seed"} <= {remark.kind for remark in found.ruled_out if not remark.place}
    assert ("data", "train") in {(remark.kind, remark.place) for remark in found.ruled_out}


def test_a_constant_two_calls_down_is_named_by_its_function(changed):
    changed.change("model.py", "min(rate, 10.0)", "min(rate, 0.001)")
    found = explain(changed, changed.run())
    assert first(found) == ("code", "model.py: clip", "probable")


def test_comments_and_names_of_locals_are_no_change(changed):
    changed.change("model.py", '"""Keep it small."""', '"""Other words."""  # and a comment')
    changed.change("model.py", "hidden", "inner")
    found = explain(changed, changed.run())
    assert found.verdict == "no_difference"
    assert found.differences == ()
    assert ("code", "") in {(remark.kind, remark.place) for remark in found.ruled_out}
    assert found.first_difference.manner == "identical"


def test_altered_data_are_named(changed):
    import numpy as np

    path = changed.folder / "data.npz"
    held = dict(np.load(path))
    held["y"] = held["y"][::-1]
    np.savez(path, **held)
    found = explain(changed, changed.run())
    assert first(found) == ("data", "train", "probable")
    assert found.checks == ()


def test_another_seed_is_no_more_than_chance(training):
    found = explain(training, training.run("--seed", "17"))
    assert found.verdict == "no_difference"
    assert {cause.kind for cause in found.differences} == {"seed"}


def test_a_key_without_effect_leaves_every_bit_as_it_was(training):
    found = explain(training, training.run("--log-every", "100"))
    assert found.verdict == "no_difference"
    assert found.first_difference.manner == "identical"
    assert found.causes == ()


@pytest.mark.long
def test_counterfactual_runs_of_kept_sources_settle_it(changed, invoke_why):
    changed.change("model.py", "min(rate, 10.0)", "min(rate, 0.001)")
    run = changed.run("--log-every", "70", "--width", "7")
    said = invoke_why(changed.seeds[0], run, "--check", "2", "-m", "val/loss")
    assert "No runs were started" in said
    said = invoke_why(changed.seeds[0], run, "--check", "2", "--yes", "-m", "val/loss")
    probable = [line for line in said.splitlines() if line.startswith("Probably")]
    assert "model.py: clip" in probable[-1]
    assert "differ in this alone" in " ".join(said.split("\n\n")[-1].split())
    checks = [
        found
        for found in quark.search_runs(storage_dir=changed.store)
        if found.stored.run.groups == (f"why/{changed.seeds[0][:8]}-{run[:8]}",)
    ]
    assert len(checks) >= 2
    # Named apart from the first side, whose name the script gives them: it still names one run.
    assert {found.stored.run.name for found in checks} >= {"check: model.py: clip"}


@pytest.fixture
def invoke_why(training):
    """Runs `quark why` over the training's store in this process."""
    from click.testing import CliRunner

    from quark.cli.main import cli

    def call(*arguments):
        given = ["why", *map(str, arguments), "-d", str(training.store)]
        done = CliRunner().invoke(cli, given, env={"COLUMNS": "200", "QUARK_SOURCES": "keep"},
                                  catch_exceptions=False)  # fmt: skip
        assert done.exit_code == 0, done.output
        return done.output

    return call
