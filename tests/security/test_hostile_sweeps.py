"""Sweeps of strangers: what a store says of one never hangs, crashes or steers anybody."""

import json
import shlex

import pytest

import quark
from quark.cli.sweep_commands import build_command, repeat_name
from quark_core.errors import SchemaValidationError
from quark_core.sweeps.definition import SweepDefinition
from quark_core.sweeps.searches import open_search

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
    with pytest.raises(SchemaValidationError, match="a grid tries them all"):
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
        with pytest.raises(SchemaValidationError, match="cannot be given to a command"):
            build_command(["train"], {"--config-dir": "/elsewhere"}, form)
