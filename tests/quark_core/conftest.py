"""The run that most tests of the core log into, and its loggers."""

import pytest

import quark


@pytest.fixture
def session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        yield session


@pytest.fixture
def strict_session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, strict_mode=True) as session:
        yield session


@pytest.fixture
def metrics(session):
    return quark.MetricsLogger(session)


@pytest.fixture
def events(session):
    return quark.EventLogger(session)
