"""The same curves and the same list of runs in the pages of other tools.

Nothing of them is a dependency: the interpreter in which one is installed is named by the
environment (`QUARK_PEER_TRACKIO=/path/to/python`), else it is this one; where it lacks the tool,
that is said, and it is left out.

All draw in the same Chromium, in a window that is high enough for twenty charts, on the page on
which they show the metrics of one run, or the list of runs, with settings as they come. What is
waited for stands in the document of the page:

- TensorBoard, time series: `line-chart` with a path of many points. It shows a sample of 1,000
  points of each curve, and is asked to draw SVG, since without a GPU nothing comes of its WebGL.
- MLflow, "Model metrics" of the run: plots of Plotly with a line (`path.js-line`).
- Trackio, the project: canvases of Vega. Aim, "Metrics" of the run: `path.Line`.
- Quark, the run: charts that say that they have drawn lines.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from viewing.served import DRAWN, load, measure_memory_mb, serve

_WRITER = Path(__file__).with_name("peer_data.py")
_START_S = 180.0
_DEADLINE_S = 240.0
_LONG_PATHS = """() => [...document.querySelectorAll('line-chart')].filter((chart) => (
  [...chart.querySelectorAll('path')].some((path) => (path.getAttribute('d') ?? '').length > 500)
)).length"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A tool with a page of its own.

    Attributes:
        module: What must be importable.
        serve: What serves `{folder}` on `{port}`, behind the interpreter.
        environment: What that needs besides.
        curves: Path of the page with the curves of one `{run}` of a `{project}`.
        drawn: How many charts are drawn, as a function in the page.
        runs: Path of the list of runs; None where there is none.
        listed: How many rows of it are there, as a function in the page.
    """

    module: str
    serve: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    curves: str
    drawn: str
    runs: str | None = None
    listed: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """What one page took.

    Attributes:
        paint_ms: From navigation to the first contentful paint, median.
        done_ms: To all charts drawn, or to the first rows of a list, median.
        memory_mb: Resident memory of the server with its processes, afterwards.
    """

    paint_ms: float
    done_ms: float
    memory_mb: float


def _count(selector: str) -> str:
    return f"() => document.querySelectorAll({selector!r}).length"


_AT = ("--port", "{port}", "--host", "127.0.0.1")
_SHOW_TRACKIO = (
    "import trackio; trackio.show(project='bench', open_browser=False, host='127.0.0.1', "
    "server_port={port}, block_thread=True)"
)
_RUN_AIM = "from aim.cli.cli import cli_entry_point; cli_entry_point()"

PEERS: dict[str, Peer] = {
    "tensorboard": Peer(
        module="tensorboard",
        serve=("-m", "tensorboard.main", "--logdir", "{folder}", *_AT),
        curves="?forceSVG=true#timeseries",
        drawn=_LONG_PATHS,
    ),
    "mlflow": Peer(
        module="mlflow",
        serve=("-m", "mlflow", "server", "--backend-store-uri", "sqlite:///{folder}/mlflow.db",
               "--workers", "1", *_AT),
        curves="#/experiments/{project}/runs/{run}/model-metrics",
        drawn=_count(".js-plotly-plot:has(path.js-line)"),
        runs="#/experiments/{project}/runs",
        listed=_count(".ag-center-cols-container .ag-row"),
    ),
    "trackio": Peer(
        module="trackio",
        serve=("-c", _SHOW_TRACKIO),
        environment=(("TRACKIO_DIR", "{folder}"),),
        curves="?project={project}",
        drawn=_count(".vega-embed canvas"),
    ),
    "aim": Peer(
        module="aim",
        serve=("-c", _RUN_AIM, "up", "--repo", "{folder}", *_AT),
        curves="runs/{run}/metrics",
        drawn=_count("path.Line"),
        runs="runs",
        listed=_count(".Table__cell"),
    ),
}  # fmt: skip


def find_python(name: str) -> str | None:
    """The interpreter that has the tool, or None."""
    python = os.environ.get(f"QUARK_PEER_{name.upper()}", sys.executable)
    told = subprocess.run(
        [python, "-c", f"import {PEERS[name].module}"], capture_output=True, check=False
    )
    return python if told.returncode == 0 else None


def look_at_peers(
    browser: Any, root: Path, names: list[str], *, curves: int, points: int, runs: int, loads: int
) -> Iterator[tuple[str, Look | str]]:
    """Write to each and open its page.

    Args:
        browser: A Chromium.
        root: An empty folder.
        names: Of `PEERS`.
        curves: Curves of one run; with `runs` there are none.
        points: Of each curve.
        runs: So many runs of one point each in place of curves; 0 for curves.
        loads: How often the page is opened.

    Yields:
        The name with what its page took, or why there is nothing.
    """
    for name in names:
        peer, python = PEERS[name], find_python(name)
        if python is None:
            yield name, f"not installed (QUARK_PEER_{name.upper()}=PYTHON names where it is)"
            continue
        if runs and peer.runs is None:
            yield name, "has no list of runs"
            continue
        try:
            yield name, _look(browser, root / name, peer, name, python, curves, points, runs, loads)
        except (TimeoutError, subprocess.SubprocessError, OSError) as error:
            yield name, f"did not come to an end: {str(error)[:120]}"


def _look(
    browser: Any,
    folder: Path,
    peer: Peer,
    name: str,
    python: str,
    curves: int,
    points: int,
    runs: int,
    loads: int,
) -> Look:
    told = subprocess.run(
        [python, str(_WRITER), name, str(folder), str(curves), str(points), str(runs)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(told.stdout.splitlines()[-1])
    with _serve_peer(peer, python, folder) as (port, pid):
        path = ((runs and peer.runs) or peer.curves).format(**found)
        expression, least = (peer.listed, 5) if runs else (peer.drawn, curves)
        root = f"http://127.0.0.1:{port}/"
        taken = [
            load(browser, root, path, expression, least, deadline_s=_DEADLINE_S)
            for _ in range(loads)
        ]
        return _sum_up(taken, measure_memory_mb(pid))


def look_at_quark(browser: Any, folder: Path, path: str, least: int, *, loads: int) -> Look:
    """The same of a store's page; without a path that of the list."""
    with serve(folder) as served:
        expression = DRAWN if path else _count(".runs tbody tr")
        taken = [
            load(browser, served.root, path, expression, least, cookies=served.cookies)
            for _ in range(loads)
        ]
        return _sum_up(taken, measure_memory_mb(served.process.pid))


