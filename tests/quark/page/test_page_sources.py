"""The code that runs were made of, as the page asks for it."""

import hashlib
import io
import zipfile

import pytest
from source_runs import keep_manifest, keep_payload, keep_sources

import quark
from quark.provenance import sources
from quark.provenance.sources import REDACTED
from quark_core.artifacts.source_packs import PACK_KEY, ManifestEntry

SCRIPT = "<script>window.ran = 1</script>\n"


@pytest.fixture
def begin(tmp_path, monkeypatch):
    def start(run_id):
        monkeypatch.setenv("QUARK_RUN_ID", run_id)
        return quark.start_run(project="p", storage_dir=tmp_path)

    return start


@pytest.fixture
def client(tmp_path, look, begin):
    files = {"train.py": "x = 1\ny = 2\n", "gone.py": "a\n", "was.py": "m = 5\n", "s.py": "s"}
    for run_id in ("old", "again"):
        with begin(run_id) as session:
            keep_sources(session, files, main="train.py")
    with begin("new") as session:
        files = {"train.py": "x = 1\ny = 3\n", "come.py": SCRIPT, "is.py": "m = 5\n", "s.py": "s"}
        more = [
            ManifestEntry("large.py", "a" * 64, 2_000_000, reason="larger than 1000000 bytes"),
        ]
        keep_sources(
            session,
            files,
            more,
            main="train.py",
            changed=["s.py"],
            left_out={"<stdin>": "code without a source file"},
            outside=["toolbox"],
        )
    with begin("none"):
        pass
    return look(tmp_path)


def test_files_are_listed_with_what_is_not_kept_and_why(client):
    said = client.json("/api/runs/new/sources")
    assert said["note"] is None
    told = {file["path"]: (file["is_kept"], file["reason"]) for file in said["files"]}
    assert list(told) == ["come.py", "is.py", "large.py", "s.py", "train.py"]
    assert told["large.py"] == (False, "larger than 1000000 bytes")
    assert told["train.py"] == (True, None)
    assert [file["path"] for file in said["files"] if file["is_main"]] == ["train.py"]
    assert [file["path"] for file in said["files"] if file["is_changed"]] == ["s.py"]
    assert said["left_out"] == [{"name": "<stdin>", "reason": "code without a source file"}]
    assert (said["count"], said["total"], said["outside"]) == (5, 5, ["toolbox"])
    assert (said["attempt"], said["attempts"], said["has_git_diff"]) == (0, [0], False)


def test_they_come_by_pages_and_are_searched(client):
    page = client.json("/api/runs/new/sources?limit=2")
    paths = [file["path"] for file in page["files"]]
    while page["next"]:
        page = client.json("/api/runs/new/sources", limit=2, after=page["next"])
        paths += [file["path"] for file in page["files"]]
    assert paths == ["come.py", "is.py", "large.py", "s.py", "train.py"]
    found = client.json("/api/runs/new/sources?text=TRAIN")
    assert ([file["path"] for file in found["files"]], found["count"]) == (["train.py"], 1)
    client.refused(400, "/api/runs/new/sources?limit=201")


def test_a_run_without_any_says_why(client):
    said = client.json("/api/runs/none/sources")
    assert "QUARK_SOURCES=off" in said["note"]
    assert said["files"] == []
    client.refused(404, "/api/runs/nope/sources")
    client.refused(404, "/api/runs/nope/source?path=train.py")


def test_the_text_of_a_file_comes_as_it_is(client):
    said = client.json("/api/runs/new/source?path=come.py")
    assert (said["text"], said["is_cut"], said["reason"]) == (SCRIPT, False, None)
    kept_not = client.json("/api/runs/new/source?path=large.py")
    assert (kept_not["text"], kept_not["reason"]) == (None, "larger than 1000000 bytes")
    for path in ("nope.py", "../train.py", "/etc/passwd", "%00"):
        client.refused(404, f"/api/runs/new/source?path={path}")
    client.refused(400, "/api/runs/new/source")
    client.refused(404, "/api/runs/new/source?git_diff=1")


def test_what_the_code_of_two_runs_differs_in(client):
    said = client.json("/api/compare/sources", side=["new", "old"])
    assert [(file["path"], file["kind"], file["old_path"]) for file in said["files"]] == [
        ("come.py", "added", None),
        ("gone.py", "removed", "gone.py"),
        ("is.py", "moved", "was.py"),
        ("large.py", "added", None),
        ("train.py", "changed", "train.py"),
    ]
    assert (said["is_equal"], said["same_count"], said["count"]) == (False, 1, 5)
    same = client.json("/api/compare/sources", side=["again", "old"])
    assert (same["is_equal"], same["files"], same["same_count"]) == (True, [], 4)
    failed = client.json("/api/compare/sources", side=["new", "none"])
    assert failed["state"] == "failed"
    assert "none has no source snapshot" in failed["note"]
    client.refused(400, "/api/compare/sources?side=new")


def test_the_lines_of_a_file_that_differs(client):
    said = client.json("/api/compare/source?side=new&side=old&path=train.py")
    assert said["lines"][2:] == ["@@ -1,2 +1,2 @@", " x = 1", "-y = 2", "+y = 3"]
    added = client.json("/api/compare/source?side=new&side=old&path=come.py")
    assert added["lines"][-1] == f"+{SCRIPT.strip()}"
    moved = client.json("/api/compare/source?side=new&side=old&path=is.py")
    assert (moved["lines"], moved["note"]) == ([], "it has a different path and the same content")
    large = client.json("/api/compare/source?side=new&side=old&path=large.py")
    assert (large["lines"], large["note"]) == ([], "larger than 1000000 bytes")
    client.refused(404, "/api/compare/source?side=new&side=old&path=s.py")


