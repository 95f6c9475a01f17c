"""Counts and checks the prose of the docs: python tests/docs/prose.py [--check] [FILE ...].

Without files it reads the README and docs/, without the decision records. `--check` prints each
line that breaks a rule, and exits with 1 if there is one. The rules are those of CONTRIBUTING.md:
plain statements, short sentences, small table cells, and the words of the glossary.
"""

import argparse
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MOST_WORDS_OF_SENTENCE = 30
MOST_WORDS_OF_CELL = 15
MOST_WORDS_OF_PAGE = 900
# Pages that are looked up, and generated ones, may be longer than a page that explains one task.
LONG_PAGES = (
    "reference/",
    "contributing/",
    "extend/",
    "about/",
    "diagnose/fix-an-alert.md",
    "CHANGELOG.md",
)

_FENCE = re.compile(r"^ *(`{3,})")
_START = re.compile(r"^(What|Of|Who|Where|Whatever|Whoever|Wherever|Whether|Nobody)\b")
_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_`\[]*[A-Z`])")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|approx)\.")
_BANNED = {
    r"\bis no (?!longer\b|more\b)[a-z]": "write 'is not a' or name what is missing",
    r"\bof (your|one's|its|our) own\b": "write 'custom' or 'own X'",
    r"\b(lies|lie|lay) (in|under|beside|there)\b": "write 'is stored in'",
    r"\bheld against\b": "write 'compared with'",
    r"\btruth values?\b": "write 'booleans'",
    r"\b(blames?|blamed|accus\w+|culprits?|guilty|acquit\w*|innocent|suspects?)\b": "write 'cause'",
    r"\b(whoever|somebody|nobody)\b": "name the person or the process, or write 'you'",
    r"\b[Ss]ay(s)? (what|why|that|how|whether|which)\b": "write 'shows', 'explains' or 'reports'",
    r"\bblack box\b": "write 'crash buffer'",
    r"\bpersistence service\b": "write 'Quark server'",
    r"\bmade of\b": "write 'provenance' or 'consists of'",
    r"\bgo(es)? on with\b": "write 'continue' or 'resume'",
    r"\bbroke(n)? off\b": "write 'interrupted'",
    r"\btaken up\b": "write 'resumed' or 'claimed'",
    r"\bin place of\b": "write 'instead of'",
    r"\bby (itself|themselves)\b": "write 'automatically' or 'alone'",
    r"\bcannot be told\b": "write 'inconclusive'",
    r"\b(is|are|to be) told\b": "write 'is reported', 'is logged' or 'notify'",
    r"\btrainings\b": "write 'runs' or 'training processes'",
}
BANNED = {re.compile(pattern): advice for pattern, advice in _BANNED.items()}


@dataclass
class Prose:
    """The prose of one page.

    Attributes:
        sentences: (line, sentence) of the text outside of tables, code, headings and comments.
        cells: (line, text) of the cells of tables.
    """

    sentences: list = field(default_factory=list)
    cells: list = field(default_factory=list)

    @property
    def words(self):
        """Words of the prose, and words of the tables."""
        return tuple(
            sum(len(text.split()) for _, text in part) for part in (self.sentences, self.cells)
        )


def read_prose(text):
    """Take the prose of a page of Markdown apart."""
    prose, paragraph, first = Prose(), [], 0
    fence, comment = "", False

    def close():
        joined = _ABBREVIATION.sub(r"\1", " ".join(paragraph))
        prose.sentences += [(first, part) for part in _END.split(joined) if part.strip()]
        paragraph.clear()

    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        if fence:
            fence = "" if stripped == fence else fence
        elif comment or stripped.startswith("<!--"):
            comment = "-->" not in stripped
        elif found := _FENCE.match(line):
            close()
            fence = found[1]
        elif stripped.startswith("|"):
            close()
            if not re.fullmatch(r"[|:\- ]+", stripped):
                cells = re.split(r"(?<!\\)\|", stripped.strip("|"))
                prose.cells += [(number, simplify(cell)) for cell in cells if cell.strip()]
        elif not stripped or stripped.startswith(("#", "![", ":::", "<")):
            close()
        else:
            item = re.match(r"(?:[-*>]|\d+\.) +", stripped)
            if item:
                close()
            if not paragraph:
                first = number
            paragraph.append(simplify(stripped[item.end() :] if item else stripped))
    return prose


def simplify(text):
    """The words that a reader sees: code counts as one word, a link as its text."""
    text = re.sub(r"`[^`]*`", "`code`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return text.replace("**", "").strip()


def is_statement(sentence):
    return not sentence.rstrip("\"')*_ ").endswith("?")


def find_faults(path, text):
    """What breaks a rule on a page, as (line, message)."""
    prose = read_prose(text)
    for line, sentence in prose.sentences:
        count = len(sentence.split())
        if _START.match(sentence) and is_statement(sentence):
            yield line, f"a statement starts with {sentence.split()[0]}: {sentence[:60]}"
        if count > MOST_WORDS_OF_SENTENCE:
            yield line, f"a sentence of {count} words: {sentence[:60]}"
    for line, cell in prose.cells:
        if len(cell.split()) > MOST_WORDS_OF_CELL:
            yield line, f"a cell of {len(cell.split())} words: {cell[:60]}"
        if _START.match(cell) and is_statement(cell):
            yield line, f"a cell starts with {cell.split()[0]}: {cell[:60]}"
    for line, sentence in [*prose.sentences, *prose.cells]:
        for pattern, advice in BANNED.items():
            if found := pattern.search(sentence):
                yield line, f"{found[0]!r}: {advice}"
    words = sum(prose.words)
    place = path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else path.name
    if words > MOST_WORDS_OF_PAGE and not place.startswith(LONG_PAGES):
        yield 1, f"the page has {words} words; split it, or link to a reference page"


def list_pages():
    """The README and all pages of the docs but decision records and generated pages."""
    left_out = (DOCS / "contributing" / "decisions", DOCS / "reference" / "api")
    pages = [
        p for p in sorted(DOCS.rglob("*.md")) if not any(p.is_relative_to(d) for d in left_out)
    ]
    return [ROOT / "README.md", *pages]


def describe(pages):
    """The figures of pages together, as lines."""
    all_prose = [read_prose(page.read_text("utf-8")) for page in pages]
    lengths = [len(s.split()) for prose in all_prose for _, s in prose.sentences]
    starts = sum(
        bool(_START.match(s)) and is_statement(s) for prose in all_prose for _, s in prose.sentences
    )
    texts, tables = (sum(prose.words[part] for prose in all_prose) for part in (0, 1))
    long = sum(length > MOST_WORDS_OF_SENTENCE for length in lengths)
    return [
        f"pages                                    {len(pages)}",
        f"words                                    {texts + tables}",
        f"words in tables                          {tables / (texts + tables):.1%}",
        f"sentences                                {len(lengths)}",
        f"mean words per sentence                  {statistics.mean(lengths):.1f}",
        f"sentences over {MOST_WORDS_OF_SENTENCE} words                  {long / len(lengths):.1%}",
        f"statements starting with What/Of/Who/... {starts / len(lengths):.1%}",
    ]


def main():
    parser = argparse.ArgumentParser(description="Counts and checks the prose of the docs.")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true", help="print what breaks a rule")
    arguments = parser.parse_args()
    pages = [path.resolve() for path in arguments.files] or list_pages()
    if not arguments.check:
        print("\n".join(describe(pages)))
        return 0
    faults = 0
    for page in pages:
        for line, message in find_faults(page, page.read_text("utf-8")):
            faults += 1
            print(f"{page.relative_to(ROOT)}:{line}: {message}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