def print_looks(title: str, looks: dict[str, Look | str]) -> dict[str, float]:
    """Print a table; returns its figures by name."""
    print(f"\n{title}\n")
    print(f"{'':<12}{'first paint, ms':>17}{'all drawn, ms':>17}{'memory, MB':>14}")
    figures: dict[str, float] = {}
    for name, look in looks.items():
        if isinstance(look, str):
            print(f"{name:<12}  {look}")
            continue
        print(f"{name:<12}{look.paint_ms:>17,.0f}{look.done_ms:>17,.0f}{look.memory_mb:>14,.0f}")
        figures |= {
            f"{title}: {name}, first paint, ms": look.paint_ms,
            f"{title}: {name}, all drawn, ms": look.done_ms,
            f"{title}: {name}, memory, MB": look.memory_mb,
        }
    return figures


def _sum_up(taken: list[tuple[float, float]], memory_mb: float) -> Look:
    paints, ends = zip(*taken, strict=True)
    return Look(median(paints), median(ends), memory_mb)


@contextmanager
def _serve_peer(peer: Peer, python: str, folder: Path) -> Iterator[tuple[int, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    known = {"folder": folder, "port": port}
    # A file, since nobody empties a pipe.
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [python, *(part.format(**known) for part in peer.serve)],
            env=os.environ | {name: text.format(**known) for name, text in peer.environment},
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            _wait_until_it_answers(process, port)
            yield port, process.pid
        finally:
            _end(process)


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + _START_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).read()
            return
        except OSError:
            if time.monotonic() > end or process.poll() is not None:
                raise TimeoutError("its server does not answer") from None
            time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server with the processes that it has begun."""
    parts = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for part in parts:
        try:
            part.terminate()
        except psutil.NoSuchProcess:
            continue
    _, left = psutil.wait_procs(parts, timeout=10)
    for part in left:
        part.kill()
    process.wait()