def test_paths_that_lead_elsewhere_are_not_there(begin, tmp_path, look):
    wrong = ["../up.py", "/etc/passwd", "a/../../b.py", "a\\b.py", "c:x.py", "a\nb.py", "a\x1b.py"]
    with begin("run") as session:
        keep_sources(session, dict.fromkeys([*wrong, "right.py"], "x = 1\n"))
    said = look(tmp_path).json("/api/runs/run/sources")
    assert [file["path"] for file in said["files"]] == ["right.py"]


def make_zip(members, **how):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **how) as pack:
        for name, data in members.items():
            pack.writestr(name, data)
    return out.getvalue()


BOMB = bytes(200_000_000)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("pack", "says"),
    [
        (lambda name: make_zip({name: BOMB}, compression=zipfile.ZIP_DEFLATED), "does not match"),
        (lambda name: make_zip({name: b"x"}, compression=zipfile.ZIP_LZMA), "compression format"),
        (lambda name: make_zip({name: b"x"}) + b"comment", "unknown format"),
        (lambda name: b"no zip file", "unknown format"),
        (lambda name: b"", "unknown format"),
        (lambda name: make_zip({"other": b"x"}), "damaged"),
    ],
)
def test_packs_that_nobody_honest_has_cost_a_sentence(begin, tmp_path, look, pack, says):
    sha256 = hashlib.sha256(b"x").hexdigest()
    with begin("run") as session:
        held = keep_payload(session, PACK_KEY, pack(sha256))
        keep_manifest(session, [ManifestEntry("a.py", sha256, 1, pack=held)])
    client = look(tmp_path)
    assert client.json("/api/runs/run/sources")["count"] == 1
    said = client.json("/api/runs/run/source?path=a.py")
    assert said["text"] is None
    assert says in said["reason"]


def test_what_turns_writing_round_is_spelled_out(begin, tmp_path, look):
    odd = "access = 'user\u202e\u2066 # admin'\x1b[2J\r\n"
    for run_id, text in (("run", odd), ("other", "x\n")):
        with begin(run_id) as session:
            keep_sources(session, {"a.py": text})
    client = look(tmp_path)
    text = client.json("/api/runs/run/source?path=a.py")["text"]
    lines = client.json("/api/compare/source?side=run&side=other&path=a.py")["lines"]
    for shown in (text, "\n".join(lines)):
        assert "user" in shown
        assert not {"\u202e", "\u2066", "\x1b"} & set(shown)


@pytest.mark.long
def test_texts_without_end_are_cut_off(begin, tmp_path, look):
    line = "x" * 9_999 + "\n"
    with begin("run") as session:
        texts = {"wide.py": line * 100, "long.py": "y\n" * 400_000}
        pack = keep_sources(session, texts)
        sha256 = hashlib.sha256(texts["wide.py"].encode()).hexdigest()
        # The same megabyte under very many names.
        entries = [ManifestEntry(f"f{n}.py", sha256, 1, pack=pack) for n in range(5_000)]
        keep_manifest(session, entries)
    with begin("other") as session:
        keep_sources(session, {"f1.py": "z" * 900_000})
    client = look(tmp_path)
    said = client.json("/api/runs/run/source?path=f1.py")
    assert (len(said["text"]), said["is_cut"]) == (200_000, True)
    listed = client.json("/api/compare/sources", side=["run", "other"])
    assert (listed["count"], len(listed["files"])) == (5_000, 500)
    diff = client.json("/api/compare/source?side=run&side=other&path=f1.py")
    assert diff["is_cut"]
    assert max(map(len, diff["lines"])) == 2_000
    kept = quark.read_sources("run", tmp_path)
    assert sum(len(file.data or b"") for file in kept.files) <= 70_000_000
    assert "more than" in kept.files[-1].reason


def test_lines_that_take_too_long_to_align_are_told_as_one_block(monkeypatch):
    monkeypatch.setattr(sources, "_MOST_LOOKS", 100)
    head, tail = ["same"] * 5, ["end"] * 5
    old = [*head, "x", *(f"a{n}" if n % 2 else "b" for n in range(50)), "x", *tail]
    new = [*head, "y", *(f"c{n}" if n % 2 else "b" for n in range(50)), "y", *tail]
    lines = list(sources._lay_out(old, new, "x", "x"))
    assert lines == [
        "--- x",
        "+++ x",
        "@@ -3,58 +3,58 @@",
        *[" same"] * 3,
        *(f"-{line}" for line in old[5:-5]),
        *(f"+{line}" for line in new[5:-5]),
        *[" end"] * 3,
    ]


def test_replaced_secrets_are_told(begin, tmp_path, look):
    data = b'TOKEN = "[redacted]"\n'
    stored = hashlib.sha256(data).hexdigest()
    with begin("run") as session:
        pack = keep_payload(session, PACK_KEY, make_zip({stored: data}))
        keep_manifest(session, [ManifestEntry("keys.py", "b" * 64, 30, pack, stored, REDACTED)])
    client = look(tmp_path)
    [file] = client.json("/api/runs/run/sources")["files"]
    assert (file["is_kept"], file["reason"]) == (True, REDACTED)
    assert client.json("/api/runs/run/source?path=keys.py")["text"] == data.decode()
