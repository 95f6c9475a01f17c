"""Help texts of all commands, and the commands that help texts and messages name."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from quark.cli.main import _GROUPS, cli

ROOT = Path(__file__).resolve().parents[3]
MOST_SUMMARY = 60
MOST_WORDS = 15
VERBS = {
    "Add", "Ask", "Back", "Cancel", "Check", "Compare", "Copy", "Create", "Delete", "Deliver",
    "Diagnose", "Edit", "Explain", "Export", "Follow", "Import", "List", "Move", "Open", "Pause",
    "Print", "Replace", "Restore", "Resume", "Retry", "Revoke", "Run", "Search", "Send", "Serve",
    "Show", "Upgrade", "View", "Write",
}  # fmt: skip
BAD_STARTS = re.compile(r"^(Of|Who|Where|Whether|Whoever|Nobody|Say|Tell|Put|Take|Give|Let|Make)\b")
NAMED = re.compile(r"`quark ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?[^`]*`")


def load_prose():
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tests" / "docs" / "prose.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def walk(command, *names):
    """Each command with its names."""
    yield names, command
    context = click.Context(command)
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        yield from walk(command.get_command(context, name), *names, name)


COMMANDS = dict(walk(cli))
OPTIONS = [
    (names, option)
    for names, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option)
]


def list_texts(tree):
    """The text of each string literal but docstrings; `…` stands for a value."""
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            documented.update(map(id, node.values))
            parts = (getattr(part, "value", "") for part in node.values)
            yield "".join(part if isinstance(part, str) else "…" for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield "" if id(node) in documented else node.value


def read_texts(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield from ((path, text) for text in list_texts(ast.parse(path.read_text("utf-8"))))


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_a_summary_is_short_and_imperative(names):
    summary = (COMMANDS[names].help or "").split("\n\n")[0].replace("\n", " ").strip()
    assert 0 < len(summary) <= MOST_SUMMARY, summary
    assert summary.split()[0].strip(",:") in VERBS, summary
    assert summary.endswith(".")


def test_the_list_of_commands_has_the_same_summaries():
    listed = {name: text for group in _GROUPS.values() for name, text in group.items()}
    assert list(listed) != sorted(listed)
    assert {*listed} == {*cli.list_commands(click.Context(cli))}
    for text in listed.values():
        assert len(text) <= MOST_SUMMARY
        assert text.split()[0].strip(",:") in VERBS, text
    shown = CliRunner().invoke(cli, ["--help"]).output
    places = [shown.index(f"\n{group}:\n") for group in _GROUPS]
    assert places == sorted(places)


def test_an_option_is_described_in_a_line():
    for names, option in OPTIONS:
        text = option.help or ""
        assert text.endswith((".", "…")), (names, option.name, text)
        assert text[0].isupper() or text.startswith("--"), (names, option.name, text)
        assert len(text.split()) <= MOST_WORDS, (names, option.name, text)
        assert not BAD_STARTS.match(text), (names, option.name, text)
        assert "default" not in text.lower(), (names, option.name, text)


def test_a_short_option_means_the_same_in_all_commands():
    meanings = {}
    for _, option in OPTIONS:
        for short in (each for each in option.opts if not each.startswith("--")):
            meanings.setdefault(short, set()).add(max(option.opts, key=len))
    assert {short: found for short, found in meanings.items() if len(found) > 1} == {}


def test_a_run_is_described_in_the_same_words():
    for names, command in COMMANDS.items():
        runs = [each for each in command.params if each.name in ("run", "runs")]
        if any(isinstance(each, click.Argument) for each in runs):
            text = " ".join((command.help or "").split())
            assert "RUN is a run ID, unique prefix or name." in text, names


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_help_follows_the_style_guide(names):
    prose = load_prose()
    command = COMMANDS[names]
    paragraphs = [part for part in (command.help or "").split("\n\n") if "\b" not in part]
    texts = [" ".join(part.split()) for part in paragraphs]
    texts += [option.help or "" for option in command.params if isinstance(option, click.Option)]
    found = prose.read_prose("\n\n".join(texts)).sentences
    for _, sentence in found:
        assert not (prose._START.match(sentence) and prose.is_statement(sentence)), sentence
        assert len(sentence.split()) <= prose.MOST_WORDS_OF_SENTENCE, sentence
        for pattern, advice in prose.BANNED.items():
            assert not pattern.search(sentence), (sentence, advice)


def test_messages_of_the_commands_follow_the_style_guide():
    prose = load_prose()
    texts = [(path, text) for path, text in read_texts("quark/cli") if len(text.split()) > 2]
    bad = [(p, t) for p, t in texts if prose._START.match(t) and prose.is_statement(t)]
    bad += [(p, t) for p, t in texts for pattern in prose.BANNED if pattern.search(t)]
    assert bad == []


@pytest.mark.parametrize("folder", ["quark", "quark_core", "quark_backends", "quark_torch"])
def test_a_command_that_a_message_names_exists(folder):
    texts = list(read_texts(folder))
    if folder == "quark":
        texts += [(names, command.help or "") for names, command in COMMANDS.items()]
        texts += [(names, option.help or "") for names, option in OPTIONS]
    for place, text in texts:
        for name, below in NAMED.findall(text):
            command = COMMANDS.get((name,))
            assert command is not None, (place, text)
            if isinstance(command, click.Group) and below and name != "artifacts":
                assert (name, below) in COMMANDS, (place, text)


def test_a_short_form_that_is_gone_is_refused(invoke, tmp_path, log_run):
    log_run(tmp_path, "r", values={"loss": [1.0]})
    for command in (("export", "r", "-f", "csv"), ("edit", "r", "-f", "a=1"), ("logs", "r", "-t")):
        assert invoke(*command, "-d", tmp_path).exit_code == 2
    invoke("edit", "r", "--field", "gpu=V100", "-d", tmp_path)
    fields = json.loads(invoke("show", "r", "-d", tmp_path, "--json").stdout)["fields"]
    assert fields == {"gpu": "V100"}
