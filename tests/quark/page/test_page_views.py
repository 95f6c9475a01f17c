"""Tabs that plugins add to the page of a run."""

import sys
from types import SimpleNamespace

import pytest

from quark_core.backends import registry as registries
from quark_core.backends.registry import BackendRegistry
from quark_core.hookspecs import hookimpl
from quark_core.records.query import Query


def make_table(reader, run_id):
    rows = reader.read(run_id, "metric", Query())
    names = ("metric_key", "step", "value")
    return {"columns": names, "rows": zip(*(rows[name].tolist() for name in names), strict=True)}


@pytest.fixture
def add_view(monkeypatch):
    """Registers a plugin with a view, beside the installed ones."""
    module = SimpleNamespace(
        table=make_table, broken=lambda *_: 1 / 0, uneven=lambda *_: {"columns": [], "rows": [[1]]}
    )
    monkeypatch.setitem(sys.modules, "tables_of_a_plugin", module)
    monkeypatch.setattr(registries, "_default", BackendRegistry.discover())

    def add(declared):
        class Plugin:
            @hookimpl
            def quark_register_views(self):
                return declared

        registries.default_registry().register(Plugin(), name=f"views {id(declared)}")

    return add


def test_a_view_of_a_plugin_is_a_table(plain, add_view):
    add_view({"all_points": "tables_of_a_plugin:table"})
    run = plain.json(f"/api/runs/{plain.run_id}")
    assert run["views"] == [{"name": "all_points", "title": "All points"}]
    table = plain.json(f"/api/runs/{plain.run_id}/views/all_points")
    assert table["columns"] == ["metric_key", "step", "value"]
    assert (table["count"], table["rows"][0]) == (100, ["train/loss", 0, 1.0])
    plain.refused(404, "/api/runs/no-such-run/views/all_points")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "no plugin provides a view 'none'"),
        ("broken", "at tables_of_a_plugin:broken failed: ZeroDivisionError"),
        ("missing", "at tables_of_a_plugin:missing failed: AttributeError"),
        ("absent", "failed: ModuleNotFoundError: No module named 'no_such_module'"),
        ("uneven", "has rows unlike its columns"),
    ],
)
def test_a_broken_view_says_why_and_spoils_no_page(plain, add_view, name, message):
    add_view({each: f"tables_of_a_plugin:{each}" for each in ("broken", "missing", "uneven")})
    add_view({"absent": "no_such_module:table", "Odd Name": "tables_of_a_plugin:table", "x": 3})
    add_view(["table"])
    names = [view["name"] for view in plain.json(f"/api/runs/{plain.run_id}")["views"]]
    assert names == ["absent", "broken", "missing", "uneven"]
    assert message in plain.refused(400, f"/api/runs/{plain.run_id}/views/{name}")
