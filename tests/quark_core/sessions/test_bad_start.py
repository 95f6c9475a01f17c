"""What `start_run` refuses, and how it says so."""

import pytest

import quark
from quark_core.backends.registry import default_registry
from quark_core.errors import BackendError, SchemaValidationError, UnknownBackendError


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"project": ""}, "project"),
        ({"project": None}, "project"),
        ({"project": "x" * 251}, "project"),
        ({"config": [1, 2]}, "config"),
        ({"config": "lr=1"}, "config"),
        ({"tags": "baseline"}, "tags"),
        ({"tags": ["ok", 3]}, "tags"),
        ({"tags": [""]}, "tags"),
        ({"parent_run_id": "../x"}, "parent_run_id"),
        ({"storage_dir": 7}, "storage_dir"),
        ({"name": ""}, "name"),
        ({"notes": 3}, "notes"),
        ({"backends": 3}, "backends"),
        ({"backends": [3]}, "backends"),
    ],
    ids=str,
)
def test_bad_arguments_are_named_and_leave_nothing_behind(tmp_path, arguments, named):
    given = {"project": "p", "storage_dir": tmp_path, **arguments}
    with pytest.raises(SchemaValidationError, match=named):
        quark.start_run(**given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backends", ["nowhere", "csv,nowhere", ["nowhere:x"], "no where", ":x"])
def test_unknown_backends_list_what_is_installed(tmp_path, backends):
    expected = r"installed: csv, embedded, mlflow, service, tensorboard, wandb\)"
    with pytest.raises(UnknownBackendError, match=expected) as caught:
        quark.start_run(project="p", storage_dir=tmp_path, backends=backends)
    assert isinstance(caught.value, (BackendError, ValueError))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["mlflow", "tensorboard:out", "wandb:team/project"])
def test_a_backend_of_an_extra_that_is_missing_says_what_to_install(tmp_path, monkeypatch, backend):
    # Each is declared where Quark is installed, whether or not the library that it needs is.
    name = backend.partition(":")[0]
    monkeypatch.delitem(default_registry()._definitions, name)
    with pytest.raises(UnknownBackendError, match=rf'pip install "quark-tracker\[{name}\]"'):
        quark.start_run(project="p", storage_dir=tmp_path, backends=backend)
    assert list(tmp_path.iterdir()) == []


def test_a_required_service_must_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_REQUIRE_SERVICE", "1")
    with pytest.raises(quark.SessionStoreError, match="QUARK_PERSISTENCE_URL"):
        quark.start_run(project="p", storage_dir=tmp_path)


def test_a_service_that_this_installation_cannot_reach_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", "https://quark.example.invalid")
    with pytest.raises(quark.SessionStoreError, match="QUARK_USER_KEY is not set"):
        quark.start_run(project="p", storage_dir=tmp_path)
    monkeypatch.setenv("QUARK_USER_KEY", "qk_a_b")
    with pytest.raises(quark.SessionStoreError, match="cannot be reached"):
        quark.start_run(project="p", storage_dir=tmp_path)
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", "quark.example.invalid:7411")
    with pytest.raises(quark.SessionStoreError, match="with its scheme"):
        quark.start_run(project="p", storage_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["QUARK_EXIT_TIMEOUT_SECONDS", "QUARK_PERSISTENCE_TIMEOUT_SECONDS"]
)
@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_bad_timeouts_are_named(tmp_path, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SchemaValidationError, match=name):
        quark.start_run(project="p", storage_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_status_is_named(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        for status in ("lost", "running", "done", None):
            with pytest.raises(SchemaValidationError, match="status"):
                session.end_run(status)
        assert session.status == "running"
