"""Runs are found by groups, fields, fingerprints and digests, by the store and by reading alike."""

import pytest

import quark
from quark_core.errors import SchemaValidationError
from quark_core.records.base import start_fields
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.runs import digest_config, digest_structure
from quark_core.runs.backend_choice import open_reader
from quark_core.runs.run_search import build_page_search, build_search, find_page
from quark_core.search.fallback import search_by_reading

RUNS = {
    "a": {
        "config": {"lr": 1, "seed": 1},
        "groups": ["paper/fig3"],
        "fields": {"gpu": "V100", "score": 3, "ok": True},
        "data": "d1",
    },
    "b": {
        "config": {"lr": 1.0, "seed": 2},
        "groups": ["paper", "idea"],
        "fields": {"gpu": "A100", "nested": {"x": 2.5}},
        "data": "d1",
    },
    "c": {"config": {"lr": 2, "seed": 1}, "groups": ["paperback"], "fields": {}, "data": "d2"},
    "d": {"config": {"other": None}, "groups": [], "fields": {"gpu": 7}, "data": None},
}


def fingerprint(session, key, digest, subject="data"):
    session.write([FingerprintRecord(*start_fields(None), subject, key, digest)])


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    root = tmp_path_factory.mktemp("found")
    for name, run in RUNS.items():
        session = quark.start_run(project="p", name=name, storage_dir=root, config=run["config"])
        if run["groups"]:
            session.open_run.emit_lifecycle("group", {"add": run["groups"], "remove": []})
        if run["fields"]:
            session.open_run.emit_lifecycle("fields", {"set": run["fields"], "remove": []})
        if run["data"]:
            fingerprint(session, "train", run["data"])
            fingerprint(session, "sources", f"code-{run['data']}", "code")
        session.end_run()
    return root


SEARCHES = {
    "group == 'paper'": "b",
    "groups == 'paper/fig3'": "a",
    "group != 'paper'": "acd",
    "'paper' in groups": "ab",
    "'paper/' in group": "ab",
    "'paper' not in groups": "cd",
    "group in ('idea', 'paperback')": "bc",
    "group not in ('idea', 'paperback')": "ad",
    "group == null": "d",
    "group != null": "abc",
    "field.gpu == 'V100'": "a",
    "field.gpu != 'V100'": "bd",
    "field.gpu == 7": "d",
    "field.gpu == null": "c",
    "field.nested.x > 2": "b",
    "field.ok == true": "a",
    "'100' in field.gpu": "ab",
    "fingerprint.train == 'd1'": "ab",
    "fingerprint.train != null and not fingerprint.train == 'd1'": "c",
    "fingerprint.train == null": "d",
    "code_digest == 'code-d2'": "c",
    "code_digest == null": "d",
    f"config_digest == '{digest_config({'lr': 1})}'": "ab",
    f"structure_digest == '{digest_structure({'lr': 7.5, 'seed': 0})}'": "abc",
    "environment_digest != null": "abcd",
}


@pytest.mark.parametrize("where", SEARCHES)
def test_stores_find_what_reading_finds(storage, where):
    found = quark.search_runs(where=where, storage_dir=storage)
    assert sorted(run.stored.run.name for run in found) == list(SEARCHES[where])
    with_reader = search_by_reading(open_reader(storage), build_search(where=where))
    assert sorted(run.stored.run.name for run in with_reader) == list(SEARCHES[where])


@pytest.mark.parametrize("order", ["field.gpu", "-field.gpu", "fingerprint.train", "config_digest"])
def test_stores_sort_as_reading_does(storage, order):
    found = quark.search_runs(order_by=order, storage_dir=storage)
    by_reading = search_by_reading(open_reader(storage), build_search(order_by=order))
    assert [run.run_id for run in found] == [run.run_id for run in by_reading]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("field.gup == 'V100'", "no run has the field 'field.gup'; the nearest names are"),
        ("fingerprint.trian == 'x'", "no run has the fingerprint 'fingerprint.trian'; the"),
        ("run.config_diges == 'x'", "config_digest"),
        ("groups < 'a'", "groups have no order"),
        ("field.nested == 1", "is a group, not a value; it contains field.nested.x"),
        ("max(field.score) == 1", "takes a metric, not a field of the fields"),
        ("code_digest == 7", "compare code_digest with a text in quotes"),
    ],
)
def test_what_is_wrong_is_told(storage, where, message):
    with pytest.raises(SchemaValidationError) as caught:
        quark.search_runs(where=where, storage_dir=storage)
    assert message in str(caught.value)


def test_pages_show_groups_fields_and_fingerprints(storage):
    columns = ["name", "groups", "field.gpu", "fingerprint.train", "code_digest"]
    page = build_page_search(columns=columns, order_by="name", limit=2)
    reader = open_reader(storage)
    rows = []
    while True:
        found = find_page(reader, page)
        rows += [row.values for row in found.rows]
        if found.next is None:
            break
        page = build_page_search(columns=columns, order_by="name", limit=2, after=found.next)
    assert rows == [
        ("a", ("paper/fig3",), "V100", "d1", "code-d1"),
        ("b", ("idea", "paper"), "A100", "d1", "code-d1"),
        ("c", ("paperback",), None, "d2", "code-d2"),
        ("d", None, 7.0, None, None),
    ]
