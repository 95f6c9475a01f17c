"""What HookEngine tells once: in the run's events and in the log."""

import logging

import pytest
import torch
from torch import nn

from quark import HookScheduleConfig
from quark_core.errors import SchemaValidationError
from quark_torch.layers.hook_engine import Overhead


def small():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model, values):
    model(values).sum().backward()


def test_a_filter_that_fits_nothing_is_told_once(engine, events, caplog):
    hooks = engine(small(), filters={"include_types": ("Conv2d",)})
    with hooks.step(0) as probed:
        assert probed
    assert hooks.instrumented_module_names == ()
    (event,) = events("filter_matches_nothing")
    assert "include_types=('Conv2d',)" in event.payload["message"]
    assert "0: Linear" in event.payload["message"]
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1


def test_a_schedule_that_never_fires_is_told_once(engine, events):
    hooks = engine(small(), schedule=HookScheduleConfig(every_n_steps=None))
    assert not hooks.should_probe(0)
    assert len(events("schedule_never_fires")) == 1


def test_a_model_without_parameters_is_told_once(engine, events):
    model = nn.Sequential(nn.Tanh())
    hooks = engine(model)
    with hooks.step(0):
        model(torch.zeros(2, 2))
    assert len(hooks.read()) == 1
    assert len(events("model_without_parameters")) == 1
    engine(nn.Sequential()).close()


def test_a_step_that_calls_nothing_is_told_once(engine, events):
    hooks = engine(small())
    for step in range(3):
        with hooks.step(step):
            pass
    assert len(events("probe_empty")) == 1
    hooks.close()
    assert events("modules_never_called") == ()


@pytest.mark.long
def test_lists_that_nobody_can_call_are_not_told(engine, events):
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])

        def forward(self, values):
            return self.parts[0](values) * self.scales[0]

    model = Listed()
    hooks = engine(model, filters={"leaf_modules_only": False})
    with hooks.step(0):
        model(torch.ones(2, 2)).sum().backward()
    hooks.close()
    (event,) = events("modules_never_called")
    assert event.payload["modules"] == ["parts.1"]


@pytest.mark.parametrize("name", ["module_name", "module_type", "summary_type", "hook_direction"])
def test_a_filter_of_a_read_that_is_no_text(engine, name):
    hooks = engine(small())
    with pytest.raises(SchemaValidationError, match=f"{name} must be a str, not int"):
        hooks.read(**{name: 3})


@pytest.mark.long
def test_lasting_overhead_is_told_once(engine, events):
    model = nn.Sequential(nn.Linear(2, 2))
    hooks = engine(model)
    for step in range(60):
        with hooks.step(step):
            train(model, torch.ones(1, 2))
    (event,) = events("instrumentation_overhead")
    assert event.payload["overhead_percent"] > 5
    assert "every_n_steps=1" in event.payload["message"]


@pytest.mark.parametrize(("spent_ns", "percent"), [(40, None), (100, pytest.approx(100 / 9))])
def test_overhead_is_the_share_of_probes_after_the_first(spent_ns, percent):
    overhead = Overhead()
    found = []
    for probe in range(30):
        overhead.begin_probe(probe * 1000)
        overhead.end_probe(900 if probe < 3 else spent_ns)
        found.append(overhead.percent_too_much())
    assert [each for each in found if each is not None] == ([] if percent is None else [percent])
