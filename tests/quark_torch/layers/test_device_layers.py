"""Layers of a model on a device, held against what hooks of the test saw there."""

import pytest
import torch
from torch import nn

from quark_torch.layers import eager_hooks
from quark_torch.measuring.device_probe import Probe, wait_for_probes
from quark_torch.measuring.measures import DeviceRing, measure

FIELDS = "element_count mean variance std norm minimum maximum nan_count inf_count".split()


class PassedEvent:
    """Of the CPU, whose work is done when the call returns."""

    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def settle(device, monkeypatch):
    """Layers go through a ring, as on a GPU; waits until it is empty."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if device.type == "cuda":
        return lambda: wait_for_probes(30)
    ring = DeviceRing(device, make_event=PassedEvent)
    monkeypatch.setattr(eager_hooks, "find_hooks", lambda: None)  # they read the CPU's memory
    monkeypatch.setattr(eager_hooks, "Probe", lambda: Probe(lambda _: ring))
    return lambda: ring.wait(30)


class Net(nn.Module):
    """In-place and shared modules, and one whose units die."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.flat = nn.Flatten()
        self.out = nn.Linear(8 * 36, 5)
        self.squash = nn.Tanh()
        with torch.no_grad():
            self.norm.bias[0] = -100.0

    def forward(self, values):
        values = self.act(self.norm(self.first(values)))
        values = self.act(values - 1.5)
        return self.squash(self.out(self.flat(values)))


def copy_what_passes(model):
    """Outputs and their gradients on the CPU, by layer, direction and call."""
    seen, calls, handles = {}, {}, []

    def watch(name, module):
        def see(_module, _args, output):
            call = calls[name] = calls.get(name, -1) + 1
            seen[name, "activation", call] = output.detach().cpu().clone()
            output.register_hook(
                lambda gradient: seen.update({(name, "gradient", call): gradient.cpu().clone()})
            )

        handles.append(module.register_forward_hook(see))

    for name, module in model.named_children():
        watch(name, module)
    return seen, handles


def hold_equal(records, seen):
    found = {(r.module_name, r.summary_type, r.call_index): r for r in records}
    assert found.keys() == seen.keys()
    for key, record in found.items():
        expected = measure(seen[key])
        assert record.tensor_shape == tuple(seen[key].shape)
        for name in FIELDS:
            slack = 2e-6 * (expected.std or 0.0) + 1e-30
            assert getattr(record, name) == pytest.approx(
                getattr(expected, name), rel=5e-6, abs=slack
            ), (key, name)


def test_activations_and_gradients(engine, device, settle):
    model = Net().to(device)
    hooks = engine(model)
    for step in range(3):
        # After the engine's own hooks, so that both see what the module gave.
        with hooks.step(step):
            seen, handles = copy_what_passes(model)
            model(torch.randn(4, 3, 8, 8, device=device)).square().sum().backward()
        for handle in handles:
            handle.remove()
        assert settle()
        hold_equal(hooks.read(step=step), seen)
    assert any(r.dead_unit_ratio for r in hooks.read() if r.module_name == "act")


def test_half_precision_and_autocast(engine, device, settle):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    hooks = engine(model)
    with hooks.step(0), torch.autocast(device.type, dtype=torch.bfloat16):
        seen, handles = copy_what_passes(model)
        model(torch.randn(8, 16, device=device)).float().square().sum().backward()
    for handle in handles:
        handle.remove()
    assert settle()
    hold_equal(hooks.read(), seen)


@pytest.mark.gpu
def test_a_probed_step_waits_for_nothing(engine):
    model = Net().cuda()
    values = torch.randn(4, 3, 8, 8, device="cuda")
    hooks = engine(model)
    with hooks.step(0):  # opens the ring, which waits
        model(values).square().sum().backward()
    assert wait_for_probes(30)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with hooks.step(1):
            model(values).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(hooks.read(step=1)) == len(hooks.read(step=0)) == 14
