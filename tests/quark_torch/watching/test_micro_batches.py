"""Loops whose steps are not their optimizer's: micro-batches, samples, epochs, two optimizers."""

import pytest
import torch
from torch import nn

import quark


@pytest.fixture
def session(tmp_path):
    torch.manual_seed(0)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        yield session


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def backward(model, share=1.0):
    (model(torch.randn(6, 4)).square().mean() * share).backward()


class Expected:
    """What each snapshot has to say, by the step at which the optimizer steps."""

    def __init__(self, model):
        self.model = model
        self.gradients = {}
        self.updates = {}

    def step(self, at, optimizer):
        weight = self.model[0].weight
        before = weight.detach().clone()
        self.gradients[at] = weight.grad.norm().item()
        optimizer.step()
        self.updates[at] = (weight.detach() - before).norm().item()

    def check(self, records):
        for record in records:
            assert record.gradient_norm == pytest.approx(self.gradients[record.step], rel=1e-4)
            assert record.update_norm == pytest.approx(self.updates[record.step], rel=1e-4)


def read(watch, name="0.weight"):
    return [r for r in watch.parameters.read_summaries() if r.parameter_name == name]


def find_layer_steps(watch, name="0"):
    return sorted({r.step for r in watch.hooks.read(module_name=name)})


@pytest.mark.sampled
@pytest.mark.parametrize("clears", ["before", "after"])
@pytest.mark.parametrize(("every", "count"), [(1, 9), (2, 9), (5, 8), (50, 1)])
def test_every_snapshot_is_of_a_whole_step_of_the_optimizer(session, clears, every, count):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = Expected(model)
    with quark.watch(session, model, optimizer, every_n_steps=every) as watch:
        for index in range(36):
            watch.step(index)
            if clears == "before" and index % 4 == 0:
                optimizer.zero_grad()
            backward(model, 0.25)
            if index % 4 == 3:
                expected.step(index, optimizer)
                if clears == "after":
                    optimizer.zero_grad()
    records = read(watch)
    assert len(records) == count
    assert all(record.step % 4 == 3 for record in records)
    if clears == "after":
        # Nothing was known of the loop yet.
        assert records[0].metadata == {"gradient_missing": "cleared_before_snapshot"}
        assert records.pop(0).update_norm == pytest.approx(expected.updates[3], rel=1e-4)
    expected.check(records)
    assert {record.metadata["accumulated"] for record in records} <= {4}
    # Once the loop is known, layers are looked at in the same steps.
    taken = {record.step for record in records if record.step > 3}
    assert {step for step in find_layer_steps(watch) if step > 3} == taken


def test_a_number_of_micro_batches_that_changes(session):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = Expected(model)
    index, sizes = 0, {}
    with quark.watch(session, model, optimizer, every_n_steps=3) as watch:
        for size in (1, 1, 1, 1, 6, 6, 6, 2, 2, 2, 2, 6, 1, 1, 1):
            for part in range(size):
                watch.step(index)
                if part == 0:
                    optimizer.zero_grad()
                backward(model)
                if part == size - 1:
                    expected.step(index, optimizer)
                    sizes[index] = size
                index += 1
    records = read(watch)
    updated = [record for record in records if record.update_norm is not None]
    expected.check(updated)
    for record in updated:
        # Where it was not foreseen that the step is long, the number is not known.
        assert (record.metadata or {}).get("accumulated", 1) in (1, sizes[record.step])
    # At most the first after each growth is not of a step of the optimizer.
    assert len(records) - len(updated) <= 2
    assert len(updated) >= 8
    assert len(find_layer_steps(watch)) >= 8


@pytest.mark.long
def test_a_loop_that_counts_samples(session):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = Expected(model)
    with quark.watch(session, model, optimizer, every_n_steps=100) as watch:
        for seen in range(0, 1000, 32):
            watch.step(seen)
            optimizer.zero_grad()
            backward(model)
            expected.step(seen, optimizer)
    steps = [0, 128, 224, 320, 416, 512, 608, 704, 800, 928]
    assert [record.step for record in read(watch)] == steps
    expected.check(read(watch))
    assert find_layer_steps(watch) == steps


