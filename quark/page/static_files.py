"""The page's own files, from a table that is made at the start: no name ever leads to the disk."""

from __future__ import annotations

import functools
import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from quark_core.errors import SessionStoreError

# Makes one script of the page's modules, so that it is one request and works without a server.
#
# Modules run as they are written; here each becomes a function that gives what it exports, called
# once, by who imports from it first: what no page in sight needs costs no time. These forms are
# understood, which a test holds the modules to: `import { a, b as c } from "./x.js";`,
# `import("./x.js")`, and `export` before a const, function or class or, at the end, around a list
# of names.

_IMPORT = re.compile(r"""^import\s*\{([^}]*)\}\s*from\s*["'](\.[^"']+)["'];?""", re.M)
_EXPORT = re.compile(
    r"(^|[;}])export\s+((?:async\s+)?(?:const|function\*?|class)\s+([\w$]+))", re.M
)
_EXPORT_LIST = re.compile(r"""(^|[;}])export\s*\{([^}]*)\};?(?!\s*from)""", re.M)
_LATE = re.compile(r"""\bimport\(\s*["'](\.[^"']+)["']\s*\)""")
# What the type checker and readers read, which is a fifth of all, and names modules too.
_COMMENT = re.compile(
    r"^[ \t]*//[^\n]*\n|^[ \t]*/\*\*(?:(?!\*/).)*\*/[ \t]*\n|/\*\*(?:(?!\*/).)*\*/", re.M | re.S
)
# Without meaning in scripts, and in the page's templates no more than one space.
_INDENT = re.compile(r"^[ \t]+", re.M)
_TAKE = """const linked = {}, taken = {};
const takeLinked = (name) => taken[name] ??= linked[name]();"""
_LEFT = re.compile(r"^\s*(?:import\s*[\w{*\"'(]|export\s)", re.M)


def find_imports(name: str, text: str) -> list[str]:
    """The modules that a module imports from, as paths below the static files."""
    plain = _COMMENT.sub("", text)
    targets = [found[2] for found in _IMPORT.finditer(plain)]
    targets += [found[1] for found in _LATE.finditer(plain)]
    folder = posixpath.dirname(name)
    return [posixpath.normpath(posixpath.join(folder, target)) for target in targets]


def link_modules(modules: Mapping[str, str], entry: str) -> str:
    """One script that does what a module and all that it imports do.

    Args:
        modules: Path -> text of each module.
        entry: The path of the one that begins.

    Raises:
        SessionStoreError: A module is missing, imports in a circle, or is in another form.
    """
    order: dict[str, None] = {}
    _visit(modules, entry, (), order)
    parts = [_TAKE]
    for name in order:
        body, names = _convert(name, modules[name])
        gives = ", ".join(f"{outer}: {inner}" for outer, inner in names.items())
        parts.append(
            f"linked[{json.dumps(name)}] = function () {{\n{body}\nreturn {{ {gives} }};\n}};"
        )
    parts.append(f"takeLinked({json.dumps(entry)});")
    return "\n".join(parts) + "\n"


def _visit(
    modules: Mapping[str, str], name: str, path: tuple[str, ...], order: dict[str, None]
) -> None:
    if name in order:
        return
    if name in path:
        raise SessionStoreError(f"the page's modules import in a circle: {' -> '.join(path)}")
    if name not in modules:
        raise SessionStoreError(f"the page's module {name} is missing. Reinstall Quark")
    for found in find_imports(name, modules[name]):
        _visit(modules, found, (*path, name), order)
    order[name] = None


