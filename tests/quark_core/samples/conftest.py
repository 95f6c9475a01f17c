"""A run to log batches into."""

import pytest

import quark


@pytest.fixture
def diagnostics(session):
    return quark.DataDiagnostics(session)


@pytest.fixture
def strict(strict_session):
    return quark.DataDiagnostics(strict_session)
