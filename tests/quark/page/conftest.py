"""A page's server as the tests of its answers ask it: without a socket, with its guard."""

import pytest
from page_client import DEADLINE_S, PageClient, log_plain_run

import quark.page.app as application
from quark.page.routes.page_source import open_source


@pytest.fixture(autouse=True)
def patient_servers(monkeypatch):
    """On a busy machine an answer takes its time, and is no 503 for that."""
    monkeypatch.setattr(application, "_ANSWER_S", DEADLINE_S)
    monkeypatch.setattr(application, "_WAIT_S", DEADLINE_S)


@pytest.fixture
def look():
    """Opens a store, or another backend, and gives a client of its page."""
    clients = []

    def open_it(storage_dir=None, backend=None, **settings):
        clients.append(PageClient(open_source(storage_dir, backend), **settings))
        return clients[-1]

    yield open_it
    for client in clients:
        # Nothing goes on beside the next test.
        client.app.state.page.desk.close(DEADLINE_S)
        client.app.state.page.tables.close()
        client.source.close()


@pytest.fixture(scope="session")
def plain_store(tmp_path_factory):
    """A store with one run, which nobody writes to."""
    folder = tmp_path_factory.mktemp("plain")
    arguments = {"config": {"lr": 0.1, "steps": 100}, "tags": ["base"], "notes": "a note"}
    return folder, log_plain_run(folder, name="first", **arguments)


@pytest.fixture
def plain(plain_store, look):
    """The page of a store with one run."""
    folder, run_id = plain_store
    client = look(folder)
    client.run_id = run_id
    return client
