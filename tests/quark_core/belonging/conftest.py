"""Where the runs of these tests lie: in a database, in journals alone, and behind a service."""

import contextlib

import pytest
from service_fixtures import serving


@contextlib.contextmanager
def keep_runs(kind, tmp_path, monkeypatch):
    """A storage root whose runs lie in a database, in journals alone, or behind a service."""
    if kind != "service":
        monkeypatch.setenv("QUARK_JOURNAL_ONLY", "0" if kind == "database" else "1")
        yield tmp_path / "runs"
        return
    folder = tmp_path / "service"
    folder.mkdir()
    with serving(folder) as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default"))
        monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", "60")
        yield tmp_path / "runs"


@pytest.fixture(params=["database", "journal", "service"])
def root(request, tmp_path, monkeypatch):
    """A storage root; runs of it lie wherever the parameter says."""
    with keep_runs(request.param, tmp_path, monkeypatch) as place:
        yield place


@pytest.fixture(params=["database", "service"])
def kept(request, tmp_path, monkeypatch):
    """The same, where the store keeps what is said of projects and groups."""
    with keep_runs(request.param, tmp_path, monkeypatch) as place:
        yield place
