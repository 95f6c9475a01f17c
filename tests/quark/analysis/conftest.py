"""What the tests of outputs on their way to mirrors share."""

import os

import pytest
from set_for_tests import SET_FOR_TESTS

from quark_core.backends.registry import default_registry
from quark_core.testing.fakes import define_scripted


@pytest.fixture
def plain_environment(monkeypatch):
    for name in [*os.environ]:
        if name.startswith("QUARK_") and name not in SET_FOR_TESTS:
            monkeypatch.delenv(name)


@pytest.fixture
def add_backend(monkeypatch):
    def add(name, backend, **fields):
        definition = define_scripted(name, backend, **fields)
        monkeypatch.setitem(default_registry()._definitions, name, definition)
        return backend

    return add
