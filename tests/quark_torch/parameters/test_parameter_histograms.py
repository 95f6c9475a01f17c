"""Histograms of values, gradients and updates."""

import math

import numpy as np
import pytest
import torch
from parameter_scenes import CopiedParameters, make_classifier, run_backward
from torch import nn

import quark

ALL = ("value", "gradient", "update")


def take(observe, model, optimizer=None, *, types=ALL, **config):
    diagnostics = observe(
        model, optimizer, capture_distributions=True, distribution_types=types, **config
    )
    run_backward(model)
    if optimizer is not None:
        optimizer.step()
    return diagnostics.snapshot(0)


def test_histograms_against_numpy(observe):
    model = make_classifier()
    copied = CopiedParameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    summaries, records = take(observe, model, optimizer, histogram_bins=8)
    assert len(summaries) == 8
    assert len(records) == 24
    parameters = dict(model.named_parameters())
    for record in records:
        parameter = parameters[record.parameter_name]
        values = {
            "value": parameter.detach(),
            "gradient": parameter.grad,
            "update": copied.difference(model, record.parameter_name),
        }[record.distribution_type]
        values = values.double().numpy().reshape(-1)
        assert record.sample_count == record.total_count == sum(record.counts) == values.size
        assert len(record.bin_edges) == 9
        assert quark.validate_record(record) == record
        if values.min() < values.max():
            assert record.bin_edges[0] == values.min()
            assert record.bin_edges[-1] == values.max()
            assert np.allclose(np.diff(record.bin_edges), np.ptp(values) / 8)
            counts = np.histogram(values, np.array(record.bin_edges))[0]
            assert record.counts == tuple(counts.tolist())


def test_a_sample_bounds_what_a_histogram_counts(observe):
    model = nn.Linear(300, 100, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(
        model,
        optimizer,
        capture_distributions=True,
        distribution_types=ALL,
        max_histogram_values=1000,
    )
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    _, records = diagnostics.snapshot(0)
    assert [record.distribution_type for record in records] == list(ALL)
    for record in records:
        assert 500 <= record.sample_count <= 1000
        assert record.sample_count == sum(record.counts)
        assert record.total_count == 30_000


def test_constant_and_non_finite_tensors(observe):
    model = nn.Module()
    model.constant = nn.Parameter(torch.full((5,), 3.0))
    model.holes = nn.Parameter(torch.tensor([1.0, math.nan, 2.0, math.inf]))
    model.nothing = nn.Parameter(torch.full((2,), math.nan))
    model.empty = nn.Parameter(torch.empty(0))
    _, records = observe(model, capture_distributions=True, histogram_bins=4).snapshot(0)
    constant, holes = records
    assert constant.parameter_name == "constant"
    assert constant.bin_edges[0] < 3.0 < constant.bin_edges[-1]
    assert sum(constant.counts) == 5
    assert max(constant.counts) == 5
    assert holes.counts == (1, 0, 0, 1)
    assert (holes.sample_count, holes.total_count) == (2, 4)


@pytest.mark.long
def test_the_types_asked_for(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    summaries, records = take(observe, model, optimizer, types=["update"], capture_summaries=False)
    assert summaries == ()
    assert {record.distribution_type for record in records} == {"update"}
    # Nothing was trained here, so that there is no update and no gradient.
    fresh = observe(make_classifier(), capture_distributions=True, distribution_types=ALL)
    _, records = fresh.snapshot(0)
    assert {record.distribution_type for record in records} == {"value"}
    summaries, records = take(observe, model, types=("gradient",), capture_summaries=False)
    assert summaries == ()
    assert {record.distribution_type for record in records} == {"gradient"}


@pytest.mark.parametrize("bins", [1, 4096])
def test_bounds_of_bins(observe, bins):
    _, records = take(observe, make_classifier(), types=("value",), histogram_bins=bins)
    assert all(len(record.counts) == bins for record in records)
