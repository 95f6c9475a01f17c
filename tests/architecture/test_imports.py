"""Which module may import which, and what importing costs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = [
    "torch",
    "httpx",
    "httpcore",
    "mlflow",
    "wandb",
    "sqlalchemy",
    "numpy",
    "rich",
    "psutil",
    "starlette",
    "uvicorn",
]


def loaded_after(program, *arguments):
    """Which of the heavy modules are loaded after a program, in a process of its own."""
    code = f"{program}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "module",
    [
        "quark",
        "quark_core",
        "quark_core.sessions.session",
        "quark_core.writers.metrics",
        "quark_core.backends.registry",
        "quark_core.runs.backend_choice",
        "quark_backends.embedded.backend",
        "quark_backends.csv.backend",
        "quark_torch",
        "quark.page.pack",
    ],
)
def test_importing_brings_in_nothing_heavy(module):
    assert loaded_after(f"import {module}") == []


@pytest.mark.long
def test_nothing_heavy_comes_before_the_first_log(tmp_path):
    program = (
        "import sys, quark\n"
        "session = quark.start_run(project='p', storage_dir=sys.argv[1])\n"
        "metrics = quark.MetricsLogger(session)\n"
        "metrics.log('m', 1.0, step=0)\n"
    )
    assert loaded_after(program, str(tmp_path)) == []


EXTRAS = (
    "accelerate anywidget apprise av cmaes httptools IPython lightning matplotlib mcp mlflow "
    "optuna pandas pcodec PIL polars psycopg psycopg_pool pyarrow sqlalchemy tensorboard torch "
    "traitlets transformers uvloop wandb yaml"
).split()
NEEDS_AN_EXTRA = [
    "quark.cli.mcp_server",
    "quark.cli.team_page",
    "quark.cli.workspace_notices",
    "quark.page.live_view",
    "quark.sweeps.optuna_cmaes",
    "quark.sweeps.optuna_samplers",
    "quark.sweeps.optuna_search",
    "quark_backends.store.databases.postgres",
]
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # as if these were not installed
import quark, quark_backends, quark_core
for package in (quark, quark_backends, quark_core):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError:
                print(module.name)
"""


def test_without_extras_all_modules_but_those_that_need_one_can_be_imported():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *EXTRAS], capture_output=True, text=True, check=True
    )
    # The server is an extra as a whole, and so are the commands' modules that belong to it.
    lacking = [name for name in done.stdout.split() if ".service.server." not in name]
    assert sorted(lacking) == NEEDS_AN_EXTRA


def lint(folder):
    script = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([script, "--no-cache"], cwd=folder, capture_output=True, text=True)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("place", "statement", "contract"),
    [
        ("quark_core/errors.py", "import quark_backends.csv", "The face above"),
        ("quark_core/records/query.py", "import quark_torch", "The face above"),
        ("quark_torch/__init__.py", "import quark_backends", "The face above"),
        ("quark_backends/csv/wide_table.py", "import quark", "The face above"),
        (
            "quark_backends/csv/wide_table.py",
            "import quark_backends.embedded.plugin",
            "know nothing",
        ),
        (
            "quark_backends/csv/wide_table.py",
            "from quark_core.records import MetricRecord",
            "Plugins import the public surface alone",
        ),
        (
            "quark_torch/watching.py",
            "import quark_core.records.codec",
            "Plugins import the public surface alone",
        ),
        ("quark_core/errors.py", "import quark_core.api", "The rooms of the core"),
        (
            "quark/page/pack.py",
            "import quark_backends.csv",
            "The features and the page know no backend",
        ),
        ("quark/page/pack.py", "import quark.cli.texts", "The features lie on floors"),
        (
            "quark_core/records/codec.py",
            "import quark_core.sessions.session",
            "The rooms of the core",
        ),
        ("quark_core/writers/buffered_writer.py", "import quark.analysis.rules", "The face above"),
        ("quark_core/errors.py", "import quark_core.records.base", "The rooms of the core"),
        ("quark/provenance/traces.py", "import quark.sweeps.trial", "The features lie on floors"),
        ("quark/analysis/rule.py", "import quark_torch", "The features and the page"),
        (
            "quark_core/runs/attempts.py",
            "import quark.provenance.traces",
            "The face above",
        ),
        (
            "quark_core/system/process.py",
            "import quark_core.ranks.launches",
            "The rooms of the core",
        ),
        (
            "quark_core/delivery/delivery_worker.py",
            "import quark_core.runs.open_run",
            "The rooms of the core",
        ),
        ("quark_core/config/snapshot.py", "import quark.configuration", "The face above"),
    ],
)
def test_a_planted_import_breaks_its_contract(tmp_path, place, statement, contract):
    for package in ("quark", "quark_backends", "quark_core", "quark_torch"):
        shutil.copytree(ROOT / package, tmp_path / package)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / place).open("a") as file:
        file.write(f"\n{statement}\n")
    done = lint(tmp_path)
    assert done.returncode == 1
    broken = [line for line in done.stdout.splitlines() if "BROKEN" in line]
    assert any(contract in line for line in broken), done.stdout


@pytest.mark.long
def test_the_contracts_hold():
    assert lint(ROOT).returncode == 0


def test_every_package_is_typed():
    for package in ("quark", "quark_backends", "quark_core", "quark_torch"):
        assert (ROOT / package / "py.typed").is_file()
