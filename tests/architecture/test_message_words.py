"""Messages of the packages follow the style guide: plain statements in standard words."""

import ast
import re
from pathlib import Path

import pytest
from docs.prose import BANNED, is_statement

import quark

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("quark", "quark_core", "quark_backends", "quark_torch")
# The command line has tests of its own, which read what it prints.
ELSEWHERE = (ROOT / "quark" / "cli", ROOT / "quark_core" / "testing")
FEWEST = 1_500

_RAISED = re.compile(
    r"(Error|Warning|Exception|Failure|Unavailable|Unusable|Unauthorized|Rejected|Unknown|Unreachable)$"
)
_LOGGED = {"debug", "info", "warning", "error", "exception", "critical", "log"}
_START = re.compile(r"(What|Of|Who|Where|Whatever|Whoever|Wherever|Nobody)\b")
_ODD = {
    r"(?:\bgot|, not) an? (?:int|bool|float|str|list|dict|tuple|NoneType|…)(?!\w)": "no article",
    r"\ban? an?\b": "two articles",
    r"\ba [aeio](?!f\b|n\b|ne\b|nce\b|ur\b)\w+\b(?<!one)(?<!once)": "write 'an'",
    r"\bno such\b": "name what does not exist",
    r"\bholds? no\b": "write 'has no' or 'does not contain'",
    r"\bbelongs? into\b": "write 'goes in' or 'put it into'",
    r"\bpersistence service\b": "write 'Quark server'",
}
_FAULTS = {**BANNED, **{re.compile(pattern): advice for pattern, advice in _ODD.items()}}


def read_text(node):
    """The text of a literal, with … for its values; None of what is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        return "".join(parts)
    return None


def iterate_literals(node):
    """Literals in the arguments of a call, but those inside the values of an f-string."""
    text = read_text(node)
    if text is not None:
        yield node.lineno, text
    elif not isinstance(node, (ast.Lambda, ast.Dict, ast.Subscript, ast.Compare)):
        for child in ast.iter_child_nodes(node):
            yield from iterate_literals(child)


def is_message(call):
    """If a call makes an error or a warning, or logs."""
    function = call.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    if name in _LOGGED:
        return owner.endswith(("log", "logger", "logging"))
    return bool(_RAISED.search(name)) or (owner, name) == ("warnings", "warn")


def collect(path):
    """(line, text) of the messages of a module, for each literal of them."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and is_message(node):
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                for line, text in iterate_literals(argument):
                    if " " in text.strip():
                        yield line, text.strip()


def list_modules():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not any(path.is_relative_to(folder) for folder in ELSEWHERE):
                yield path


def find_faults(text):
    """What the style guide forbids in a message."""
    if _START.match(text) and is_statement(text):
        yield f"starts with {text.split()[0]}"
    # Code between backticks is written as it must be.
    prose = re.sub(r"`[^`]*`", "`code`", text)
    for pattern, advice in _FAULTS.items():
        if found := pattern.search(prose):
            yield f"{found[0]!r}: {advice}"


def test_messages_follow_the_style_guide():
    messages = [(path, line, text) for path in list_modules() for line, text in collect(path)]
    assert len(messages) >= FEWEST
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {fault}: {text[:80]}"
        for path, line, text in messages
        for fault in find_faults(text)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Where it is, it is", "starts with Where"),
        ("name must be a str, not a int", "no article"),
        ("name is no identifier", "'is no i': write 'is not a' or name what is missing"),
        ("run: a error", "'a error': write 'an'"),
        ("the key belongs into QUARK_USER_KEY", "write 'goes in'"),
    ],
)
def test_planted_faults_are_found(text, fault):
    assert any(fault in found for found in find_faults(text))


@pytest.mark.parametrize(
    "text", ["metric is required", "name must be a str, not …", "use a URI", "a one-line text"]
)
def test_plain_messages_pass(text):
    assert list(find_faults(text)) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: quark.start_run(project="p", capture=3),
        lambda: quark.start_run(project="p", on_stop=3),
        lambda: quark.start_run(project="p", if_exists=3),
        lambda: quark.start_run(project=3),
        lambda: quark.search_runs(where=3),
    ],
)
def test_a_value_of_the_wrong_type_is_named_without_an_article(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(quark.SchemaValidationError) as raised:
        call()
    assert not re.search(r"\ban? (int|str|float)$", str(raised.value))
    assert re.search(r"\b(int|3)$", str(raised.value))
