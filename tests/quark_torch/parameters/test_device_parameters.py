"""Parameters of a model on a device, held against copies of them on the CPU."""

import math

import pytest
import torch
from parameter_scenes import CopiedParameters, assert_statistics, by_name, make_classifier

from quark_torch.measuring.measures import measure_histogram

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, for each": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, one by one": (torch.optim.AdamW, {"foreach": False}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


def run_backward(model, device, scaler=None, factor=1.0):
    loss = model(torch.randn(5, 1, 8, 8, device=device)).square().mean() * factor
    (loss if scaler is None else scaler.scale(loss)).backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values_gradients_and_updates(observe, device, name):
    kind, options = OPTIMIZERS[name]
    hold_updates(observe, device, kind, options)


@pytest.mark.gpu
def test_an_optimizer_whose_steps_may_be_captured(observe):
    hold_updates(observe, torch.device("cuda"), torch.optim.AdamW, {"capturable": True})


def hold_updates(observe, device, kind, options):
    model = make_classifier().to(device)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    diagnostics = observe(model, optimizer, capture_distributions=True)
    for step in range(3):
        copied = CopiedParameters(model)
        optimizer.zero_grad()
        run_backward(model, device)
        optimizer.step()
        summaries, distributions = diagnostics.snapshot(step)
        parameters = dict(model.named_parameters())
        found = by_name(summaries)
        assert found.keys() == parameters.keys()
        for key, record in found.items():
            assert_statistics(record, "value", parameters[key])
            assert_statistics(record, "gradient", parameters[key].grad)
            assert_statistics(record, "update", copied.difference(model, key))
        for record in distributions:
            if record.distribution_type == "value":
                values = parameters[record.parameter_name].detach().cpu()
                expected = measure_histogram(values, len(record.counts), values.numel())
                assert (record.bin_edges, record.counts) == expected[:2]


def test_a_scaler_divides_and_leaves_out_a_step(observe, device):
    model = make_classifier().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    diagnostics = observe(model, optimizer, grad_scaler=scaler)
    for step in range(3):
        optimizer.zero_grad()
        run_backward(model, device, scaler, math.inf if step == 1 else 1.0)
        gradient = model[0].weight.grad / scaler.get_scale()
        copied = CopiedParameters(model)
        scaler.step(optimizer)
        scaler.update()
        record = diagnostics.snapshot(step)[0][0]
        assert_statistics(record, "update", copied.difference(model, "0.weight"))
        assert (record.metadata == {"skipped": True}) == (step == 1)
        if step != 1:
            assert_statistics(record, "gradient", gradient)
