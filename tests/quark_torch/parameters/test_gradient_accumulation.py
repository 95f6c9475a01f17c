"""How many micro-batches a gradient sums up, as the records of parameters say."""

import copy
import pickle

import pytest
import torch
from parameter_scenes import make_classifier, run_backward
from torch import nn
from torch._dynamo.utils import counters


def find_accumulated(summaries):
    """What all records with a gradient agree on."""
    (found,) = {
        (record.metadata or {}).get("accumulated")
        for record in summaries
        if record.gradient_norm is not None
    }
    return found


def count_hooks(model):
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("is_clipped", [False, True])
def test_a_loop_that_accumulates(observe, to_none, every, is_clipped):
    model = make_classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    diagnostics = observe(model, optimizer, every=every)
    for step in range(7):
        optimizer.zero_grad(set_to_none=to_none)
        for _ in range(1 + step % 4):
            run_backward(model)
        if is_clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        summaries, _ = diagnostics.snapshot(step)
        if step % every == 0:
            expected = None if step % 4 == 0 else 1 + step % 4
            assert find_accumulated(summaries) == expected, step


def test_a_snapshot_for_each_micro_batch(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer)
    found = []
    for step in range(8):
        run_backward(model)
        if step % 4 == 3:
            optimizer.step()
        found.append(find_accumulated(diagnostics.snapshot(step)[0]))
        if step % 4 == 3:
            optimizer.zero_grad()
    assert found == [None, 2, 3, 4, None, 2, 3, 4]


def test_what_cannot_be_known_is_left_out(observe):
    """The snapshots that are due come in between micro-batches of the same step."""
    model = make_classifier()
    diagnostics = observe(model, torch.optim.SGD(model.parameters(), lr=0.1), every=3)
    found = []
    for step in range(7):
        run_backward(model)
        found.append(diagnostics.snapshot(step)[0])
    assert [find_accumulated(found[step]) for step in (0, 3, 6)] == [None, None, None]


def test_clipping_each_micro_batch_makes_it_unknown(observe):
    model = make_classifier()
    diagnostics = observe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        run_backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert find_accumulated(diagnostics.snapshot(0)[0]) is None


def test_each_optimizer_has_its_own_number(observe):
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.ModuleList([first, second])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    diagnostics = observe(model, optimizers)
    for part, times in ((first, 3), (second, 2)):
        for _ in range(times):
            part(torch.randn(2, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    found = {r.parameter_name: r.metadata["accumulated"] for r in diagnostics.snapshot(0)[0]}
    assert found == {"0.weight": 3, "0.bias": 3, "1.weight": 2, "1.bias": 2}


def test_a_closure_that_runs_often_counts_once(observe):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    diagnostics = observe(model, optimizer)

    def close():
        optimizer.zero_grad()
        return run_backward(model, shape=(4, 3))

    optimizer.step(close)
    assert find_accumulated(diagnostics.snapshot(0)[0]) is None


def test_without_an_optimizer(observe):
    model = make_classifier()
    diagnostics = observe(model)
    for _ in range(3):
        run_backward(model)
    assert find_accumulated(diagnostics.snapshot(0)[0]) == 3


@pytest.mark.long
def test_a_step_that_is_not_due_has_no_hooks(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer, every=4)
    there = []
    for step in range(9):
        optimizer.zero_grad()
        run_backward(model)
        there.append(count_hooks(model))
        optimizer.step()
        diagnostics.snapshot(step)
    # Before the second snapshot nothing is known of the loop.
    # One counts the passes, three more are watched for what is not cleared.
    assert there == [4, 4, 0, 0, 4, 0, 0, 0, 4]
    diagnostics.close()
    assert count_hooks(model) == 0


def test_copies_and_pickles_of_the_model_are_free_of_it(observe):
    model = make_classifier()
    observe(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert count_hooks(other) == 0
        run_backward(other)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_not_compiled_again(observe):
    torch._dynamo.reset()
    counters.clear()
    inner = make_classifier()
    model = torch.compile(inner, backend="aot_eager")
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer, every=3)
    for step in range(7):
        optimizer.zero_grad()
        for _ in range(2):
            run_backward(model)
        optimizer.step()
        summaries, _ = diagnostics.snapshot(step)
        if step % 3 == 0:
            assert find_accumulated(summaries) == 2
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
