"""`quark sources` before stores that nobody honest has made."""

import hashlib
import io
import json
import zipfile

import pytest
from source_runs import keep_manifest, keep_payload, keep_sources

from quark_core.artifacts.source_packs import PACK_KEY, ManifestEntry

WRONG = [
    "../up.py", "/etc/evil.py", "a/../../b.py", "a\\b.py", "c:x.py", "a\nb.py", "\x1b[2J.py",
    "a/./b.py", "a//b.py", "\u202e.py",
]  # fmt: skip
HIDDEN = [".git/config", "pkg/.env", "CON.py"]


@pytest.fixture
def make_run(start, tmp_path):
    """Makes a run whose sources `keep(session)` says."""

    def make(run_id, keep):
        session = start(tmp_path / "store", run_id)
        keep(session)
        session.end_run()

    return make


@pytest.fixture
def call(invoke, tmp_path):
    return lambda *words: invoke("sources", *words, "-d", tmp_path / "store")


def list_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_restored_files_lie_in_their_folder_and_nowhere_else(make_run, call, tmp_path):
    texts = dict.fromkeys([*WRONG, *HIDDEN, "right.py", "pkg/deep.py"], "x = 1\n")
    make_run("run", lambda session: keep_sources(session, texts))
    there = tmp_path / "one" / "there"
    done = call("run", "--restore", there)
    assert done.exit_code == 0, done.output
    assert list_files(tmp_path / "one") == ["there/pkg/deep.py", "there/right.py"]
    assert ".git/config was not restored" in done.output
    assert not {"\x1b", "\u202e"} & set(done.output)


def test_a_folder_that_is_a_link_or_has_something_is_refused(make_run, call, tmp_path):
    make_run("run", lambda session: keep_sources(session, {"a.py": "x\n"}))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("full", "link"):
        done = call("run", "--restore", tmp_path / name)
        assert done.exit_code == 1
        assert "Pass a new directory." in done.output
    assert list_files(tmp_path / "empty") == []
    assert list_files(tmp_path / "full") == ["mine"]


def test_names_that_meet_are_written_once(make_run, call, tmp_path):
    texts = {"a/b.py": "x\n", "a": "file and folder\n"}
    make_run("run", lambda session: keep_sources(session, texts))
    done = call("run", "--restore", tmp_path / "there")
    assert "Traceback" not in done.output
    assert len(list_files(tmp_path / "there")) == 1


def test_texts_steer_no_terminal(make_run, call):
    odd = "x = 1  # \x1b]0;title\x07\x9b2J\u202e\r\n"
    make_run("old", lambda session: keep_sources(session, {"a.py": "x = 2\n"}))
    make_run("new", lambda session: keep_sources(session, {"a.py": odd}, outside=["\x1b[2J"]))
    for words in (["new"], ["new", "a.py"], ["new", "--diff", "old"], ["old", "--diff", "new"]):
        done = call(*words)
        assert done.exit_code == 0, done.output
        assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(done.output)


def test_a_bomb_is_no_source(make_run, call, tmp_path):
    sha256 = hashlib.sha256(b"x").hexdigest()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as pack:
        pack.writestr(sha256, bytes(300_000_000))

    def keep(session):
        held = keep_payload(session, PACK_KEY, out.getvalue())
        keep_manifest(session, [ManifestEntry(f"f{n}.py", sha256, 1, held) for n in range(50)])

    make_run("run", keep)
    done = call("run", "--restore", tmp_path / "there", "--json")
    told = json.loads(done.stdout)
    assert (told["written"], len(told["missing"])) == ([], 50)
    assert list_files(tmp_path / "there") == []


def test_a_diff_tells_moved_and_equal_files(make_run, call):
    make_run("old", lambda session: keep_sources(session, {"a.py": "x\n", "same.py": "s\n"}))
    make_run("new", lambda session: keep_sources(session, {"b.py": "x\n", "same.py": "s\n"}))
    done = call("old", "--diff", "new")
    assert "moved b.py from a.py" in done.output
    assert "1 file differs, 1 is the same." in done.output
