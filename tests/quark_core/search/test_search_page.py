"""What docs/reference/search.md says is so."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark_core.search.parser import MAX_CHARACTERS, MAX_DEPTH, MAX_NAMES, MAX_TERMS
from quark_core.search.resolution import ALIASES, CHOICES, RUN_FIELDS

PAGE = (Path(__file__).parents[3] / "docs/reference/search.md").read_text("utf-8")


def find_blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def find_lines(language):
    lines = [line for block in find_blocks(language) for line in block.splitlines()]
    assert lines
    return lines


@pytest.fixture
def runs(tmp_path, log_run, monkeypatch):
    """A working directory with the storage root `runs`, in which every name of the page exists."""
    monkeypatch.chdir(tmp_path)
    log_run(
        "runs",
        "example",
        name="resnet50",
        tags=["baseline"],
        config={
            "lr": 3e-4,
            "batch size": 32,
            "amp": True,
            "betas": [0.9, 0.999],
            "optimizer": {"name": "adamw", "weight decay": 0.1},
        },
        values={
            "val/loss": [0.5, 0.25],
            "train/acc@1": [0.7],
            "2nd try": [1.0],
            "step": [2000.0],
        },
        group="paper/fig3",
        fields={"gpu": "V100", "score": 0.9, "nested": {"note": "x"}},
        fingerprints={"train": "5f1c0a"},
    )
    log_run("runs", "other", status="failed", values={"val/loss": [float("nan")]})


@pytest.mark.sampled
@pytest.mark.parametrize("where", find_lines("where"))
def test_examples_of_expressions_run(runs, where):
    quark.search_runs(storage_dir="runs", where=where)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("not val/loss < 0.3", ["other"]),
        ("val/loss >= 0.3", []),
        ("val/loss == null and count(val/loss) != null", ["other"]),
        ("config.amp == 1", []),
        ("config.lr != 3e-4", []),
    ],
)
def test_what_the_page_says_of_missing_values(runs, where, found):
    assert [run.run_id for run in quark.search_runs(storage_dir="runs", where=where)] == found


@pytest.mark.sampled
@pytest.mark.parametrize("order_by", find_lines("order"))
def test_examples_of_orders_run(runs, order_by):
    assert len(quark.search_runs(storage_dir="runs", order_by=order_by)) == 2


@pytest.mark.long
@pytest.mark.parametrize("program", find_blocks("python"))
def test_programs_run(runs, program, capsys):
    exec(program, {"quark": quark})
    assert capsys.readouterr().out == "example completed 0.25 0.0003\n"


@pytest.mark.sampled
@pytest.mark.parametrize("line", find_lines("console"))
def test_commands_run(runs, line, monkeypatch):
    monkeypatch.chdir("runs")
    prompt, command, *arguments = shlex.split(line)
    assert (prompt, command) == ("$", "quark")
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "example" in result.stdout


@pytest.mark.sampled
@pytest.mark.parametrize("block", find_blocks("mistake"))
def test_mistakes_are_told_as_shown(runs, block):
    where, _, message = block.partition("\n---\n")
    with pytest.raises(quark.SchemaValidationError) as caught:
        quark.search_runs(storage_dir="runs", where=where)
    assert str(caught.value) == message.rstrip("\n")


def test_every_field_and_word_is_described():
    table = PAGE[PAGE.index("| field |") : PAGE.index("A field comes before")]
    fields = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*\|", table, re.MULTILINE))))
    assert fields == set(RUN_FIELDS) | set(ALIASES)
    assert all(word in table for word in CHOICES["state"])


def test_the_limits_are_those_of_the_parser():
    end = PAGE[PAGE.index("An expression has at most") :].replace(",", "")
    numbers = [int(number) for number in re.findall(r"\b\d+\b", end)]
    assert numbers == [MAX_CHARACTERS, MAX_TERMS, MAX_NAMES, MAX_DEPTH]
