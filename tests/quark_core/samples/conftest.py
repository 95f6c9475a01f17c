"""A run to log batches into."""

import pytest

import quark


@pytest.fixture
def session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as found:
        yield found


@pytest.fixture
def strict_session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, strict_mode=True) as found:
        yield found


@pytest.fixture
def diagnostics(session):
    return quark.DataDiagnostics(session)


@pytest.fixture
def strict(strict_session):
    return quark.DataDiagnostics(strict_session)
