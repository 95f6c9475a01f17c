"""Every number in a text of a finding is a recorded value, or named arithmetic of such."""

import inspect
import itertools
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from kit.traced_texts import Records, find_untraced
from run_builder import RunBuilder, falling

from quark.analysis.analysis_context import Case
from quark.analysis.config import AnalyzerEngineConfig
from quark.analysis.engine import analyze_run
from quark.analysis.observations import Figure, at_step, limit, say
from quark.analysis.rule import Finding

STEPS = list(range(0, 100, 5))


def _make(fact):
    return Finding(
        culprit="fc", severity="warning", title="t", fact=fact, inference="i",
        suggested_check="c", evidence=(), step=0,
    )  # fmt: skip


@pytest.fixture
def builder():
    return RunBuilder().metric("train/loss", falling()).layer("fc1", steps=STEPS, std=1.5)


@pytest.fixture
def case(builder):
    return Case(builder.build(), AnalyzerEngineConfig())


def test_a_figure_is_computed_of_the_records_that_it_names(builder, case):
    text = say(
        "At step {step} the deviation of {name} is {std}, {ratio} times {loss}.",
        step=at_step(5), name="fc1", std=case.measure("activation", "fc1", "median", "std"),
        ratio=case.measure("activation", "fc1", "median", "std")
        / case.measure("metric", "train/loss", "first value"),
        loss=case.measure("metric", "train/loss", "first value"),
    )  # fmt: skip
    assert text.startswith("At step 5 the deviation of fc1 is 1.5, 0.7")
    assert find_untraced([_make(text)], Records(builder.records)) == []


@pytest.mark.parametrize(
    "fact",
    [
        "It rose by 17 %.",
        say("It rose 17 times."),
        say("It rose {times} times.", times=Figure(17.0, "median")),
        say("It rose {times} times.", times=limit(17.123)),
        say("It rose at step {step}.", step=at_step(7777)),
        say("{name} is dead.", name="fc7"),
    ],
    ids=["plain", "literal", "no source", "no constant", "no step", "no layer"],
)
def test_a_number_that_nothing_was_recorded_of_is_found_out(builder, fact):
    assert find_untraced([_make(fact)], Records(builder.records)) != []


def test_a_value_that_is_not_the_records_is_found_out(builder, case):
    measured = case.measure("activation", "fc1", "median", "std")
    invented = Figure(2.5, "median", measured.function, measured.source)
    text = say("It deviates by {std}.", std=invented)
    assert "2.5 is 1.5" in find_untraced([_make(text)], Records(builder.records))[0]


def _list_calls(module):
    """Every call of the tests of a module that takes nothing but what it is parametrized by."""
    for name, test in inspect.getmembers(module, inspect.isfunction):
        marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
        choices = [
            [dict(zip(names, values, strict=True)) for values in _list_values(mark, names)]
            for mark in marks
            for names in [_split(mark.args[0])]
        ]
        given = {key for options in choices for key in options[0]}
        if name.startswith("test_") and given == set(inspect.signature(test).parameters):
            for chosen in itertools.product(*choices):
                yield test, {key: value for part in chosen for key, value in part.items()}


def _split(names):
    return [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)


def _list_values(mark, names):
    for entry in mark.args[1]:
        is_set = isinstance(entry, type(pytest.param()))
        values = entry.values if is_set else entry
        yield values if is_set or len(names) > 1 else (values,)


def _collect_builders(module, monkeypatch):
    """Every run that the tests of a module analyze, by running them."""
    seen = []
    build = RunBuilder.build

    def note(self):
        seen.append(self)
        return build(self)

    monkeypatch.setattr(RunBuilder, "build", note)
    for test, arguments in _list_calls(module):
        test(**arguments)
    monkeypatch.undo()
    return seen


def _find_modules():
    """Tests beside this one whose runs are built, but for those of arbitrary numbers."""
    own = Path(__file__)
    texts = {path: path.read_text() for path in own.parent.glob("test_*.py") if path != own}
    found = [
        path.stem
        for path, text in texts.items()
        if "import RunBuilder" in text and "hypothesis import" not in text
    ]
    # The first one is in every run of the tests.
    return sorted(found, key=lambda name: (name != "test_rules", name))


@pytest.mark.sampled
@pytest.mark.parametrize("module", _find_modules())
def test_every_number_of_every_rule_is_traced(module, monkeypatch):
    """Of all runs that the rules are tested with: a rule that prints another number fails."""
    for builder in _collect_builders(import_module(module), monkeypatch):
        records = Records(builder.records)
        for mode in ("adaptive", "absolute"):
            result = analyze_run(builder.build(), AnalyzerEngineConfig(mode=mode))
            assert find_untraced(result.findings.values(), records) == []


def test_an_infinite_gradient_is_told_as_such():
    norms = np.full(40, 0.1)
    norms[30:] = np.nan
    loss = falling()
    loss[155:] = np.nan
    builder = RunBuilder().metric("train/loss", loss)
    for number in range(3):
        builder.layer(f"layers.{number}", steps=range(0, 200, 5), norm=10.0)
        builder.layer(
            f"layers.{number}", summary="gradient", steps=range(0, 200, 5),
            norm=np.nan_to_num(norms), nan_count=np.isnan(norms) * 100.0,
        )  # fmt: skip
    result = analyze_run(builder.build())
    (alert,) = [a for a in result.alerts if a.rule_id == "exploding_gradients"]
    assert "ceased to be finite" in alert.fact
    assert "1e+03" not in alert.fact
    assert find_untraced(result.findings.values(), Records(builder.records)) == []


def test_a_case_without_anything_measures_nothing():
    case = Case(RunBuilder().build(), AnalyzerEngineConfig())
    assert str(case.measure("metric", "train/loss", "median")) == "an unknown number"
