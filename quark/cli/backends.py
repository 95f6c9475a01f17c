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
from quark.cli.store_access import json_option, print_json
from quark_core.backends.registry import BackendRegistry, default_registry
from quark_core.errors import SchemaValidationError


@click.group(cls=SuggestingGroup, invoke_without_command=True)
@json_option
@click.pass_context
def backends(context: click.Context, as_json: bool) -> None:
    """List the storage backends, and the plugins that were left out."""
    if context.invoked_subcommand is None:
        _list(as_json)


@backends.command()
@click.argument("name")
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder in which quark-NAME is made [default: the working directory].",
)
def new(name: str, into: Path) -> None:
    """Write a new backend: a distribution that works, with its tests.

    NAME is what users write in `backends=`; the distribution is called quark-NAME, which
    may be given as well.
    """
    name = check_backend_name(name, _discover())
    target = write_skeleton(name, into)
    for path in sorted(path for path in target.rglob("*") if path.is_file()):
        click.echo(f"  {path}")
    click.echo(
        f"This is the backend {name}, in the distribution quark-{name}. Its tests pass as it is:\n"
        f'  cd {shlex.quote(str(target))} && pip install -e ".[test]" && python -m pytest\n'
        "Then put your store in place of the files in backend.py."
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

    from quark.cli.texts import BOLD, PLAIN, WHOLE, Console, Text, make_table

    table = make_table(
        {"backend": BOLD, "what it is, and what it can do": PLAIN, ("ranks", "from"): WHOLE}
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
                ("left out: ", "yellow"), (item.name, "bold"), f" of {item.origin}: {item.reason}"
            )
        )


# The files of a new backend, as `quark backends new` writes them.
#
# In the texts @name@ stands for the backend's name, @package@ for its package
# and @class@ for its class.

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
            f"NAME {name!r}: a backend's name begins with a lowercase letter and goes on with "
            "lowercase letters and digits, with single '-', '_' or '.' between, such as my-store"
        )
    if len(name) > _MAX_LENGTH:
        raise SchemaValidationError(f"NAME has {len(name)} characters; {_MAX_LENGTH} are allowed")
    schemes = {scheme for definition in registry.definitions for scheme in definition.schemes}
    left_out = {item.name for item in registry.left_out}
    if name in {*registry.names, *schemes, *left_out, *_TAKEN}:
        raise SchemaValidationError(f"NAME {name!r} is taken; `quark backends` lists what exists")
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
        raise SchemaValidationError(f"{target} exists already, and nothing in it was changed")
    into.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".quark-{name}-", dir=into))
    try:
        scratch.chmod(0o777 & ~_read_umask())
        for path, text in FILES.items():
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


_PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "quark-@name@"
version = "0.1.0"
description = "A Quark backend: @name@"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["quark-tracker"]

[project.optional-dependencies]
test = ["pytest>=8.2"]

# Quark finds the backend by this line: the group, the plugin's name, its module.
[project.entry-points."quark.backends"]
"@name@" = "@package@.plugin"

[tool.hatch.build.targets.wheel]
packages = ["src/@package@"]

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["src"]
filterwarnings = ["error"]
"""

_INIT = '''\
"""A Quark backend: @name@."""
'''

_PLUGIN = '''\
"""Declares the backend.

Quark imports this module whenever it looks for backends, in every program
that uses it. So nothing heavy is imported here, and nothing is opened.
"""

from __future__ import annotations

from quark_core.api import Backend, BackendConfig, BackendDefinition, Capability
from quark_core.hookspecs import hookimpl

__all__ = ["quark_register_backends"]


def open_backend(config: BackendConfig) -> Backend:
    """Open the backend for one run, on its lane's thread."""
    from @package@.backend import @class@

    return @class@(config)


