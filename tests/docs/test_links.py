"""Links between pages of Markdown lead somewhere where the sources are read, as on a code host."""

import re
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from blocks import DOCS, ROOT

_FENCED = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (?P<text>.+?) *$", re.MULTILINE)


def list_sources():
    """All pages of Markdown of the repository but those of examples and tests."""
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def read_prose(path):
    return _FENCED.sub("", path.read_text("utf-8"))


def list_targets(path):
    """The targets of a page's links that are no addresses of the web: file and anchor."""
    for found in _LINK.finditer(_CODE.sub("", read_prose(path))):
        address = urlsplit(found["target"])
        if not address.scheme:
            file = (path.parent / unquote(address.path)).resolve() if address.path else path
            yield found["target"], file, unquote(address.fragment)


def list_anchors(path):
    """The anchors that a code host makes of headings."""
    anchors = set()
    for found in _HEADING.finditer(read_prose(path)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found["text"])
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in anchors:
            number += 1
        anchors.add(anchor)
    return anchors


@pytest.mark.parametrize("path", list_sources(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_are_there(path):
    for target, file, anchor in list_targets(path):
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor and file.suffix == ".md":
            assert anchor in list_anchors(file), target


def test_every_page_is_two_clicks_from_the_start_page():
    """The navigation of the site is what docs/index.md and the index pages that it lists say."""
    start = DOCS / "index.md"
    reached = {start}
    for _ in range(2):
        indexes = [page for page in reached if page.name == "index.md"]
        reached |= {file for index in indexes for _, file, _ in list_targets(index)}
    decisions = set((DOCS / "contributing" / "decisions").glob("*.md"))
    assert sorted(map(str, set(DOCS.rglob("*.md")) - decisions - reached)) == []


def test_pictures_are_light():
    pictures = [path for path in (DOCS / "assets").iterdir() if path.suffix == ".png"]
    assert pictures
    assert [path.name for path in pictures if path.stat().st_size > 150_000] == []


def test_what_the_readme_needs_is_in_the_repository():
    tracked = subprocess.run(
        ["git", "ls-files", "docs"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode != 0:
        pytest.skip("no git repository here")
    files = {Path(ROOT / line) for line in tracked.stdout.splitlines()}
    missing = [
        target
        for target, file, _ in list_targets(ROOT / "README.md")
        if file.is_file() and DOCS in file.parents and file not in files
    ]
    assert missing == []
