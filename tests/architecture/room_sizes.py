"""Counts the rooms of the repository and compares them with what is recorded of each.

    python tests/architecture/room_sizes.py                compare (a part of `make check`)
    python tests/architecture/room_sizes.py --lower        lower the records of rooms that shrank
    python tests/architecture/room_sizes.py --raise ROOM   record a room as it is now (or: all)
    python tests/architecture/room_sizes.py --moved        record all rooms after a move of code
    python tests/architecture/room_sizes.py --cycles       list the import cycles
    python tests/architecture/room_sizes.py --imports      list core modules that others import

A room is a folder of a package, of tests/ or of benchmarks/, with all that is in it; the modules
beside the folders are one room too, such as `quark_core/.`. A line counts if it is not blank and
holds more than a comment or a docstring. `quark_core.testing` is for authors of backends and is
counted apart from the core. An import in a function counts like one at the top.
"""

import argparse
import ast
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from code_lines import count_javascript_lines, count_python_lines
from import_graph import count_importers, find_cycles, find_imports

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_suffix(".toml")
COMMAND = "python tests/architecture/room_sizes.py"
PACKAGES = ("quark_core", "quark_backends", "quark_torch", "quark")
BESIDE = ("tests", "benchmarks")
JAVASCRIPT = ("quark/page/static", "tests/quark/page/modules")
OTHERS_CODE = "vendor"
KIT = "quark_core/testing"
MAX_MODULE_LINES = 700
PUBLIC = ("quark_core.api", "quark_core.hookspecs")
MEASURES = {
    "lines": "lines of code",
    "cyclic": "modules that import each other in cycles, imports of types counted",
    "cyclic_at_run_time": "modules that import each other in cycles at run time",
}


@dataclass
class Room:
    """What a room holds."""

    files: int = 0
    lines: int = 0
    cyclic: int = 0
    cyclic_at_run_time: int = 0
    imported_once: int = 0


@dataclass
class Sizes:
    """What the repository holds: rooms by name, modules by the modules that they import."""

    rooms: dict[str, Room] = field(default_factory=lambda: defaultdict(Room))
    too_long: dict[str, int] = field(default_factory=dict)
    at_run_time: dict[str, set[str]] = field(default_factory=dict)
    with_types: dict[str, set[str]] = field(default_factory=dict)

    def find_all_cycles(self):
        """Find the import cycles at run time, and those with imports of types counted."""
        return {
            "at run time": find_cycles(self.at_run_time),
            "with types": find_cycles(self.with_types),
        }


def name_room(path):
    """Name the room of a file, whose path is relative to the root."""
    if path.suffix == ".js":
        return next(place for place in JAVASCRIPT if path.is_relative_to(place))
    top, *inner = path.parts
    return f"{top}/{inner[0]}" if len(inner) > 1 else f"{top}/."


def count_rooms(root):
    """Count all rooms below a root.

    Returns:
        The sizes.
    """
    sizes, trees, rooms = Sizes(), {}, {}
    for top in (*PACKAGES, *BESIDE):
        for path in sorted((root / top).rglob("*.py")):
            place, source = path.relative_to(root), path.read_text("utf-8")
            tree, room = ast.parse(source), name_room(place)
            sizes.rooms[room].files += 1
            lines = count_python_lines(source, tree)
            sizes.rooms[room].lines += lines
            if top in PACKAGES:
                if lines > MAX_MODULE_LINES:
                    sizes.too_long[place.as_posix()] = lines
                is_package = path.name == "__init__.py"
                module = ".".join((place.parent if is_package else place.with_suffix("")).parts)
                trees[module], rooms[module] = (tree, is_package), room
    for folder in JAVASCRIPT:
        for path in sorted((root / folder).rglob("*.js")):
            if OTHERS_CODE not in path.parts:
                room = sizes.rooms[name_room(path.relative_to(root))]
                room.files += 1
                room.lines += count_javascript_lines(path.read_text("utf-8"))
    for module, (tree, is_package) in trees.items():
        at_run_time, for_types = find_imports(tree, module, is_package, set(trees))
        sizes.at_run_time[module] = at_run_time
        sizes.with_types[module] = at_run_time | for_types
    for module in chain(*find_cycles(sizes.with_types)):
        sizes.rooms[rooms[module]].cyclic += 1
    for module in chain(*find_cycles(sizes.at_run_time)):
        sizes.rooms[rooms[module]].cyclic_at_run_time += 1
    for module, importers in count_importers(sizes.with_types).items():
        sizes.rooms[rooms[module]].imported_once += importers == 1
    return sizes


