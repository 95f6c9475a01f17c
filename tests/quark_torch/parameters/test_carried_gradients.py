"""Gradients that a step has used and nobody has cleared; steps in evaluation mode."""

import pytest
import torch
from torch import nn

from quark_torch.parameters.optimizers import OptimizerPace


def make(momentum=0.0):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=momentum)


def run_backward(model):
    model(torch.randn(3, 4)).square().sum().backward()


def clear_to_none(optimizer):
    optimizer.zero_grad()


def clear_to_zero(optimizer):
    optimizer.zero_grad(set_to_none=False)


def leave(_optimizer):
    """Clear nothing."""


def marks(records):
    return {bool((record.metadata or {}).get("carried_over")) for record in records}


@pytest.mark.sampled
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("clear", [clear_to_none, clear_to_zero, leave])
def test_what_is_not_cleared_is_told(observe, clear, is_first, every):
    model, optimizer = make()
    diagnostics = observe(model, optimizer, every=every)
    found = {}
    for step in range(10):
        if is_first:
            clear(optimizer)
        run_backward(model)
        optimizer.step()
        if not is_first:
            clear(optimizer)
        records, _ = diagnostics.snapshot(step)
        if records:
            found[step] = marks(records)
    assert found.pop(0) == {False}
    expected = {True} if clear is leave else {False}
    assert len(found) == len(range(every, 10, every))
    assert all(each == expected for each in found.values())


def clear_head(model):
    model[2].zero_grad()


def clear_body(model):
    model[0].zero_grad()


def clear_one_after_the_other(model):
    model[2].zero_grad()
    model[0].zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    ("clear", "held"),
    [(clear_head, {"0.weight", "0.bias"}), (clear_body, None), (clear_one_after_the_other, set())],
)
@pytest.mark.parametrize("every", [1, 3])
def test_a_part_that_is_not_cleared_is_told_by_its_parameters(observe, clear, held, every):
    model, optimizer = make()
    diagnostics = observe(model, optimizer, every=every)
    told = []
    for step in range(10):
        clear(model)
        run_backward(model)
        optimizer.step()
        records, _ = diagnostics.snapshot(step)
        if records:
            told.append(
                {
                    record.parameter_name
                    for record in records
                    if (record.metadata or {}).get("carried_over")
                }
            )
    assert told[0] == set()
    # Where the last parameter has it, that is said of the whole optimizer.
    everything = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(names == (everything if held is None else held) for names in told[1:])


@pytest.mark.sampled
@pytest.mark.parametrize("every", [1, 4, 5])
def test_accumulation_is_not_that(observe, every):
    model, optimizer = make()
    diagnostics = observe(model, optimizer, every=every)
    for step in range(40):
        run_backward(model)
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        assert True not in marks(diagnostics.snapshot(step)[0])


@pytest.mark.sampled
@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("every", [2, 6])
def test_micro_batches_as_steps_of_the_loop(observe, every, clears):
    model, optimizer = make()
    diagnostics = observe(model, optimizer, every=every)
    pace = OptimizerPace(every)
    told = []
    for step in range(48):
        run_backward(model)
        if step % 4 == 3:
            optimizer.step()
            if clears:
                optimizer.zero_grad()
        told.append(marks(diagnostics.keep_pace(pace, step)[0]))
    seen = [each for each in told if each]
    assert len(seen) >= 5
    assert (True in set().union(*seen[2:])) is not clears
    if clears:
        assert {True} not in seen


def test_the_discriminator_gets_gradients_from_the_generator(observe):
    generator, of_generator = make()
    judge = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
    of_judge = torch.optim.SGD(judge.parameters(), lr=1e-2)
    model = nn.ModuleList([generator, judge])
    for generator_first in (True, False):
        diagnostics = observe(model, [of_generator, of_judge])
        for step in range(6):
            turns = [(of_generator, False), (of_judge, True)]
            for optimizer, is_judge in turns if generator_first else reversed(turns):
                optimizer.zero_grad()
                fake = generator(torch.randn(3, 4))
                judge(fake.detach() if is_judge else fake).sum().backward()
                optimizer.step()
            assert True not in marks(diagnostics.snapshot(step)[0])
        diagnostics.close()


def test_an_optimizer_with_a_closure(observe):
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    diagnostics = observe(model, optimizer)

    def close():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    for step in range(4):
        optimizer.step(close)
        assert True not in marks(diagnostics.snapshot(step)[0])


def modes(records):
    return {(record.metadata or {}).get("evaluation_mode", False) for record in records}


def step_once(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(6, 4)).square().sum().backward()
    optimizer.step()


def test_a_model_that_was_left_in_evaluation_mode(observe):
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    diagnostics = observe(model, optimizer)
    for step, is_training in enumerate((True, False, True)):
        model.train(is_training)
        step_once(model, optimizer)
        model.train()
        assert modes(diagnostics.snapshot(step)[0]) == {not is_training}


def test_a_frozen_body_in_evaluation_mode_is_meant_to_be(observe):
    body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).requires_grad_(False)
    model = nn.Sequential(body, nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1e-2)
    diagnostics = observe(model, optimizer)
    model.eval()
    for step in range(2):
        step_once(model, optimizer)
        assert modes(diagnostics.snapshot(step)[0]) == {False}


def test_a_model_in_which_no_mode_matters(observe):
    model, optimizer = make()
    diagnostics = observe(model.eval(), optimizer)
    step_once(model, optimizer)
    assert modes(diagnostics.snapshot(0)[0]) == {False}
