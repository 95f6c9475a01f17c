"""The site of the docs is built without a warning, and all of its links lead somewhere."""

import importlib.util
import subprocess
import sys

import pytest
from blocks import DOCS, ROOT

BUILD = DOCS / "site" / "build.py"
_SPEC = importlib.util.spec_from_file_location("build_site", BUILD)
build_site = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(build_site)


def needs_tools():
    pytest.importorskip("zensical", reason="zensical is in the group docs")


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_without_a_dead_link(tmp_path):
    needs_tools()
    built = subprocess.run(
        [sys.executable, BUILD, "--out", tmp_path / "docs"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    site = tmp_path / "docs" / "site"
    page = (site / "reference" / "api" / "runs.html").read_text()
    assert 'id="start_run"' in page
    assert "<!-- hidden" not in page


def write_site(folder, **pages):
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return list(build_site.check_site(folder))


def test_a_link_to_a_place_that_is_not_there_is_found(tmp_path):
    assert write_site(
        tmp_path,
        a='<h1 id="top">A</h1><a href="b.html#bottom">b</a><a href="c.html">c</a>',
        b='<a href="a.html#top">a</a>',
    ) == ["a.html: b.html#bottom has no such place", "a.html: c.html leads nowhere"]


def test_a_page_that_fetches_from_elsewhere_is_found(tmp_path):
    script = '<script src="https://example.org/x.js"></script><a href="https://example.org">x</a>'
    assert write_site(tmp_path, a=script) == ["a.html: fetches https://example.org/x.js"]


def test_the_navigation_is_what_the_index_pages_say():
    titles = [next(iter(part)) for part in build_site.read_navigation()]
    assert titles == [
        "Quark",
        "Get started",
        "Log",
        "View and organize",
        "Diagnose",
        "Sweeps",
        "Integrations",
        "Team server",
        "Extend",
        "Reference",
        "About",
        "Contributing",
    ]
    assert (ROOT / "docs" / "index.md").is_file()
