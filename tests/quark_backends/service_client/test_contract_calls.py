"""Each method of the contract gives the same directly, in a helper process and over HTTP."""

import contextlib
import dataclasses
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from service_fixtures import serving

from quark_backends.embedded.plugin import quark_register_backends as register_embedded
from quark_backends.service.client.backend import ServiceBackend
from quark_backends.service.server.call_routes import RULES
from quark_core.backends.contract import BackendConfig, Capability
from quark_core.backends.coordination import NewTrial, TrialWish
from quark_core.backends.curves import CurveQuery
from quark_core.backends.edits import BelongingEdit, RunEdit
from quark_core.backends.grids import GridQuery
from quark_core.backends.methods import CHANGING_METHODS, list_methods
from quark_core.backends.registry import PROTOCOLS
from quark_core.hosting.hosted_backend import open_hosted
from quark_core.records.query import Query
from quark_core.records.sweeps import TrialResult
from quark_core.runs.run_search import build_page_search, build_search
from quark_core.system.process import ProcessIdentity
from quark_core.testing.fakes import BatchMaker

SWEEP = {"project": "vision", "name": "lr", "definition": {"metric": "val/acc", "seeds": [1, 2]}}
EDIT = BelongingEdit(description="d", set_fields={"owner": "ann"}, add_tags=("t",))
EXCHANGE = {"field": "state", "expect": None, "value": [1, {"a": None}], "by": "ann@lab"}
RUN = {"run_id": "run0"}
PAGE = {"columns": ("loss", "config.lr", "tags"), "count": True, "limit": 5}
# In the order in which they are called; SWEEP_ID is the sweep of the first.
CALLS = {
    "open_sweep": {**SWEEP, "max_failures": 3},
    "add_trials": {"sweep_id": "SWEEP_ID", "trials": [NewTrial(parameters={"x": 1})], "key": "k"},
    "claim_trial": {
        "sweep_id": "SWEEP_ID",
        "request_id": "r",
        "worker": ProcessIdentity("elsewhere", 1, "now"),
        "lease_s": 600.0,
        "wish": TrialWish(where="param.x > 0"),
    },
    "settle_trial": {
        "sweep_id": "SWEEP_ID",
        "number": 0,
        "token": 1,
        "result": TrialResult(state="completed", values=(1.5,), reason="done"),
        "lease_s": 60.0,
    },
    "update_sweep": {"sweep_id": "SWEEP_ID", "state": "paused", "by": "ann@lab"},
    "load_sweep": {"sweep_id": "SWEEP_ID"},
    "list_sweeps": {"project": "vision"},
    "list_trials": {"sweep_id": "SWEEP_ID", "start": 0, "limit": 5},
    "append_entries": {"log": "l", "entries": ["a", "b"], "request_id": "r"},
    "read_entries": {"log": "l", "start": 1},
    "compare_and_set": {**RUN, **EXCHANGE},
    "compare_and_set_group": {"project": "conformance", "path": "paper/fig3", **EXCHANGE},
    "edit_run": {**RUN, "edit": RunEdit(notes="n", add_tags=("late",)), "by": "ann@lab"},
    "update_project": {"project": "conformance", "edit": EDIT, "by": "ann@lab"},
    "update_group": {"project": "conformance", "path": "paper/fig3", "edit": EDIT, "by": "ann@lab"},
    "load_project": {"project": "conformance"},
    "list_groups": {},
    "request_stop": {**RUN, "by": "ann@lab", "reason": "enough"},
    "find_stop": RUN,
    "load_run": RUN,
    "list_runs": {"project": "conformance", "limit": 5},
    "summarize": RUN,
    "search": {"search": build_search(project=None, where="loss > 0", order_by=["-loss"])},
    "search_page": {"search": build_page_search(project=None, where=None, order_by=None, **PAGE)},
    "list_names": {"project": None, "text": "", "limit": 9},
    "read": {**RUN, "kind": "metric", "query": Query(equals={"metric_key": "loss"}, limit=50)},
    "iterate": {**RUN, "kind": "layer", "query": Query(), "rows": 2},
    "read_series": {**RUN, "key": "loss", "max_points": 7},
    "read_series_many": {**RUN, "query": CurveQuery.build(["loss", "odd"], entries=5, low=2)},
    "read_heads": RUN,
    "read_changes": {**RUN, "cursor": {}, "kinds": ["metric", "event"], "max_rows": 1_000},
    "read_grid": {**RUN, "query": GridQuery.build("layer", "norm", summary_type="gradient")},
    "read_batches": {**RUN, "writer_id": "writer0", "start": 1, "limit": 2},
    "read_outputs": {**RUN, "kind": "alert"},
    "measure_runs": {"run_ids": ["run0"]},
    "list_damaged": {},
    "trash_runs": {"run_ids": ["ended"]},
    "list_trash": {},
    "restore_runs": {"run_ids": ["ended"]},
    "measure_store": {},
}
# A mark is of the place that gives it; these take records, payloads or paths, or more than one
# request, and have tests of their own.
OTHERS = {
    *("read_mark", "write_group", "put_payload", "open_payload", "payload_directory", "locate"),
    *("write_generation", "collect_trash"),
}
# The clock goes on between two calls, and the store may be compacted.
CHANGING_FIELDS = {"lease_until", "updated_at", "heartbeat_at", "database_bytes", "settled_at"}


