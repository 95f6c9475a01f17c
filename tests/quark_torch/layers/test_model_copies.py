"""Copies and pickles of a model, made during a probe and outside of one."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from quark_torch.layers.recording import InertHook


def small():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch])
@pytest.mark.parametrize("compiled", [None, True])
def test_copies_carry_inert_hooks_at_most(engine, duplicate, compiled):
    model = small()
    hooks = engine(model, compiled=compiled)
    values = torch.randn(3, 4)
    outside = duplicate(model)
    with hooks.step(0):
        model(values).sum().backward()
        during = duplicate(model)
        assert torch.equal(during(values), model(values))
        during(values).sum().backward()
        outside(values).sum().backward()
    # What the model itself was called for, twice; the copies came and went unseen.
    activations = hooks.read(module_name="0", summary_type="activation")
    assert [record.call_index for record in activations] == [0, 1]
    for each in (during, outside):
        left = [hook for m in each.modules() for hook in m._forward_hooks.values()]
        assert all(type(hook) is InertHook for hook in left)
        assert each(values) is not None
    hooks.close()
    assert not [hook for m in model.modules() for hook in m._forward_hooks.values()]


def test_averaged_models_are_not_seen(engine):
    model = small()
    hooks = engine(model)
    with hooks.step(0):
        averaged = torch.optim.swa_utils.AveragedModel(model)
        model(torch.randn(3, 4)).sum().backward()
        averaged(torch.randn(3, 4))
    averaged.update_parameters(model)
    averaged(torch.randn(3, 4))
    assert len(hooks.read(summary_type="activation")) == 3


def test_shallow_copies_are_not_the_module(engine):
    model = small()
    hooks = engine(model, capture_backward=False)
    with hooks.step(0):
        shallow = copy.copy(model[0])
        shallow(torch.randn(3, 4))
    assert hooks.read() == ()


def test_an_output_can_be_copied_and_saved_while_it_has_a_hook(engine):
    model = small()
    hooks = engine(model)
    with hooks.step(0):
        output = model(torch.randn(3, 4))
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        torch.save(output.detach(), saved)
        output.sum().backward()
    assert len(hooks.read()) == 6
