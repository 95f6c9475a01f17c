"""Decision records have one form, stay short, and are listed."""

import re

import pytest
from blocks import DOCS
from prose import find_faults

FOLDER = DOCS / "contributing" / "decisions"
RECORDS = sorted(FOLDER.glob("0*.md"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name[:4])
def test_a_record_has_the_form_of_all(path):
    text = path.read_text("utf-8")
    title, _, body = text.partition("\n")
    assert title.startswith(f"# {int(path.name[:4])}. ")
    assert re.search(r"^\*\*Status:\*\* accepted$", body, re.MULTILINE)
    headings = [line[3:].partition(":")[0] for line in text.splitlines() if line.startswith("## ")]
    assert list(dict.fromkeys(headings))[:3] == ["Context", "Decision", "Consequences"]
    assert set(headings[3:]) <= {"Decision", "Consequences", "Rejected", "Measured"}
    assert len(body.split()) <= 350


@pytest.mark.parametrize("path", [*RECORDS, FOLDER / "index.md"], ids=lambda path: path.name[:4])
def test_a_record_is_in_plain_english(path):
    assert list(find_faults(path, path.read_text("utf-8"))) == []


def test_the_index_lists_all_records():
    listed = re.findall(r"\((0[^)]+)\)", (FOLDER / "index.md").read_text("utf-8"))
    assert listed == [path.name for path in RECORDS]
