"""What the tests of plugins share: definitions, plugins, and modules behind entry points."""

import itertools
import os
import sys
from importlib.metadata import EntryPoint, entry_points

import pytest
from set_for_tests import SET_FOR_TESTS

from quark_core.backends.contract import BackendDefinition, Capability
from quark_core.backends.registry import BackendRegistry
from quark_core.hookspecs import ENTRY_POINT_GROUP, hookimpl

_counter = itertools.count()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in [*os.environ]:
        if name.startswith("QUARK_") and name not in SET_FOR_TESTS:
            monkeypatch.delenv(name)


@pytest.fixture
def define():
    """Makes a definition; a primary where that is asked for."""

    def make(name, *, primary=False, open_it=None, **fields):
        if primary:
            fields.setdefault(
                "capabilities",
                frozenset(
                    {
                        Capability.PRIMARY,
                        Capability.READ,
                        Capability.IDEMPOTENT,
                        Capability.GENERATIONS,
                    }
                ),
            )
        fields.setdefault("own_process", False)
        return BackendDefinition(
            name=name, summary=f"{name} of a test", open=open_it or (lambda _: None), **fields
        )

    return make


@pytest.fixture
def plugin():
    """Makes a plugin object that declares these definitions."""

    class Plugin:
        def __init__(self, *declared):
            self.declared = declared

        @hookimpl
        def quark_register_backends(self):
            return self.declared

    return Plugin


@pytest.fixture
def make_point(tmp_path, monkeypatch):
    """Writes a module and makes the entry point that leads to it."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    written = []

    def make(name, source):
        module = f"quark_test_plugin_{next(_counter)}"
        (folder / f"{module}.py").write_text(source)
        written.append(module)
        return EntryPoint(name=name, value=module, group=ENTRY_POINT_GROUP)

    yield make
    for module in written:
        sys.modules.pop(module, None)


@pytest.fixture
def built_in():
    """The entry points of the two backends that need nothing else installed."""
    return [
        point
        for point in entry_points(group=ENTRY_POINT_GROUP)
        if point.name in ("csv", "embedded")
    ]


@pytest.fixture
def registry(built_in):
    """A registry of its own, with the embedded store and the CSV mirror."""
    return BackendRegistry.discover(built_in)
