"""Settings and installed plugins become the backends of one run."""

import contextlib
import logging
import re

import pytest

import quark
from quark_core.backends import registry as registry_module
from quark_core.backends.contract import Capability, RankPolicy
from quark_core.errors import (
    BackendContractError,
    SchemaValidationError,
    SessionStoreError,
    UnknownBackendError,
)
from quark_core.hookspecs import hookimpl
from quark_core.ranks.launches import RankInfo
from quark_core.runs.backend_choice import open_primary, open_reader, plan_backends
from quark_core.runs.open_run import open_runs
from quark_core.testing.fakes import ScriptedBackend, define_scripted

ZERO, ONE = RankInfo(), RankInfo(rank=1, world_size=2)


@pytest.fixture
def default(registry, monkeypatch):
    """The registry that sessions of this test use."""
    monkeypatch.setattr(registry_module, "_default", registry)
    yield registry
    for session in open_runs.sessions:
        with contextlib.suppress(SystemExit):
            session.end_run()


def describe(plan):
    return [(c.definition.name, c.location, dict(c.options)) for c in plan.mirrors]


@pytest.mark.parametrize(
    ("backends", "mirrors"),
    [
        (None, []),
        ("", []),
        ([], []),
        ("csv", [("csv", "", {})]),
        (["csv"], [("csv", "", {})]),
        (("csv",), [("csv", "", {})]),
        (" csv , csv:out,", [("csv", "", {}), ("csv", "out", {})]),
        ("CSV", [("csv", "", {})]),
        ("csv:./out", [("csv", "./out", {})]),
        ("csv:/abs/out", [("csv", "/abs/out", {})]),
        ("csv://out", [("csv", "out", {})]),
        ("csv:out?x=1&y=", [("csv", "out", {"x": "1", "y": ""})]),
        ("csv+sqlite:///x.db", [("csv", "sqlite:///x.db", {})]),
        (["csv+https://h/x?y=1"], [("csv", "https://h/x?y=1", {})]),
        ("csv,csv", [("csv", "", {})]),
        (["csv:out", "csv:out"], [("csv", "out", {})]),
        ("csv,CSV", [("csv", "", {})]),
    ],
)
def test_names_and_uris_become_mirrors_beside_the_embedded_store(registry, backends, mirrors):
    plan = plan_backends(backends, ZERO, registry)
    assert plan.primary.definition.name == "embedded"
    assert describe(plan) == mirrors


def test_a_named_primary_takes_the_place_of_the_default(registry, plugin, define):
    registry.register(plugin(define("other", primary=True)), name="p")
    plan = plan_backends("csv,other:place", ZERO, registry)
    assert (plan.primary.definition.name, plan.primary.location) == ("other", "place")
    assert describe(plan) == [("csv", "", {})]
    assert plan.specifications == ("other:place", "csv")


def test_two_primaries_are_refused(registry, plugin, define):
    registry.register(plugin(define("other", primary=True)), name="p")
    with pytest.raises(SchemaValidationError, match="embedded and other are both primary"):
        plan_backends("embedded,csv,other", ZERO, registry)


@pytest.mark.parametrize("backends", [3, ["csv", 3], {"csv"}, [["csv"]], b"csv"])
def test_backends_of_a_wrong_type_are_refused(registry, backends):
    with pytest.raises(SchemaValidationError, match="backends"):
        plan_backends(backends, ZERO, registry)


@pytest.mark.parametrize("backends", ["absent", "csv,absent:x", "1bad", "/tmp/out", "https://h/x"])
def test_what_nothing_answers_to_is_refused(registry, backends):
    with pytest.raises(UnknownBackendError, match="installed: 'csv', 'embedded'"):
        plan_backends(backends, ZERO, registry)


def test_mlflow_that_is_not_installed_names_its_extra(registry):
    with pytest.raises(UnknownBackendError, match=r"quark-tracker\[mlflow\]"):
        plan_backends("mlflow:http://h", ZERO, registry)


def test_a_named_plugin_that_was_left_out_is_an_error(registry, plugin, define):
    with pytest.warns(RuntimeWarning):
        registry.register(plugin(define("old", api_version=0)), name="old")
    with pytest.raises(BackendContractError, match="version 0"):
        plan_backends("csv,old", ZERO, registry)
    assert describe(plan_backends("csv", ZERO, registry)) == [("csv", "", {})]


