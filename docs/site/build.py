"""Builds the site of the docs: python docs/site/build.py [--out FOLDER].

The pages are read where they lie and written, as the site needs them, into a folder beside it:

- comments that say how blocks are run are taken out;
- the navigation is what docs/index.md lists, in its order and under its headings;
- what a page links to outside of docs (an example, the changelog) becomes a page too.

Then Zensical builds, and stops at a warning; after it each link of the built site is followed, and
each page must fetch nothing from elsewhere. The exit status is 1 where anything is found.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).resolve().parent
DOCS = SITE.parent
ROOT = DOCS.parent
OUTSIDE = "project"  # where pages lie that are made of files outside of docs
ASSETS = {".png", ".svg", ".css"}

_COMMENT = re.compile(r"^<!--.*?-->\n?", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s]+)(?P<after>\))")
_FENCED = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_ENTRY = re.compile(r"^(?:[-*]|\|)\s*\[(?P<title>[^\]]+)\]\((?P<target>[^)#\s]+\.md)\)")


class SiteError(Exception):
    """What a writer of the docs has to mend."""


def split_fences(text):
    """The text in pieces: (piece, is it a fenced block)."""
    at = 0
    for found in _FENCED.finditer(text):
        yield text[at : found.start()], False
        yield found[0], True
        at = found.end()
    yield text[at:], False


def stage_pages(pages):
    """Writes every page of docs into `pages`, and what they link to outside of docs."""
    outside = []
    for path in sorted(DOCS.rglob("*")):
        inside = path.relative_to(DOCS)
        if path.is_dir() or inside.parts[0] == SITE.name:
            continue
        target = pages / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = turn_page(path, target, pages, outside)
            target.write_text(text, "utf-8")
        elif path.suffix in ASSETS:
            shutil.copyfile(path, target)
    done = set()
    while outside:
        path = outside.pop()
        if path not in done:
            done.add(path)
            stage_outside(path, pages, outside)


def turn_page(path, target, pages, outside):
    """A page as the site has it: without comments, with links that lead to pages of the site."""

    def turn(link):
        address = urlsplit(link["target"])
        if address.scheme or not address.path:
            return link[0]
        file = (path.parent / unquote(address.path)).resolve()
        if not file.exists():
            raise SiteError(f"{path.relative_to(ROOT)}: {link['target']} leads nowhere")
        if file.is_dir() and (file / "index.md").exists():
            file /= "index.md"
        if file.is_dir():
            raise SiteError(
                f"{path.relative_to(ROOT)}: {link['target']} is a folder without index.md"
            )
        if DOCS in file.parents:
            place = pages / file.relative_to(DOCS)
        else:
            outside.append(file)
            place = place_outside(file, pages)
        turned = os.path.relpath(place, target.parent)
        anchor = f"#{address.fragment}" if address.fragment else ""
        return f"{link['before']}{turned}{anchor}{link['after']}"

    return "".join(
        piece if fenced else _LINK.sub(turn, _COMMENT.sub("", piece))
        for piece, fenced in split_fences(path.read_text("utf-8"))
    )


def place_outside(file, pages):
    inside = file.relative_to(ROOT)
    return pages / OUTSIDE / (inside if file.suffix == ".md" else f"{inside.as_posix()}.md")


def stage_outside(file, pages, outside):
    target = place_outside(file, pages)
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".md":
        text = turn_page(file, target, pages, outside)
    elif file.suffix == ".ipynb":
        place = file.relative_to(ROOT).as_posix()
        text = f"# {file.name}\n\nThis notebook is `{place}` of the source.\n"
    else:
        language = "python" if file.suffix == ".py" else "text"
        fence = "````"
        text = f"# {file.name}\n\n{fence}{language}\n{file.read_text('utf-8')}{fence}\n"
    target.write_text(text, "utf-8")


def read_navigation():
    """The navigation: the sections of the start page, each with the pages that it lists."""
    return [{"Quark": "index.md"}, *read_entries(DOCS / "index.md")]


def read_entries(index):
    """What an index page lists, headings of the second level being sections."""
    entries = section = []
    for line in index.read_text("utf-8").splitlines():
        if line.startswith("## "):
            section = []
            entries.append({line.removeprefix("## "): section})
        elif found := _ENTRY.match(line):
            file = (index.parent / found["target"]).resolve()
            inside = file.relative_to(DOCS).as_posix()
            if file.name == "index.md":
                section.append({found["title"]: [inside, *read_entries(file)]})
            else:
                section.append({found["title"].strip("`"): inside})
    return [each for each in entries if any(each.values())]


def write_config(out):
    sys.path.insert(0, str(ROOT))
    from quark_core.version import __version__

    base = (SITE / "zensical.toml").read_text("utf-8")
    extra = f'nav = {write_toml(read_navigation())}\ncopyright = "Quark {__version__}"\n'
    config = base.replace("[project]\n", f"[project]\n{extra}", 1)
    tomllib.loads(config)
    (out / "zensical.toml").write_text(config, "utf-8")


def write_toml(value):
    if isinstance(value, list):
        return "[" + ", ".join(map(write_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write_toml(k)} = {write_toml(v)}" for k, v in value.items()) + "}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


class BuiltPage(HTMLParser):
    """What a built page links to, fetches, and can be linked to by."""

    def __init__(self, text):
        super().__init__()
        self.links, self.fetched, self.anchors = [], [], {"", "__skip"}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in ("img", "script", "iframe", "source") and values.get("src"):
            self.fetched.append(values["src"])
        is_fetched = values.get("rel") not in ("canonical", "alternate", "next", "prev")
        if tag == "link" and values.get("href") and is_fetched:
            self.fetched.append(values["href"])


def check_site(site):
    """What is wrong with the built site, as lines."""
    pages = {path: BuiltPage(path.read_text("utf-8")) for path in site.rglob("*.html")}
    for path, page in sorted(pages.items()):
        name = path.relative_to(site).as_posix()
        for target in page.fetched:
            if urlsplit(target).netloc:
                yield f"{name}: fetches {target}"
        for target in [*page.links, *page.fetched]:
            address = urlsplit(target)
            if address.scheme or address.netloc or name == "404.html":
                continue
            file = (path.parent / unquote(address.path)).resolve() if address.path else path
            if file.is_dir():
                file /= "index.html"
            if not file.exists():
                yield f"{name}: {target} leads nowhere"
            elif file in pages and unquote(address.fragment) not in pages[file].anchors:
                yield f"{name}: {target} has no such place"


def build(out):
    """Builds into `out`/site; what is wrong, as lines, none where all is well."""
    shutil.rmtree(out, ignore_errors=True)
    pages = out / "pages"
    pages.mkdir(parents=True)
    stage_pages(pages)
    write_config(out)
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean"],
        cwd=out,
        capture_output=True,
        text=True,
    )
    said = built.stdout + built.stderr
    if built.returncode != 0 or re.search(r"\bwarning\b", said, re.IGNORECASE):
        return [said or f"zensical ended with {built.returncode}"]
    return list(check_site((out / "site").resolve()))


def main():
    parser = argparse.ArgumentParser(description="Builds the site of the docs.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs")
    out = parser.parse_args().out.resolve()
    try:
        wrong = build(out)
    except SiteError as error:
        wrong = [str(error)]
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        print(f"{out / 'site' / 'index.html'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
