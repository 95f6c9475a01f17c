"""What comes with the package, and how large it may be."""

import gzip
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from quark.page.static_files import (
    INDEX,
    SCRIPT,
    STATIC_DIRECTORY,
    find_imports,
    link_modules,
    load_static_files,
)
from quark_core.errors import SessionStoreError

ROOT = Path(__file__).parents[3]
# As they travel: the script that is linked of the modules, styles and the page itself. The pages of
# sweeps are some 60 kB of these (17 kB packed): axes that are narrowed by keys too, brushes, a
# verdict, who has which trial. No page in sight that needs none of it runs any of it.
OWN_BYTES, OWN_PACKED_BYTES, VENDORED_BYTES, FIRST_PAGE_REQUESTS = 477_000, 127_500, 220_000, 20
# What a page asks for beside its own files: runs, about, standings, sparks, a second page of these.
DATA_REQUESTS = 6


@pytest.fixture(scope="module")
def static():
    return load_static_files(STATIC_DIRECTORY)


def test_own_and_vendored_code_stay_within_their_budgets(static):
    vendored = {
        name: content
        for name, (_, content) in static.files.items()
        if name.startswith("vendor/") and not name.endswith((".d.ts", ".LICENSE"))
    }
    assert sum(map(len, vendored.values())) <= VENDORED_BYTES
    styles = [
        content
        for name, (_, content) in static.files.items()
        if name.endswith(".css") and name not in vendored
    ]
    modules = {name: content.decode() for name, (_, content) in load_modules(static).items()}
    # The vendored modules as empty ones that give the same names.
    empty = {
        name: "export { " + ", ".join(f"nothing as {each}" for each in sorted(wanted)) + " };"
        for name, wanted in list_wanted(modules).items()
        if name.startswith("vendor/")
    }
    script = link_modules({**modules, **empty}, SCRIPT).encode()
    own = b"".join([script, *styles, static.index.encode()])
    assert len(own) <= OWN_BYTES
    assert len(gzip.compress(own)) <= OWN_PACKED_BYTES


def load_modules(static):
    """The modules as they were written: the first one is served linked."""
    found = {name: each for name, each in static.files.items() if name.endswith(".js")}
    found[SCRIPT] = (found[SCRIPT][0], (STATIC_DIRECTORY / SCRIPT).read_bytes())
    return found


def list_wanted(modules):
    """Module -> the names that others import from it."""
    wanted = {}
    for name, text in modules.items():
        targets = find_imports(name, text)
        lists = re.findall(r"""^import\s*\{([^}]*)\}\s*from\s*["']\.""", text, re.M)
        for target, names in zip(targets, lists, strict=False):  # those of late imports are last
            outer = [each.strip().partition(" as ")[0] for each in names.split(",") if each.strip()]
            wanted.setdefault(target, set()).update(outer)
    return wanted


def test_the_first_page_asks_for_few_things(static):
    loaded = re.findall(r"\{\{static\}\}([\w./-]+)", static.index)
    assert all(name in static.files for name in loaded)
    assert not re.search(r"^import\b", static.files[SCRIPT][1].decode(), re.M)
    assert 1 + len(loaded) + DATA_REQUESTS <= FIRST_PAGE_REQUESTS


def test_every_module_is_reached_from_the_page_a_report_or_a_notebook(static):
    modules = {name: text.decode() for name, (_, text) in load_modules(static).items()}
    # Put in the place of the page's own by what links a report, or what notebooks show.
    found, waiting = set(), [SCRIPT, "report.js", "report/connection.js", "report/sight.js"]
    waiting += ["widget.js", "widget/theme.js"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += find_imports(name, modules[name])
    assert found == set(modules)


def test_what_is_linked_gives_what_the_modules_give():
    modules = {
        "app.js": 'import { b as c, Shape } from "./in/b.js";\n'
        'export const got = [c(), import("./late.js")]; /** @type {import("./types.js").A} */',
        "in/b.js": 'import {\n  one,\n} from "../one.js";\n/** Says. */\n'
        "export function b() { return one; }\nexport class Shape { x = 2; }",
        "late.js": "export const two = 2;\n  /** @type {A} */ (two);\n"
        "const kept = 3;\n/** Ends. */\n",
        "one.js": "const first = 1;\nexport { first as one };",
    }
    linked = link_modules(modules, "app.js")
    assert linked.index("one.js") < linked.index("in/b.js") < linked.index('linked["app.js"]')
    assert 'const { b: c, Shape: Shape } = takeLinked("in/b.js");' in linked
    assert "return { one: first };" in linked
    assert 'got = [c(), new Promise((give) => give(takeLinked("late.js")))]' in linked
    assert linked.endswith('takeLinked("app.js");\n')
    assert "Says" not in linked
    assert "const kept = 3;" in linked
    assert not re.search(r"^\s*(import|export)\b", linked, re.M)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('import { a } from "./gone.js";', "gone.js is missing"),
        ('import { a } from "./app.js";', "in a circle"),
        ('import * as a from "./x.js";', "line 1: not a supported import"),
        ("const a = 1;\nexport default a;", "line 2: not a supported import"),
        ('import "./x.js";', "line 1: not a supported import"),
    ],
)
def test_a_form_that_is_not_linked_is_told(text, said):
    with pytest.raises(SessionStoreError, match=said):
        link_modules({"app.js": text, "x.js": ""}, "app.js")


