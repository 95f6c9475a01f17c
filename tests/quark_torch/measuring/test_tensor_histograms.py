"""Histograms of tensors: edges, counts, and a sample that is fair and bounded."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from statistics_reference import as_doubles
from tiers import count_examples

from quark_torch.measuring.measures import measure_histogram

finite = st.floats(-1e308, 1e308) | st.sampled_from([0.0, 1.0, 5e-324, 0.1, 1.7e308, -1.7e308])


@settings(deadline=None, max_examples=count_examples(300))
@given(arrays(np.float64, st.integers(1, 60), elements=finite), st.integers(1, 20))
def test_counts_are_of_the_edges(values, bins):
    found = measure_histogram(torch.from_numpy(values), bins, 1000)
    assert len(found.edges) == bins + 1
    assert list(found.edges) == sorted(found.edges)
    assert found.sample_count == found.total_count == len(values) == sum(found.counts)
    edges = np.array(found.edges)
    places = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, bins - 1)
    if len(set(found.edges)) == len(found.edges):
        assert np.bincount(places, minlength=bins).tolist() == list(found.counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_a_whole_tensor_gives_what_numpy_gives(dtype):
    torch.manual_seed(0)
    tensor = (torch.randn(900) * 10).to(dtype)
    found = measure_histogram(tensor, 16, 1000)
    counts, edges = np.histogram(as_doubles(tensor), 16)
    assert found.counts == tuple(counts)
    assert found.edges == pytest.approx(edges)


def test_what_is_not_finite_is_left_out():
    found = measure_histogram(torch.tensor([math.nan, 1.0, math.inf, 2.0]), 2, 100)
    assert (found.counts, found.sample_count, found.total_count) == ((1, 1), 2, 4)
    assert measure_histogram(torch.tensor([math.nan]), 2, 100) is None


def test_a_constant_lies_within_its_edges():
    for value in (0.0, 5.0, 1e30, -1e-30):
        found = measure_histogram(torch.full((7,), value), 4, 100)
        assert found.edges[0] < value < found.edges[-1] or value in found.edges[1:-1]
        assert sum(found.counts) == 7


@pytest.mark.parametrize("view", ["whole", "transposed", "cut", "expanded", "images"])
def test_the_sample_is_bounded_and_sees_every_column(view):
    base = torch.arange(100).float().repeat(1000, 1)
    tensor = {
        "whole": base,
        "transposed": base.t(),
        "cut": base[::2],
        "expanded": base[0].expand(1000, 100),
        "images": base.reshape(10, 100, 10, 10).to(memory_format=torch.channels_last),
    }[view]
    found = measure_histogram(tensor, 10, 1000)
    assert found.total_count == tensor.numel()
    assert 500 <= found.sample_count <= 1000
    share = np.array(found.counts) / found.sample_count
    assert share == pytest.approx(np.full(10, 0.1), abs=0.03)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_other_forms():
    tensor = torch.randn(30, dtype=torch.complex64)
    assert measure_histogram(tensor, 4, 100).edges[0] == pytest.approx(tensor.abs().min().item())
    sparse = torch.eye(5).to_sparse()
    found = measure_histogram(sparse, 4, 100)
    assert (found.sample_count, found.total_count) == (5, 25)
    assert measure_histogram(None, 4, 100) is None
