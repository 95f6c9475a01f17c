"""`quark runs --where … --sort …`."""

import json

import pytest
from click.testing import CliRunner

from quark.cli.main import cli


@pytest.fixture
def invoke(three_runs):
    def call(*arguments, columns=200):
        return CliRunner().invoke(
            cli,
            ["runs", "-d", str(three_runs), *arguments],
            env={"COLUMNS": str(columns)},
            catch_exceptions=False,
        )

    return call


def list_ids(result):
    assert result.exit_code == 0, result.output
    return [run["id"] for run in json.loads(result.stdout)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--where", "val/loss < 0.3"], ["first"]),
        (["-w", "config.lr == 1e-3"], ["third", "second"]),
        (["-w", "config.lr == 1e-3", "-s", "failed"], ["third"]),
        (["-w", "config.lr == 1e-3 or acc@1 > 0", "-t", "baseline"], ["first"]),
        (["-w", "config.lr > 0", "-p", "vision"], ["second", "first"]),
        (["--sort", "created"], ["first", "second", "third"]),
        (["--sort", "-val/loss", "-n", "1"], ["first"]),
        (["--sort", "-config.lr", "--sort", "created"], ["second", "third", "first"]),
        (["--sort", "min(val/loss) desc"], ["second", "first", "third"]),
    ],
)
def test_options_choose_and_sort(invoke, options, found):
    assert list_ids(invoke("--json", *options)) == found


@pytest.mark.long
def test_json_has_the_summary(invoke):
    (run,) = json.loads(invoke("--json", "-w", "id == 'second'").stdout)
    assert run["config"] == {"lr": 1e-3, "optimizer": {"name": "sgd"}}
    assert run["metrics"]["val/loss"]["non_finite"] == 1
    assert (run["newest_step"], run["last_loss"], run["state"]) == (2, None, "completed")


@pytest.mark.long
def test_what_is_asked_for_becomes_a_column(invoke):
    options = ["-w", "config.lr > 0 and acc@1 != 7", "--sort", "-min(val/loss)", "--sort", "step"]
    lines = invoke(*options).stdout.splitlines()
    header = next(line for line in lines if "status" in line)
    wanted = ("last loss", "config.lr", "acc@1", "min(val/loss)", "step", "tags")
    places = [header.index(name) for name in wanted]
    assert places == sorted(places)
    (row,) = [line for line in lines if line.strip().startswith("first")]
    assert row.split()[-6:] == ["0.25", "0.0003", "0.5", "0.25", "1", "baseline"]


@pytest.mark.long
def test_what_has_a_column_gets_no_second(invoke):
    plain = invoke().stdout.splitlines()[1]
    options = ["-w", "status != 'running' and tags == null", "--sort", "duration"]
    searched = invoke(*options).stdout.splitlines()[1]
    assert searched.split() == [word for word in plain.split() if word != "name"]


@pytest.mark.sampled
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_what_is_asked_for_has_room(invoke, columns):
    options = ["-w", "val/loss != 7 and config.optimizer.name == 'adamw'", "--sort", "-acc@1"]
    result = invoke(*options, columns=columns)
    assert max(map(len, result.stdout.splitlines())) <= columns
    (row,) = [line for line in result.stdout.splitlines() if line.strip().startswith("first")]
    for text in ("completed", "0.25", "adamw", "0.5"):
        assert text in row


@pytest.mark.long
def test_too_many_columns_are_folded(invoke):
    names = "config.lr config.optimizer.name val/loss acc@1 attempt updated ended".split()
    options = [option for name in names for option in ("--sort", name)]
    lines = invoke(*options, columns=60).stdout.splitlines()
    assert max(map(len, lines)) <= 60


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "message", "line"),
    [
        (["--where", "val/loss <"], "--where, column 11: expected", "  val/loss <"),
        (["--where", "val/los < 1"], "the nearest names are val/loss", "  val/los < 1"),
        (["--sort", "-tags"], "--sort, column 2: runs cannot be sorted", "  -tags"),
    ],
)
def test_a_malformed_expression_shows_the_place(invoke, options, message, line):
    result = invoke(*options)
    assert (result.exit_code, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert any(message in text for text in lines)
    assert lines[-2] == line
    assert set(lines[-1].strip()) == {"^"}


@pytest.mark.long
def test_no_fitting_run_is_no_error(invoke):
    result = invoke("-w", "val/loss > 100")
    assert result.exit_code == 0
    assert result.stdout.startswith("No run fits in the store ")
