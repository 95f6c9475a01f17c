"""The pages of the API and of the commands are what the code says, with examples that are run."""

import importlib.util
import re
import sys

import pytest
from blocks import DOCS, read_page

import quark

REFERENCE = DOCS / "reference"
API = REFERENCE / "api"
_HEADING = re.compile(r"^## `(?P<name>\w+)`", re.MULTILINE)


@pytest.fixture(scope="module")
def reference():
    """The program docs/site/reference.py, as a module."""
    pytest.importorskip("torch", reason="the pages have names that need PyTorch")
    spec = importlib.util.spec_from_file_location("reference", DOCS / "site" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


def list_pages():
    return [path for path in sorted(API.rglob("*.md")) if path.name != "index.md"]


def split_page(path):
    """(name, its part of the page) of each public name."""
    parts = _HEADING.split(path.read_text("utf-8"))
    return list(zip(parts[1::2], parts[2::2], strict=True))


def test_the_pages_are_what_the_code_and_the_examples_say(reference):
    """`python docs/site/reference.py --write` brings them up to date."""
    assert [path.name for path in reference.list_stale(reference.write_pages())] == []


def test_every_public_name_is_on_one_page_and_no_other_name_is():
    named = [name for path in list_pages() for name, _ in split_page(path)]
    assert sorted(named) == sorted(quark.__all__)


def test_a_name_has_a_signature_and_an_example_that_is_run_and_uses_it():
    for path in list_pages():
        blocks = [block for block in read_page(path).blocks if block.language == "python"]
        for name, part in split_page(path):
            start = path.read_text("utf-8").index(f"\n## `{name}`")
            first = path.read_text("utf-8")[: start + 1].count("\n") + 1
            last = first + part.count("\n")
            mine = [block for block in blocks if first < block.line <= last]
            run = [block for block in mine if not block.hidden and not block.not_run]
            assert run, f"{name} has no example that is run"
            is_typed = name in ("__version__", "CURRENT_SCHEMA_VERSION", "LogIdentifier")
            is_typed = is_typed or name == "ARTIFACT_STORAGE_LAYOUT"
            assert is_typed or any(block.not_run for block in mine), f"{name} has no signature"


def test_no_two_pages_have_paths_that_differ_in_their_case_alone():
    """Two such pages are one file where a file system does not tell the cases apart."""
    paths = [path.relative_to(API).as_posix().lower() for path in list_pages()]
    assert sorted(paths) == sorted(set(paths))


def test_the_first_line_of_a_public_docstring_is_short_and_ends_in_a_period(reference):
    from api_pages import find_function, list_members, read_docstring

    for name in quark.__all__:
        thing = getattr(quark, name)
        if isinstance(thing, type):
            things = [thing, *(find_function(each) for _, each in list_members(thing))]
        else:
            things = [find_function(thing) or getattr(thing, "__func__", None)]
        for each in filter(None, things):
            first = read_docstring(each).text.splitlines()[0]
            assert len(first) <= 80, f"{each.__qualname__}: {first}"
            assert first.endswith("."), f"{each.__qualname__}: {first}"
            assert ".md" not in read_docstring(each).text, each.__qualname__
            compile(read_docstring(each).sections.get("Example", ""), each.__qualname__, "exec")


def test_the_page_of_the_commands_has_each_of_them():
    text = (REFERENCE / "cli.md").read_text("utf-8")
    from quark.cli.main import _COMMANDS

    assert [name for name in _COMMANDS if f"\n## `quark {name}`\n" not in text] == []
