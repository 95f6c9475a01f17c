"""The environment: git is read as git itself says, and only what is promised is captured."""

import json
import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from quark_core.ranks.launches import RankInfo
from quark_core.runs.environment import capture_environment, complete_environment, read_git_state

RANK = RankInfo(3, 1, 8, "torchrun")


@pytest.fixture
def git(tmp_path):
    """Runs git in a folder, by default in a new repository with one commit."""
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    quiet |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    quiet |= {f"GIT_{who}_NAME": "Ada" for who in ("AUTHOR", "COMMITTER")}
    quiet |= {f"GIT_{who}_EMAIL": "ada@example.com" for who in ("AUTHOR", "COMMITTER")}

    def run(*arguments, cwd=tmp_path / "repo"):
        done = subprocess.run(
            ["git", *arguments], cwd=cwd, env=quiet, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    (tmp_path / "repo" / "pkg" / "sub").mkdir(parents=True)
    run("init", "--quiet", "-b", "main")
    (tmp_path / "repo" / "train.py").write_text("lr = 0.1\n")
    run("add", "train.py")
    run("commit", "--quiet", "-m", "first")
    return run


@pytest.fixture
def repo(tmp_path):
    return tmp_path / "repo"


def state_of(folder):
    found = read_git_state(folder)
    return found.root, found.commit, found.branch


def test_commit_and_branch_are_those_of_git(git, repo):
    assert state_of(repo) == (repo, git("rev-parse", "HEAD"), "main")


def test_a_folder_inside_the_tree_finds_its_root(git, repo):
    assert state_of(repo / "pkg" / "sub") == state_of(repo)


def test_a_branch_may_have_slashes(git, repo):
    git("checkout", "--quiet", "-b", "feature/deep/name")
    git("commit", "--quiet", "--allow-empty", "-m", "second")

    assert state_of(repo) == (repo, git("rev-parse", "HEAD"), "feature/deep/name")


def test_a_detached_head_has_a_commit_and_no_branch(git, repo):
    git("checkout", "--quiet", "--detach")

    assert state_of(repo) == (repo, git("rev-parse", "HEAD"), None)


def test_a_branch_before_its_first_commit_has_none(git, repo):
    git("checkout", "--quiet", "--orphan", "empty")

    assert state_of(repo) == (repo, None, "empty")


def test_packed_references_are_found(git, repo):
    git("tag", "-a", "v1", "-m", "annotated, so that the packed file has a peeled line")
    git("branch", "mainline")
    git("pack-refs", "--all")
    assert not (repo / ".git" / "refs" / "heads" / "main").exists()

    assert state_of(repo) == (repo, git("rev-parse", "HEAD"), "main")


def test_a_loose_reference_goes_before_an_older_packed_one(git, repo):
    git("pack-refs", "--all")
    packed = git("rev-parse", "HEAD")
    git("commit", "--quiet", "--allow-empty", "-m", "second")

    assert state_of(repo)[1] == git("rev-parse", "HEAD") != packed


@pytest.mark.parametrize("packed", [False, True])
def test_a_worktree_has_its_own_branch(git, repo, tmp_path, packed):
    tree = tmp_path / "tree"
    git("worktree", "add", "--quiet", "-b", "other", str(tree))
    git("commit", "--quiet", "--allow-empty", "-m", "second", cwd=tree)
    if packed:
        git("pack-refs", "--all")

    assert (tree / ".git").is_file()
    assert state_of(tree) == (tree, git("rev-parse", "HEAD", cwd=tree), "other")
    assert state_of(repo) == (repo, git("rev-parse", "main"), "main")


def test_a_git_file_with_a_relative_path_is_followed(git, repo):
    (repo / ".git").rename(repo.parent / "apart")
    (repo / ".git").write_text("gitdir: ../apart\n")

    assert state_of(repo) == (repo, git("rev-parse", "HEAD"), "main")


def test_outside_of_a_repository_there_is_no_state(tmp_path):
    assert read_git_state(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"gitdir: /nowhere/at/all\n", b"nonsense", b"\xff\xfe"])
def test_a_broken_git_file_is_no_state_and_no_error(tmp_path, content):
    (tmp_path / ".git").write_bytes(content)

    assert read_git_state(tmp_path) is None


def test_the_environment_holds_what_it_promises_as_json(git, repo):
    state = read_git_state(repo)
    known = capture_environment(RANK, state)
    before = json.dumps(known)
    values = complete_environment(known, state).to_dict()["values"]

    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["python"]["version"] == platform.python_version()
    assert values["python"]["executable"] == sys.executable
    assert values["host"]["cpu_count"] == os.cpu_count()
    assert values["process"]["pid"] == os.getpid()
    assert values["process"]["cwd"] == os.getcwd()
    assert values["launch"] == {
        "rank": 3,
        "local_rank": 1,
        "world_size": 8,
        "source": "torchrun",
    }
    assert values["packages"]["numpy"] == np.__version__
    assert isinstance(values["gpus"], list)
    assert values["git"] == {"commit": state.commit, "branch": "main", "dirty": False}
    assert json.dumps(known) == before


def test_a_changed_tracked_file_makes_the_tree_dirty_and_an_untracked_one_does_not(git, repo):
    state = read_git_state(repo)
    known = capture_environment(RANK, state)

    (repo / "notes.txt").write_text("untracked")
    assert complete_environment(known, state).values["git"]["dirty"] is False
    (repo / "train.py").write_text("lr = 0.2\n")
    assert complete_environment(known, state).values["git"]["dirty"] is True


def test_a_tree_that_git_cannot_read_is_neither_clean_nor_dirty(git, repo):
    state = read_git_state(repo)
    (repo / ".git" / "index").write_bytes(b"damaged")

    assert complete_environment(capture_environment(RANK, state), state).values["git"] == {
        "commit": state.commit,
        "branch": "main",
        "dirty": None,
    }


def test_without_a_repository_git_is_none():
    known = capture_environment(RANK, None)

    assert known["git"] is None
    assert complete_environment(known, None).values["git"] is None


def test_only_listed_variables_are_captured(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    monkeypatch.setenv("SOME_VARIABLE", "s3cr3t")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    values = complete_environment(capture_environment(RANK, None), None).values

    assert values["variables"]["OMP_NUM_THREADS"] == "4"
    assert "NCCL_DEBUG" not in values["variables"]
    assert "SOME_VARIABLE" not in values["variables"]
    assert b"s3cr3t" not in values.encoded


def test_the_command_line_is_redacted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key", "s3cr3t", "--lr=0.1"])
    known = capture_environment(RANK, None)

    assert known["process"]["argv"] == ["train.py", "--api-key", "[redacted]", "--lr=0.1"]


def test_a_working_directory_that_is_gone_is_no_error(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert capture_environment(RANK, None)["process"]["cwd"] == ""
