"""Records of every kind with all that is odd, and the command in this process."""

import math

import pytest
from click.testing import CliRunner

from quark.cli.main import cli
from quark_core.records import EventRecord, LayerSummaryRecord, MetricRecord
from quark_core.records.json_object import JsonObject

ORIGIN = ("run-ü", "w1", 0, 0)


def make_metrics():
    values = [1.5, math.nan, math.inf, -math.inf, -0.0, 5e-324]
    return [
        MetricRecord(
            *ORIGIN,
            index,
            1_700_000_000_000_000 + index,
            "train/loss" if index % 2 else "größe",
            "train" if index % 2 else None,
            "loss" if index % 2 else "größe",
            value,
            step=None if index == 0 else index,
            epoch=0 if index == 0 else None,
            description=None if index < 3 else 'say "hi",\r\n日本',
            metadata=None if index % 3 else JsonObject({"b": 1, "a": [None, {"ä": 1.5}]}),
        )
        for index, value in enumerate(values)
    ]


def make_events():
    payloads = [None, JsonObject({}), JsonObject({"z": 1, "a": "ß\n", "n": "NaN"})]
    return [
        EventRecord(*ORIGIN, index, -62_135_596_800_000_000, "user_log", "info", payload=payload)
        for index, payload in enumerate(payloads)
    ]


def make_layers():
    shapes = [(2, 3), None, (2, 3), ()]
    means = [None, math.nan, 0.25, -math.inf]
    return [
        LayerSummaryRecord(
            *ORIGIN,
            index,
            253_402_300_799_999_999,
            "net.0",
            "Linear",
            "activation",
            "forward",
            0,
            6,
            step=index,
            tensor_shape=shape,
            mean=mean,
        )
        for index, (shape, mean) in enumerate(zip(shapes, means, strict=True))
    ]


MAKERS = {"metric": make_metrics, "event": make_events, "layer": make_layers}


@pytest.fixture(params=MAKERS)
def records(request):
    """Odd records of one kind."""
    return MAKERS[request.param]()


@pytest.fixture
def all_records():
    """Odd records of every kind."""
    return [record for make in MAKERS.values() for record in make()]


@pytest.fixture
def invoke():
    """Runs a command in this process; errors that it raises come through."""

    def call(*arguments):
        return CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False)

    return call
