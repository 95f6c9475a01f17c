"""Sweeps of strangers: what a store says of one never hangs, crashes or steers anybody."""

import contextlib
import json
import shlex
import sqlite3

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark.cli.sweep_agent import build_command, repeat_name
from quark.sweeps.definition import SweepDefinition
from quark.sweeps.search_algorithms import open_search
from quark_core.errors import SchemaValidationError

GIVEN = {
    "space": {"lr": {"type": "uniform", "low": 0.0, "high": 1.0}},
    "metric": "loss", "mode": "min", "search": "random", "trials": 4, "budget": 2**62,
}  # fmt: skip


class EmptyLogs:
    """A store whose logs have no entries."""

    def read_entries(self, log, start, *, limit=10_000):
        return []


def open_definition(changes):
    definition = SweepDefinition.build({**GIVEN, **changes})
    return open_search(definition, "s0", EmptyLogs(), None)


@pytest.mark.parametrize(
    "search",
    [
        "asha(rate=0.9999999999999999, least=1)", "asha(rate=0.999999, least=1)",
        "asha(least=inf)", "asha(least=nan)", "halving(rate=nan)", "halving(least=inf)",
        "hyperband(rate=5e-324)", "hyperband(least=inf)", "tpe(startup=inf)",
        f"tpe(startup={'9' * 900})", "cmaes(population=1000000000)", "optuna:os.system", "--help",
    ],
)  # fmt: skip
def test_a_search_without_end_or_sense_is_refused_by_name(search):
    with pytest.raises(SchemaValidationError, match="search") as told:
        open_definition({"search": search})
    assert len(str(told.value)) < 1_000


@pytest.mark.parametrize("search", ["random", "grid", "tpe"])
@pytest.mark.parametrize(
    "values",
    [
        {"type": "uniform", "low": 0, "high": 10**4000},
        {"type": "uniform", "low": 0.0, "high": 1.0, "step": 5e-324},
        {"type": "uniform", "low": -1.7e308, "high": 1.7e308, "step": 1e-300},
        {"type": "integers", "low": 0, "high": 10**4000},
        {"type": "integers", "low": True, "high": 2},
        {"type": ["uniform"]},
        {"low": {}, "high": []},
    ],
)
def test_a_range_of_impossible_numbers_is_refused_by_name(search, values):
    with pytest.raises(SchemaValidationError, match=r"space\['lr'\]") as told:
        open_definition({"search": search, "space": {"lr": values}})
    assert len(str(told.value)) < 1_000


@pytest.mark.parametrize(
    "values",
    [
        {"type": "uniform", "low": 0.0, "high": 1.0, "step": 1e-12},
        {"type": "integers", "low": -(2**62), "high": 2**62},
    ],
)
def test_a_grid_of_more_values_than_memory_is_refused(values):
    with pytest.raises(SchemaValidationError, match='search="grid" tries all of them'):
        open_definition({"search": "grid", "space": {"lr": values}})


def test_a_constraint_is_read_in_a_bounded_time():
    with pytest.raises(SchemaValidationError, match="constraints"):
        open_definition({"constraints": ["x" + " " * 1_000_000]})


def test_a_sweeps_name_is_one_word_of_a_line_that_is_copied():
    for name in ("x; touch here", "$(id)", "a b", "'", "--help", "-d/etc"):
        (word,) = shlex.split(repeat_name(name, "s0123"))
        assert word == ("s0123" if name.startswith("-") else name)


def test_a_parameter_that_is_called_like_an_option_is_not_given_to_a_command():
    for form in ("flags", "assignments"):
        with pytest.raises(SchemaValidationError, match="cannot be passed to a command"):
            build_command(["train"], {"--config-dir": "/elsewhere"}, form)


@pytest.fixture
def strange(tmp_path):
    """A store with one sweep of two trials, and what puts a value into a column of it."""
    with quark.sweep(
        "s", project="p", space={"lr": [0.1, 0.2]}, metric="loss", mode="min", search="grid",
        storage_dir=tmp_path,
    ) as sweep:  # fmt: skip
        for _ in range(2):
            sweep.claim().complete(0.5)
        sweep_id = sweep.id

    def put(table, column, value):
        connection = sqlite3.connect(tmp_path / ".quark" / "quark.db")
        where = " WHERE number = 0" if table == "trial" else ""
        connection.execute(f"UPDATE {table} SET {column} = ?{where}", (value,))
        connection.commit()
        connection.close()
        return sweep_id

    return put


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("trial", "parameters", '{"a":' * 500 + "1" + "}" * 500),
        ("trial", "parameters", json.dumps({"\x1b]0;x\x07": "\x1b[31m\u202e", "s": "\ud800"})),
        ("trial", "parameters", '{"lr": 1e999, "x": ' + "9" * 4_000 + "}"),
        ("trial", "origin", '{"rung": 1e999, "parent": ' + "9" * 4_000 + "}"),
        ("trial", "state", b"\xff"),
        ("trial", "claimed_us", "soon"),
        ("trial", "claimed_us", 2**62),
        ("trial", "lease_us", -(2**62)),
        ("trial", "token", "first"),
        ("trial", "number", "first"),
        ("trial", "objective_values", "[" * 100_000),
        ("trial", "reason", "\x1b]0;x\x07\u202e"),
        ("trial", "reason", b"\xff"),
        ("sweep", "name", "\x1b[2J\u202e"),
        ("sweep", "name", b"\xff"),
        ("sweep", "definition", "[" * 100_000),
        ("sweep", "definition", '{"metric": ["a"], "mode": {}, "space": {"lr": {"low": []}}}'),
        ("sweep", "created_us", 2**62),
        ("sweep", "created_us", "soon"),
    ],
)
def test_columns_that_no_quark_has_written_end_in_our_errors_alone(
    strange, tmp_path, table, column, value
):
    sweep_id = strange(table, column, value)
    for arguments in ([], [sweep_id], [sweep_id, "--json"]):
        shown = CliRunner().invoke(cli, ["sweep", "show", *arguments, "-d", str(tmp_path)])
        assert shown.exception is None or isinstance(shown.exception, SystemExit | quark.QuarkError)
        assert "\x1b" not in shown.output
        assert "\u202e" not in shown.output
    with (
        contextlib.suppress(quark.QuarkError),
        quark.sweep(sweep_id, storage_dir=tmp_path) as sweep,
    ):
        sweep.claim()
        assert len(sweep.trials()) >= 2
