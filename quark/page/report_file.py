"""A report as one file: the page's own modules, its styles and the data, under a policy of hashes.

The file asks nobody for anything. What names and texts a run has travels deflated and in base 64
in a block of data, so that no name can end it, and becomes text where it is shown.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quark.page.linker import link_modules
from quark.page.markup import escape
from quark.page.pack import encode_pack
from quark.page.static_files import STATIC_DIRECTORY
from quark_core.errors import SessionStoreError

_ENTRY, _WIDGET = "report.js", "widget.js"
# What stands in the place of what asks the server, and of what waits until it is in sight.
_REPLACED = {
    "pages/connection.js": "report/connection.js",
    "pages/sight.js": "report/sight.js",
}
_REPLACED_IN_WIDGET = {"charts/theme.js": "widget/theme.js"}
_WIDGET_STYLES = ("vendor/uplot.css", "charts/charts.css", "widget/widget.css")
_STYLES = ("vendor/uplot.css", "charts/charts.css", "style.css", "report/report.css")
# What could end the element that it stands in, or begin another one.
_UNSAFE = ("</script", "<!--", "</style")


def write_report(
    title: str, head: str, runs: str, contents: Mapping[str, Any], packs: Sequence[bytes]
) -> str:
    """The file.

    Args:
        title: Of the window.
        head: What stands above the runs, as HTML.
        runs: The runs for readers without scripts, as HTML.
        contents: The head of the data; `packs` names the packs.
        packs: In the order of their names.
    """
    script, style = _link()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    columns = {str(place): np.frombuffer(pack, np.uint8) for place, pack in enumerate(packs)}
    data = base64.b64encode(zlib.compress(encode_pack(contents, columns), 4)).decode()
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<main class="report-page">{head}<div id="runs">{runs}</div></main>\n'
        f'<script type="application/json" id="contents">{{"deflated":"{data}"}}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


@functools.cache
def link_widget() -> str:
    """The module that shows a run in a notebook's cell: one text, which imports and asks nothing.

    Raises:
        SessionStoreError: The page's files are not whole.
    """
    modules = _read_modules(_REPLACED_IN_WIDGET)
    # Its styles lie in a tree of their own, whose root is not that of the page.
    styles = _read_styles(_WIDGET_STYLES).replace(":root", ".live")
    modules["widget/styles.js"] = f"export const STYLES = {json.dumps(styles)};\n"
    linked = link_modules(modules, _WIDGET)
    return f"{linked}export default takeLinked({json.dumps(_WIDGET)}).widget;\n"


def _read_modules(replaced: Mapping[str, str]) -> dict[str, str]:
    """The page's modules by their paths, some of them in the place of others."""
    modules = {
        path.relative_to(STATIC_DIRECTORY).as_posix(): path.read_text("utf-8")
        for path in sorted(STATIC_DIRECTORY.rglob("*.js"))
    }
    return modules | {old: modules[new] for old, new in replaced.items()}


def _read_styles(names: Sequence[str]) -> str:
    return "".join((STATIC_DIRECTORY / name).read_text("utf-8") for name in names)


@functools.cache
def _link() -> tuple[str, str]:
    """The script and the style of every report."""
    modules = _read_modules(_REPLACED)
    linked = link_modules(modules, _ENTRY)
    script = f"(() => {{\n{linked}}})();\n"
    style = _read_styles(_STYLES)
    for word in _UNSAFE:
        if word in script.lower() or word in style.lower():
            raise SessionStoreError(f"the page's files hold {word!r}, which would end the report")
    return script, style


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
