"""What history holds of a run: which runs are alike, and that it is the same in every process."""

import itertools
import os
import subprocess
import sys

import pytest

from quark.analysis.explanation.history import PastRun
from quark.analysis.explanation.run_attributes import RunTraits, encode_value


def make(number, **settings):
    values = {("config", key): value for key, value in settings.items()}
    return PastRun(
        str(number),
        RunTraits({**values, ("seed", "seed"): number}, frozenset()),
        float(number), None, "completed", None, None,
    )  # fmt: skip


def test_runs_are_alike_but_for_one_trait_where_all_others_are_the_same():
    settings = [{"a": a, "b": b} for a in (1, 1.0, True, "1", None, [1]) for b in (2, 3)]
    settings += [{"a": 1}, {"b": 2}, {"b": 2, "name": "x"}, {}]
    runs = [make(number, **each) for number, each in enumerate(settings)]
    places = [("config", "a"), ("config", "b"), ("config", "absent"), ("config", "name")]
    for one, two in itertools.product(runs, repeat=2):
        for place in places:
            rest = [
                {key: encode_value(value) for key, value in run.traits.values.items()}
                for run in (one, two)
            ]
            for each in rest:
                each.pop(place, None)
                # Names and seeds part no runs.
                each.pop(("config", "name"), None)
                each.pop(("seed", "seed"), None)
            is_alike = one.sign_rest(place) == two.sign_rest(place)
            assert is_alike == (rest[0] == rest[1])
            if is_alike:
                assert one.hash_rest(place) == two.hash_rest(place)
    assert len({run.hash_rest(("config", "a")) for run in runs}) == 3


@pytest.mark.parametrize("order", [1, -1])
def test_values_are_told_apart_whichever_was_asked_for_first(order):
    values = [1, 1.0, True, "1", None, "null", 0, -0.0, False, "x" * 1_000, [1, 2.0], {"b": 1}]
    texts = ["1", "1", "true", '"1"', "null", '"null"', "0", "0", "false", f'"{"x" * 1_000}"']
    texts += ["[1,2.0]", '{"b":1}']
    for value, text in list(zip(values, texts, strict=True))[::order]:
        assert encode_value(value) == text.encode()


SCRIPT = """
import random
from quark.analysis.explanation.attribution import regress
from quark.analysis.explanation.differences import Difference
from quark.analysis.explanation.history import PastRun
from quark.analysis.explanation.run_attributes import RunTraits

draw = random.Random(0)
runs = []
for number in range(60):
    values = {("config", f"key{key}"): draw.choice((1, 2, 3)) for key in range(30)}
    end = values["config", "key0"] / 7 + draw.gauss(0, 0.1)
    traits = RunTraits(values, frozenset())
    runs.append(PastRun(str(number), traits, end, None, "completed", None, None))
found = regress(runs, [Difference("config", "key0", 1, 2)], 0.1)
print(repr(found))
"""


@pytest.mark.long
def test_the_answer_is_the_same_to_the_bit_in_every_process():
    told = []
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT]
        told.append(
            subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True)
        )
    assert "history" in told[0].stdout.decode()
    assert len({each.stdout for each in told}) == 1
