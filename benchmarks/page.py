"""What the page costs whoever looks: start, first paint, curves, zoom, list, maps, memory.

A real Chromium opens it (`QUARK_CHROMIUM`, or `chromium` on the path; with playwright of the
development tools). Without one only the server is measured.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure, make_parser, parse, print_figures, tell_load, write
from storage.layers import _make_batches as make_layer_batches
from storage.run_list import fill_runs
from storage.stores import RUN_ID, BenchStore, make_losses, make_metric_batches, name_keys
from viewing.install_size import measure_install_size
from viewing.live import measure_live
from viewing.peers import PEERS, Look, look_at_peers, look_at_quark, print_looks
from viewing.served import DEADLINE_S, DRAWN, SCREEN, Served, load, open_browser, serve
from viewing.team import measure_login

from quark_backends.store.databases.sqlite import connect, ensure_store

PARTS = ("curves", "list", "metrics", "layers", "compare", "report", "size", "login", "live")
_KEYS = 20
_REPORT_KEYS = 60
# Of the chart that has the most.
LINES = """() => (window.quark?.charts?.describe() ?? []).reduce(
    (most, chart) => Math.max(most, chart.lines?.length ?? 0), 0)"""


def measure_curves(browser: Any, folder: Path, *, steps: int, loads: int) -> list[Figure]:
    store = BenchStore(folder)
    store.fill(make_metric_batches(make_losses(steps, _KEYS), rows=2_000), compacting=True)
    store.compact()
    store.close()
    with serve(folder) as served:
        figures = [Figure("quark ui is ready, s", served.ready_s, at_most=0.8)]
        if browser is not None:
            found = [visit(browser, served, f"run/{RUN_ID}", DRAWN, _KEYS) for _ in range(loads)]
            paints, charts = zip(*found, strict=True)
            figures.append(Figure("first paint, ms", median(paints), at_most=300))
            figures.append(Figure(f"all {_KEYS} charts, ms", median(charts), at_most=500))
            figures.append(Figure("the same at the very first visit, ms", charts[0]))
        keys = "&".join(f"key={key}" for key in name_keys(_KEYS))
        for low, high in ((steps // 5, 2 * steps // 5), (steps // 5, steps // 5 + 20_000)):
            path = f"api/runs/{RUN_ID}/series?{keys}&low={low}&high={high}"
            times = [time_read(served, path) for _ in range(loads)]
            name = f"curves of {high - low:,} steps, ms"
            figures.append(Figure(name, median(times) * 1e3, at_most=150))
        figures.append(Figure("memory of the server, MB", served.memory_mb, at_most=250))
    return figures


def visit(
    browser: Any,
    served: Served,
    path: str,
    expression: str,
    least: int,
    viewport: dict[str, int] | None = None,
) -> tuple[float, float]:
    cookies = served.cookies
    return load(browser, served.root, path, expression, least, cookies=cookies, viewport=viewport)


def time_read(served: Served, path: str) -> float:
    began = time.perf_counter()
    served.opener.open(served.root + path, timeout=DEADLINE_S).read()
    return time.perf_counter() - began


def fill_list(folder: Path, runs: int) -> None:
    connection = connect(ensure_store(folder))
    fill_runs(connection, runs)
    connection.close()


def measure_list(browser: Any, folder: Path, *, runs: int, loads: int) -> list[Figure]:
    fill_list(folder, runs)
    with serve(folder) as served:
        time_read(served, "api/runs")
        times = [time_read(served, "api/runs?limit=100&column=val/metric7") for _ in range(loads)]
        figures = [Figure(f"a page of {runs:,} runs, ms", median(times) * 1e3, at_most=300)]
        if browser is not None:
            rows = "() => document.querySelectorAll('tbody tr').length"
            found = [visit(browser, served, "", rows, 5, SCREEN)[1] for _ in range(loads)]
            figures.append(Figure("first rows in the browser, ms", median(found), at_most=300))
    return figures


def measure_metrics(browser: Any, folder: Path, *, count: int, loads: int) -> list[Figure]:
    store = BenchStore(folder)
    store.fill(make_metric_batches(make_losses(50, count), rows=count))
    store.compact()
    store.close()
    with serve(folder) as served:
        times = [time_read(served, f"api/runs/{RUN_ID}") for _ in range(loads)]
        figures = [Figure(f"a run of {count:,} metrics, ms", median(times) * 1e3)]
        if browser is not None:
            found = [
                visit(browser, served, f"run/{RUN_ID}", DRAWN, 4, SCREEN)[1] for _ in range(loads)
            ]
            figures.append(Figure("its first charts, ms", median(found), at_most=500))
    return figures


def measure_map(folder: Path, *, layers: int, steps: int, loads: int) -> list[Figure]:
    store = BenchStore(folder)
    store.fill(make_layer_batches(layers, steps), compacting=True)
    store.compact()
    store.close()
    path = f"api/runs/{RUN_ID}/grid?kind=layer&field=norm&summary=activation"
    with serve(folder) as served:
        times = [time_read(served, path) for _ in range(loads)]
    name = f"map of {layers:,} layers over {steps:,} steps, ms"
    return [Figure(name, median(times) * 1e3, at_most=300)]


def measure_report(folder: Path, *, steps: int, loads: int) -> list[Figure]:
    """Of a run of as many curves and entries as a report has, whose analysis is stored."""
    import quark

    store = BenchStore(folder)
    store.fill(make_metric_batches(make_losses(steps, _REPORT_KEYS), rows=10_000))
    store.compact()
    store.close()
    quark.AnalyzerEngine(quark.open_run(RUN_ID, folder)).analyze(store=True)
    times, texts = [], []
    for _ in range(loads):
        began = time.perf_counter()
        texts.append(quark.report(RUN_ID, storage_dir=folder).to_html())
        times.append(time.perf_counter() - began)
    bare = quark.report(RUN_ID, storage_dir=folder, config=False, logs=False).to_html()
    data = bare.partition('"deflated":"')[2].partition('"')[0]
    return [
        Figure(
            f"a report of {_REPORT_KEYS} curves of {steps:,} points, s", median(times), at_most=1
        ),
        Figure("its size, kB", len(texts[-1]) / 1e3),
        Figure("its size without data, kB", (len(bare) - len(data)) / 1e3, at_most=350),
    ]


def measure_comparing(
    browser: Any, folder: Path, *, runs: tuple[int, ...], steps: int, loads: int
) -> list[Figure]:
    """Of ended runs of so many points each, to the last curve; the first so many of one store."""
    store = BenchStore(folder)
    ids = [RUN_ID, *(f"benchrun{number:04d}" for number in range(1, max(runs)))]
    for seed, run_id in enumerate(ids):
        if seed:
            store.add_run(run_id)
        batches = make_metric_batches(make_losses(steps, seed=seed), rows=10_000)
        store.fill(batches, compacting=True, run_id=run_id)
        store.end_run(run_id)
    store.compact()
    store.close()
    figures = []
    for count, goal_ms in zip(runs, (700, 2_000), strict=False):
        asked = "&".join(f"run={run_id}" for run_id in ids[:count])
        sides = "&".join(f"side={run_id}" for run_id in ids[:count])
        what = f"{count} runs of {steps:,} points"
        with serve(folder) as served:
            first_s = time_read(served, f"api/compare/curves?{sides}&key=loss")
            times = [
                time_read(served, f"api/compare/curves?{sides}&key=loss") for _ in range(loads)
            ]
            figures.append(Figure(f"{what}: their curves, the first time, ms", first_s * 1e3))
            figures.append(Figure(f"{what}: their curves again, ms", median(times) * 1e3))
            times = [time_read(served, f"api/compare?{asked}") for _ in range(loads)]
            figures.append(Figure(f"{what}: what differs, ms", median(times) * 1e3))
            if browser is not None:
                found = [
                    visit(browser, served, f"compare?{asked}", LINES, count)[1]
                    for _ in range(loads)
                ]
                name = f"{what}: to the last curve, ms"
                figures.append(Figure(name, median(found), at_most=goal_ms))
    return figures


def measure_peers(
    browser: Any, root: Path, *, names: list[str], points: int, runs: int, loads: int
) -> dict[str, float]:
    """Curves of one run, then a list of runs, here and in other tools; prints as it goes."""
    store = BenchStore(root / "curves")
    store.fill(make_metric_batches(make_losses(points, _KEYS), rows=2_000))
    store.compact()
    store.close()
    figures: dict[str, float] = {}
    for what in ("curves", "runs"):
        is_list = what == "runs"
        if is_list and not runs:
            continue
        title = f"A list of {runs:,} runs" if is_list else f"{_KEYS} curves of {points:,} points"
        looks: dict[str, Look | str] = {}
        if is_list:
            connection = connect(ensure_store(root / "runs"))
            fill_runs(connection, runs)
            connection.close()
            looks["quark"] = look_at_quark(browser, root / "runs", "", 5, loads=loads)
        else:
            looks["quark"] = look_at_quark(
                browser, root / "curves", f"run/{RUN_ID}", _KEYS, loads=loads
            )
        peers = root / f"peers-{what}"
        peers.mkdir()
        for name, look in look_at_peers(
            browser, peers, names, curves=_KEYS, points=points, runs=runs if is_list else 0,
            loads=loads,
        ):  # fmt: skip
            looks[name] = look
            print(f"({name}: {look})", flush=True)
        figures |= print_looks(title, looks)
    return figures


def say_load() -> None:
    print(f"\n({tell_load()})", flush=True)


def main() -> None:
    parser = make_parser(__doc__, PARTS, quick="fewer points and runs")
    parser.add_argument(
        "--peers", nargs="*", choices=tuple(PEERS), metavar="TOOL",
        help=f"the pages of other tools beside ours, and nothing else: {', '.join(PEERS)}; all by "
        "default. QUARK_PEER_TOOL names the interpreter that has one",
    )  # fmt: skip
    parser.add_argument("--points", type=int, default=10_000, help="of each curve, with --peers")
    parser.add_argument("--runs", type=int, default=0, help="also a list of so many, with --peers")
    arguments = parse(parser)
    steps, runs, layers, loads, seconds = (
        (100_000, 1_000, 200, 3, 10.0) if arguments.quick else (1_000_000, 10_000, 1_000, 7, 60.0)
    )
    compared = (2, 5) if arguments.quick else (10, 50)
    if arguments.quick:
        print("This is the short form: the goals are meant for the full one.")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name, open_browser() as browser:
        root = Path(name)
        if arguments.peers is not None:
            assert browser is not None, "pages of others need a browser"
            figures = measure_peers(
                browser, root, names=arguments.peers or list(PEERS), points=arguments.points,
                runs=arguments.runs, loads=min(loads, 5),
            )  # fmt: skip
            say_load()
        else:
            figures = measure_page(
                browser, root, steps=steps, runs=runs, layers=layers, loads=loads, seconds=seconds,
                compared=compared, parts=arguments.parts,
            )  # fmt: skip
    write(arguments, figures)


def measure_page(
    browser: Any,
    root: Path,
    *,
    steps: int,
    runs: int,
    layers: int,
    loads: int,
    seconds: float,
    compared: tuple[int, ...],
    parts: list[str],
) -> dict[str, float]:
    """All parts, or some of them; prints each."""
    measures = {
        "curves": (
            f"{_KEYS} curves of {steps:,} points",
            lambda: measure_curves(browser, root / "curves", steps=steps, loads=loads),
        ),
        "list": (
            "The list",
            lambda: measure_list(browser, root / "list", runs=runs, loads=loads),
        ),
        "metrics": (
            "Many metrics",
            lambda: measure_metrics(browser, root / "metrics", count=4_000, loads=loads),
        ),
        "layers": (
            "Layers",
            lambda: measure_map(root / "map", layers=layers, steps=layers, loads=loads),
        ),
        "compare": (
            "A comparison",
            lambda: measure_comparing(
                browser, root / "compare", runs=compared, steps=steps, loads=loads
            ),
        ),
        "report": (
            "A report",
            lambda: measure_report(root / "report", steps=20_000, loads=loads),
        ),
        "size": ("What is installed", measure_install_size),
    }
    if browser is not None:
        measures["login"] = (
            "A team's page",
            lambda: measure_login(
                browser, root / "team", fill=lambda folder: fill_list(folder, runs), loads=loads
            ),
        )
        measures["live"] = (
            "A run that goes on, watched by one page",
            lambda: [
                figure
                for rate_hz in (5.0, 100.0)
                for figure in measure_live(
                    browser, root / f"live{rate_hz:.0f}", rate_hz=rate_hz, seconds=seconds
                )
            ],
        )
    figures: dict[str, float] = {}
    for name, (title, measure) in measures.items():
        if name in parts:
            figures |= print_figures(title, measure())
            say_load()
    return figures


if __name__ == "__main__":
    main()
