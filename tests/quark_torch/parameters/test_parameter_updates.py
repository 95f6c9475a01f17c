"""The optimizer's true update, under every optimizer and every way of stepping."""

import pytest
import torch
from parameter_scenes import (
    CopiedParameters,
    assert_statistics,
    by_name,
    make_classifier,
    run_backward,
)
from torch import nn

from quark_torch.schedule import HookScheduleConfig

OPTIMIZERS = sorted(
    name
    for name in dir(torch.optim)
    if isinstance(getattr(torch.optim, name), type) and name != "Optimizer"
)


def make_optimizer(name, model):
    if name == "Muon":
        # Takes matrices only.
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)
    if name == "SparseAdam":
        return torch.optim.SparseAdam([model.weight], lr=0.01)
    return getattr(torch.optim, name)(model.parameters(), lr=0.01)


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(observe, name):
    model = nn.Embedding(9, 4, sparse=True) if name == "SparseAdam" else make_classifier()
    optimizer = make_optimizer(name, model)
    diagnostics = observe(model, optimizer)

    def compute():
        optimizer.zero_grad()
        if name == "SparseAdam":
            loss = model(torch.tensor([1, 2, 2])).square().sum()
        else:
            loss = model(torch.ones(2, 1, 8, 8)).square().mean()
        loss.backward()
        return loss

    for step in range(3):
        copied = CopiedParameters(model)
        if name == "LBFGS":
            optimizer.step(compute)
        else:
            compute()
            optimizer.step()
        found = by_name(diagnostics.snapshot(step)[0])
        for key, record in found.items():
            if not record.in_optimizer:
                assert name == "Muon"
                assert record.update_norm is None
                continue
            assert record.optimizer_name == name
            assert record.learning_rate == 0.01
            update = copied.difference(model, key)
            assert_statistics(record, "update", update)
            before = copied.before[key].double().norm().item()
            if before:
                ratio = update.norm().item() / before
                assert record.update_to_parameter_ratio == pytest.approx(ratio, rel=1e-5)
        assert any(record.update_norm for record in found.values())


@pytest.mark.parametrize(
    "arguments",
    [{"foreach": True}, {"foreach": False}, {"fused": True}, {"lr": torch.tensor(0.01)}],
)
def test_implementations_of_one_optimizer(observe, arguments):
    model = make_classifier()
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **arguments})
    diagnostics = observe(model, optimizer)
    copied = CopiedParameters(model)
    run_backward(model)
    optimizer.step()
    for key, record in by_name(diagnostics.snapshot(0)[0]).items():
        assert_statistics(record, "update", copied.difference(model, key))
        assert record.learning_rate == pytest.approx(0.01)
        assert record.weight_decay == 0.01


def train(model, optimizer, diagnostics, steps):
    """Update norms by step, and what they really were."""
    found, real = {}, {}
    for step in steps:
        copied = CopiedParameters(model)
        optimizer.zero_grad()
        run_backward(model)
        optimizer.step()
        records, _ = diagnostics.snapshot(step)
        if records:
            found[step] = records[0].update_norm
            real[step] = copied.difference(model, records[0].parameter_name).norm().item()
    return found, real


@pytest.mark.sampled
@pytest.mark.parametrize("steps", [range(41), range(0, 400, 10), range(1000, 1041)])
def test_cadences_are_foreseen(observe, steps):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer, every=10)
    found, real = train(model, optimizer, diagnostics, steps)
    assert list(found) == [step for step in steps if step % 10 == 0]
    assert found == pytest.approx(real, rel=1e-5)


@pytest.mark.long
def test_nothing_is_copied_for_a_step_that_is_not_due(observe, monkeypatch):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer, every=10)
    copies = []
    original = torch._foreach_copy_

    def count(*arguments):
        copies.append(len(arguments[0]))
        return original(*arguments)

    monkeypatch.setattr(torch, "_foreach_copy_", count)
    train(model, optimizer, diagnostics, range(31))
    # Before steps 0, 10, 20 and 30; and 1, when one snapshot had told nothing of the loop yet.
    assert copies == [8] * 5


