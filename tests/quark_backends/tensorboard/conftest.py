"""Event files, read back with TensorBoard's own reader."""

import pytest

from quark_backends.tensorboard.plugin import quark_register_backends

EVERYTHING = {"scalars": 0, "tensors": 0, "histograms": 0, "images": 0}


class EventFolder:
    """One folder of event files, as TensorBoard reads it: a run of its."""

    def __init__(self, folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        self.read = EventAccumulator(
            str(folder), size_guidance=EVERYTHING, purge_orphaned_data=False
        ).Reload()

    def points(self, name):
        if name not in self.read.Tags()["scalars"]:
            return []
        return [(event.step, event.value) for event in self.read.Scalars(name)]

    def texts(self, name):
        if name not in self.read.Tags()["tensors"]:
            return []
        return [
            (event.step, event.tensor_proto.string_val[0].decode())
            for event in self.read.Tensors(name)
        ]

    @property
    def scalars(self):
        return self.read.Tags()["scalars"]


@pytest.fixture
def read_events():
    return EventFolder


@pytest.fixture
def definition():
    return quark_register_backends()[0]


@pytest.fixture(autouse=True)
def patient(monkeypatch, known):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")
