"""Makes one script of the page's modules, so that it is one request and works without a server.

Modules run as they are written; here each becomes a function that gives what it exports, called
once, by who imports from it first: what no page in sight needs costs no time. These forms are
understood, which a test holds the modules to: `import { a, b as c } from "./x.js";`,
`import("./x.js")`, and `export` before a const, function or class or, at the end, around a list
of names.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping

from quark_core.errors import SessionStoreError

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
        raise SessionStoreError(f"the page's module {name} is missing: install Quark again")
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
        raise SessionStoreError(f"the page's module {name}, line {line}: this form is not linked")
    return body, names


def _split_as(text: str) -> tuple[str, str]:
    first, _, second = (part.strip() for part in text.strip().partition(" as "))
    return first, second or first