def _convert(name: str, text: str) -> tuple[str, dict[str, str]]:
    """The body of a module as a function has it, and what it exports: outer name -> inner."""
    folder = posixpath.dirname(name)
    names: dict[str, str] = {}

    def bring_in(found: re.Match[str]) -> str:
        wanted = [_split_as(each) for each in found[1].split(",") if each.strip()]
        pairs = ", ".join(f"{outer}: {inner}" for outer, inner in wanted)
        source = posixpath.normpath(posixpath.join(folder, found[2]))
        return f"const {{ {pairs} }} = takeLinked({json.dumps(source)});"

    def keep(found: re.Match[str]) -> str:
        names[found[3]] = found[3]
        return found[1] + found[2]

    def keep_list(found: re.Match[str]) -> str:
        for each in found[2].split(","):
            if each.strip():
                inner, outer = _split_as(each)
                names[outer] = inner
        return found[1]

    def bring_in_late(found: re.Match[str]) -> str:
        source = posixpath.normpath(posixpath.join(folder, found[1]))
        return f"new Promise((give) => give(takeLinked({json.dumps(source)})))"

    body = _IMPORT.sub(bring_in, _COMMENT.sub("", text))
    body = _LATE.sub(bring_in_late, body)
    body = _EXPORT.sub(keep, body)
    body = _EXPORT_LIST.sub(keep_list, body)
    body = _INDENT.sub("", body)
    if left := _LEFT.search(body):
        line = body[: left.start() + 1].count("\n") + 1
        raise SessionStoreError(f"the page's module {name}, line {line}: not a supported import")
    return body, names


def _split_as(text: str) -> tuple[str, str]:
    first, _, second = (part.strip() for part in text.strip().partition(" as "))
    return first, second or first


STATIC_DIRECTORY = Path(__file__).with_name("static")
INDEX, SCRIPT = "index.html", "app.js"

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_HASH_CHARACTERS = 16
# As the page's own requests are made, or it would be asked for twice.
_PRELOAD = '<link rel="preload" as="fetch" crossorigin="anonymous" href="{}">\n'


@dataclass(frozen=True, slots=True)
class StaticFiles:
    """The files, as they were when the server began.

    Attributes:
        version: A hash over all names and contents.
        files: Path below `static/` -> media type and content.
        index: The page itself.
    """

    version: str
    files: Mapping[str, tuple[str, bytes]]
    index: str

    def render(self, depth: int, first: str | None = None) -> bytes:
        """The page for an address that lies so deep below the root.

        Args:
            depth: How deep.
            first: What the page will ask for first, below the root, so that it is on its way
                before the script is there.
        """
        root = "../" * depth or "./"
        preload = _PRELOAD.format(escape(root + first)) if first else ""
        text = self.index.replace("{{static}}", f"{root}static/{self.version}/")
        return text.replace("{{preload}}", preload).replace("{{root}}", root).encode()


@functools.cache
def load_installed_files() -> StaticFiles:
    """The files that come with Quark, which a process reads and links once.

    Raises:
        SessionStoreError: As `load_static_files` does; the next call tries again.
    """
    return load_static_files(STATIC_DIRECTORY)


def load_static_files(directory: Path) -> StaticFiles:
    """Read the files of a folder and of those in it; other types than the page's are left out.

    Raises:
        SessionStoreError: The page is not whole, or a module is in a form that is not linked.
    """
    files: dict[str, tuple[str, bytes]] = {}
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        media_type = _MEDIA_TYPES.get(path.suffix)
        if media_type is None or not path.is_file():
            continue
        name = path.relative_to(directory).as_posix()
        content = path.read_bytes()
        files[name] = (media_type, content)
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    if INDEX not in files:
        raise SessionStoreError(f"the page's files are missing ({directory}). Reinstall Quark")
    _, index = files.pop(INDEX)
    if SCRIPT in files:
        # One request in place of fifty; the modules are there besides, as they were written.
        modules = {name: body.decode() for name, (_, body) in files.items() if name.endswith(".js")}
        files[SCRIPT] = (files[SCRIPT][0], link_modules(modules, SCRIPT).encode())
    return StaticFiles(digest.hexdigest()[:_HASH_CHARACTERS], files, index.decode())
