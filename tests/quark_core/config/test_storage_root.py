"""Which store runs and commands use where nobody says: the next one upwards, as git does."""

import os
import shutil

import pytest

import quark
from quark_core.config.arguments import find_storage_root


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a store, below a home of its own; the working directory is far below it."""
    home = tmp_path / "home"
    root = home / "project"
    (root / "src" / "deep").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    quark.start_run(project="p", storage_dir=root, name="first").end_run()
    monkeypatch.chdir(root / "src" / "deep")
    return root


def test_runs_and_readers_below_a_store_use_it(project):
    with quark.start_run(project="p") as session:
        assert session.context.storage_dir == project
    assert next(run.run_id for run in quark.search_runs()) == session.id
    assert quark.open_run(session.id).context.storage_dir == project
    assert not (project / "src" / "deep" / ".quark").exists()


def test_a_folder_that_is_named_wins(project):
    here = project / "src" / "deep"
    with quark.start_run(project="p", storage_dir=".") as session:
        assert session.context.storage_dir == here
    # And from then on that one is the next.
    assert find_storage_root(here) == here
    assert find_storage_root(project / "src") == project


def test_the_way_up_ends_at_home(project):
    home = project.parent
    shutil.move(project / ".quark", home / ".quark")
    assert find_storage_root(project / "src") == project / "src"
    # Who works there means it.
    assert find_storage_root(home) == home


def test_a_folder_called_so_that_is_no_store_is_passed_by(project):
    (project / "src" / ".quark").mkdir()
    assert find_storage_root(project / "src" / "deep") == project
    # In the working directory itself it is told, and not passed by.
    assert find_storage_root(project / "src") == project / "src"


def test_a_mark_that_is_a_link_marks_nothing(project):
    marker = project / ".quark" / "store.json"
    marker.rename(project / "elsewhere.json")
    marker.symlink_to(project / "elsewhere.json")
    assert find_storage_root(project / "src") == project / "src"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs owners of files")
def test_the_way_up_ends_at_a_folder_that_everybody_may_write(project):
    project.chmod(0o777)
    assert find_storage_root(project / "src") == project / "src"


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs to give files away"
)
@pytest.mark.parametrize("what", [".quark", ".quark/store.json", "."])
def test_a_store_of_somebody_else_is_told_and_left_alone(project, what, caplog):
    os.chown(project / what, 12345, 12345)
    here = project / "src" / "deep"
    assert find_storage_root(here) == here
    told = [record.getMessage() for record in caplog.records]
    if what != ".":
        assert len(told) == 1
        assert str(project) in told[0]
        assert "storage_dir=" in told[0]
    with quark.start_run(project="p") as session:
        assert session.context.storage_dir == here
    assert len(caplog.records) == len(told)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs to give files away"
)
def test_a_folder_of_somebody_else_on_the_way_ends_it(project):
    os.chown(project / "src", 12345, 12345)
    assert find_storage_root(project / "src" / "deep") == project / "src" / "deep"


def test_a_store_is_left_alone_by_git_and_what_is_said_there_stays(tmp_path):
    quark.start_run(project="p", storage_dir=tmp_path).end_run()
    ignore = tmp_path / ".quark" / ".gitignore"
    assert ignore.read_text() == "*\n"
    ignore.write_text("runs\n")
    quark.start_run(project="p", storage_dir=tmp_path).end_run()
    assert ignore.read_text() == "runs\n"
