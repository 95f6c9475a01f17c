"""What a shell is offered behind `quark …`, and how it is set up."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

import quark
from quark.cli import completion


@pytest.fixture
def store(tmp_path):
    """A store with two runs, one of which has names that a shell would run."""
    with quark.start_run(
        project="vision", name="resnet", tags=["good"], storage_dir=tmp_path
    ) as first:
        quark.MetricsLogger(first).log("train/loss", 1.0, step=0)
        with pytest.warns(RuntimeWarning):
            quark.MetricsLogger(first).log("acc@1", 0.5, step=0)
    hostile = "x;touch$IFS/tmp/owned"
    with (
        quark.start_run(
            project=hostile, name="$(id)", tags=["`id`"], storage_dir=tmp_path
        ) as second,
        pytest.warns(RuntimeWarning),
    ):
        quark.MetricsLogger(second).log("a b|c", 1.0, step=0)
    return tmp_path, first.id, second.id


@pytest.fixture
def command(tmp_path_factory, monkeypatch):
    """`quark` on the path, which waits for answers as long as a loaded machine takes."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "quark"
    script.write_text(
        f"#!{sys.executable}\nimport quark.cli.completion as completion\n"
        "completion._PATIENCE_S = 60\nfrom quark.cli import main\nmain()\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return script


@pytest.fixture
def offer(store, command):
    """What a shell is offered for the last word of a line: (word, help)."""

    def ask(line, call=(command,), **environment):
        asked = {
            "_QUARK_COMPLETE": "zsh_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
        }
        done = subprocess.run(
            call,
            cwd=store[0],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | asked | environment,
        )
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        return list(zip(lines[1::3], lines[2::3], strict=False))

    return ask


def test_runs_are_offered_newest_first_with_project_and_name(store, offer):
    _, first, second = store
    found = offer("quark show ")
    assert [word for word, _ in found] == [second, first]
    assert dict(found)[first] == "vision resnet completed"
    assert [word for word, _ in offer(f"quark compare {first} {first[:5]}")] == [first]
    assert [word for word, _ in offer("quark show res")] == ["resnet"]


@pytest.mark.long
def test_metrics_projects_tags_commands_and_choices_are_offered(store, offer):
    _, first, _ = store
    assert [word for word, _ in offer(f"quark follow {first} -m ")] == ["acc@1", "train/loss"]
    assert [word for word, _ in offer("quark runs --sort tr")] == ["train/loss"]
    assert [word for word, _ in offer("quark runs -p ")] == ["vision"]
    assert [word for word, _ in offer("quark runs -t ")] == ["good"]
    assert "show" in dict(offer("quark sh"))
    assert ("completed", "_") in offer("quark runs -s com")


@pytest.mark.long
def test_nothing_that_a_shell_would_run_is_offered(store, offer):
    _, _, second = store
    for line in ("quark runs -p x", "quark runs -t ", "quark show $", f"quark follow {second} -m "):
        assert not [word for word, _ in offer(line) if set(word) & set(" ;|&$`<>()*?'\"\\")]


def test_what_goes_wrong_is_no_text_on_the_line(store, offer):
    root = store[0]
    assert offer("quark show -d /nowhere/at/all ") == []
    (root / ".quark" / "quark.db").write_bytes(b"no database")
    assert offer("quark show ") == []
    assert offer("quark show ", _QUARK_COMPLETE="nonsense_complete") == []


def test_a_service_that_never_answers_holds_up_nobody(offer):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        call = (sys.executable, "-m", "quark")
        assert offer("quark show ", call, QUARK_PERSISTENCE_URL=url, QUARK_USER_KEY="key") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_setting_it_up_again_changes_nothing_and_says_how_to_undo_it(
    tmp_path, monkeypatch, invoke, shell
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("ZDOTDIR", raising=False)
    start = tmp_path / f".{shell}rc"
    if shell != "fish":
        start.write_text("alias ll='ls -l'")
    said = invoke("--install-completion").output
    files = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) == (1 if shell == "fish" else 2)
    assert all(str(path) in said for path in files)
    assert "To remove it: rm " in said
    again = invoke("--install-completion", shell).output
    assert "up to date" in again
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == files
    if shell != "fish":
        text = start.read_text()
        assert text.startswith("alias ll='ls -l'\n")
        assert text.count(completion._BEGIN) == text.count(completion._END) == 1


def test_a_place_that_has_moved_is_written_anew_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("one", "two"):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / folder))
        completion.install_completion("bash")
    text = (tmp_path / ".bashrc").read_text()
    assert text.count(completion._BEGIN) == 1
    assert str(tmp_path / "two") in text
    assert str(tmp_path / "one") not in text


def test_what_else_is_in_the_shells_file_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "one"))
    start = tmp_path / ".bashrc"
    # Not of UTF-8, through a link, and with a block of which somebody has deleted the end.
    (tmp_path / "dotfiles").write_bytes(b"a=\xff\n" + f"{completion._BEGIN}\n".encode() + b"b=1\n")
    start.symlink_to(tmp_path / "dotfiles")
    completion.install_completion("bash")
    assert start.read_bytes().startswith(b"a=\xff\n")
    assert b"\nb=1\n" in start.read_bytes()
    assert start.is_symlink()
    start.unlink()
    start.write_bytes(b"a=\xff\n")
    completion.install_completion("bash")
    start.write_bytes(start.read_bytes() + b"c=\xfe\n")
    start.chmod(0o600)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "two"))
    completion.install_completion("bash")
    said = start.read_bytes()
    assert said.startswith(b"a=\xff\n")
    assert said.endswith(b"c=\xfe\n")
    assert str(tmp_path / "two").encode() in said
    assert start.stat().st_mode & 0o777 == 0o600


def test_a_shell_that_is_not_known_is_told(monkeypatch, invoke):
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    done = invoke("--install-completion")
    assert done.exit_code == 2
    assert "'tcsh' is not supported. Choose 'bash', 'zsh' or 'fish'" in done.output


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_what_was_set_up(store, command, tmp_path_factory, monkeypatch):
    root, first, _ = store
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    completion.install_completion("bash")
    script = (
        f'. "{home}/.bashrc"; '
        f"COMP_WORDS=(quark show {first[:6]}); COMP_CWORD=2; "
        '_quark_completion quark; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [first], done.stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("shwo", "x"), "'show'"),
        (("analyse", "x"), "'analyze'"),
        (("keys", "revok"), "'revoke'"),
        (("mirror", "verfy"), "'verify'"),
        (("show", "x", "--jsn"), "'--json'"),
        (("db", "upgrad"), "'upgrade'"),
    ],
)
def test_who_mistypes_is_told_what_was_meant(invoke, words, meant):
    done = invoke(*words)
    assert done.exit_code == 2
    assert f"Did you mean {meant}?" in done.output
