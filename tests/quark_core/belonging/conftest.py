"""Where the runs of these tests lie: in a database, in journals alone, and behind a service."""

import pytest
from service_fixtures import serving


@pytest.fixture(params=["database", "journal", "service"])
def root(request, tmp_path, monkeypatch):
    """A storage root; runs of it lie wherever the parameter says."""
    if request.param != "service":
        monkeypatch.setenv("QUARK_JOURNAL_ONLY", "0" if request.param == "database" else "1")
        yield tmp_path / "runs"
        return
    folder = tmp_path / "service"
    folder.mkdir()
    with serving(folder) as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default"))
        yield tmp_path / "runs"
