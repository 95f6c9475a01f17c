"""What the tests of mirrors have in common: the mirror is known, opened, and logged to by forks.

A folder of tests gives `definition`, the backend that they are about.
"""

import multiprocessing

import pytest

import quark
from quark_core.backends.contract import BackendConfig
from quark_core.backends.registry import default_registry


@pytest.fixture
def known(monkeypatch, definition):
    """The backend by its name, whether its entry point is installed or not."""
    registry = default_registry()
    if definition.name not in registry.names:
        monkeypatch.setitem(registry._definitions, definition.name, definition)


@pytest.fixture
def config(tmp_path):
    return BackendConfig(
        storage_dir=tmp_path, run_path=tmp_path / "run", run_id="run0", project="conformance"
    )


@pytest.fixture
def backend(definition, config):
    opened = definition.open(config)
    yield opened
    opened.close()


@pytest.fixture
def start(tmp_path, definition):
    """Starts runs that the backend mirrors."""

    def start_it(backends=definition.name, **arguments):
        arguments.setdefault("project", "vision")
        return quark.start_run(storage_dir=tmp_path, backends=backends, **arguments)

    return start_it


def log_in_child(session, first):
    metrics = quark.MetricsLogger(session)
    for step in range(first, first + 20):
        metrics.log("child", float(step), step=step)


class Dataset:
    def __init__(self, session):
        self.session = session

    def __len__(self):
        return 12

    def __getitem__(self, index):
        quark.MetricsLogger(self.session).log("worker", float(index), step=index)
        return index


@pytest.fixture
def log_in_forks():
    """Logs `m` at steps 0 to 49, and `child` at 0 to 19 and 100 to 119 in two forked children."""

    def log(session):
        metrics = quark.MetricsLogger(session)
        metrics.log("m", 0.0, step=0)
        session.flush("stored")
        context = multiprocessing.get_context("fork")
        children = [
            context.Process(target=log_in_child, args=(session, first)) for first in (0, 100)
        ]
        for child in children:
            child.start()
        for step in range(1, 50):
            metrics.log("m", float(step), step=step)
        for child in children:
            child.join(250)
            assert child.exitcode == 0
        session.end_run()

    return log


@pytest.fixture
def log_in_workers():
    """Logs `m`, twice its step, at steps 0 to 5, and `worker` at 0 to 11 in a loader's workers."""
    data = pytest.importorskip("torch.utils.data")

    def log(session):
        loader = data.DataLoader(
            Dataset(session), num_workers=2, batch_size=2, multiprocessing_context="fork"
        )
        metrics = quark.MetricsLogger(session)
        for step, batch in enumerate(loader):
            metrics.log("m", float(batch[0]), step=step)
        session.end_run()

    return log
