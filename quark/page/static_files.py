"""The page's own files, from a table that is made at the start: no name ever leads to the disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from quark.page.linker import link_modules
from quark_core.errors import SessionStoreError

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
        raise SessionStoreError(f"the page's files are missing ({directory}): install Quark again")
    _, index = files.pop(INDEX)
    if SCRIPT in files:
        # One request in place of fifty; the modules are there besides, as they were written.
        modules = {name: body.decode() for name, (_, body) in files.items() if name.endswith(".js")}
        files[SCRIPT] = (files[SCRIPT][0], link_modules(modules, SCRIPT).encode())
    return StaticFiles(digest.hexdigest()[:_HASH_CHARACTERS], files, index.decode())
