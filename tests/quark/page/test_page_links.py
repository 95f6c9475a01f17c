"""Where a run says that it can be looked at: its page, where there is one; in a notebook too."""

import pytest
from notebook_kernel import Kernel
from team_server import Person, serving_team

import quark


@pytest.fixture
def team(tmp_path, monkeypatch):
    """A server with a page, which runs of this process go to."""
    with serving_team(tmp_path / "server") as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default", "ingest", "read"))
        yield server


def test_a_run_says_its_address_which_its_team_can_open(team, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("QUARK_QUIET")
    with quark.start_run(project="p", name="digits", storage_dir=tmp_path) as session:
        url = session.url
        assert url == f"{team.url}/run/{session.id}?in=default"
        assert url in capfd.readouterr().err
    with Person(team) as person:
        person.log_in(team.make_key("default", "read"))
        assert person.get(url.removeprefix(team.url)).status_code == 200
    # The beginning of an id is enough there too, and whoever only reads learns the address.
    opened = quark.open_run(session.id[:6], tmp_path)
    assert (opened.id, opened.url) == (session.id, url)


def test_a_store_on_this_machine_has_no_address(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        assert session.url is None


@pytest.mark.long
def test_in_a_real_notebook_a_run_speaks_on_standard_output(tmp_path, monkeypatch):
    monkeypatch.delenv("QUARK_QUIET")
    kernel = Kernel(tmp_path)
    try:
        kernel.run("import quark; quark.start_run(project='p', name='digits').end_run()")
        said = [
            (each["content"]["name"], each["content"]["text"]) for each in kernel.list("stream")
        ]
    finally:
        kernel.close()
    assert {name for name, _ in said} == {"stdout"}
    assert "".join(text for _, text in said).count("quark: run ") == 2