def read_record(path):
    """Read what is recorded of each room: measure -> figure. A measure that is left out is 0."""
    return tomllib.loads(path.read_text("utf-8")) if path.exists() else {}


def write_record(path, record):
    """Write the record of all rooms, one line for each."""
    lines = [f"# Sizes that rooms may not outgrow, written by {COMMAND} (see there)."]
    for name, recorded in sorted(record.items()):
        figures = ", ".join(f"{key} = {recorded[key]}" for key in MEASURES if recorded.get(key))
        lines.append(f'"{name}" = {{ {figures or "lines = 0"} }}')
    path.write_text("\n".join(lines) + "\n", "utf-8")


def find_growth(rooms, record):
    """Find where rooms are larger than their records.

    Returns:
        A sentence for each, which says what to do.
    """
    found = []
    for name, room in sorted(rooms.items()):
        if name not in record:
            found.append(
                f"{name} has no record. Run `{COMMAND} --moved` if its code was elsewhere before, "
                f"or `{COMMAND} --raise {name}` in a commit of its own that says why."
            )
            continue
        for measure, meaning in MEASURES.items():
            now, recorded = getattr(room, measure), record[name].get(measure, 0)
            if now > recorded:
                way = "Shrink it" if measure == "lines" else f"Break them (`{COMMAND} --cycles`)"
                found.append(
                    f"{name} has {now:,} {meaning}; {recorded:,} are recorded. {way}, or raise "
                    f"its record in a commit of its own that says why: `{COMMAND} --raise {name}`."
                )
    return found


def measure_room(room):
    """Give what is recorded of a room."""
    return {measure: getattr(room, measure) for measure in MEASURES}


def lower_record(rooms, record):
    """Lower each recorded figure to that of now, and forget rooms that are gone."""
    return {
        name: {
            measure: min(now, record[name].get(measure, 0))
            for measure, now in measure_room(rooms[name]).items()
        }
        for name in record
        if name in rooms
    }


def record_moved(rooms, record):
    """Record all rooms anew, if nothing has grown on the whole.

    Raises:
        SystemExit: All rooms together are larger than their records.
    """
    for measure, meaning in MEASURES.items():
        now = sum(getattr(room, measure) for room in rooms.values())
        recorded = sum(figures.get(measure, 0) for figures in record.values())
        if now > recorded:
            raise SystemExit(
                f"All rooms together have {now:,} {meaning}; {recorded:,} are recorded, and a move "
                f"adds none. Shrink what has grown, or raise its record first (--raise ROOM)."
            )
    return {name: measure_room(room) for name, room in rooms.items()}


def raise_record(rooms, record, names):
    """Record some rooms as they are now.

    Raises:
        SystemExit: There is no room of a name.
    """
    if names == ["all"]:
        return {name: measure_room(room) for name, room in rooms.items()}
    unknown = sorted(set(names) - set(rooms))
    if unknown:
        raise SystemExit(
            f"There is no room {', '.join(unknown)}. Rooms: {', '.join(sorted(rooms))}."
        )
    return record | {name: measure_room(rooms[name]) for name in names}