def test_the_environment_is_asked_only_where_nothing_is_given(registry, monkeypatch):
    monkeypatch.setenv("QUARK_BACKENDS", "csv:env, csv:env2")
    assert [c.location for c in plan_backends(None, ZERO, registry).mirrors] == ["env", "env2"]
    assert [c.location for c in plan_backends("csv:own", ZERO, registry).mirrors] == ["own"]
    assert plan_backends([], ZERO, registry).mirrors == ()


def test_none_keeps_nothing(registry, monkeypatch):
    for plan in (plan_backends("none", ZERO, registry), plan_backends(["none"], ZERO, registry)):
        assert (plan.primary, plan.mirrors, plan.specifications) == (None, (), ())
    monkeypatch.setenv("QUARK_BACKENDS", "none")
    assert plan_backends(None, ZERO, registry).primary is None
    with pytest.raises(UnknownBackendError, match=r"stores nothing\. Remove it, or pass csv"):
        plan_backends("none,csv", ZERO, registry)


def test_other_ranks_have_only_what_is_for_all_ranks(registry, plugin, define):
    registry.register(plugin(define("local", rank_policy=RankPolicy.ALL)), name="p")
    plan = plan_backends("csv,local", ONE, registry)
    assert plan.primary is None
    assert describe(plan) == [("local", "", {})]
    assert len(plan_backends("csv,local", ZERO, registry).mirrors) == 2


def test_specifications_hold_no_secret(registry):
    plan = plan_backends("csv+https://user:pw@h/x?token=abc", ZERO, registry)
    (_, text) = plan.specifications
    assert text.startswith("csv+https://")
    assert not any(secret in text for secret in ("user", "pw", "abc"))


def test_requiring_the_service_without_its_url_is_an_error(registry, monkeypatch):
    monkeypatch.setenv("QUARK_REQUIRE_SERVICE", "1")
    with pytest.raises(SessionStoreError, match="QUARK_PERSISTENCE_URL"):
        plan_backends("csv", ZERO, registry)
    monkeypatch.setenv("QUARK_REQUIRE_SERVICE", "0")
    assert plan_backends("csv", ZERO, registry).primary.definition.name == "embedded"


@pytest.mark.parametrize("required", ["", "1"])
def test_a_service_that_is_not_installed_is_an_error(registry, monkeypatch, required):
    monkeypatch.setenv("QUARK_REQUIRE_SERVICE", required)
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", "https://quark.example.org")
    with pytest.raises(SessionStoreError, match=r"QUARK_PERSISTENCE_URL.*reinstall quark-tracker"):
        plan_backends(None, ZERO, registry)


def test_the_service_is_the_primary_where_its_url_is_set(registry, monkeypatch, plugin, define):
    service = define("service", primary=True, schemes=("http", "https"))
    registry.register(plugin(service), name="service")
    monkeypatch.setenv("QUARK_REQUIRE_SERVICE", "1")
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", " https://h/quark?a=1 ")
    plan = plan_backends("csv", ZERO, registry)
    assert plan.primary.definition is service
    assert (plan.primary.location, plan.primary.options) == ("https://h/quark?a=1", ())


def test_a_primary_that_lies_is_refused_when_it_is_opened(registry, plugin, define, tmp_path):
    liar = define("liar", primary=True, open_it=lambda _: ScriptedBackend())
    registry.register(plugin(liar), name="liar")
    choice = plan_backends("liar", ZERO, registry).primary
    with pytest.raises(BackendContractError, match="liar"):
        open_primary(choice, choice.configure(tmp_path))


@pytest.mark.parametrize(
    ("uri", "reads"), [("mlflow+http://127.0.0.1:9", True), ("tensorboard", False)]
)
def test_a_backend_that_no_run_lives_in_is_refused_by_name(uri, reads, tmp_path, monkeypatch):
    called = rf"quark\.open_run\('{re.escape(uri)}', run_id\)"
    with pytest.raises(SessionStoreError, match="is not a primary store") as refused:
        open_reader(tmp_path, specification=uri)
    assert bool(re.search(called, str(refused.value))) is reads
    # The environment may name one, and then every call of a run comes here.
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", uri)
    for call in (
        lambda: quark.open_run("run", tmp_path),
        lambda: quark.start_run(project="p", storage_dir=tmp_path),
        lambda: quark.search_runs(storage_dir=tmp_path),
    ):
        with pytest.raises(SessionStoreError, match="QUARK_PERSISTENCE_URL"):
            call()


