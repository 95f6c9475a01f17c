"""`quark.watch`: one line in the loop records layers, parameters and telemetry."""

import pytest
import torch
from torch import nn

import quark
from quark_core.errors import InvalidRunStateError, SchemaValidationError


@pytest.fixture
def session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        yield session


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model, optimizer):
    loss = model(torch.randn(6, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.long
def test_everything_is_recorded_at_the_same_steps(session, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quark.watch(session, model, optimizer, every_n_steps=3, distributions=True) as watch:
        for step in range(10):
            watch.step(step, epoch=0, metadata={"split": "train"})
            watch.mark_data_ready()
            train(model, optimizer)
    due = [0, 3, 6, 9]
    layers = watch.hooks.read()
    assert sorted({record.step for record in layers}) == due
    assert {record.module_name for record in layers} == {"0", "1", "2"}
    assert {record.summary_type for record in layers} == {"activation", "gradient"}
    summaries = watch.parameters.read_summaries()
    assert sorted({record.step for record in summaries}) == due
    weights = [r for r in summaries if r.parameter_name == "0.weight"]
    assert [record.step for record in weights] == due
    for record in weights[1:]:
        # Plain SGD: the update is the gradient times the rate.
        assert record.update_norm == pytest.approx(0.1 * record.gradient_norm, rel=1e-4)
    kinds = {record.distribution_type for record in watch.parameters.read_distributions()}
    assert kinds == {"value", "gradient", "update"}
    timed = watch.telemetry.read()
    assert [record.step for record in timed] == due
    assert all(record.data_time_ms is not None for record in timed)
    assert timed[0].metadata["split"] == "train"


def test_parts_can_be_left_out(session, model):
    with quark.watch(session, model, layers=False, telemetry=False, every_n_steps=1) as watch:
        assert (watch.hooks, watch.telemetry) == (None, None)
        watch.step(0)
    assert {record.step for record in watch.parameters.read_summaries()} == {0}


def test_an_exception_leaves_no_hook_and_no_half_step(session, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(ZeroDivisionError, match="planted"),
        quark.watch(session, model, optimizer, every_n_steps=1) as watch,
    ):
        watch.step(0)
        train(model, optimizer)
        watch.step(1)
        raise ZeroDivisionError("planted")
    assert {record.step for record in watch.parameters.read_summaries()} == {0}
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(InvalidRunStateError, match="closed"):
        watch.step(2)


@pytest.mark.parametrize(
    ("step", "message"),
    [(None, "^step is required"), *((bad, "^step must") for bad in (-1, 1.5, "1", True))],
)
def test_a_bad_step_is_refused(session, model, step, message):
    with (
        quark.watch(session, model, every_n_steps=1) as watch,
        pytest.raises(SchemaValidationError, match=message),
    ):
        watch.step(step)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"include_types": "Linear"}, "include_types must be a tuple of str"),
        ({"include_types": 3}, "include_types must be a tuple of str"),
        ({"include_name_patterns": "head"}, "include_name_patterns must be a tuple of str"),
        ({"layers": None}, "layers must be True or False"),
        ({"parameters": 1}, "parameters must be True or False"),
        ({"distributions": "update"}, "distributions must be True or False"),
        ({"telemetry": "no"}, "telemetry must be True or False"),
    ],
)
def test_bad_arguments_are_refused(session, model, given, message):
    with pytest.raises(SchemaValidationError, match=message):
        quark.watch(session, model, **given)
