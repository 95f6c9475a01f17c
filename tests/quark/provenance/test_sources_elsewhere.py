"""Kept code in every store, on every rank, and through all that moves runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from wide_bounds import keep_sources_in_children

import quark
from quark.provenance.source_snapshots import _find_command

QUARK = str(Path(sys.executable).with_name("quark"))
# A look each second: on a busy machine the first ones come before the program has imported.
QUICK = "import quark_core.runs.environment as looks; looks._LOOKS_S = range(1, 250)"


def call(*words):
    return subprocess.run([QUARK, *map(str, words)], check=True, capture_output=True, text=True)


def test_of_eight_ranks_the_leader_alone_keeps_them(project):
    project.write_training(path="train.py")
    ranked = {"WORLD_SIZE": "8", "QUARK_RUN_ID": "ranked"}
    environ = {**os.environ, **keep_sources_in_children(), **ranked}
    children = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=project.root,
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(8)
    ]
    for child in children:
        out, problem = child.communicate()
        assert child.returncode == 0, problem
        assert out.split()[-1] == "ranked"
    kept = project.read("ranked")
    assert (list(kept), kept["train.py"].is_exact) == (["train.py"], True)
    # A pack, a manifest and the list of packages: of one process.
    assert len(project.list_payloads("ranked")) == 3


@pytest.mark.long
def test_late_looks_keep_what_the_first_steps_import(project):
    project.write("late.py", "x = 1\n")
    project.write("later.py", "x = 2\n")
    wait = (
        "import time\n"
        "def wait_for(name):\n"
        "    while True:\n"
        "        try:\n"
        "            if name in quark.read_sources(session): return\n"
        "        except quark.QuarkError: pass\n"
        "        time.sleep(0.02)\n"
        "wait_for('train.py'); import late; wait_for('late.py')\n"
        "import later; wait_for('later.py'); print('seen while it ran')"
    )
    project.write_training(QUICK, body=wait)
    done = project.run("train.py")
    assert "seen while it ran" in done.stdout
    assert "later.py" in project.read(done.stdout.split()[-1])


def test_where_there_are_no_hard_links_each_run_has_its_own(project):
    project.write_training(
        "import os\ndef refuse(*_, **__): raise OSError(95, 'Operation not supported')\n"
        "os.link = refuse"
    )
    first, second = project.train(), project.train()
    for run_id in (first, second):
        assert project.read(run_id)["train.py"].is_exact
        assert set(project.list_payloads(run_id).values()) == {1}


def test_a_store_on_a_network_file_system_gives_them_once_it_is_synced(project):
    project.write_training()
    run_id = project.train(QUARK_JOURNAL_ONLY="1")
    assert not list(project.store.rglob("quark.db"))
    call("sync", project.store)
    kept = project.read(run_id)
    assert (list(kept), kept["train.py"].is_exact) == (["train.py"], True)


@pytest.mark.long
def test_exports_tell_of_them_and_artifacts_leave_them_out(project, tmp_path):
    project.write_training(
        body="quark.ArtifactStore(session).log_file('pyproject.toml', name='mine')"
    )
    run_id = project.train()
    call("export", run_id, "--format", "jsonl", "-o", tmp_path / "out", "-d", project.store)
    told = (tmp_path / "out" / "fingerprint.jsonl").read_text()
    assert project.read(run_id).digest in told
    call("artifacts", run_id, "--output", tmp_path / "files", "-d", project.store)
    found = [file for file in (tmp_path / "files").rglob("*") if file.is_file()]
    assert found
    assert not [file for file in found if file.read_bytes()[:2] == b"PK"]


@pytest.mark.long
def test_a_backup_has_them_in_each_run(project, tmp_path):
    project.write_training()
    runs = [project.train(), project.train()]
    call("backup", tmp_path / "copy", "-d", project.store)
    call("backup", tmp_path / "copy", "--verify")
    shutil.rmtree(project.store)
    for run_id in runs:
        assert quark.read_sources(run_id, tmp_path / "copy")["train.py"].is_exact
    # What two runs shared is two files there: a backup copies run by run.
    folder = tmp_path / "copy" / ".quark" / "runs" / runs[0] / "artifacts" / ".objects"
    names = {file.stat().st_nlink for file in folder.rglob("*") if file.is_file()}
    assert names == {1}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("python -c x", "x"),
        ("python -Bc x", "x"),
        ("python -cx", "x"),
        ("python -W error -c x", "x"),
        ("python -Werror -Xdev -c x", "x"),
        ("python --check-hash-based-pycs always -c x", "x"),
        ("python -m pkg -c x", None),
        ("python train.py -c x", None),
        ("python - -c x", None),
        ("python -c", None),
        ("python", None),
        ("", None),
    ],
)
def test_the_code_behind_c_is_found_as_python_finds_it(arguments, found):
    assert _find_command(arguments.split()) == found