def print_rooms(rooms, record):
    """Print a line for each room, and one for each package."""
    print(
        f"{'room':<27}{'files':>6}{'lines':>9}{'recorded':>10}{'change':>8}  cyclic  one importer"
    )
    totals = defaultdict(Room)
    for name, room in sorted(rooms.items()):
        recorded = record.get(name, {}).get("lines")
        change = f"{room.lines - recorded:+,}" if recorded not in (None, room.lines) else ""
        shown = "none" if recorded is None else f"{recorded:,}"
        print(
            f"{name:<27}{room.files:>6}{room.lines:>9,}{shown:>10}{change:>8}"
            f"{room.cyclic or '':>8}{room.imported_once or '':>14}"
        )
        total = totals[name if name in (KIT, *JAVASCRIPT) else name.split("/")[0]]
        for measure, value in vars(room).items():
            setattr(total, measure, getattr(total, measure) + value)
    print()
    for name in (*PACKAGES, KIT, *BESIDE, *JAVASCRIPT):
        total = totals[name]
        print(
            f"{name:<27}{total.files:>6}{total.lines:>9,}{'':>18}"
            f"{total.cyclic or '':>8}{total.imported_once or '':>14}"
        )


def print_graph(sizes):
    """Print the figures of the import graph."""
    once = [module for module, count in count_importers(sizes.with_types).items() if count == 1]
    print(f"{len(once)} modules are imported by one module alone.")
    for meaning, cycles in sizes.find_all_cycles().items():
        modules = sum(map(len, cycles))
        print(f"{len(cycles)} import cycles {meaning}: {modules} modules.")
    imported = find_core_imports(sizes.with_types)
    print(
        f"{len(imported)} modules of the core beside {' and '.join(PUBLIC)} are imported elsewhere."
    )


def find_core_imports(graph):
    """Find the modules of the core, but for the public ones, that other packages import.

    Returns:
        Module of the core -> packages that import it.
    """
    found = defaultdict(set)
    for module, imported in graph.items():
        package = module.split(".")[0]
        for name in imported if package != "quark_core" else ():
            is_public = any(name == public or name.startswith(f"{public}.") for public in PUBLIC)
            if name.split(".")[0] == "quark_core" and not is_public:
                found[name].add(package)
    return dict(sorted(found.items()))


def main(arguments=None, root=ROOT, path=RECORD):
    """Compare the rooms with their records, or change the records.

    Returns:
        The exit status: 1 if a room is larger than its record, or a module too long.
    """
    parser = argparse.ArgumentParser(description="Compare the rooms with their recorded sizes.")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--lower", action="store_true", help="lower the records of rooms that shrank")
    way.add_argument("--raise", nargs="+", metavar="ROOM", dest="raised", help="record rooms anew")
    way.add_argument("--moved", action="store_true", help="record all rooms after a move of code")
    way.add_argument("--cycles", action="store_true", help="list the import cycles")
    way.add_argument("--imports", action="store_true", help="list imports of the core by others")
    chosen = parser.parse_args(arguments)
    sizes, record = count_rooms(root), read_record(path)
    if chosen.cycles:
        for meaning, cycles in sizes.find_all_cycles().items():
            for cycle in cycles:
                print(f"{len(cycle)} {meaning}: {' '.join(cycle)}")
        return 0
    if chosen.imports:
        for module, packages in find_core_imports(sizes.with_types).items():
            print(f"{module:<50} {' '.join(sorted(packages))}")
        return 0
    changed = record
    if chosen.lower:
        changed = lower_record(sizes.rooms, record)
    elif chosen.moved:
        changed = record_moved(sizes.rooms, record)
    elif chosen.raised:
        changed = raise_record(sizes.rooms, record, chosen.raised)
    if changed != record:
        write_record(path, changed)
    print_rooms(sizes.rooms, changed)
    print_graph(sizes)
    growth = find_growth(sizes.rooms, changed)
    growth += [
        f"{module} has {lines:,} lines of code; a module has at most {MAX_MODULE_LINES}. "
        "Move one of its concepts into a module of its own."
        for module, lines in sizes.too_long.items()
    ]
    if growth:
        print("", *growth, sep="\n")
    return 1 if growth else 0


if __name__ == "__main__":
    raise SystemExit(main())