def test_explicit_steps(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = HookScheduleConfig(every_n_steps=None, explicit_steps=(3, 4, 11))
    found, real = train(model, optimizer, observe(model, optimizer, schedule=schedule), range(15))
    assert list(found) == [3, 4, 11]
    assert found == pytest.approx(real, rel=1e-5)


def test_a_wrong_forecast_gives_no_update_and_says_so(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer, every=10)
    train(model, optimizer, diagnostics, range(5))
    run_backward(model)
    optimizer.step()
    records, _ = diagnostics.snapshot(20)  # the loop jumps
    for record in records:
        assert record.update_norm is None
        assert record.update_to_parameter_ratio is None
        assert record.metadata == {"update_missing": "step_not_foreseen"}
        assert record.value_norm is not None


def test_several_steps_between_snapshots_are_not_sold_as_one(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer)
    for step, count in enumerate((1, 3, 3, 2, 5)):
        for _ in range(count):
            copied = CopiedParameters(model)
            optimizer.zero_grad()
            run_backward(model)
            optimizer.step()
        record = diagnostics.snapshot(step)[0][0]
        if count == 2:  # fewer than ever
            assert record.update_norm is None
            assert record.metadata == {"update_missing": "step_not_foreseen"}
        else:
            assert_statistics(record, "update", copied.difference(model, "0.weight"))


@pytest.mark.long
def test_a_loop_that_asks_only_when_due(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer, every=25)
    for step in range(101):
        copied = CopiedParameters(model)
        optimizer.zero_grad()
        run_backward(model, shape=(1, 1, 8, 8))
        optimizer.step()
        if step % 25 == 0:
            record = diagnostics.snapshot(step)[0][0]
            assert_statistics(record, "update", copied.difference(model, "0.weight"))


def test_before_the_first_snapshot_only_some_steps_are_copied(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer)
    for _ in range(8):
        optimizer.step()
    assert diagnostics.kept_bytes == 4 * sum(p.numel() for p in model.parameters())
    for _ in range(32):
        optimizer.step()
    assert diagnostics.kept_bytes == 0
    run_backward(model)
    optimizer.step()
    assert diagnostics.snapshot(0)[0][0].metadata == {"update_missing": "step_not_foreseen"}
    optimizer.step()
    assert diagnostics.snapshot(1)[0][0].update_norm > 0


def test_gradient_accumulation(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer)
    for step in range(12):
        run_backward(model)
        is_last = step % 4 == 3
        copied = CopiedParameters(model)
        if is_last:
            optimizer.step()
        record = diagnostics.snapshot(step)[0][0]
        # The running sum of the micro-batches, as it is.
        assert_statistics(record, "gradient", model[0].weight.grad)
        if is_last:
            assert_statistics(record, "update", copied.difference(model, "0.weight"))
            optimizer.zero_grad()
        else:
            assert record.update_norm is None
            assert record.metadata["update_missing"] == "no_optimizer_step"
        assert (record.metadata or {}).get("accumulated", 1) == 1 + step % 4


def test_several_optimizers(observe):
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 3), "rest": nn.Linear(3, 3)})
    first = torch.optim.Adam(model["g"].parameters(), lr=0.1)
    second = torch.optim.SGD(
        [
            {"params": [model["d"].weight], "name": "weights"},
            {"params": [model["d"].bias], "lr": 0.5, "weight_decay": 0.25},
        ],
        lr=0.2,
    )
    diagnostics = observe(model, [first, second])
    for step in range(3):
        for _ in range(2):  # the second steps twice as often
            copied = CopiedParameters(model)
            second.zero_grad()
            sum(module(torch.randn(3)).square().sum() for module in model.values()).backward()
            second.step()
        first.step()
        found = by_name(diagnostics.snapshot(step)[0])
        for name in ("g.weight", "g.bias", "d.weight", "d.bias"):
            assert_statistics(found[name], "update", copied.difference(model, name))
    assert found["g.weight"].optimizer_name == "Adam"
    assert found["d.weight"].optimizer_name == "SGD"
    assert found["d.weight"].optimizer_group_name == "weights"
    assert found["d.weight"].learning_rate == 0.2
    assert found["d.bias"].optimizer_group_index == 1
    assert found["d.bias"].optimizer_group_name is None
    assert (found["d.bias"].learning_rate, found["d.bias"].weight_decay) == (0.5, 0.25)
    rest = found["rest.weight"]
    assert rest.in_optimizer is False
    assert rest.gradient_norm > 0
    assert (rest.optimizer_name, rest.optimizer_group_index, rest.learning_rate) == (None,) * 3
    assert rest.update_norm is None


def test_one_optimizer_steps_and_the_other_does_not(observe):
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    first, second = (torch.optim.SGD(module.parameters(), lr=0.1) for module in model)
    diagnostics = observe(model, {"first": first, "second": second})
    for step in range(4):
        sum(module(torch.randn(3)).sum() for module in model).backward()
        (first if step % 2 else second).step()
        found = by_name(diagnostics.snapshot(step)[0])
        moved, still = ("0.weight", "1.weight") if step % 2 else ("1.weight", "0.weight")
        assert found[moved].update_norm > 0
        assert found[still].update_norm is None
        assert found[still].metadata["update_missing"] == "no_optimizer_step"


