"""Writes the reference pages that come from the code.

    python docs/site/reference.py --write     write docs/reference/api/ and docs/reference/cli.md
    python docs/site/reference.py             name the pages that are not up to date; exit 1

Run it with --write after a change of a public docstring or signature, or of a command's help. The
texts of the API are docstrings, the examples are in docs/site/api/, the texts of the commands are
their help. A test fails while a page is not what this program writes.
"""

import argparse
import sys
from pathlib import Path

SITE = Path(__file__).resolve().parent
REFERENCE = SITE.parent / "reference"
sys.path[:0] = [str(SITE), str(SITE.parents[1])]

from api_pages import DocsError, write_api_pages  # noqa: E402
from cli_page import write_cli_page  # noqa: E402


def write_pages():
    """Path -> text of each page, as it should be."""
    pages = {REFERENCE / "api" / name: text for name, text in write_api_pages().items()}
    return {**pages, REFERENCE / "cli.md": write_cli_page()}


def list_stale(pages):
    """The pages that are missing, differ, or that nothing writes."""
    present = set((REFERENCE / "api").rglob("*.md"))
    stale = [
        path for path, text in pages.items() if not path.exists() or path.read_text("utf-8") != text
    ]
    return stale + sorted(present - set(pages))


def main():
    parser = argparse.ArgumentParser(description="Writes the reference pages.")
    parser.add_argument("--write", action="store_true", help="write the pages")
    arguments = parser.parse_args()
    try:
        pages = write_pages()
    except DocsError as error:
        print(error, file=sys.stderr)
        return 2
    stale = list_stale(pages)
    for path in stale:
        print(path.relative_to(SITE.parents[1]))
        if arguments.write and path in pages:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages[path], "utf-8")
        elif arguments.write:
            path.unlink()
    return 1 if stale and not arguments.write else 0


if __name__ == "__main__":
    sys.exit(main())