def fill(store):
    maker = BatchMaker("run0")
    odd = maker.metrics(("odd", 0, float("nan")), ("odd", None, float("inf")), ("odd", 5, -1.0))
    store.write(maker.start(tags=["a"]))
    store.write(maker.metrics(*(("loss", step, 1.0 / (step + 1)) for step in range(100))))
    store.write(odd)
    store.write(maker.layers(3, {"encoder.0": 1.0, "encoder.1": float("inf")}))
    store.write(maker.events("saved"))
    maker = BatchMaker("ended", writer_id="ended")
    store.write(maker.start())
    store.write(maker.lifecycle(("status", {"status": "completed"})))


def open_pair(place, folder, monkeypatch, stack):
    """A store, and what hands calls on to it."""
    if place == "hosted":
        (definition,) = register_embedded()
        config = BackendConfig(
            storage_dir=folder, run_id="run0", project="conformance", run_path=folder / "run"
        )
        near = definition.open(config)
        stack.callback(near.close)
        fill(near)
        far = open_hosted(replace(definition, own_process=True), replace(config, run_id="other"))
        stack.callback(far.close)
        return near, far
    server = stack.enter_context(serving(folder))
    monkeypatch.setenv("QUARK_USER_KEY", server.make_key())
    config = BackendConfig(
        storage_dir=folder, location=server.url, run_path=folder, options={"store": "*"}
    )
    far = ServiceBackend(config)
    stack.callback(far.close)
    fill(far)
    return server.service.stores._open["default"].store, far


def list_fields(value):
    if dataclasses.is_dataclass(value):
        return [each.name for each in dataclasses.fields(value)]
    return value.__struct_fields__ if isinstance(value, msgspec.Struct) else None


def check_same(one, other, where):
    """Types and values, down to the elements of arrays."""
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, where
        np.testing.assert_array_equal(one, other, err_msg=where)
    elif (names := list_fields(one)) is not None:
        assert type(one) is type(other), where
        for name in names:
            if name not in CHANGING_FIELDS:
                check_same(getattr(one, name), getattr(other, name), f"{where}.{name}")
    elif hasattr(one, "to_records"):
        check_same(one.to_records(), other.to_records(), where)
    elif isinstance(one, (list, tuple)):
        assert (type(one), len(one)) == (type(other), len(other)), where
        for place, pair in enumerate(zip(one, other, strict=True)):
            check_same(*pair, f"{where}[{place}]")
    elif hasattr(one, "keys"):
        assert [*one] == [*other], where
        for key in one:
            check_same(one[key], other[key], f"{where}[{key!r}]")
    else:
        assert one == other or (one != one and other != other), where


def ask(store, method, arguments, sweep_id):
    given = {name: sweep_id if value == "SWEEP_ID" else value for name, value in arguments.items()}
    called = getattr(getattr(store, "trash", store), method, None) or getattr(store, method)
    # The stores of a service take one bound more.
    found = called(*given.values()) if method == "read_batches" else called(**given)
    return list(found) if method == "iterate" else found


def test_each_method_is_called_or_has_a_test_of_its_own():
    declared = {each.__name__ for protocol in PROTOCOLS.values() for each in list_methods(protocol)}
    assert declared == CALLS.keys() | OTHERS
    # Over HTTP nothing can be called that no rule allows; `iterate` is `read`.
    assert RULES.keys() == CALLS.keys() - {"iterate"}


@pytest.mark.parametrize("place", ["hosted", "http"])
def test_each_method_gives_the_same_from_afar(place, tmp_path, monkeypatch):
    with contextlib.ExitStack() as stack:
        near, far = open_pair(place, tmp_path, monkeypatch, stack)
        sweep_id = None
        for method, arguments in CALLS.items():
            if place == "hosted" and not hasattr(far, method):
                continue  # only commands remove runs
            found = ask(far, method, arguments, sweep_id)
            if method == "open_sweep":
                sweep_id = found.id
            if method in ("compare_and_set", "compare_and_set_group"):
                assert found is True
            elif method in ("trash_runs", "restore_runs"):
                assert not found
            elif method in ("measure_store", "list_trash", "measure_runs"):
                assert type(found) is type(ask(near, method, arguments, sweep_id))
            elif method not in ("edit_run", "update_project", "update_group"):
                check_same(ask(near, method, arguments, sweep_id), found, method)


def test_whatever_a_hosted_store_declares_it_has():
    (definition,) = register_embedded()
    from quark_core.hosting.hosted_backend import _make_class

    made = _make_class(definition.capabilities)
    for capability in definition.capabilities - {Capability.IDEMPOTENT, Capability.REMOVAL}:
        for method in list_methods(PROTOCOLS[capability]):
            assert callable(getattr(made, method.__name__))
    assert {*CHANGING_METHODS} <= {*CALLS, *OTHERS}
