"""Ids by their beginning, over stores of every sort."""

import pytest

import quark
from quark_core.runs.backend_choice import open_reader
from quark_core.runs.run_ids import find_labels, shorten_run_id


@pytest.fixture(params=["database", "journal"])
def root(request, tmp_path, monkeypatch):
    if request.param == "journal":
        monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    for run_id, name in (("alpha-1", "one"), ("alpha-2", None), ("beta-1", "two")):
        monkeypatch.setenv("QUARK_RUN_ID", run_id)
        quark.start_run(project="p", name=name, storage_dir=tmp_path, backends="csv").end_run()
    monkeypatch.delenv("QUARK_RUN_ID")
    return tmp_path


def test_labels_are_those_of_runs_that_begin_so_newest_first(root):
    reader = open_reader(root)
    assert [label.run_id for label in find_labels(reader, "")] == ["beta-1", "alpha-2", "alpha-1"]
    assert find_labels(reader, "alpha-1") == [("alpha-1", "p", "one", "completed")]
    assert [label.run_id for label in find_labels(reader, "al", 1)] == ["alpha-2"]
    assert find_labels(reader, "alpha' or '1'='1") == []
    assert find_labels(reader, "ALPHA") == []


def test_the_beginning_of_an_id_is_enough(root):
    assert quark.open_run("beta", root).id == "beta-1"
    with pytest.raises(quark.RunNotFoundError, match="'alpha' fits 2 runs: alpha-2, alpha-1 "):
        quark.open_run("alpha", root)
    with quark.resume_run(run_id="beta", storage_dir=root, reopen=True) as session:
        assert session.id == "beta-1"


def test_a_mirror_finds_them_too(root):
    place = f"csv:{root / '.quark' / 'runs'}"
    assert quark.open_run(place, "beta").id == "beta-1"
    with pytest.raises(quark.RunNotFoundError, match="fits 2 runs"):
        quark.open_run(place, "alpha")


def test_ids_of_ours_are_shortened_and_those_of_others_are_not():
    assert shorten_run_id("3f2a91c0deadbeef") == "3f2a91c0"
    assert shorten_run_id("sweep-learning-rate-1") == "sweep-learning-rate-1"
    assert shorten_run_id("abc") == "abc"