@hookimpl
def quark_register_backends() -> list[BackendDefinition]:
    """The backend `@name@`."""
    return [
        BackendDefinition(
            name="@name@",
            summary="JSON lines, in storage_dir/@name@ or in @name@:DIR",
            open=open_backend,
            # Declare what `@class@` does, no more and no less: the kit compares.
            capabilities=frozenset({Capability.READ, Capability.IDEMPOTENT}),
        )
    ]
'''

_BACKEND = '''\
"""The backend. It works as it is: one JSON file per writer of a run, a line per batch.

Put your store in place of the files, and let the tests say when you are done.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_core.api import (
    BackendConfig,
    BackendRejected,
    BackendUnavailable,
    Batch,
    RunNotFoundError,
    SchemaValidationError,
    SessionStoreError,
    StoredRun,
    describe_run,
    dump_batch,
    restore_batch,
    select_rows,
)

if TYPE_CHECKING:
    from quark_core.api import Columns, Query

__all__ = ["@class@"]


class @class@:
    """Keeps the batches of runs as JSON lines.

    `write` and `close` are called from one thread, the readers from any.

    Args:
        config: Its `location` is a folder; a relative one counts from `storage_dir`.
    """

    def __init__(self, config: BackendConfig) -> None:
        default = config.storage_dir / "@name@"
        self._root = config.storage_dir / config.location if config.location else default
        self._read_only = config.read_only
        # File -> the batches that it has, each by its number.
        self._known: dict[Path, dict[int, str]] = {}

    def write(self, batch: Batch) -> None:
        """Store a batch, and return when it is safe.

        Raises:
            BackendRejected: Never to be sent again: it is put into quarantine.
            BackendUnavailable: To be sent again later, for as long as it takes.
        """
        if self._read_only:
            raise BackendUnavailable("it was opened for reading only", backend="@name@")
        path = self._root / batch.run_id / f"{batch.writer_id}.jsonl"
        digest = hashlib.sha256(batch.body).hexdigest()
        try:
            known = self._known.get(path)
            if known is None:
                known = self._known[path] = _take_up(path)
            if batch.number not in known:
                _append(path, json.dumps({**dump_batch(batch), "digest": digest}))
                known[batch.number] = digest
            elif known[batch.number] != digest:
                raise BackendRejected(f"{path} has another batch {batch.number}", backend="@name@")
        except SchemaValidationError as error:
            raise BackendRejected(str(error), backend="@name@") from error
        except OSError as error:
            # What was half written is cut off before the next try.
            self._known.pop(path, None)
            raise BackendUnavailable(f"@name@: {error}", backend="@name@") from error

    def close(self) -> None:
        """Give up files and connections; nothing is held open here."""

    # What a backend has that declares READ.

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """Rows of one kind that fit the query, in persistence order."""
        return select_rows(self._load(run_id), kind, query)

    def load_run(self, run_id: str) -> StoredRun:
        """One run."""
        return describe_run(self._load(run_id))

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """Runs, newest first."""
        folders = sorted(self._root.glob("*/")) if self._root.is_dir() else []
        runs = [self.load_run(folder.name) for folder in folders if any(folder.glob("*.jsonl"))]
        chosen = [run for run in runs if project in (None, run.project.name)]
        return sorted(chosen, key=lambda run: run.run.created_at, reverse=True)[:limit]

    def _load(self, run_id: str) -> list[Batch]:
        try:
            paths = sorted((self._root / run_id).glob("*.jsonl"))
            if not paths:
                raise RunNotFoundError(f"{self._root} has no run {run_id}")
            return [restore_batch(line) for path in paths for line in _read_lines(path)]
        except (OSError, SchemaValidationError) as error:
            raise SessionStoreError(f"@name@: {self._root}: {error}") from error


def _take_up(path: Path) -> dict[int, str]:
    """What a file has of its writer; a line that a kill has cut short is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return {line["number"]: line["digest"] for line in _read_lines(path)}


def _append(path: Path, line: str) -> None:
    with path.open("ab") as file:
        file.write(f"{line}\\n".encode())
        file.flush()
        os.fsync(file.fileno())


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file."""
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\\n") + 1].splitlines()]
'''

_CONFORMANCE = '''\
"""The backend passes Quark's conformance kit."""

