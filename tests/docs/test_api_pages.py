"""Every public name has a page of its own, with an example that the tests run."""

import re
from functools import reduce
from importlib import import_module

from blocks import DOCS, read_page

import quark

API = DOCS / "reference" / "api"
_SHOWN = re.compile(r"^::: (?P<path>[\w.]+)$", re.MULTILINE)


def find_object(path):
    """What a dotted path names: `quark.watch`, `quark_core.….TrainingSession.start_run`."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[length:], found)
    raise AssertionError(f"{path} names nothing")


def list_pages():
    return [path for path in sorted(API.rglob("*.md")) if path.name != "index.md"]


def test_every_public_name_has_one_page_and_no_other_has_one():
    assert sorted(path.stem for path in list_pages()) == sorted(quark.__all__)


def test_a_page_shows_its_name_and_uses_it_in_an_example_that_is_run():
    for path in list_pages():
        shown = [found["path"] for found in _SHOWN.finditer(path.read_text("utf-8"))]
        assert len(shown) == 1, path.stem
        assert find_object(shown[0]) == getattr(quark, path.stem)
        run = [b for b in read_page(path).blocks if b.language == "python" and not b.not_run]
        assert any(not block.hidden for block in run), f"{path.stem} has no example that is run"


def test_no_two_pages_have_paths_that_differ_in_their_case_alone():
    """`Series` and `series` are one file where a file system does not tell the cases apart."""
    paths = [path.relative_to(API).as_posix().lower() for path in list_pages()]
    assert sorted(paths) == sorted(set(paths))
