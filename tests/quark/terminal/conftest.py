"""A service on this machine, whose runs are looked at."""

import pytest
from service_fixtures import serving


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A server in this process, and the environment says so."""
    with serving(tmp_path / "server") as running:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", running.url)
        monkeypatch.setenv("QUARK_USER_KEY", running.make_key("default"))
        yield running
