"""How the command is entered and left: `python -m quark`, --help, Ctrl-C, errors of the system."""

import subprocess
import sys
from importlib import import_module

import click
import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli

# Runs the command with a system that does something at the import of one of its modules.
AT_IMPORT = """
import sys
blocked = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == blocked:
            raise {error}
sys.meta_path.insert(0, Finder())
from quark.cli import main
main()
"""
LOADED = """
import sys
from quark.cli import main
try:
    main()
except SystemExit:
    pass
print(*sorted(name for name in sys.modules if name.startswith(("quark.cli", "numpy", "rich"))))
"""


def run_python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("shw", "show"),
        ("run", "runs"),
        ("list", "runs"),
        ("tail", "follow"),
        ("xyzzy", None),
    ],
)
def test_a_slip_of_the_hand_is_answered_with_what_was_meant(written, meant):
    done = CliRunner().invoke(cli, [written])
    assert done.exit_code == 2
    assert f"No such command '{written}'." in done.output
    assert ("Did you mean" in done.output) is bool(meant)
    assert meant is None or f"Did you mean '{meant}'?" in done.output


@pytest.mark.parametrize("command", ["show", "analyze", "compare", "report"])
def test_a_command_without_its_run_says_where_runs_are_listed(command):
    done = CliRunner().invoke(cli, [command])
    assert done.exit_code == 2
    assert f"Missing argument '{'OLD' if command == 'compare' else 'RUN'}" in done.output
    assert "`quark runs` lists the runs." in done.output


@pytest.mark.long
def test_the_package_is_the_command(tmp_path):
    done = run_python("-m", "quark", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"quark, version {quark.__version__}\n"
    with quark.start_run(project="vision", storage_dir=tmp_path, name="first"):
        pass
    assert "first" in run_python("-m", "quark", "runs", "-d", str(tmp_path)).stdout
    failed = run_python("-m", "quark", "runs", "-d", str(tmp_path / "absent"))
    assert failed.returncode == 2
    assert failed.stderr.startswith("quark: ")


def test_help_imports_no_command():
    done = run_python("-c", LOADED, "--help")
    *_, loaded = done.stdout.splitlines()
    parts = ("", ".command_groups", ".completion", ".main", ".options", ".terminal")
    assert loaded.split() == [f"quark.cli{part}" for part in parts]
    assert "View runs:" in done.stdout


def test_every_command_is_listed_in_whole_sentences():
    text = CliRunner().invoke(cli, ["--help"], terminal_width=80).stdout
    names = cli.list_commands(click.Context(cli))
    assert names == sorted(names)
    for name in names:
        command = cli.get_command(click.Context(cli), name)
        assert command.name == name
        assert command.callback.__module__.startswith("quark.cli.")
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {name} ")]
        assert line.endswith(".")
        assert not line.endswith("..")
        # Each option and argument says what it is for.
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert len(parameter.help.split()) > 1, (name, parameter.name)
    assert len(names) >= 18


def test_an_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(cli, ["frobnicate"])
    assert result.exit_code == 2
    assert "frobnicate" in result.output


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(tmp_path):
    program = AT_IMPORT.format(error="KeyboardInterrupt")
    done = run_python("-c", program, "quark.cli.runs", "runs", "-d", str(tmp_path))
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert done.stderr.strip() == "quark: aborted"


def test_what_the_system_refuses_is_one_line(tmp_path):
    program = AT_IMPORT.format(error="OSError(24, 'Too many open files', 'some/file')")
    done = run_python("-c", program, "quark.cli.runs", "runs", "-d", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "quark: [Errno 24] Too many open files: 'some/file'\n"


@pytest.mark.parametrize("path", ["loop", "name" * 100, "~nobody-of-that-name/x"])
def test_a_path_that_cannot_be_one_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(quark.SessionStoreError, match="storage_dir"):
        quark.search_runs(storage_dir=path)


def test_modules_of_commands_can_be_imported_one_by_one():
    for module in ("du", "rm", "restore", "gc", "export", "doctor"):
        assert getattr(import_module(f"quark.cli.{module}"), module).name == module
