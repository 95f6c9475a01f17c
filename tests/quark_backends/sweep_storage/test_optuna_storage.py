"""Optuna's own tests of a storage, over each store that coordinates."""

import uuid
from functools import partial

import pytest

pytest.importorskip("optuna")

from optuna.storages import JournalStorage
from optuna.testing.pytest_storages import StorageTestCase
from postgres_server import open_database
from service_fixtures import serving

from quark_backends.embedded.plugin import quark_register_backends as embedded
from quark_backends.service.plugin import quark_register_backends as service
from quark_backends.store.run_store import RunStore
from quark_core.backends.contract import BackendConfig
from quark_core.sweeps.optuna_journal import EntryJournal


class _StorageTests(StorageTestCase):
    """All tests of a class share a store, and each has a log of its own: as sweeps do."""

    @pytest.fixture
    def storage(self, reopen):
        store = reopen()
        log = f"{uuid.uuid4().hex}/optuna"
        yield JournalStorage(EntryJournal(store, log, reopen=reopen))
        store.close()


class TestEmbedded(_StorageTests):
    @pytest.fixture(scope="class")
    def reopen(self, tmp_path_factory):
        config = BackendConfig(storage_dir=tmp_path_factory.mktemp("store"), run_id="run")
        return partial(embedded()[0].open, config)


class _Database:
    """A schema, named so that a pickle need not hold its connections."""

    opened = None


def open_postgres():
    return RunStore.over_postgres(_Database.opened)


@pytest.mark.long
class TestPostgres(_StorageTests):
    @pytest.fixture(scope="class")
    def reopen(self, postgres_url):
        with open_database(postgres_url) as database:
            _Database.opened = database
            yield open_postgres


@pytest.mark.long
class TestService(_StorageTests):
    @pytest.fixture(scope="class")
    def reopen(self, tmp_path_factory):
        with (
            serving(tmp_path_factory.mktemp("server")) as server,
            pytest.MonkeyPatch.context() as m,
        ):
            m.setenv("QUARK_USER_KEY", server.make_key("default", "ingest"))
            config = BackendConfig(
                storage_dir=tmp_path_factory.mktemp("client"),
                run_id="run",
                location=server.url,
                options={"store": "*"},
            )
            yield partial(service()[0].open, config)
