"""The page's modules: their form, what they never do, and deno's tests of those that are pure."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import quark

STATIC = Path(quark.__file__).parent / "page" / "static"
MODULES = Path(__file__).parent / "modules"
OWN = sorted(path for path in STATIC.rglob("*.js") if path.parent.name != "vendor")
# What makes markup, code or style of a text.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\s*\.\s*write|\beval\s*\("
    r"|new\s+Function\b|createContextualFragment|DOMParser|setAttribute\(\s*[\"']style"
    r"|\sstyle=[\"']|\.cssText|srcdoc|javascript:"
)
# One script is made of these modules by a linker that knows no other form.
IMPORT = re.compile(r'^import \{[^{}]+\} from "(\.{1,2}/[\w./-]+\.js)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) \w+", re.MULTILINE)


def find_forbidden(source):
    """What of a module's code is forbidden; comments may speak of it."""
    code = re.sub(r"/\*[\s\S]*?\*/|^\s*//[^\n]*$", "", source, flags=re.MULTILINE)
    return FORBIDDEN.findall(code)


def find_odd_forms(source):
    """Lines that import or export in another form than the linker knows."""
    lines = [line for line in source.splitlines() if re.match(r"(import|export)\b", line)]
    return [line for line in lines if not IMPORT.match(line) and not EXPORT.match(line)]


def join_imports(source):
    """The source with each import on one line."""
    return re.sub(
        r"^import \{[^}]*\} from",
        lambda found: " ".join(found[0].split()),
        source,
        flags=re.MULTILINE,
    )


def run_deno(home, *arguments):
    """Deno, in the root of the tree, with a home of its own."""
    done = subprocess.run(
        [Path(sys.executable).parent / "deno", *arguments],
        cwd=STATIC.parents[2],
        capture_output=True,
        text=True,
        env={"NO_COLOR": "1", "PATH": "", "HOME": str(home), "DENO_NO_UPDATE_CHECK": "1"},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def test_pure_modules_do_what_their_tests_say(tmp_path):
    out = run_deno(
        tmp_path, "test", "--no-remote", "--no-check", "--allow-read", "--config",
        str(MODULES / "deno.json"), str(MODULES),
    )  # fmt: skip
    assert re.search(r"ok \| [1-9]\d* passed \| 0 failed", out), out[-2000:]


@pytest.mark.parametrize("path", OWN, ids=[path.relative_to(STATIC).as_posix() for path in OWN])
def test_a_module_makes_no_markup_of_text_and_is_strictly_typed(path):
    source = path.read_text("utf-8")
    assert source.startswith("// @ts-check\n")
    assert "@ts-ignore" not in source
    assert "@ts-nocheck" not in source
    assert find_forbidden(source) == []


@pytest.mark.parametrize("folder", ["data", "charts"])
def test_modules_of_a_report_have_the_form_that_a_linker_knows(folder):
    paths = [path for path in OWN if path.parent.name == folder]
    assert len(paths) > 5
    for path in paths:
        source = join_imports(path.read_text("utf-8"))
        assert find_odd_forms(source) == [], path
        for target in IMPORT.findall(source):
            assert (path.parent / target).resolve().is_file(), (path, target)


@pytest.mark.parametrize(
    "planted",
    [
        "box.innerHTML = name;",
        "document.write(name)",
        "html`<p style='color:red'>`",
        'setTimeout("x"); eval (name)',
        'element.setAttribute("style", name)',
    ],
)
def test_planted_markup_is_found(planted):
    assert find_forbidden(f"// innerHTML\n{planted}\n")


@pytest.mark.parametrize(
    "planted", ["export default 1;", 'import * as all from "./x.js";', 'import "./x.js";']
)
def test_a_planted_form_is_found(planted):
    assert find_odd_forms(f'import {{ a }} from "./x.js";\n{planted}\nexport const b = 1;\n') == [
        planted
    ]
