"""Layers that no optimizer has are marked in their records."""

import pytest
import torch
from torch import nn

import quark


def _train(tmp_path, model, optimizer, change=None, steps=4):
    with (
        quark.TrainingSession.start_run(project="p", storage_dir=tmp_path) as session,
        quark.HookEngine(session, model, optimizer) as hooks,
    ):
        for step in range(steps):
            if change is not None and step == 2:
                change()
            with hooks.step(step):
                model(torch.randn(8, 6)).sum().backward()
        records = hooks.read(summary_type="activation")
    marked = {
        (record.module_name, record.step)
        for record in records
        if (record.metadata or {}).get("in_optimizer") is False
    }
    return session, marked


def _make():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))


def test_a_layer_that_was_replaced_after_the_optimizer_is_marked(tmp_path):
    model = _make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2] = nn.Linear(6, 2)
    session, marked = _train(tmp_path, model, optimizer)
    assert marked == {("2", step) for step in range(4)}
    (alert,) = [
        alert
        for alert in quark.AnalyzerEngine(session).analyze().alerts
        if alert.rule_id == "stagnant_layers"
    ]
    assert alert.culprit == "2"


@pytest.mark.long
def test_frozen_layers_layers_without_parameters_and_runs_without_optimizer_are_not(tmp_path):
    model = _make()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([model[2].weight], lr=0.1)
    assert _train(tmp_path / "a", model, optimizer)[1] == set()
    assert _train(tmp_path / "b", _make(), None)[1] == set()


def test_a_group_that_is_added_later_counts(tmp_path):
    model = _make()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)

    def add():
        optimizer.add_param_group({"params": list(model[2].parameters())})

    _, marked = _train(tmp_path, model, optimizer, change=add)
    assert marked == {("2", 0), ("2", 1)}