def test_a_loop_that_counts_epochs(session):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = Expected(model)
    with quark.watch(session, model, optimizer, every_n_steps=1) as watch:
        for epoch in range(4):
            watch.step(epoch)
            for _ in range(5):
                optimizer.zero_grad()
                backward(model)
                expected.step(epoch, optimizer)
    assert [record.step for record in read(watch)] == [0, 1, 2, 3]
    expected.check(read(watch))


def test_counters_that_begin_anew_in_each_epoch(session):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quark.watch(session, model, optimizer, every_n_steps=4) as watch:
        for epoch in range(3):
            for index in range(7):
                watch.step(index, epoch=epoch)
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
    found = [(record.epoch, record.step) for record in read(watch)]
    assert found == [(epoch, step) for epoch in range(3) for step in (0, 4)]
    # What follows the last step of an epoch was foreseen as another one.
    assert [record.update_norm is not None for record in read(watch)].count(True) >= 4


@pytest.mark.sampled
@pytest.mark.parametrize(("every", "second_steps"), [(50, [54, 104, 154]), (1, None)])
def test_two_optimizers_of_which_one_steps_rarely(session, every, second_steps):
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 4)})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in model}
    with quark.watch(session, model, list(optimizers.values()), every_n_steps=every) as watch:
        for index in range(170):
            watch.step(index)
            for name in ("d", "g"):
                if name == "d" or index % 5 == 4:
                    optimizers[name].zero_grad()
                    model["g"](model["d"](torch.randn(3, 4))).square().sum().backward()
                    optimizers[name].step()
    first, second = read(watch, "d.weight"), read(watch, "g.weight")
    assert all(record.update_norm is not None for record in first)
    if second_steps is None:
        # It is not waited for where snapshots are wanted oftener than it steps.
        assert len(first) == 170
        moved = [record.step for record in second if record.update_norm is not None]
        assert moved == list(range(4, 170, 5))
    else:
        assert [record.step for record in second] == [0, *second_steps]
        assert [record.update_norm is None for record in second] == [True, False, False, False]


def test_an_optimizer_that_never_steps_is_not_waited_for_for_ever(session):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quark.watch(session, model, optimizer, every_n_steps=10) as watch:
        for index in range(100):
            watch.step(index)
            backward(model)
    records = read(watch)
    assert len(records) >= 6
    assert {record.metadata["update_missing"] for record in records} == {"no_optimizer_step"}


def test_a_short_training_without_a_step_has_its_snapshot_at_the_end(session):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quark.watch(session, model, optimizer, every_n_steps=10) as watch:
        for index in range(3):
            watch.step(index)
            backward(model)
    (record,) = read(watch)
    assert record.step == 2
    assert record.value_norm == pytest.approx(model[0].weight.norm().item())


def test_a_step_that_the_scaler_left_out_is_not_waited_for(session):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with quark.watch(session, model, optimizer, every_n_steps=4, grad_scaler=scaler) as watch:
        for index in range(12):
            watch.step(index)
            optimizer.zero_grad()
            factor = torch.inf if index in (2, 8) else 1.0
            scaler.scale(model(torch.randn(6, 4)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    records = read(watch)
    assert [record.step for record in records] == [0, 4, 8]
    assert records[1].metadata is None
    assert records[1].update_norm > 0
    assert (records[2].update_norm, records[2].metadata) == (0.0, {"skipped": True})


@pytest.mark.sampled
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_training_is_the_same_to_the_last_bit(tmp_path, micro_batches):
    def run(session):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        watch = session and quark.watch(session, model, optimizer, every_n_steps=3)
        for index in range(40):
            if watch is not None:
                watch.step(index)
            backward(model)
            if index % micro_batches == micro_batches - 1:
                optimizer.step()
                optimizer.zero_grad()
        if watch is not None:
            watch.close()
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        watched = run(session)
    assert torch.equal(watched, run(None))
