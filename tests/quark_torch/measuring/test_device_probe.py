"""Probes of devices: tensors of the CPU in the place of a GPU's, and events set by hand."""

import math
import threading

import pytest
import torch
from statistics_reference import check

from quark_torch.measuring import measures
from quark_torch.measuring.device_probe import Probe, wait_for_probes
from quark_torch.measuring.measures import DeviceRing
from quark_torch.measuring.tensor_statistics import Wanted

WANTED = Wanted(0.1, (-1.0, 1.0), 1)


class HeldEvent:
    """Passed by the device only when the test says so."""

    gate = threading.Event()

    def __init__(self):
        self.recorded = 0

    def record(self):
        self.recorded += 1

    def synchronize(self):
        assert self.gate.wait(30)


@pytest.fixture
def ring():
    HeldEvent.gate = threading.Event()
    yield DeviceRing(torch.device("cpu"), slot_count=2, row_count=4, make_event=HeldEvent)
    HeldEvent.gate.set()


def test_on_the_cpu_statistics_come_at_once():
    found = []
    probe = Probe()
    tensor = torch.randn(4, 5)
    assert probe.add(tensor, WANTED, found.append)
    check(found[0], tensor, WANTED)
    assert not probe.add(torch.empty(3, device="meta"), WANTED, found.append)
    probe.finish()
    assert len(found) == 1
    assert probe.dropped == 0
    assert wait_for_probes(1.0)


def test_on_a_device_statistics_come_later_and_on_another_thread(ring, monkeypatch):
    monkeypatch.setattr(measures, "CHUNK", 700)
    torch.manual_seed(0)
    special = torch.randn(3, 4)
    special[0, 0], special[1, 1], special[2] = math.nan, -math.inf, 0.0
    tensors = [
        torch.randn(40, 30) + 100,
        special,
        torch.tensor(2.0).expand(3, 4),
        torch.zeros(0, 3),
        torch.randn(6, 8, dtype=torch.float64).t()[::2],
        torch.randn(5, 4, dtype=torch.complex64),
    ]
    expected = [tensor.clone() for tensor in tensors]
    found, threads = {}, set()
    probe = Probe(lambda _: ring)

    def emitter(index):
        def emit(statistics):
            threads.add(threading.current_thread())
            found[index] = statistics

        return emit

    kept = [probe.add(tensor, WANTED, emitter(index)) for index, tensor in enumerate(tensors)]
    for tensor in tensors[:2]:
        tensor.zero_()  # reduced at once: what comes after does not matter
    probe.finish()
    assert found == {}
    HeldEvent.gate.set()
    assert ring.wait(30)
    assert kept == [True] * len(tensors)
    for index, tensor in enumerate(expected):
        check(found[index], tensor, WANTED)
    assert threading.current_thread() not in threads
    assert found[5].notes == ("complex: of the magnitudes",)


def test_a_probe_without_a_free_slot_is_dropped_and_counted(ring):
    found = []
    tensor = torch.randn(3, 4)
    for _ in range(2):
        probe = Probe(lambda _: ring)
        assert probe.add(tensor, WANTED, found.append)
        probe.finish()
    late = Probe(lambda _: ring)
    assert not late.add(tensor, WANTED, found.append)
    assert not late.add(tensor, WANTED, found.append)
    late.finish()
    assert late.dropped == 2
    assert not ring.wait(0.01)
    HeldEvent.gate.set()
    assert ring.wait(30)
    assert len(found) == 2
    again = Probe(lambda _: ring)
    assert again.add(tensor, WANTED, found.append)
    again.finish()
    assert ring.wait(30)
    assert len(found) == 3


def test_a_probe_takes_more_slots_where_one_is_full(ring):
    HeldEvent.gate.set()
    found = []
    probe = Probe(lambda _: ring)
    added = [probe.add(torch.full((2, 2), float(n)), WANTED, found.append) for n in range(9)]
    probe.finish()
    assert ring.wait(30)
    assert added == [True] * 8 + [False]
    assert [statistics.mean for statistics in found] == [float(n) for n in range(8)]
    assert probe.dropped == 1


def test_a_probe_that_is_never_finished_gives_its_slots_back(ring):
    for _ in range(5):
        probe = Probe(lambda _: ring)
        assert probe.add(torch.ones(2, 2), WANTED, print)
        del probe


def test_a_receiver_that_raises_costs_nobody_else_anything(ring, caplog):
    HeldEvent.gate.set()
    found = []

    def refuse(_):
        raise ValueError("no")

    probe = Probe(lambda _: ring)
    for emit in (refuse, found.append):
        probe.add(torch.ones(2, 2), WANTED, emit)
    probe.finish()
    assert ring.wait(30)
    assert len(found) == 1
    assert "no" in caplog.text


def test_what_would_wait_for_the_device_is_left_out(ring):
    probe = Probe(lambda _: ring)
    assert not probe.add(torch.ones(2, 2).to_sparse(), WANTED, print)
    assert not probe.add(torch.empty(2, 2, device="meta"), WANTED, print)
    assert probe.dropped == 0


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_waited_for():
    tensors = [torch.randn(300, 40, device="cuda") for _ in range(5)]
    warm = Probe()
    warm.add(tensors[0], WANTED, lambda _: None)
    warm.finish()
    assert wait_for_probes(30)
    found = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        probe = Probe()
        for tensor in tensors:
            assert probe.add(tensor, WANTED, found.append)
        probe.finish()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert wait_for_probes(30)
    for statistics, tensor in zip(found, tensors, strict=True):
        check(statistics, tensor.cpu(), WANTED)
