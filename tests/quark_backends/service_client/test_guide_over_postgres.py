"""The programs of the public guide, as they are, over a service on PostgreSQL."""

import uuid

import pytest
import test_guide
from service_fixtures import serving

globals().update({n: f for n, f in vars(test_guide).items() if n.startswith("test_")})


@pytest.fixture(autouse=True)
def over_the_service(tmp_path, postgres_url, monkeypatch):
    with serving(tmp_path / "server", store_url=postgres_url) as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key(f"guide_{uuid.uuid4().hex[:12]}"))
        yield
