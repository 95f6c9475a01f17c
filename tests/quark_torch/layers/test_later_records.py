"""Records of a probed step are made on another thread, in order, and are there when asked for."""

import os
import threading

import pytest
import torch
from torch import nn

import quark
from quark_torch.measuring import device_probe
from quark_torch.measuring.device_probe import (
    Probe,
    conclude_later,
    wait_for_conclusions,
    wait_for_probes,
)
from quark_torch.measuring.measures import measure
from quark_torch.measuring.tensor_statistics import Wanted


def make_engine(session, model, **config):
    return quark.HookEngine(session, model, config=quark.HookEngineConfig(**config))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_what_was_read_is_what_the_tensor_was(tmp_path):
    probe, found = Probe(), []
    tensors = [torch.randn(50 + size) for size in range(300)]
    tensors[7] = torch.randn(20, dtype=torch.float64)  # which the kernel may have to read twice
    expected = [measure(tensor.clone(), Wanted(near_zero=0.1)) for tensor in tensors]
    for index, tensor in enumerate(tensors):
        assert probe.add(
            tensor,
            Wanted(near_zero=0.1),
            lambda statistics, index=index: found.append((index, statistics)),
            later=True,
        )
        tensor.fill_(float("nan"))  # what comes after the reading changes nothing
    probe.finish()
    assert wait_for_probes(30)
    assert dict(found) == dict(enumerate(expected))
    assert [index for index, _ in found] == list(range(300))


@pytest.mark.long
def test_a_read_after_the_step_finds_its_records(tmp_path, model):
    with (
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        make_engine(session, model) as hooks,
    ):
        for step in range(5):
            with hooks.step(step):
                model(torch.randn(3, 4)).sum().backward()
            records = hooks.read(step=step)
            assert [r.module_name for r in records] == ["0", "1", "2", "2", "1", "0"]
            assert {thread.name for thread in threading.enumerate()} >= {"quark-probes"}


def test_a_strict_run_makes_them_at_once(tmp_path, model):
    with (
        quark.start_run(project="p", storage_dir=tmp_path, strict_mode=True) as session,
        make_engine(session, model) as hooks,
    ):
        channel = session.open_run.stream.channel("layer")
        drawn = repr(channel.sequence)
        with hooks.step(0):
            model(torch.randn(3, 4))
            assert repr(channel.sequence) != drawn


def test_the_end_of_a_run_waits_for_them(tmp_path, model):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        hooks = make_engine(session, model)
        gate = threading.Event()
        conclude_later(lambda: gate.wait(30))
        with hooks.step(0):
            model(torch.randn(3, 4))
        threading.Timer(0.3, gate.set).start()
    opened = quark.open_run(session.run_id, storage_dir=tmp_path)
    assert len(make_engine(opened, model).read()) == 3


def test_work_that_fails_does_not_stop_what_comes_after_it():
    done = []

    def fail():
        raise ZeroDivisionError("planted")

    conclude_later(fail)
    conclude_later(lambda: done.append(1))
    wait_for_conclusions(30)
    assert done == [1]


def test_waiting_is_bounded():
    gate = threading.Event()
    conclude_later(gate.wait)
    try:
        with pytest.raises(TimeoutError):
            wait_for_conclusions(0.05)
        assert not wait_for_probes(0.05)
    finally:
        gate.set()
    wait_for_conclusions(30)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_a_thread_of_its_own():
    conclude_later(lambda: None)
    wait_for_conclusions(30)
    before = device_probe._conclusions
    child = os.fork()
    if child == 0:
        done = []
        conclude_later(lambda: done.append(1))
        try:
            wait_for_conclusions(60)
        finally:
            os._exit(7 if done and device_probe._conclusions is not before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
