"""A tab that a plugin adds to the page of a run."""

import sys
from types import SimpleNamespace

from browser_runs import log_run

from quark_core.backends import registry as registries
from quark_core.backends.registry import BackendRegistry
from quark_core.hookspecs import hookimpl


class Plugin:
    @hookimpl
    def quark_register_views(self):
        return {"energy_use": "energy_view:read", "broken": "energy_view:missing"}


def read(reader, run_id):
    return {"columns": ["device", "joules"], "rows": [["gpu0", 41.5], ["<b>gpu1</b>", None]]}


def test_a_view_of_a_plugin_is_a_tab_with_a_table(visit, serve, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "energy_view", SimpleNamespace(read=read))
    monkeypatch.setattr(registries, "_default", BackendRegistry.discover())
    registries.default_registry().register(Plugin(), name="energy")
    log_run(tmp_path, "viewed", {"train/loss": [1.0, 0.5]})
    visitor = visit(serve(tmp_path), "run/viewed")
    visitor.wait("document.querySelector('#tab-view-energy_use')")
    visitor.evaluate("document.querySelector('#tab-view-energy_use').click()")
    visitor.wait("document.querySelectorAll('table.view tbody tr').length === 2")
    cells = "[...document.querySelectorAll('table.view tr')].map(r => r.innerText)"
    assert visitor.evaluate(cells) == ["device\tjoules", "gpu0\t41.5", "<b>gpu1</b>\t"]
    visitor.check_axe()
