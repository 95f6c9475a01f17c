"""Tables and texts out of payloads: pages of rows, sorted and searched, whatever the bytes are."""

import csv
import io
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quark
from quark.page.routes.table_files import find_elements, find_lines, open_table
from quark_core.errors import SchemaValidationError

ROWS = 9_000
MANY_ROWS = 150_000
NO_BOUND = {"most_rows": 10**6, "most_bytes": 10**9}


def log_forms(artifacts, folder, count):
    """The same table in each form."""
    columns = ["id", "loss", "label"]
    rows = [[row, find_loss(row, count), f"class {row % 3}"] for row in range(count)]
    folder.mkdir()
    with (folder / "scores.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    lines = (json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
    (folder / "scores.jsonl").write_text("".join(lines))
    pyarrow = pytest.importorskip("pyarrow")
    arrays = dict(zip(columns, zip(*rows, strict=True), strict=True))
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table(arrays), folder / "scores.parquet", row_group_size=count // 3
    )
    for name in ("scores.csv", "scores.jsonl", "scores.parquet"):
        artifacts.log_file(folder / name)
    artifacts.log_table("scores", rows, columns=columns)


def find_loss(row, count):
    return (row * 7919) % count / 8


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A run with the same table in each form, and things that are none."""
    root = tmp_path_factory.mktemp("tables")
    session = quark.start_run(project="p", storage_dir=root)
    with session, quark.ArtifactStore(session) as artifacts:
        log_forms(artifacts, root / "files", ROWS)
        log_hostile(artifacts)
    return root, session.run_id


def log_hostile(artifacts):
    for name, payload in {
        "page.png": b"<!doctype html><script>window.ran=1</script>",
        "drawing": b'<svg xmlns="http://www.w3.org/2000/svg"><script>window.ran=1</script></svg>',
        "picture.csv": b"\x89PNG\r\n\x1a\nno,picture\n",
        "formula.csv": "a,b\n=cmd|'/c calc'!A0,\x1b[31m\x00red\u202eder\n".encode(),
        "deep.jsonl": b"[" * 40_000 + b"]" * 40_000 + b'\n{"a": 1}\n{broken\n\n',
        "wide.csv": b",".join(b"c%d" % column for column in range(5_000)) + b"\n" + b"," * 4_999,
        "open.csv": b'a,b\n1,"never closed\n' + b"2,x\n" * 300_000,
        "utf16.csv": "a,b\n1,2\n".encode("utf-16"),
        "long.jsonl": b'{"a": "' + b"x" * 200_000 + b'"}\n{"a": 2}\n',
        "empty.csv": b"",
        "broken.parquet": b"PAR1" + b"\xff" * 200 + b"PAR1",
        "notes.txt": b"one\ntwo " + bytes([0xC3, 0xA9]),
    }.items():
        artifacts.store("odd", name, payload, payload_format="bytes")
    artifacts.store("table", "no-table", {"columns": 3, "rows": 4})
    artifacts.store("odd", "deep", b"[" * 90_000 + b"]" * 90_000, payload_format="bytes")
    artifacts.store("odd", "large", b"a line\n" * 100_000, payload_format="bytes")
    artifacts.store("odd", "numbers", b'{"n":12345678901234567890,"z":[1,NaN]}')


def open_client(look, root, run_id):
    found = look(root)
    listed = found.json(f"/api/runs/{run_id}/artifacts", limit=200)["artifacts"]
    found.artifacts = {row["name"]: row for row in listed}
    found.run_id = run_id
    return found


@pytest.fixture
def client(tables, look):
    return open_client(look, *tables)


def read(client, name, **parameters):
    row = client.artifacts[name]
    kind = parameters.pop("kind", row["table"])
    return client.json(
        f"/api/runs/{client.run_id}/table", sha256=row["sha256"], kind=kind, **parameters
    )


def refuse(client, name, kind, **parameters):
    sha256 = client.artifacts[name]["sha256"]
    path = f"/api/runs/{client.run_id}/table"
    return client.refused(400, path, sha256=sha256, kind=kind, **parameters)


def is_like(value, other):
    return float(value) == other if isinstance(other, (int, float)) else value == other


FORMS = ["scores.csv", "scores.jsonl", "scores", "scores.parquet"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", FORMS)
def test_any_rows_of_a_table_are_read_sorted_and_searched(client, name):
    check_table(client, name, ROWS)


@pytest.mark.long
def test_tables_of_many_rows_are_read_sorted_and_searched(tmp_path, look):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session, quark.ArtifactStore(session) as artifacts:
        log_forms(artifacts, tmp_path / "files", MANY_ROWS)
    many = open_client(look, tmp_path, session.run_id)
    for name in FORMS:
        check_table(many, name, MANY_ROWS)


def check_table(client, name, count):
    for first in (0, count // 2 + 1, count - 40):
        said = read(client, name, first=first)
        assert said["columns"] == ["id", "loss", "label"]
        assert (said["count"], said["row_count"], said["is_whole"]) == (count, count, True)
        numbers = range(first, min(first + 100, count))
        assert said["numbers"] == list(numbers)
        for number, row in zip(numbers, said["rows"], strict=True):
            expected = [number, find_loss(number, count), f"class {number % 3}"]
            assert all(map(is_like, row, expected))
    assert read(client, name, first=count)["rows"] == []
    said = read(client, name, sort=1, descending=1, limit=3)
    highest = sorted((find_loss(row, count) for row in range(count)), reverse=True)
    assert [float(row[1]) for row in said["rows"]] == highest[:3]
    assert (said["count"], said["searched"]) == (count, count)
    found = read(client, name, text="CLASS 2", sort=0, first=10, limit=2)
    assert found["numbers"] == [32, 35]
    assert (found["count"], found["row_count"]) == (count // 3, count)
    assert read(client, name, text="nowhere")["count"] == 0


def test_the_list_says_what_is_a_table_and_what_a_picture(client):
    tables = {name: row["table"] for name, row in client.artifacts.items() if row["table"]}
    assert tables == {
        "scores.csv": "csv", "scores.jsonl": "lines", "scores": "json", "scores.parquet": "parquet",
        "formula.csv": "csv", "deep.jsonl": "lines", "wide.csv": "csv", "open.csv": "csv",
        "utf16.csv": "csv", "long.jsonl": "lines", "empty.csv": "csv", "no-table": "json",
        "broken.parquet": "parquet",
    }  # fmt: skip
    assert [name for name, row in client.artifacts.items() if row["is_image"]] == [
        "drawing", "picture.csv",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "disposition", "media_type"),
    [
        ("page.png", "attachment", "text/html; charset=utf-8"),
        ("picture.csv", "inline", "image/png"),
        ("drawing", "inline", "image/svg+xml"),
        ("formula.csv", "attachment", "application/octet-stream"),
        ("scores.parquet", "attachment", "application/vnd.apache.parquet"),
    ],
)
def test_a_payload_is_what_its_bytes_are_in_a_sandbox(client, name, disposition, media_type):
    answer = client.get(f"/{client.artifacts[name]['url']}")
    assert answer.headers["content-type"] == media_type
    assert answer.headers["content-disposition"].startswith(disposition)
    assert answer.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_formulas_are_texts_and_what_is_not_seen_is_shown_by_signs(client):
    (row,) = read(client, "formula.csv")["rows"]
    assert row == ["=cmd|'/c calc'!A0", "␛[31m␀red\N{REPLACEMENT CHARACTER}der"]


def test_odd_tables_have_bounds(client):
    wide = read(client, "wide.csv")
    assert (len(wide["columns"]), wide["column_count"], len(wide["rows"][0])) == (200, 5_000, 200)
    deep = read(client, "deep.jsonl")
    assert deep["columns"] == ["value", "a"]
    assert [row[1] for row in deep["rows"]] == [None, 1, None, None]
    assert [len(str(row[0])) for row in deep["rows"]] == [301, 4, 7, 4]
    # A mark that nobody closes does not make one row of all that follows.
    unclosed = read(client, "open.csv", first=200_000, limit=1)
    assert (unclosed["count"], unclosed["rows"]) == (300_001, [["2", "x"]])
    long = read(client, "long.jsonl")
    assert [len(str(cell)) for row in long["rows"] for cell in row if cell is not None] == [301, 1]
    assert read(client, "empty.csv") | {"name": ""} == {
        "name": "", "size_bytes": 0, "columns": [], "column_count": 0, "rows": [], "numbers": [],
        "count": 0, "row_count": 0, "is_whole": True, "searched": 0,
    }  # fmt: skip


def test_what_is_no_table_says_so(client):
    assert "UTF-16" in refuse(client, "utf16.csv", "csv")
    assert "image/png" in refuse(client, "picture.csv", "csv")
    assert "cannot be read" in refuse(client, "broken.parquet", "parquet")
    assert "cannot be read" in refuse(client, "notes.txt", "parquet")
    assert "it must start with" in refuse(client, "no-table", "json")
    assert "it must start with" in refuse(client, "deep", "json")
    assert "sort must be a column from 0 to 2" in refuse(client, "scores.csv", "csv", sort=3)
    assert "kind" in refuse(client, "scores.csv", "xlsx")
    path = f"/api/runs/{client.run_id}/table"
    assert "SHA-256" in client.refused(404, path, sha256="../../etc")
    assert "no artifact" in client.refused(404, path, sha256="0" * 64)


def test_texts_have_bounds_and_json_is_laid_out_as_it_is(client):
    def read_text(name):
        path = f"/api/runs/{client.run_id}/text"
        return client.json(path, sha256=client.artifacts[name]["sha256"])

    assert read_text("notes.txt") == {"text": "one\ntwo é", "is_cut": False, "size_bytes": 10}
    large = read_text("large")
    assert (len(large["text"]), large["is_cut"], large["size_bytes"]) == (200_000, True, 700_000)
    # Not laid out: each level would add to every line.
    assert read_text("deep")["text"] == "[" * 90_000 + "]" * 90_000
    assert read_text("no-table")["text"] == '{\n  "columns": 3,\n  "rows": 4\n}'
    # No number is another one for being shown, and what is no JSON is there as well.
    assert read_text("numbers")["text"].startswith('{"n":12345678901234567890')
    path = f"/api/runs/{client.run_id}/text"
    for name in ("page.png", "drawing", "picture.csv", "scores.parquet"):
        said = client.refused(400, path, sha256=client.artifacts[name]["sha256"])
        assert "is not a text" in said


@pytest.mark.long
def test_a_text_of_a_gigabyte_is_shown_and_sent_in_pieces(tmp_path, look):
    large = tmp_path / "large.csv"
    with large.open("wb") as file:
        file.write(b"a,b\n" + b"1,2\n" * 60_000)
        # Sparse: the disk holds nothing of it.
        file.truncate(2**30)
    session = quark.start_run(project="p", storage_dir=tmp_path / "store")
    with session, quark.ArtifactStore(session) as artifacts:
        artifacts.log_file(large)
    large.unlink()
    client = look(tmp_path / "store")
    (row,) = client.json(f"/api/runs/{session.run_id}/artifacts")["artifacts"]
    asked = {"sha256": row["sha256"]}
    tracemalloc.start()
    try:
        text = client.json(f"/api/runs/{session.run_id}/text", **asked)
        table = client.json(f"/api/runs/{session.run_id}/table", **asked, kind=row["table"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (text["is_cut"], text["size_bytes"]) == (True, 2**30)
    assert table["rows"][0] == ["1", "2"]
    assert (table["count"], table["is_whole"]) == (60_000, False)
    assert peak < 64 * 2**20


def test_tables_that_were_looked_at_last_stay_open_and_no_others(client):
    for name in ("formula.csv", "wide.csv", "open.csv", "long.jsonl", "empty.csv", "formula.csv"):
        assert read(client, name)["name"] == name
    desk = client.app.state.page.tables
    assert len(desk._open) == 4
    desk.close()
    assert read(client, "wide.csv")["column_count"] == 5_000


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=8)


@given(st.lists(st.lists(CELLS, min_size=2, max_size=3), min_size=1, max_size=8))
def test_rows_of_any_csv_are_those_of_the_standard_library(rows):
    out = io.StringIO()
    csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows([["a", "b", "c"], *rows])
    table = open_table(io.BytesIO(out.getvalue().encode()), "csv")
    assert table.read(range(table.count)) == rows


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(
    st.lists(st.lists(VALUES, min_size=2, max_size=2), max_size=20), st.booleans(), st.booleans()
)
def test_rows_of_any_json_are_those_that_were_written(rows, is_plain, is_spaced):
    document = {"columns": ['a"]', "\\"], "rows": rows}
    separators = (", ", ": ") if is_spaced else (",", ":")
    text = json.dumps(document, ensure_ascii=is_plain, separators=separators)
    table = open_table(io.BytesIO(text.encode()), "json")
    assert (table.columns, table.count, table.is_whole) == (['a"]', "\\"], len(rows), True)
    assert table.read(range(len(rows))) == rows


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_rows_are_found_whichever_bytes_come_together(monkeypatch, size):
    monkeypatch.setattr("quark.page.routes.table_files._PART_BYTES", size)
    text = b'[["a\\"]\\\\", {"b": "[\\\\"}], [[1], "\\\\\\""], [3]] tail ]'
    places = find_elements(io.BytesIO(text), 1, **NO_BOUND)
    found = [text[start:end] for start, end in zip(places.starts, places.ends, strict=True)]
    assert found == [b'["a\\"]\\\\", {"b": "[\\\\"}]', b'[[1], "\\\\\\""]', b"[3]"]
    assert places.is_whole
    lines = b'a,"b\n""c\n"\n1,2\nlast'
    places = find_lines(io.BytesIO(lines), quoted=True, **NO_BOUND)
    assert (places.starts.tolist(), places.ends.tolist()) == ([0, 11, 15], [11, 15, 19])


def test_bounds_leave_rows_out_and_say_so():
    text = b"".join(b"%d\n" % row for row in range(1_000))
    some = find_lines(io.BytesIO(text), quoted=False, most_rows=10, most_bytes=10**6)
    assert (len(some), some.is_whole) == (10, False)
    array = b"[" + b",".join(b"[%d]" % row for row in range(1_000)) + b"]"
    some = find_elements(io.BytesIO(array), 1, most_rows=10, most_bytes=10**6)
    assert (len(some), some.is_whole) == (10, False)
    cut = find_elements(io.BytesIO(array[:-200]), 1, **NO_BOUND)
    assert not cut.is_whole
    with pytest.raises(SchemaValidationError, match="UTF-16"):
        open_table(io.BytesIO("a".encode("utf-16")), "csv")


def test_pictures_are_found_among_many_artifacts_by_name_and_step(tmp_path, look):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session, quark.ArtifactStore(session) as artifacts:
        artifacts.store("figure", "whole", SVG, payload_format="text")
        for step in range(0, 120, 4):
            for name in ("a/one", "a/two", "b") if step < 60 else ("b",):
                drawing = SVG.replace("9", str(step + 9))
                artifacts.store("image", name, drawing, step=step, payload_format="text")
            artifacts.store("note", f"words-{step}", "no picture", step=step)
    client = look(tmp_path)
    path = f"/api/runs/{session.run_id}/images"
    said = client.json(path)
    assert (said["steps"], said["step_count"]) == (list(range(0, 120, 4)), 30)
    assert [(row["name"], row["step"]) for row in said["images"]] == [
        ("a/one", 56), ("a/two", 56), ("b", 116), ("whole", None),
    ]  # fmt: skip
    early = client.json(path, at=9, text="A/")
    assert [(row["name"], row["step"]) for row in early["images"]] == [("a/one", 8), ("a/two", 8)]
    assert all(client.get(f"/{row['url']}").status_code == 200 for row in early["images"])
    assert (early["count"], early["left_out"]) == (2, 0)
    assert "at" in client.refused(400, path, at="x")
    client.refused(404, "/api/runs/none-such/images")


SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9"></svg>'
