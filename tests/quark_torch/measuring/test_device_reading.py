"""What is reduced on a device, held against the CPU's statistics of the same tensors."""

import math

import pytest
import torch
from statistics_reference import check

from quark_torch.measuring import device_probe, measures
from quark_torch.measuring.device_probe import Probe, wait_for_probes
from quark_torch.measuring.measures import (
    DeviceRing,
    measure,
    measure_histogram,
    measure_many,
    measure_update,
)
from quark_torch.measuring.tensor_statistics import Wanted

WANTED = Wanted(0.1, (-1.0, 1.0), 1)


class PassedEvent:
    """Of the CPU, whose work is done when the call returns."""

    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def read(device):
    """Statistics of tensors of a device, through a ring of its own."""
    torch.manual_seed(0)
    if device.type == "cuda":
        open_probe = Probe
    else:
        ring = DeviceRing(device, make_event=PassedEvent)

        def open_probe():
            return Probe(lambda _: ring)

    def read(tensors, wanted=WANTED):
        found = {}
        probe = open_probe()
        for index, tensor in enumerate(tensors):
            assert probe.add(tensor, wanted, lambda s, index=index: found.update({index: s}))
        probe.finish()
        assert wait_for_probes(30)
        if device.type == "cpu":
            assert ring.wait(30)
        return [found[index] for index in range(len(tensors))]

    return read


def with_odd_values(*shape):
    tensor = torch.randn(*shape)
    flat = tensor.view(-1)
    flat[0], flat[1], flat[2], flat[3:7] = math.nan, math.inf, -math.inf, 0.0
    return tensor


def hold_equal(found, expected):
    """Counts and ends of the range to the last bit, moments as far as their sums were ordered."""
    exact = (
        "element_count finite_count nan_count inf_count minimum maximum near_zero_count "
        "saturated_count unit_count dead_unit_count density notes"
    ).split()
    assert [getattr(found, name) for name in exact] == [getattr(expected, name) for name in exact]
    for name in ("mean", "variance", "norm"):
        wanted = getattr(expected, name)
        spread = 0.0 if expected.std is None else expected.std
        assert getattr(found, name) == (
            None if wanted is None else pytest.approx(wanted, rel=2e-6, abs=2e-6 * spread + 1e-30)
        ), name


DENSE = {
    "float32": lambda: torch.randn(60, 40),
    "far from zero": lambda: torch.randn(60, 40) + 1e4,
    "float64": lambda: torch.randn(60, 40, dtype=torch.float64),
    "float16": lambda: torch.randn(60, 40).half(),
    "bfloat16": lambda: torch.randn(60, 40).bfloat16(),
    "int64": lambda: torch.randint(-9, 9, (60, 40)),
    "uint8": lambda: torch.randint(0, 9, (60, 40), dtype=torch.uint8),
    "bool": lambda: torch.rand(60, 40) > 0.5,
    "complex64": lambda: torch.randn(60, 40, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(40, 60, dtype=torch.complex64).conj().t(),
    "not finite": lambda: with_odd_values(60, 40),
    "nothing finite": lambda: torch.full((3, 4), math.nan),
    "dead units": lambda: torch.randn(60, 40) * (torch.arange(40) % 3 > 0),
    "all zero": lambda: torch.zeros(5, 6),
    "one element": lambda: torch.randn(1, 1),
    "empty": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.randn(40, 60).t(),
    "every other": lambda: torch.randn(60, 80)[::2, ::2],
    "expanded": lambda: torch.randn(60, 1).expand(60, 40),
    "channels last": lambda: torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last),
}


def test_stacked_reductions_say_what_the_cpu_says(read, device):
    tensors = [make() for make in DENSE.values()]
    for name, tensor, found in zip(
        DENSE, tensors, read([t.to(device) for t in tensors]), strict=True
    ):
        expected = measure(tensor, WANTED)
        hold_equal(found, expected)
        if name != "expanded":  # of which the reference knows no repeats
            check(found, tensor, WANTED)


@pytest.mark.parametrize(
    "wanted", [Wanted(), Wanted(0.5), Wanted(None, (-1.0, 1.0)), Wanted(units=0)]
)
def test_only_what_is_wanted_is_counted(read, device, wanted):
    tensor = with_odd_values(30, 20)
    (found,) = read([tensor.to(device)], wanted)
    hold_equal(found, measure(tensor, wanted))


def test_tensors_in_several_chunks(read, device, monkeypatch):
    monkeypatch.setattr(measures, "CHUNK", 1000)
    tensors = [with_odd_values(300, 40) + 50, with_odd_values(70, 80)[::2], torch.ones(7, 999)]
    for tensor, found in zip(tensors, read([t.to(device) for t in tensors]), strict=True):
        hold_equal(found, measure(tensor, WANTED))


@pytest.mark.long
def test_the_usual_chunk_is_passed(read, device):
    tensor = torch.randn(measures.CHUNK // 1024 + 8, 1024)
    (found,) = read([tensor.to(device)])
    hold_equal(found, measure(tensor, WANTED))


def test_what_is_measured_at_once_says_what_the_cpu_says(device):
    """As the parameters are, whose snapshot waits for the device."""
    torch.manual_seed(0)
    for make in DENSE.values():
        tensor = make()
        (found,) = measure_many([tensor.to(device)], WANTED)
        expected = measure(tensor, WANTED)
        hold_equal(found, expected)
        assert measure_histogram(tensor.to(device), 8, 500) == measure_histogram(tensor, 8, 500)
    before, after = torch.randn(90, 70), torch.randn(90, 70)
    found = measure_update(before.to(device), after.to(device), WANTED)
    expected = measure_update(before, after, WANTED)
    for one, other in zip(found[:2], expected[:2], strict=True):
        hold_equal(one, other)
    assert found.before_norm == pytest.approx(expected.before_norm, rel=1e-6)


@pytest.mark.gpu
def test_streams_of_their_own_are_waited_for():
    """Backward runs on the streams of forward, and the one copy at the end must follow them all."""
    tensors, found = [], []
    probe = Probe()
    for _ in range(4):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # cycles of the device, which the host does not wait for
            tensors.append(torch.randn(200, 50, device="cuda"))
            assert probe.add(tensors[-1], WANTED, found.append)
    probe.finish()
    assert wait_for_probes(30)
    torch.cuda.synchronize()
    for statistics, tensor in zip(found, tensors, strict=True):
        check(statistics, tensor.cpu(), WANTED)


def test_while_a_graph_is_captured_no_ring_is_opened(monkeypatch):
    """The pinned memory that it takes would end the capture with an error."""
    opened = []
    monkeypatch.setattr(device_probe, "_is_capturing", lambda _: True)
    probe = Probe(opened.append)
    assert not probe.add(torch.ones(2, 2), WANTED, print)
    assert opened == []
    assert probe.dropped == 0


@pytest.mark.gpu
def test_a_capture_is_not_harmed_by_a_probe():
    tensor = torch.ones(4, 4, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    probe = Probe()
    with torch.cuda.graph(graph):
        doubled = tensor * 2
        assert not probe.add(doubled, WANTED, print)
    probe.finish()
    graph.replay()
    assert doubled.sum().item() == 32.0
