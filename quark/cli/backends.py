"""`quark backends`: what is installed and what was left out; `new` begins one of one's own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
import warnings
from pathlib import Path

import click

from quark.cli.command_groups import SuggestingGroup
from quark.cli.options import FOLDER, argument, option, takes_options
from quark.cli.store_access import AS_JSON, print_json
from quark.cli.texts import BOLD, PLAIN, WHOLE, Console, Text, make_table
from quark_core.backends.registry import BackendRegistry, default_registry
from quark_core.errors import SchemaValidationError


@click.group(cls=SuggestingGroup, invoke_without_command=True)
@takes_options
@click.pass_context
def backends(context: click.Context, *, as_json: bool = AS_JSON) -> None:
    """List storage backends and plugins, or create a backend."""
    if context.invoked_subcommand is None:
        _list(as_json)


@backends.command()
@takes_options
def new(
    *,
    name: str = argument(),
    into: Path = option(
        "Directory in which the folder quark-NAME is created.",
        type=FOLDER,
        show_default="the working directory",
        default=Path(),
    ),
) -> None:
    """Create a backend package with its tests.

    NAME is the name that users pass to `backends=`. The package is called
    quark-NAME. You can also pass quark-NAME here.
    """
    name = check_backend_name(name, _discover())
    target = write_skeleton(name, into)
    for path in sorted(path for path in target.rglob("*") if path.is_file()):
        click.echo(f"  {path}")
    click.echo(
        f"Created the backend {name!r} in the package quark-{name}. Its tests pass:\n"
        f'  cd {shlex.quote(str(target))} && pip install -e ".[test]" && python -m pytest\n'
        "Next, edit backend.py: write to your store instead of to files."
    )


def _discover() -> BackendRegistry:
    with warnings.catch_warnings():
        # The table says the same, in its place.
        warnings.simplefilter("ignore", RuntimeWarning)
        return default_registry()


def _list(as_json: bool) -> None:
    registry = _discover()
    if as_json:
        print_json(
            {
                "backends": [
                    {
                        "name": definition.name,
                        "summary": definition.summary,
                        "schemes": list(definition.schemes),
                        "capabilities": sorted(definition.capabilities),
                        "ranks": str(definition.rank_policy),
                        "api_version": definition.api_version,
                        "origin": registry.origin(definition.name),
                    }
                    for definition in registry.definitions
                ],
                "left_out": [
                    {"name": item.name, "origin": item.origin, "reason": item.reason}
                    for item in registry.left_out
                ],
            }
        )
        return

    table = make_table(
        {"backend": BOLD, "description and capabilities": PLAIN, ("ranks", "from"): WHOLE}
    )
    for definition in registry.definitions:
        can = ", ".join(["write", *sorted(definition.capabilities)])
        table.add_row(
            definition.name,
            Text.assemble(definition.summary, Text(f"\n{can}", "dim", lines=True)),
            str(definition.rank_policy),
            registry.origin(definition.name),
        )
    console = Console()
    console.print(table)
    for item in registry.left_out:
        console.print(
            Text.assemble(
                ("ignored: ", "yellow"), (item.name, "bold"), f" of {item.origin}: {item.reason}"
            )
        )


# What `quark backends new` writes. In these files @name@ stands for the backend's name, @package@
# for its package and @class@ for its class.
_SKELETON = Path(__file__).with_name("backend_skeleton")
# Path -> the file that it is made of; an empty one is made of none.
_FILES = {
    ".gitignore": "gitignore.in",
    "README.md": "README.md.in",
    "pyproject.toml": "pyproject.toml.in",
    "src/@package@/__init__.py": "init.py.in",
    "src/@package@/backend.py": "backend.py.in",
    "src/@package@/plugin.py": "plugin.py.in",
    "src/@package@/py.typed": None,
    "tests/test_@package@_conformance.py": "conformance.py.in",
    "tests/test_@package@_runs.py": "runs.py.in",
}

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*")
# Every distribution's begins so, by itself.
_OWN_PREFIX = re.compile(r"^quark[-_.](?=.)")
_MAX_LENGTH = 50
# Words that `backends=` understands otherwise.
_TAKEN = ("none", "new")


def check_backend_name(name: str, registry: BackendRegistry) -> str:
    """Return the name, or refuse what cannot be a new backend's.

    One that begins as its distribution does, such as quark-my-store, is my-store.

    Raises:
        SchemaValidationError: Not lowercase words of letters and digits with
            `-`, `_` or `.` between them, too long, or the name of an
            installed backend or scheme.
    """
    name = _OWN_PREFIX.sub("", name)
    if not _NAME.fullmatch(name):
        raise SchemaValidationError(
            f"NAME {name!r} is not a valid backend name. Start with a lowercase letter, and use "
            "lowercase letters, digits and single '-', '_' or '.' in between, as in 'my-store'."
        )
    if len(name) > _MAX_LENGTH:
        raise SchemaValidationError(
            f"NAME has {len(name)} characters. At most {_MAX_LENGTH} are allowed."
        )
    schemes = {scheme for definition in registry.definitions for scheme in definition.schemes}
    left_out = {item.name for item in registry.left_out}
    if name in {*registry.names, *schemes, *left_out, *_TAKEN}:
        raise SchemaValidationError(
            f"NAME {name!r} is already in use. `quark backends` lists the backends."
        )
    return name


def write_skeleton(name: str, into: Path) -> Path:
    """Write the files of a new backend; all of them or none.

    Args:
        name: A name that `check_backend_name` has passed.
        into: Folder in which the backend's own folder is made.

    Returns:
        The backend's folder, `into/quark-NAME`.

    Raises:
        SchemaValidationError: There is something of that name already.
        OSError: It cannot be written.
    """
    words = re.split(r"[-_.]", name)
    named = {
        "@name@": name,
        "@package@": "_".join(["quark", *words]),
        "@class@": "".join(word.capitalize() for word in words) + "Backend",
    }
    target = into / f"quark-{name}"
    if os.path.lexists(target):
        raise SchemaValidationError(f"{target} already exists. Nothing was changed.")
    into.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".quark-{name}-", dir=into))
    try:
        scratch.chmod(0o777 & ~_read_umask())
        for path, source in _FILES.items():
            text = "" if source is None else (_SKELETON / source).read_text("utf-8")
            file = scratch / _fill(path, named)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_fill(text, named), encoding="utf-8", newline="\n")
        # Over an empty folder that came meanwhile this succeeds, over anything else it raises.
        os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _fill(text: str, named: dict[str, str]) -> str:
    for mark, word in named.items():
        text = text.replace(mark, word)
    return text


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