def test_a_primary_that_would_lose_what_analyzers_find_is_refused_by_name(
    registry, plugin, define, tmp_path
):
    """When it is opened, before a run is begun that would be analyzed in vain."""

    class Forgetful:
        def write(self, batch): ...
        def close(self): ...
        def read(self, run_id, kind, query): ...
        def load_run(self, run_id): ...
        def list_runs(self, *, project=None, limit=None): ...
        def locate(self, run_id): ...

    capabilities = frozenset({Capability.PRIMARY, Capability.READ, Capability.IDEMPOTENT})
    forgetful = define("forgetful", open_it=lambda _: Forgetful(), capabilities=capabilities)
    registry.register(plugin(forgetful), name="forgetful")
    choice = plan_backends("forgetful", ZERO, registry).primary
    with pytest.raises(BackendContractError, match=r"'forgetful'.*without generations.*analyze"):
        open_primary(choice, choice.configure(tmp_path))


def test_opening_for_reading_makes_no_store(tmp_path):
    with pytest.raises(SessionStoreError, match="no Quark store"):
        open_reader(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_plugin_gets_what_a_run_logs(default, plugin, tmp_path):
    backend = ScriptedBackend()
    default.register(plugin(define_scripted("mine", backend)), name="mine")
    with quark.start_run(project="p", storage_dir=tmp_path, backends="mine") as session:
        quark.MetricsLogger(session).log("m", 2.5, step=0)
    values = [r.value for b in backend.stored if b.kind == "metric" for r in b.to_records()]
    assert values == [2.5]
    assert backend.closed
    assert session.report_delivery().complete


@pytest.mark.long
def test_a_mirror_that_lies_does_not_hurt_the_run(default, plugin, define, tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "10")
    liar = define("liar", capabilities=frozenset({Capability.READ}), open_it=lambda _: object())
    default.register(plugin(liar), name="liar")
    with quark.start_run(project="p", storage_dir=tmp_path, backends="liar") as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
        session.flush()
    primary, lane = session.report_delivery().lanes
    assert (primary.complete, lane.delivered) == (True, 0)
    assert any("has no write() and close()" in reason for reason in lane.errors)
    assert [r.value for r in quark.MetricsLogger(session).read()] == [1.0]


class Listener:
    def __init__(self, error=None):
        self.heard = []
        self.error = error

    @hookimpl
    def quark_run_started(self, context):
        self.heard.append(("started", context.run_id, context.status))
        if self.error:
            raise self.error

    @hookimpl
    def quark_run_ended(self, context, report):
        self.heard.append(("ended", context.run_id, context.status, report.complete))
        if self.error:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("deaf"), SystemExit(3)], ids=["raises", "exits"])
def test_plugins_hear_of_runs_and_a_failing_one_hurts_nothing(default, tmp_path, caplog, error):
    listeners = [Listener(), Listener(error), Listener()]
    for number, listener in enumerate(listeners):
        default.register(listener, name=f"listener{number}")
    with caplog.at_level(logging.ERROR, "quark"):
        session = quark.start_run(project="p", storage_dir=tmp_path)
        session.end_run("interrupted")
    expected = [
        ("started", session.run_id, "running"),
        ("ended", session.run_id, "interrupted", True),
    ]
    assert [listener.heard for listener in listeners] == [expected] * 3
    assert quark.open_run(session.run_id, tmp_path).status == "interrupted"
    messages = [text for text in caplog.messages if "listener" in text]
    assert [message for message in messages if "listener1" in message] == messages
    assert len(messages) == 2


@pytest.mark.long
def test_a_resumed_run_is_heard_of_too(default, tmp_path):
    quark.start_run(project="p", storage_dir=tmp_path).end_run("failed")
    listener = Listener()
    default.register(listener, name="listener")
    (run,) = open_reader(tmp_path).list_runs()
    quark.resume_run(run_id=run.run.id, storage_dir=tmp_path).end_run()
    assert [item[0] for item in listener.heard] == ["started", "ended"]


def test_a_mirror_without_its_library_is_not_opened_and_the_package_is_named(
    default, define, plugin, tmp_path, caplog
):
    opened = []
    lacking = define(
        "lacking",
        open_it=opened.append,
        needs=("json", "no_such_library"),
        install='pip install "lacking[client]"',
    )
    default.register(plugin(lacking), name="p")
    session = quark.start_run(project="p", storage_dir=tmp_path, backends="lacking")
    session.end_run()
    (lane,) = [one for one in session.report_delivery().lanes if not one.primary]
    assert list(lane.errors) == ['no_such_library is not installed: pip install "lacking[client]"']
    assert lane.errors == dict.fromkeys(lane.errors, 1)
    assert opened == []