def test_nothing_is_loaded_from_elsewhere(static):
    for name, (media_type, content) in static.files.items():
        if name.startswith("vendor/") or not media_type.startswith(("text/css", "text/javascript")):
            continue
        text = content.decode()
        assert not re.search(r"""(?:from|import|url)\s*\(?\s*["']?(?:https?:)?//""", text), name
    assert "http://" not in static.index.replace("http://www.w3.org/", "")
    assert "https://" not in static.index


def test_the_page_works_under_its_policy(static):
    """No inline script or style, which the policy would refuse anyway."""
    assert not re.search(r"<script(?![^>]*\bsrc=)", static.index)
    assert not re.search(r"<style|\sstyle=|\son\w+=", static.index)
    assert "<noscript" in static.index


@pytest.mark.parametrize(
    "word",
    ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"],
)
def test_no_text_ever_becomes_html_or_code(static, word):
    own = {
        name: content.decode()
        for name, (_, content) in load_modules(static).items()
        if not name.startswith("vendor/")
    }
    assert [name for name, text in own.items() if word in text] == []


def test_a_page_that_is_not_whole_is_told(tmp_path):
    (tmp_path / "x.js").write_text("")
    with pytest.raises(SessionStoreError, match="Reinstall Quark"):
        load_static_files(tmp_path)


def test_the_version_is_of_names_and_contents(tmp_path):
    (tmp_path / INDEX).write_text("{{static}} {{root}}")
    (tmp_path / "a.js").write_text("1")
    (tmp_path / "notes.py").write_text("never served")
    first = load_static_files(tmp_path)
    assert set(first.files) == {"a.js"}
    assert first.render(2) == f"../../static/{first.version}/ ../../".encode()
    (tmp_path / "a.js").write_text("2")
    second = load_static_files(tmp_path)
    (tmp_path / "a.js").rename(tmp_path / "b.js")
    assert len({first.version, second.version, load_static_files(tmp_path).version}) == 3


def test_wheel_and_sdist_hold_the_page():
    """The whole packages are in both, so no list of files can be forgotten."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert "quark" in build["targets"]["wheel"]["packages"]
    assert "/quark" in build["targets"]["sdist"]["include"]
    ignored = (ROOT / ".gitignore").read_text()
    assert "static" not in ignored
    assert STATIC_DIRECTORY == ROOT / "quark" / "page" / "static"


@pytest.mark.long
def test_a_built_wheel_holds_every_file(tmp_path, static):
    import zipfile

    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"quark/page/static/{name}" for name in (*static.files, INDEX)}
    licences = {
        f"quark/page/static/{path.relative_to(STATIC_DIRECTORY).as_posix()}"
        for path in STATIC_DIRECTORY.rglob("*.LICENSE")
    }
    assert licences
    assert (wanted | licences) - names == set()


def test_the_widget_is_one_module_that_shows_something(tmp_path):
    from quark.page.report import link_widget

    module = tmp_path / "widget.mjs"
    module.write_text(link_widget(), "utf-8")
    assert not re.search(r"^import\b", link_widget(), re.M)
    tell = f"console.log(Object.keys((await import({module.as_uri()!r})).default).sort().join())"
    deno = Path(sys.executable).with_name("deno")
    done = subprocess.run([deno, "eval", tell], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "initialize,render"
