"""A run, and a quick way to look at parameters in it."""

import pytest
import torch

import quark
from quark import EventLogger, ParameterDiagnostics, ParameterDiagnosticsConfig
from quark_torch.schedule import HookScheduleConfig


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as opened:
        yield opened


@pytest.fixture
def observe(session):
    """Makes a ParameterDiagnostics; `every` is its cadence, the rest goes to its config."""
    made = []

    def make(model, optimizer=None, *, every=1, run=None, **config):
        schedule = config.pop("schedule", None) or HookScheduleConfig(every_n_steps=every)
        diagnostics = ParameterDiagnostics(
            run or session,
            model,
            optimizer,
            config=ParameterDiagnosticsConfig(schedule=schedule, **config),
        )
        made.append(diagnostics)
        return diagnostics

    yield make
    for diagnostics in made:
        diagnostics.close()


@pytest.fixture
def notices(session):
    """What instrumentation told the run: types of events, and their payloads."""

    def read():
        events = EventLogger(session).read()
        return [
            (event.event_type, event.payload)
            for event in events
            if event.payload is not None and "component" in event.payload
        ]

    return read
