"""How a run is started that is one side with a difference of the other; when it cannot be."""

import pytest

from quark.analysis.explanation.results import ABSENT, Cause
from quark.analysis.explanation.swap_experiments import plan_checks, plan_exchange
from quark_core.backends.run_summary import StoredRun
from quark_core.records import EnvironmentSnapshot
from quark_core.records.json_object import JsonObject


def start(*arguments):
    environment = EnvironmentSnapshot(JsonObject({"process": {"argv": ["train.py", *arguments]}}))
    return StoredRun(project=None, run=None, state="completed", environment=environment)


def cause(kind, place, before, after, standing="possible", repeats=()):
    return Cause(kind, place, before, after, standing, None, "", (), (), repeats)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--lr", "0.1", "--fast"), ("--lr", "0.5", "--fast")),
        (("--lr=0.1",), ("--lr=0.5",)),
        (("optim.lr=0.1", "seed=3"), ("optim.lr=0.5", "seed=3")),
        (("--width", "8"), ("--width", "8", "--lr", "0.5")),
    ],
)
def test_a_key_is_set_where_the_command_line_sets_it(given, expected):
    place = "optim.lr" if given[0].startswith("optim") else "lr"
    planned = plan_exchange(start(*given), [cause("config", place, 0.1, 0.5, repeats=("argv lr",))])
    assert planned.refusal is None
    assert planned.arguments == expected


def test_the_seed_is_found_so_that_each_run_has_its_own():
    assert plan_exchange(start("--seed", "7"), []).seed == (1, "", 7)
    assert plan_exchange(start("seed=7"), []).seed == (0, "seed=", 7)
    assert plan_exchange(start("-o", "trainer.seed=7"), []).seed == (1, "trainer.seed=", 7)
    assert plan_exchange(start("--set=seed=7"), []).seed == (0, "--set=seed=", 7)
    assert plan_exchange(start("--lr", "7"), []).seed is None
    assert plan_exchange(start("7"), []).seed is None
    assert plan_exchange(start("7"), [], "#1").seed == (0, "", 7)


def test_what_cannot_be_exchanged_is_refused_by_name():
    refused = [
        plan_exchange(start("--width", "8"), [cause("config", "lr", 0.1, 0.5)]),
        plan_exchange(start("--lr", "1"), [cause("config", "lr", 0.1, ABSENT)]),
        plan_exchange(start(), [cause("package", "numpy", "1", "2")]),
        plan_exchange(start("--key", "[redacted]"), [cause("config", "lr", 0.1, 0.5)]),
        plan_exchange(StoredRun(project=None, run=None, state="completed"), []),
    ]
    words = ["command line", "lr", "package numpy", "secret", "not recorded"]
    for planned, word in zip(refused, words, strict=True):
        assert word in planned.refusal


def test_code_and_variables_are_exchanged():
    planned = plan_exchange(
        start(),
        [
            cause("code", "model.py: clip", "a", "b"),
            cause("code", "model.py", "a", "b"),
            cause("switch", "OMP", "1", ABSENT),
        ],
    )
    assert (planned.code, planned.variables) == ({"model.py": ("clip", "")}, {"OMP": None})


def test_an_argument_without_a_name_is_set_where_it_stands():
    told = cause("config", "lr", 0.1, 0.5, repeats=("argv #1",))
    assert plan_exchange(start("0.1", "--fast"), [told]).arguments == ("0.5", "--fast")
    launch = cause("launch", "argv #2", "8", "16")
    assert plan_exchange(start("0.1", "8"), [launch]).arguments == ("0.1", "16")


def test_many_causes_are_halved_and_the_unlikely_left_out():
    many = [cause("config", f"k{number}", 1, 2) for number in range(7)]
    planned = plan_checks([*many, cause("config", "other", 1, 2, "unlikely")], "a b", 2)
    assert [check.place for check in planned] == ["k0, k1, k2, k3", "k4, k5, k6"]
    few = plan_checks(many[:6], "a b", 2)
    assert [check.place for check in few] == [each.place for each in many[:6]]
    assert planned[0].command == "quark why a b --check 2"
    assert plan_checks([cause("hardware", "gpus", 1, 2)], "a b") == ()