def test_an_optimizer_for_each_parameter_in_backward(observe):
    model = make_classifier()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_at_once(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    diagnostics = observe(model, list(optimizers.values()))
    for step in range(3):
        copied = CopiedParameters(model)
        run_backward(model)
        found = by_name(diagnostics.snapshot(step)[0])
        for name, record in found.items():
            update = copied.difference(model, name)
            assert_statistics(record, "update", update)
            if step == 0:
                assert record.gradient_norm is None
                assert record.metadata == {"gradient_missing": "cleared_before_snapshot"}
            elif name in ("4.weight", "6.weight"):
                assert_statistics(record, "gradient", update / -0.1, rel=1e-4)
            else:
                assert record.gradient_norm > 0


@pytest.mark.sampled
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_cleared_before_the_snapshot_are_read_earlier(observe, set_to_none):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(
        model, optimizer, every=2, capture_distributions=True, distribution_types=("gradient",)
    )
    for step in range(7):
        run_backward(model)
        gradient = model[0].weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        summaries, distributions = diagnostics.snapshot(step)
        if step == 0:
            assert summaries[0].gradient_norm is None
            assert summaries[0].metadata["gradient_missing"] == "cleared_before_snapshot"
            assert distributions == ()
        elif step % 2 == 0:
            assert_statistics(summaries[0], "gradient", gradient)
            assert distributions[0].total_count == gradient.numel()
            assert distributions[0].bin_edges[0] == gradient.min().item()
            assert summaries[0].metadata is None


def test_gradients_that_are_zero_are_not_taken_for_cleared(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer)
    run_backward(model, scale=0.0)
    optimizer.step()
    record = diagnostics.snapshot(0)[0][0]
    assert record.gradient_norm == 0.0
    assert record.gradient_near_zero_ratio == 1.0
    assert record.update_norm == 0.0
    assert record.metadata is None


def test_a_step_that_raises(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer)

    def fail():
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        optimizer.step(fail)
    assert diagnostics.snapshot(0)[0][0].metadata == {"update_missing": "optimizer_step_failed"}
    run_backward(model)
    optimizer.step()
    assert diagnostics.snapshot(1)[0][0].update_norm > 0


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_frozen_layer_that_the_optimizer_still_moves(observe, name):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    arguments = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.5}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **arguments)
    diagnostics = observe(model, optimizer)
    for step in range(4):
        if step == 2:
            # Its gradient stays, as it does where layers are frozen after backward.
            model[0].requires_grad_(False)
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(3, 4)).square().sum().backward()
        copied = CopiedParameters(model)
        optimizer.step()
        found = by_name(diagnostics.snapshot(step)[0])
        frozen = found["0.weight"]
        before, after = copied.before["0.weight"].double(), model[0].weight.detach().double()
        moved = (after - before).norm().item()
        assert frozen.requires_grad is (step < 2)
        assert moved > 0
        assert frozen.update_norm == pytest.approx(moved, rel=1e-4)
        assert frozen.update_to_parameter_ratio == pytest.approx(
            moved / before.norm().item(), rel=1e-4
        )


def test_a_frozen_layer_that_moves_unforeseen_says_so(observe):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer, every=3)
    model(torch.randn(3, 4)).square().sum().backward()
    for step in (0, 1, 3):
        optimizer.step()
        model[0].requires_grad_(False)
        found = by_name(diagnostics.snapshot(step)[0])
    assert found["0.weight"].metadata == found["1.weight"].metadata
    assert found["0.weight"].metadata["update_missing"] == "step_not_foreseen"


def test_a_frozen_layer_without_a_gradient_has_no_update(observe):
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer)
    for step in range(2):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        found = by_name(diagnostics.snapshot(step)[0])
    assert found["0.weight"].update_norm is None
    assert found["0.weight"].metadata is None


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["data", "in place"])
def test_clipping_weights_after_the_step_is_no_part_of_the_update(observe, how):
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    diagnostics = observe(
        model,
        optimizer,
        capture_distributions=True,
        distribution_types=("update",),
    )
    found, histograms = {}, {}
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().sum().backward()
        copied = CopiedParameters(model)
        optimizer.step()
        stepped = model[0].weight.detach().clone()
        if step:
            for parameter in model.parameters():
                if how == "data":
                    parameter.data.clamp_(-0.01, 0.01)
                else:
                    with torch.no_grad():
                        parameter.clamp_(-0.01, 0.01)
        summaries, distributions = diagnostics.snapshot(step)
        found[step] = by_name(summaries)["0.weight"]
        histograms[step] = [d for d in distributions if d.parameter_name == "0.weight"]
        if step != 1:
            update = (stepped - copied.before["0.weight"]).double()
            assert found[step].update_norm == pytest.approx(update.norm().item(), rel=1e-4)
            ratio = update.norm() / copied.before["0.weight"].double().norm()
            assert found[step].update_to_parameter_ratio == pytest.approx(ratio.item(), rel=1e-4)
            (histogram,) = histograms[step]
            assert histogram.bin_edges[-1] == pytest.approx(update.max().item(), rel=1e-4)
        assert found[step].value_max == pytest.approx(model[0].weight.max().item())
    assert found[0].metadata is None
    assert found[1].update_norm is None
    assert found[1].metadata["update_missing"] == "changed_after_step"
    assert not histograms[1]
    assert found[2].metadata == found[3].metadata == {"changed_after_step": True}


def test_weights_that_are_not_a_number_are_not_taken_for_changed(observe):
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight[0] = torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        found = by_name(diagnostics.snapshot(step)[0])
    assert found["weight"].metadata is None
