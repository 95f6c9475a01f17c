"""The check of the prose finds what it is for, and leaves plain English alone."""

import prose
import pytest

PAGE = prose.DOCS / "log" / "page.md"

FAULTY = {
    "Of two runs it says why the second differs.": "starts with Of",
    "Whoever asks a second time gets the first request.": "starts with Whoever",
    "It runs where you are.\nWhat it took survives.": "starts with What",
    ("word " * 31).strip() + ".": "31 words",
    "The run lies in a folder.": "lies in",
    "That is no answer.": "is no a",
    "A backend of your own is opened.": "of your own",
    "| a | b |\n|---|---|\n| " + "cell " * 16 + "| b |": "a cell of 16 words",
    "A short sentence of six words. " * 151: "906 words",
}
PLAIN = [
    "What happens if the disk is full?",
    "Quark explains why the results of two runs differ, e.g. Of the code.",
    "```text\nOf two runs it says why.\n```",
    "<!-- hidden\nWhat a program prints.\n-->",
    "It is no longer there.",
    "See `What it says` and [the list](Of/what.md).",
]


@pytest.mark.parametrize(("text", "message"), FAULTY.items())
def test_a_fault_is_found_and_named(text, message):
    assert [told for _, told in prose.find_faults(PAGE, text) if message in told]


@pytest.mark.parametrize("text", PLAIN)
def test_plain_english_is_left_alone(text):
    assert list(prose.find_faults(PAGE, text)) == []


def test_figures_count_prose_and_tables_apart(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title words\n\nOne two three. Four five six.\n\n| a | b |\n|---|---|\n| c | d |\n"
    )
    told = dict(line.rsplit(maxsplit=1) for line in prose.describe([page]))
    assert told["words"] == "10"
    assert told["words in tables"] == "40.0%"
    assert told["sentences"] == "2"
    assert told["mean words per sentence"] == "3.0"


def test_the_readme_and_the_user_pages_are_checked():
    pages = prose.list_pages()
    assert prose.ROOT / "README.md" in pages
    assert len(pages) > 50
