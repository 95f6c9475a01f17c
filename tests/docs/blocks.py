"""The code blocks of a page, and what its comments say about running them.

A page says in HTML comments, which no reader sees, how its blocks are run:

    <!-- page: long, needs torch lightning -->   which tier, and what must be installed
    <!-- hidden                                  Python that is run, and not shown
    session = quark.start_run()
    -->
    <!-- not run: needs a cluster -->            the next block is only compiled
    <!-- exit status 1 -->                       how the next block's last command ends
    <!-- fails with SessionStoreError -->        what the next block raises
    <!-- example: needs torch -->                what follows begins in an empty folder, without
                                                 names, and is skipped without what it needs
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w-]*)(?P<rest>.*)$")
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->")
_STATUS = re.compile(r"<!-- exit status (?P<status>\d+) -->")
_FAILS = re.compile(r"<!-- fails with (?P<error>\w+) -->")
_PAGE = re.compile(r"<!-- page: (?P<words>.+?) -->")
_EXAMPLE = re.compile(r"<!-- example(: needs (?P<needs>[\w ]+?))? -->")


@dataclass(frozen=True)
class Block:
    """A fenced block, or a hidden one, with what the comments before it say."""

    language: str
    text: str
    line: int
    hidden: bool = False
    not_run: str | None = None
    status: int = 0
    fails_with: str | None = None
    follows: bool = False  # nothing but blank lines between it and the block before
    begins: bool = False  # the first one of an example
    needs: tuple[str, ...] = ()  # of the example


@dataclass
class Page:
    """A page of Markdown: its blocks in order, its tier and what it needs."""

    path: Path
    blocks: list[Block] = field(default_factory=list)
    is_long: bool = False
    needs: tuple[str, ...] = ()

    @property
    def name(self):
        return self.path.relative_to(ROOT).as_posix()


def list_pages():
    """Every page that readers are led to: the README's, the docs' without the decisions."""
    decisions = DOCS / "contributing" / "decisions"
    found = [path for path in sorted(DOCS.rglob("*.md")) if decisions not in path.parents]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found]


def read_page(path):
    try:
        return parse_page(path, path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None


def parse_page(path, text):
    page = Page(path)
    if found := _PAGE.search(text):
        words = found["words"].replace(",", " ").split()
        page.is_long = "long" in words
        if "needs" in words:
            page.needs = tuple(words[words.index("needs") + 1 :])
    lines = text.splitlines()
    said = []  # the comments since the last block
    example = None  # the comment that began an example which has no block yet
    follows = False
    number = 0
    while number < len(lines):
        line = lines[number]
        if line.strip() == "<!-- hidden":
            end = _find(lines, number + 1, "-->")
            body = "\n".join(lines[number + 1 : end])
            page.blocks.append(begin(example, Block("python", body, number + 2, hidden=True)))
            example, follows = None, False
            number = end
        elif fence := _FENCE.match(line):
            end = _find(lines, number + 1, fence["ticks"])
            indent = len(fence["indent"])
            body = "\n".join(each[indent:] for each in lines[number + 1 : end])
            _add(page, fence["language"], body, number + 2, "\n".join(said), follows)
            page.blocks[-1] = begin(example, page.blocks[-1])
            said, example, follows = [], None, True
            number = end
        elif found := _EXAMPLE.fullmatch(line.strip()):
            example, follows = found, False
        elif line.strip().startswith("<!--"):
            said.append(line)
        elif line.strip():
            said, follows = [], False
        number += 1
    return page


def begin(example, block):
    """A block, as the first one of an example where a comment before it says so."""
    if example is None:
        return block
    return replace(block, begins=True, needs=tuple((example["needs"] or "").split()))


def _find(lines, start, mark):
    for number in range(start, len(lines)):
        if lines[number].strip() == mark:
            return number
    raise ValueError(f"line {start}: nothing ends the block that begins here")


def _add(page, language, body, line, said, follows):
    not_run, status, fails = _NOT_RUN.search(said), _STATUS.search(said), _FAILS.search(said)
    block = Block(
        language,
        body,
        line,
        not_run=not_run["reason"] if not_run else None,
        status=int(status["status"]) if status else 0,
        fails_with=fails["error"] if fails else None,
        follows=follows,
    )
    page.blocks.append(block)


def list_words(text):
    """The words of a program's output that stay the same from run to run."""
    return re.findall(r"(?<![\w.…/-])[A-Za-z][A-Za-z_]{3,}(?![\w…/-])", text)
