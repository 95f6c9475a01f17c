"""Commands of plugins: listed, run, and harmless when they are broken."""

import sys
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from quark.cli.main import cli, find_plugin_commands
from quark_core.backends import registry as registries
from quark_core.backends.registry import BackendRegistry
from quark_core.hookspecs import hookimpl


@click.command("greet")
@click.argument("name")
def greet(name):
    """Print a greeting."""
    click.echo(f"Hello {name}.")


@pytest.fixture
def add_commands(monkeypatch):
    """Registers a plugin that declares commands, in a registry of this test."""
    monkeypatch.setitem(sys.modules, "greetings", SimpleNamespace(greet=greet, number=3))
    registry = BackendRegistry()
    monkeypatch.setattr(registries, "_default", registry)
    monkeypatch.setattr(sys.modules["quark.cli.main"], "_has_foreign_plugins", lambda: True)
    find_plugin_commands.cache_clear()

    def add(plugin, declared):
        class Plugin:
            @hookimpl
            def quark_register_commands(self):
                if isinstance(declared, Exception):
                    raise declared
                return declared

        registry.register(Plugin(), name=plugin)

    yield add
    find_plugin_commands.cache_clear()


def invoke(*arguments):
    return CliRunner().invoke(cli, arguments)


def test_a_command_of_a_plugin_is_listed_and_runs(add_commands):
    add_commands("greetings", {"greet": "greetings:greet"})
    text = invoke("--help").stdout
    assert text.endswith("Commands of plugins:\n  greet  From greetings.\n")
    assert invoke("greet", "Ada").stdout == "Hello Ada.\n"
    assert "Print a greeting." in invoke("greet", "--help").stdout
    assert "Did you mean 'greet'" in invoke("gret").stderr


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("no_such_module:run", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("greetings:missing", "AttributeError"),
        ("greetings:number", "it is a int, not a click.Command"),
    ],
)
def test_a_broken_command_says_why_and_spoils_no_other(add_commands, place, reason):
    add_commands("broken", {"broken": place})
    add_commands("greetings", {"greet": "greetings:greet"})
    failed = invoke("broken")
    assert failed.exit_code == 1
    assert failed.stderr.startswith(
        f"quark: command 'broken' of the plugin 'broken' cannot be used ({place}): "
    )
    assert reason in failed.stderr
    assert "broken  From broken." in invoke("--help").stdout
    assert invoke("greet", "Ada").stdout == "Hello Ada.\n"


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"runs": "greetings:greet"}, "it is a command of Quark"),
        ({"greet": "greetings:greet"}, "the plugin 'greetings' has it"),
        ({"Greet All": "greetings:greet"}, "it is not a lowercase word"),
        ({"other": "greetings"}, "it is at 'greetings', not at 'module:attribute'"),
        ({"other": greet}, "not at 'module:attribute'"),
        (7, "a int is not a mapping"),
    ],
)
def test_a_wrong_declaration_is_left_out_with_a_message(add_commands, declared, reason):
    add_commands("greetings", {"greet": "greetings:greet"})
    add_commands("wrong", declared)
    shown = invoke("--help")
    assert shown.stderr.startswith("quark: left out the command")
    assert "of the plugin 'wrong'" in shown.stderr
    assert reason in shown.stderr
    assert shown.stdout.count("From ") == 1
    assert invoke("greet", "Ada").stdout == "Hello Ada.\n"


def test_commands_of_quark_load_no_plugin(monkeypatch):
    monkeypatch.setattr(registries, "_default", None)
    monkeypatch.setattr(BackendRegistry, "discover", lambda: pytest.fail("plugins were loaded"))
    assert invoke("runs", "--help").exit_code == 0
