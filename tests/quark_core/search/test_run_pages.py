"""Pages of runs with chosen columns: every run once, whatever it is sorted by."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from search_stores import BASE_US, Run, SearchStore

import quark
from quark.cli.main import cli
from quark_core.backends.run_pages import MOST_COLUMNS, TagName
from quark_core.errors import SchemaValidationError
from quark_core.runs.run_search import build_page_search, build_search, find_page, list_names
from quark_core.search.parser import MAX_CHARACTERS, MAX_DEPTH, MAX_NAMES, MAX_TERMS
from quark_core.search.resolution import ALIASES, CHOICES, RUN_FIELDS

ORDERS = [
    None, "val/loss", "-max(val/loss)", "config.lr", "-config.lr", "state", "-duration",
    "name", "-created", "step", ["config.flag", "-val/loss"],
]  # fmt: skip


class Paging:
    """A store that makes pages."""

    def __init__(self, store):
        self.search_page = store.finder.search_page
        self.list_names = store.finder.list_names

    def read(self, run_id, kind, query):
        raise AssertionError("no point is read for a page")

    load_run = list_runs = read


class ReadOnly:
    """A store that can only be read: its runs, and what a search makes of them."""

    def __init__(self, store):
        self._store = store

    def list_runs(self, *, project=None, limit=None):
        runs = self._store.finder.search(build_search(project=project, limit=limit))
        return [run.stored for run in runs]


class Searching(ReadOnly):
    """A store that searches, and makes no pages."""

    def search(self, search):
        return self._store.finder.search(search)

    def summarize(self, run_id):
        return self._store.finder.summarize(run_id)

    def load_run(self, run_id):
        return self.summarize(run_id).stored

    def read(self, run_id, kind, query):
        raise AssertionError("no point is read by a store that searches")


def make_runs(count=40):
    values = [0.1, "a", None, True, 3, [1, "b"], 0.1]
    runs = []
    for index in range(count):
        created_us = BASE_US + (index // 3) * 1_000_000
        losses = [1.0, float(index % 5), math.nan if index % 7 == 0 else index % 4 / 8]
        runs.append(
            Run(
                id=f"run{index:02}",
                project="one" if index % 4 else "two",
                name=[None, "b", "a"][index % 3],
                tags=[(), ("big",), ("big", "base")][index % 3],
                config={"lr": values[index % 7], "flag": index % 2 == 0} if index % 6 else {},
                created_us=created_us,
                ended_us=created_us + index % 3 * 1_000_000,
                newest_step=index % 5 or None,
                metrics={"val/loss": losses, f"m{index % 12}": [1.0]} if index % 5 else {},
            )
        )
    return runs


@pytest.fixture(scope="module")
def store():
    return SearchStore(make_runs())


@pytest.fixture(params=["pages", "search"])
def reader(request, store):
    return Paging(store) if request.param == "pages" else Searching(store)


def walk(reader, limit, **asked):
    """Every row of all pages."""
    rows, after = [], None
    while True:
        page = find_page(reader, build_page_search(limit=limit, after=after, **asked))
        rows += page.rows
        if page.next is None:
            return rows
        assert len(page.rows) == limit
        after = page.next


@pytest.mark.sampled
@pytest.mark.parametrize("order_by", ORDERS, ids=str)
def test_pages_are_what_a_search_finds(reader, store, order_by):
    wanted = [run.run_id for run in store.finder.search(build_search(order_by=order_by))]
    for limit in (7, 1, 40, 1000):
        rows = walk(reader, limit, order_by=order_by)
        assert [row.run_id for row in rows] == wanted
    page = find_page(
        reader, build_page_search(order_by=order_by, where="config.flag == true", limit=3,
                                  count=True)
    )  # fmt: skip
    assert page.count == len(store.search(where="config.flag == true"))
    assert len(page.rows) == 3


def test_a_page_has_the_columns_that_were_asked_for(reader):
    columns = [
        "val/loss", "min(val/loss)", "max(val/loss)", "first(val/loss)", "count(val/loss)",
        "config.lr", "config.flag", "tags", "state", "status", "name", "project", "created",
        "ended", "duration", "step", "absent", "config.absent", "id",
    ]  # fmt: skip
    page = find_page(reader, build_page_search(columns=columns, order_by="id", limit=40))
    assert page.columns == tuple(columns)
    rows = {row.run_id: dict(zip(columns, row.values, strict=True)) for row in page.rows}
    one = rows["run01"]
    assert [one[name] for name in columns[:5]] == [0.125, 0.125, 1.0, 1.0, 3]
    assert (one["config.lr"], one["config.flag"], one["tags"]) == ("a", False, ("big",))
    assert (one["state"], one["name"], one["project"]) == ("completed", "b", "one")
    assert (one["created"], one["ended"]) == (BASE_US, BASE_US + 1_000_000)
    assert (one["duration"], one["step"], one["id"]) == (1.0, 1, "run01")
    assert one["absent"] is one["config.absent"] is None
    assert rows["run19"]["config.lr"] == [1, "b"]
    assert rows["run04"]["config.lr"] == 3.0
    assert math.isnan(rows["run07"]["val/loss"])
    assert rows["run07"]["min(val/loss)"] == 1.0
    assert rows["run05"]["val/loss"] is rows["run05"]["count(val/loss)"] is None
    assert rows["run00"]["tags"] is None


def test_a_cursor_stays_good_while_runs_come_and_go():
    runs = [
        replace(run, created_us=BASE_US + place * 1000) for place, run in enumerate(make_runs(12))
    ]
    for make_reader in (Paging, Searching):
        store = SearchStore(runs)
        reader = make_reader(store)
        first = find_page(reader, build_page_search(limit=5))
        last = first.rows[-1].run_id
        store.connection.execute("UPDATE run SET trashed_us = 1 WHERE id = ?", (last,))
        store.add(replace(runs[0], id="new", created_us=BASE_US + 10**12))
        second = find_page(reader, build_page_search(limit=5, after=first.next))
        shown = {row.run_id for row in first.rows}
        assert shown.isdisjoint(row.run_id for row in second.rows)
        assert second.rows[0].run_id == "run06"


def test_what_makes_no_sense_is_refused(reader):
    page = find_page(reader, build_page_search(order_by="val/loss", limit=3))
    for asked in (
        {"order_by": "-val/loss"}, {"order_by": "val/loss", "project": "one"},
        {"order_by": "val/loss", "where": "config.flag == true"}, {},
    ):  # fmt: skip
        with pytest.raises(SchemaValidationError, match="another search"):
            find_page(reader, build_page_search(after=page.next, **asked))
    for after in ("", "%", "é", "AAAA", page.next[:-4]):
        with pytest.raises(SchemaValidationError, match="after must be"):
            find_page(reader, build_page_search(order_by="val/loss", after=after))
    with pytest.raises(SchemaValidationError, match="no run has the metric"):
        find_page(reader, build_page_search(order_by="absent"))
    with pytest.raises(SchemaValidationError, match="columns, column 3"):
        build_page_search(columns=["a ="])
    with pytest.raises(SchemaValidationError, match="columns has 61"):
        build_page_search(columns=["a"] * (MOST_COLUMNS + 1))
    with pytest.raises(SchemaValidationError, match="limit must be at most 1000"):
        build_page_search(limit=1001)
    with pytest.raises(SchemaValidationError, match="columns must be a sequence"):
        build_page_search(columns="val/loss")


def test_a_store_that_is_only_read_makes_pages_without_reading_a_point(store):
    asked = build_page_search(columns=["name", "config.lr"], count=True)
    page = find_page(ReadOnly(store), asked)
    assert page == find_page(Paging(store), asked) == find_page(Searching(store), asked)


def test_names_are_those_that_runs_have(reader):
    names = list_names(reader)
    assert names.metrics == (*(f"m{index}" for index in range(12)), "val/loss")
    assert names.tags == (TagName("base", 13), TagName("big", 26))
    flag, lr = names.config
    assert (flag.key, flag.written, flag.types) == ("flag", "config.flag", ("bool",))
    assert set(flag.values) == {True, False}
    assert set(lr.types) == {"number", "text", "bool", "null", "json"}
    assert lr.values[0] == 3.0 or lr.values[0] in (True, 0.1, "a")
    assert {repr(value) for value in lr.values} == {"0.1", "'a'", "True", "3.0"}
    assert names.complete


def test_names_that_have_a_text_in_them(reader):
    assert list_names(reader, text="LOSS").metrics == ("val/loss",)
    assert list_names(reader, text="1").metrics == ("m1", "m10", "m11")
    assert list_names(reader, text="lr").config[0].written == "config.lr"
    cut = list_names(reader, text="m", limit=2)
    assert (cut.metrics, cut.complete) == (("m0", "m1"), False)
    assert list_names(reader, project="absent") == list_names(reader, text="nowhere")
    assert list_names(reader, project="two").tags == (TagName("base", 3), TagName("big", 6))
    with pytest.raises(SchemaValidationError, match="project must be a str"):
        list_names(reader, project=3)


PAGE = (Path(__file__).parents[3] / "docs/reference/search.md").read_text("utf-8")


def find_blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def find_lines(language):
    lines = [line for block in find_blocks(language) for line in block.splitlines()]
    assert lines
    return lines


@pytest.fixture
def runs(tmp_path, log_run, monkeypatch):
    """A working directory with the storage root `runs`, in which every name of the page exists."""
    monkeypatch.chdir(tmp_path)
    log_run(
        "runs",
        "example",
        name="resnet50",
        tags=["baseline"],
        config={
            "lr": 3e-4,
            "batch size": 32,
            "amp": True,
            "betas": [0.9, 0.999],
            "optimizer": {"name": "adamw", "weight decay": 0.1},
        },
        values={
            "val/loss": [0.5, 0.25],
            "train/acc@1": [0.7],
            "2nd try": [1.0],
            "step": [2000.0],
        },
        group="paper/fig3",
        fields={"gpu": "V100", "score": 0.9, "nested": {"note": "x"}},
        fingerprints={"train": "5f1c0a"},
    )
    log_run("runs", "other", status="failed", values={"val/loss": [float("nan")]})


@pytest.mark.sampled
@pytest.mark.parametrize("where", find_lines("where"))
def test_examples_of_expressions_run(runs, where):
    quark.search_runs(storage_dir="runs", where=where)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("not val/loss < 0.3", ["other"]),
        ("val/loss >= 0.3", []),
        ("val/loss == null and count(val/loss) != null", ["other"]),
        ("config.amp == 1", []),
        ("config.lr != 3e-4", []),
    ],
)
def test_what_the_page_says_of_missing_values(runs, where, found):
    assert [run.run_id for run in quark.search_runs(storage_dir="runs", where=where)] == found


@pytest.mark.sampled
@pytest.mark.parametrize("order_by", find_lines("order"))
def test_examples_of_orders_run(runs, order_by):
    assert len(quark.search_runs(storage_dir="runs", order_by=order_by)) == 2


@pytest.mark.long
@pytest.mark.parametrize("program", find_blocks("python"))
def test_programs_run(runs, program, capsys):
    exec(program, {"quark": quark})
    assert capsys.readouterr().out == "example completed 0.25 0.0003\n"


@pytest.mark.sampled
@pytest.mark.parametrize("line", find_lines("console"))
def test_commands_run(runs, line, monkeypatch):
    monkeypatch.chdir("runs")
    prompt, command, *arguments = shlex.split(line)
    assert (prompt, command) == ("$", "quark")
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "example" in result.stdout


@pytest.mark.sampled
@pytest.mark.parametrize("block", find_blocks("mistake"))
def test_mistakes_are_told_as_shown(runs, block):
    where, _, message = block.partition("\n---\n")
    with pytest.raises(quark.SchemaValidationError) as caught:
        quark.search_runs(storage_dir="runs", where=where)
    assert str(caught.value) == message.rstrip("\n")


def test_every_field_and_word_is_described():
    table = PAGE[PAGE.index("| Field |") : PAGE.index("A field comes before")]
    fields = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*\|", table, re.MULTILINE))))
    assert fields == set(RUN_FIELDS) | set(ALIASES)
    assert all(word in table for word in CHOICES["state"])


def test_the_limits_are_those_of_the_parser():
    end = PAGE[PAGE.index("An expression has at most") :].replace(",", "")
    numbers = [int(number) for number in re.findall(r"\b\d+\b", end)]
    assert numbers == [MAX_CHARACTERS, MAX_TERMS, MAX_NAMES, MAX_DEPTH]
