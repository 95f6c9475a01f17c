"""The command line in this process, and how what it prints is read."""

import json

from click.testing import CliRunner

from quark.cli.main import cli


def call(*arguments, code=0, columns=200):
    """Run a command that must end with this exit status; an error that it raises comes through."""
    result = invoke(*arguments, columns=columns)
    assert result.exit_code == code, result.output
    return result


def invoke(*arguments, columns=200):
    """Run a command, whatever its exit status; an error that it raises comes through."""
    return CliRunner().invoke(
        cli, list(map(str, arguments)), env={"COLUMNS": str(columns)}, catch_exceptions=False
    )


def read_json(result):
    """What a command has printed with --json, which must be JSON to the letter."""
    return json.loads(result.stdout, parse_constant=_refuse_constant)


def _refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def squeeze(text):
    """A text without what folds it."""
    return " ".join(text.split())
