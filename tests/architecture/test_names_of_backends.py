"""The core knows no backend by name, not even in a string: a definition says what it needs."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "quark.backends"
    ]
)
# Also words of their own, in texts for people: of these only names and URIs count.
WORDS = {"csv", "embedded", "service"}
# They name packages whose versions a run notes, and makers of secrets; no backend is meant.
LISTS = {
    "runs/environment.py",
    "config/redaction/detection.py",
}


def list_docstrings(tree):
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # Behind an assignment too, such a text is a docstring.
            yield from (
                id(one.value)
                for one in body
                if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            )


def find_names(source):
    """The strings of a module that name a backend."""
    tree = ast.parse(source)
    docstrings = set(list_docstrings(tree))
    tools = "|".join(name for name in NAMES if name not in WORDS)
    named = re.compile(
        rf"(?<![A-Za-z0-9])(?:{tools})|^(?:{'|'.join(WORDS)})(?:[:+?].*)?$",
        re.IGNORECASE | re.DOTALL,
    )
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
        and named.search(node.value)
    ]


@pytest.mark.long
def test_the_core_knows_no_backend_by_name():
    core = ROOT / "quark_core"
    found = {
        (path.relative_to(core).as_posix(), text)
        for path in core.rglob("*.py")
        if path.relative_to(core).as_posix() not in LISTS
        for text in find_names(path.read_text())
    }
    assert not found


@pytest.mark.parametrize(
    "planted",
    [
        "if name == 'wandb': pass",
        "x = environ['MLFLOW_TRACKING_URI']",
        "x = f'the W&B {y} mirror, tensorboard:{z}'",
        "x = {'csv': 1}",
        "x = 'csv:?publish=out'",
        "x = folder / 'mirrors' / 'mlflow'",
        "DEFAULT = 'embedded'",
    ],
)
def test_a_planted_name_is_found(planted):
    assert find_names(planted)


@pytest.mark.parametrize(
    "planted",
    [
        '"""Feeds wandb."""',
        'x = 1\n"""As mlflow has it."""',
        "raise E('the service does not answer')",
        "x = 'comma-separated, as csv is'",
    ],
)
def test_other_words_are_not(planted):
    assert not find_names(planted)
