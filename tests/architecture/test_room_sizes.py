"""The counter of rooms counts exactly, and its check fails when a room outgrows its record."""

import ast

from code_lines import count_javascript_lines, count_python_lines
from import_graph import find_cycles, find_imports
from room_sizes import count_rooms, find_core_imports, main, read_record

PYTHON = '''\
"""A docstring
of two lines."""

# A comment.
import os  # code with a comment

NOTE = """a string, not a docstring,

# with a blank line and what looks like a comment"""


def call(
    first,
    # A comment between the arguments.
    second,
):
    """A docstring."""
    "no docstring, the second statement"
    return (
        f"{first}#"
        # A comment in a string of two parts.
        "second # part"
    )


class One: """A docstring beside its class."""


async def two():
    r\'\'\'A docstring

    with a blank line.\'\'\'
'''
JAVASCRIPT = """\
// A comment.
import { html } from "./html.js"; // code

/** A comment
 * of three lines.
 */
const address = "https://localhost/*"; /* code */ let code;
const pattern = text.replace(/["'`]/g, "");
/* a comment */ /* and another */
const page = html`<p>
  // text, ${isOpen ? html`<b>it's</b>` : { /* a comment */
    // a comment
  }}

  /* text */</p>`;
const half = whole / 2; // "code"
"""


def test_python_lines_are_counted_exactly():
    # import, two of NOTE, four of def, the second string, four of return, class, async def
    assert count_python_lines(PYTHON) == 1 + 2 + 4 + 1 + 4 + 1 + 1


def test_javascript_lines_are_counted_exactly():
    # import, address, pattern, four of the template, half
    assert count_javascript_lines(JAVASCRIPT) == 1 + 1 + 1 + 4 + 1


def write(root, **sources):
    for name, source in sources.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def plant_house(root):
    """A small repository: one cycle of a late import, one module that others import."""
    write(
        root,
        quark_core__runs__one="def f():\n    import quark_core.runs.two\n",
        quark_core__runs__two="from quark_core.runs import one\n",
        quark_core__records__base="A = 1\nB = 2\n",
        quark_core__api="A = 1\n",
        quark__cli__show="from quark_core import api\nfrom quark_core.records.base import A\n",
        tests__quark__test_show="assert True\n",
    )
    return root, root / "record.toml"


def test_a_repository_that_fits_its_record_passes(tmp_path, capsys):
    root, path = plant_house(tmp_path)
    assert main(["--raise", "all"], root, path) == 0
    assert main([], root, path) == 0
    assert "quark_core/runs" in capsys.readouterr().out
    assert read_record(path)["quark_core/runs"] == {
        "lines": 3,
        "cyclic": 2,
        "cyclic_at_run_time": 2,
    }


def test_a_planted_line_fails_until_the_record_of_that_room_is_raised(tmp_path, capsys):
    root, path = plant_house(tmp_path)
    main(["--raise", "all"], root, path)
    write(root, quark_core__records__base="A = 1\nB = 2\nC = 3\n", quark__cli__show="")
    assert main(["--lower"], root, path) == 1
    assert read_record(path)["quark_core/records"] == {"lines": 2}
    assert "quark_core/records has 3 lines of code; 2 are recorded" in capsys.readouterr().out
    assert read_record(path)["quark/cli"] == {"lines": 0}
    assert main(["--raise", "quark_core/records"], root, path) == 0


def test_a_planted_cycle_fails_and_so_does_one_of_types(tmp_path, capsys):
    root, path = plant_house(tmp_path)
    write(root, quark_core__records__codec="from quark_core.records.base import A\nC = 3\n")
    main(["--raise", "all"], root, path)
    late = "if 1:\n    from quark_core.records import codec\n"
    write(root, quark_core__records__base=late)
    assert main([], root, path) == 1
    assert "quark_core/records has 2 modules that import each other" in capsys.readouterr().out
    write(root, quark_core__records__base=late.replace("1", "TYPE_CHECKING"))
    assert main([], root, path) == 1
    assert "imports of types counted" in capsys.readouterr().out


def test_a_room_without_a_record_fails_and_a_move_is_recorded_at_once(tmp_path, capsys):
    root, path = plant_house(tmp_path)
    main(["--raise", "all"], root, path)
    (root / "quark_core/records").rename(root / "quark/records")
    assert main([], root, path) == 1
    assert "quark/records has no record" in capsys.readouterr().out
    assert main(["--moved"], root, path) == 0
    assert "quark_core/records" not in read_record(path)


def test_imports_of_the_core_are_those_that_are_not_public(tmp_path):
    root, _ = plant_house(tmp_path)
    sizes = count_rooms(root)
    assert find_core_imports(sizes.with_types) == {"quark_core.records.base": {"quark"}}
    assert sizes.rooms["quark_core/records"].imported_once == 1


def test_late_relative_and_type_imports_are_found():
    source = (
        "from typing import TYPE_CHECKING\n"
        "from . import b\n"
        "if TYPE_CHECKING:\n    from a import c\nelse:\n    import a.d\n"
        "def late():\n    from .e import Name\n"
    )
    modules = {"a", "a.b", "a.c", "a.d", "a.e", "a.me"}
    assert find_imports(ast.parse(source), "a.me", False, modules) == (
        {"a.b", "a.d", "a.e"},
        {"a.c"},
    )
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_a_module_with_more_than_700_lines_fails_whatever_is_recorded(tmp_path, capsys):
    root, path = plant_house(tmp_path)
    write(root, quark_core__records__base="A = 1\nB = 2\n" + "C = 3\n" * 699)
    assert main(["--raise", "all"], root, path) == 1
    assert "quark_core/records/base.py has 701 lines of code" in capsys.readouterr().out
