"""What else happens to models and processes while parameters are recorded."""

import copy
import io
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from parameter_scenes import CopiedParameters, assert_statistics, make_classifier, run_backward
from torch import nn

import quark
from quark import EventLogger, ParameterDiagnostics


@pytest.fixture
def scene(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, observe(model, optimizer)


def test_copies_of_model_and_optimizer_are_independent(scene):
    model, optimizer, diagnostics = scene
    run_backward(model)
    optimizer.step()
    average = copy.deepcopy(model)
    twin = copy.deepcopy(optimizer)
    saved = io.BytesIO()
    torch.save((model, optimizer), saved)
    pickle.loads(pickle.dumps(optimizer))
    saved.seek(0)
    loaded_model, loaded_optimizer = torch.load(saved, weights_only=False)
    copied = CopiedParameters(model)
    run_backward(model)
    optimizer.step()
    for other_model, other in ((average, twin), (loaded_model, loaded_optimizer)):
        run_backward(other_model)
        other.step()
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)
    record = diagnostics.snapshot(0)[0][0]
    assert_statistics(record, "update", copied.difference(model, "0.weight"))


def test_copies_of_a_hook_do_nothing(scene):
    _, optimizer, diagnostics = scene
    hooks = [*optimizer._optimizer_step_pre_hooks.values()]
    hooks += optimizer._optimizer_step_post_hooks.values()
    for hook in hooks:
        for twin in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
            assert twin(optimizer, (), {}) is None
    assert diagnostics.kept_bytes == 0
    assert hooks[0](optimizer, (), {}) is None
    assert diagnostics.kept_bytes > 0


def test_loading_states(scene):
    model, optimizer, diagnostics = scene
    for step in range(4):
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        copied = CopiedParameters(model)
        run_backward(model)
        optimizer.step()
        records, _ = diagnostics.snapshot(step)
        assert_statistics(records[0], "update", copied.difference(model, "0.weight"))


@pytest.mark.long
def test_a_compiled_model(observe):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # a reset leaves what tests before have counted
    inner = make_classifier()
    optimizer = torch.optim.Adam(inner.parameters(), lr=0.1)
    diagnostics = observe(inner, optimizer)
    model = torch.compile(inner, backend="eager")
    for step in range(3):
        copied = CopiedParameters(inner)
        optimizer.zero_grad()
        run_backward(model)
        optimizer.step()
        record = diagnostics.snapshot(step)[0][0]
        assert_statistics(record, "update", copied.difference(inner, "0.weight"))
    assert not torch._dynamo.utils.counters["graph_break"]
    # An optimizer that is made now is watched like one that was made before.
    later = torch.optim.SGD(inner.parameters(), lr=0.1)
    watched = observe(model, later)
    run_backward(model)
    later.step()
    assert watched.snapshot(0)[0][0].update_norm > 0


# PyTorch's own, when it traces an optimizer for the first time.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_stays_one_graph(observe):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make_classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer, every=3)
    step_compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for step in range(7):
        copied = CopiedParameters(model)
        run_backward(model)
        step_compiled()
        records, _ = diagnostics.snapshot(step)
        assert bool(records) == (step % 3 == 0)
        if records:
            assert_statistics(records[0], "update", copied.difference(model, "0.weight"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_snapshots_under_other_modes(scene):
    model, optimizer, diagnostics = scene
    run_backward(model)
    optimizer.step()
    with torch.no_grad():
        assert diagnostics.snapshot(0)[0][0].update_norm > 0
    with torch.inference_mode():
        assert_statistics(diagnostics.snapshot(1)[0][0], "value", model[0].weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_statistics(diagnostics.snapshot(2)[0][0], "value", model[0].weight)
    model.eval()
    assert diagnostics.snapshot(3)[0][0].value_norm > 0


def run_threads(work, arguments):
    problems = []

    def guarded(*given):
        try:
            work(*given)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=given) for given in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


@pytest.mark.long
def test_training_in_several_threads(observe):
    def train(model, optimizer, diagnostics):
        for step in range(20):
            copied = CopiedParameters(model)
            optimizer.zero_grad()
            model(torch.ones(1, 20)).sum().backward()
            optimizer.step()
            record = diagnostics.snapshot(step)[0][0]
            assert_statistics(record, "update", copied.difference(model, "weight"))

    scenes = []
    for _ in range(3):
        model = nn.Linear(20, 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scenes.append((model, optimizer, observe(model, optimizer)))
    run_threads(train, scenes)
    assert len(scenes[0][2].read_summaries()) == 3 * 20 * 2


@pytest.mark.long
def test_snapshots_from_several_threads(scene):
    diagnostics = scene[2]
    run_backward(scene[0])

    def take(first):
        for step in range(first, first + 20):
            assert len(diagnostics.snapshot(step)[0]) == 8

    run_threads(take, [(0,), (100,), (200,)])
    records = diagnostics.read_summaries()
    assert len({record.sequence for record in records}) == len(records) == 3 * 20 * 8


FORKING = """
import os, sys, torch, quark
torch.set_num_threads(1)
model = torch.nn.Linear(3, 2)
with quark.start_run(project="p", storage_dir=sys.argv[1]) as session:
    diagnostics = quark.ParameterDiagnostics(session, model)
    diagnostics.snapshot(0)
    child = os.fork()
    if not child:
        records, _ = diagnostics.snapshot(1)
        os._exit(0 if len(records) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    diagnostics.snapshot(2)
    run_id = session.run_id
with quark.open_run(run_id, storage_dir=sys.argv[1]) as reader:
    records = quark.ParameterDiagnostics(reader, model).read_summaries()
assert sorted(record.step for record in records) == [0, 0, 1, 1, 2, 2], records
assert len({record.writer_id for record in records}) == 2
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_records_to_the_same_run(tmp_path):
    command = [sys.executable, "-c", FORKING, str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert finished.returncode == 0, finished.stderr


def test_learning_rate_schedulers(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    diagnostics = observe(model, optimizer)
    for step in range(3):
        run_backward(model)
        optimizer.step()
        record = diagnostics.snapshot(step)[0][0]
        assert record.learning_rate == 0.1 * 0.5**step
        assert record.update_norm > 0
        scheduler.step()


@pytest.mark.parametrize("strict", [False, True])
def test_an_optimizer_without_step_hooks(tmp_path, strict):
    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters):
            self.param_groups = [{"params": [*parameters]}]

        def step(self):
            pass

    model = make_classifier()
    with quark.start_run(project="p", storage_dir=tmp_path, strict_mode=strict) as session:
        if strict:
            with pytest.raises(AttributeError, match="_optimizer_step_pre_hooks"):
                ParameterDiagnostics(session, model, Bare(model.parameters()))
            return
        diagnostics = ParameterDiagnostics(session, model, Bare(model.parameters()))
        record = diagnostics.snapshot(0)[0][0]
        assert record.in_optimizer
        assert record.optimizer_name == "Bare"
        assert record.learning_rate is None
        assert record.metadata == {"update_missing": "optimizer_has_no_step_hooks"}
        (event,) = EventLogger(session).read(event_type="instrumentation_failed")
        assert event.payload["where"] == "optimizer_has_no_step_hooks"


def test_a_wrapper_of_an_optimizer(observe):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self, closure=None):
            return self.optimizer.step(closure)

    model = make_classifier()
    wrapper = Wrapper(torch.optim.Adam(model.parameters()))
    diagnostics = observe(model, wrapper)
    run_backward(model)
    wrapper.step()
    record = diagnostics.snapshot(0)[0][0]
    assert record.optimizer_name == "Adam"
    assert record.update_norm > 0
