"""Gradients and updates under a GradScaler."""

import math

import pytest
import torch
from parameter_scenes import CopiedParameters, assert_statistics, make_classifier


class ScaledLoop:
    """A training loop with a GradScaler on the CPU."""

    def __init__(self, **arguments):
        self.model = make_classifier()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, **arguments)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(self, *, overflow=False):
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(3, 1, 8, 8)).square().mean()
        self.scaler.scale(loss * (math.inf if overflow else 1.0)).backward()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_grad_scaler_gradients_after_the_step_are_unscaled(observe):
    loop = ScaledLoop()
    diagnostics = observe(loop.model, loop.optimizer, grad_scaler=loop.scaler)
    for step in range(3):
        loop.backward()
        scaled = loop.model[0].weight.grad.clone()
        copied = CopiedParameters(loop.model)
        loop.step()
        record = diagnostics.snapshot(step)[0][0]
        assert_statistics(record, "gradient", scaled / 1024)
        assert_statistics(record, "update", copied.difference(loop.model, "0.weight"))
        assert record.metadata is None


def test_grad_scaler_gradients_before_the_step_are_divided(observe):
    loop = ScaledLoop()
    diagnostics = observe(
        loop.model,
        loop.optimizer,
        grad_scaler=loop.scaler,
        capture_distributions=True,
        distribution_types=("gradient",),
    )
    loop.backward()
    gradient = loop.model[0].weight.grad / 1024
    summaries, distributions = diagnostics.snapshot(0)
    assert_statistics(summaries[0], "gradient", gradient)
    assert summaries[0].metadata["grad_scale"] == 1024.0
    assert distributions[0].bin_edges[0] == pytest.approx(gradient.min().item())
    loop.scaler.unscale_(loop.optimizer)
    record = diagnostics.snapshot(1)[0][0]
    assert_statistics(record, "gradient", gradient)
    assert "grad_scale" not in record.metadata


def test_the_scale_may_come_from_a_function(observe):
    loop = ScaledLoop()
    loop.backward()
    diagnostics = observe(loop.model, loop.optimizer, grad_scaler=lambda: 512.0)
    record = diagnostics.snapshot(0)[0][0]
    assert_statistics(record, "gradient", loop.model[0].weight.grad / 512)


@pytest.mark.parametrize("gives_scaler", [True, False])
@pytest.mark.parametrize("clears", [True, False])
def test_a_step_that_the_scaler_left_out(observe, gives_scaler, clears):
    loop = ScaledLoop()
    scaler = loop.scaler if gives_scaler else None
    diagnostics = observe(loop.model, loop.optimizer, grad_scaler=scaler)
    for step in range(4):
        loop.backward(overflow=step == 2)
        loop.step()
        if clears and step == 2:
            loop.optimizer.zero_grad()
        record = diagnostics.snapshot(step)[0][0]
        if step != 2:
            assert record.update_norm > 0
        else:
            # A scaler that was not given has been seen in the steps before.
            assert record.update_norm == record.update_mean == 0.0
            assert record.update_to_parameter_ratio == 0.0
            assert record.metadata == {"skipped": True}


def test_a_fused_step_that_the_scaler_left_out(observe):
    loop = ScaledLoop(fused=True)
    diagnostics = observe(loop.model, loop.optimizer, grad_scaler=loop.scaler)
    for step in range(3):
        loop.backward(overflow=step == 1)
        loop.step()
        record = diagnostics.snapshot(step)[0][0]
        assert (record.update_norm == 0.0) == (step == 1)
        assert (record.metadata == {"skipped": True}) == (step == 1)
