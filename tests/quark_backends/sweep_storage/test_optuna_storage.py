"""Optuna's own tests of a storage, over each store that coordinates."""

import uuid
from contextlib import closing
from functools import partial

import pytest

pytest.importorskip("optuna")

from optuna.storages import JournalStorage
from optuna.testing.pytest_storages import StorageTestCase
from postgres_server import open_database
from service_fixtures import serving

from quark.sweeps.optuna_search import EntryJournal
from quark_backends.embedded.plugin import quark_register_backends as embedded
from quark_backends.service.plugin import quark_register_backends as service
from quark_backends.store.run_store import PostgresRunStore
from quark_core.backends.contract import BackendConfig


def open_storage(reopen):
    """Optuna's storage over a log of its own, as each sweep has one, in a store of all tests."""
    store = reopen()
    with closing(store):
        yield JournalStorage(EntryJournal(store, f"{uuid.uuid4().hex}/optuna", reopen=reopen))


@pytest.fixture(scope="module")
def embedded_store(tmp_path_factory):
    config = BackendConfig(storage_dir=tmp_path_factory.mktemp("store"), run_id="run")
    return partial(embedded()[0].open, config)


@pytest.fixture(scope="module")
def postgres_store(postgres_url):
    with open_database(postgres_url) as database:
        _databases.append(database)
        yield _open_postgres
        _databases.clear()


_databases = []


def _open_postgres():
    """By its name, since connections cannot be pickled."""
    return PostgresRunStore(_databases[0])


@pytest.fixture(scope="module")
def service_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    with serving(folder / "server") as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUARK_USER_KEY", server.make_key("default", "ingest"))
        config = BackendConfig(
            storage_dir=folder / "client",
            run_id="run",
            location=server.url,
            options={"store": "*"},
        )
        yield partial(service()[0].open, config)


class TestEmbedded(StorageTestCase):
    @pytest.fixture
    def storage(self, embedded_store):
        yield from open_storage(embedded_store)


@pytest.mark.long
class TestPostgres(StorageTestCase):
    @pytest.fixture
    def storage(self, postgres_store):
        yield from open_storage(postgres_store)


@pytest.mark.long
class TestService(StorageTestCase):
    @pytest.fixture
    def storage(self, service_store):
        yield from open_storage(service_store)