import contextlib
import json

import pytest

from @package@.plugin import quark_register_backends
from quark_core.api import BackendConfig
from quark_core.testing.conformance import BackendConformance


class Test@class@(BackendConformance):
    # What your store cannot hold: {"test_values_are_kept_exactly": "it has no infinity"}
    EXPECTED_FAILURES = {}

    @pytest.fixture
    def definition(self):
        return quark_register_backends()[0]

    @pytest.fixture
    def config(self, tmp_path):
        """What opens an EMPTY store."""
        return BackendConfig(storage_dir=tmp_path, run_id=self.RUN_ID, location="out")

    @pytest.fixture
    def observe(self, config):
        """Reads the store WITHOUT the backend: (key, step, value) of every metric."""
        folder = config.storage_dir / "out" / self.RUN_ID

        def read():
            lines = [
                json.loads(line)
                for path in sorted(folder.glob("*.jsonl"))
                for line in path.read_text().split("\\n")
                if line.endswith("}")
            ]
            return [
                (record["metric_key"], record["step"], record["value"])
                for line in lines
                if line["kind"] == "metric"
                for record in line["records"]
            ]

        return read

    @pytest.fixture
    def outage(self, config):
        """Makes the store unreachable for a while: a file where the folder was."""
        folder = config.storage_dir / "out"
        aside = folder.with_name("aside")

        @contextlib.contextmanager
        def take_away():
            folder.rename(aside)
            folder.write_text("in the way")
            try:
                yield
            finally:
                folder.unlink()
                aside.rename(folder)

        return take_away
'''

_RUNS = '''\
"""A training through the backend, from its first step to reading it back."""

import pytest

import quark
from @package@ import plugin
from quark_core.api import default_registry


@pytest.fixture(autouse=True)
def registered():
    """Known by its name, also where the distribution is not installed."""
    registry = default_registry()
    if "@name@" not in registry.names:
        registry.register(plugin, name="@name@")


def test_a_training_is_read_back(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="@name@:out") as session:
        metrics = quark.MetricsLogger(session)
        for step in range(50):
            metrics.log("train/loss", 1 / (step + 1), step=step)
    assert session.report_delivery().complete
    run = quark.open_run(session.run_id, tmp_path, backend="@name@:out")
    assert run.status == "completed"
    records = quark.MetricsLogger(run).read(metric_key="train/loss")
    assert [record.value for record in records] == [1 / (step + 1) for step in range(50)]
'''

_README = """\
# quark-@name@

A storage backend for Quark (the distribution `quark-tracker`).

    pip install quark-@name@

    quark.start_run(project="vision", backends="@name@")          # in the folder @name@
    quark.start_run(project="vision", backends="@name@:./out")    # in a folder
    quark.open_run(run_id, backend="@name@:./out")                # read it back

| file | what it holds |
|---|---|
| `pyproject.toml` | the entry point by which Quark finds the backend |
| `src/@package@/plugin.py` | the declaration: name, summary, capabilities |
| `src/@package@/backend.py` | the backend |
| `tests/test_@package@_conformance.py` | Quark's conformance kit |
| `tests/test_@package@_runs.py` | a training through the backend |

The tests, and what they say of the backend:

    pip install -e ".[test]"
    pytest -p quark_core.testing.report
"""

_IGNORED = """\
__pycache__/
*.egg-info/
.pytest_cache/
dist/
"""

FILES = {
    ".gitignore": _IGNORED,
    "README.md": _README,
    "pyproject.toml": _PYPROJECT,
    "src/@package@/__init__.py": _INIT,
    "src/@package@/backend.py": _BACKEND,
    "src/@package@/plugin.py": _PLUGIN,
    "src/@package@/py.typed": "",
    "tests/test_@package@_conformance.py": _CONFORMANCE,
    "tests/test_@package@_runs.py": _RUNS,
}
"""Path -> text."""
