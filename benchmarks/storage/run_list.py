"""The first page of many runs, sorted and filtered by what is known of them."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, print_figures, time_call

import quark
from quark_backends.store.databases.sqlite import connect, ensure_store
from quark_backends.store.reading.reader import StoreReader
from quark_core.runs.run_search import build_page_search, build_search
from storage.stores import START_US

_METRICS = 50
_PAGE = 100
_GOAL_MS = 50
_LONG_PAGE = 200
_GOAL_PAGE_MS = 100
_COLUMNS = ("val/metric7", "min(val/metric9)", "config.lr")
_KEYS = [f"{('train', 'val')[index % 2]}/metric{index}" for index in range(_METRICS)]
_ELSEWHERE = json.dumps({"host": "elsewhere", "pid": 1, "started": "1"})
_SEARCHES: dict[str, dict[str, Any]] = {
    "newest first": {},
    "by a metric": {"order_by": "val/metric7"},
    "by a metric, descending": {"order_by": "-val/metric7"},
    "by a config value": {"order_by": "config.lr"},
    "where a metric, a config value and a tag": {
        "where": "val/metric7 < 0.5 and config.lr > 0.001 and 'baseline' in tags"
    },
    "the same, by a metric": {
        "where": "val/metric7 < 0.5 and config.lr > 0.001 and 'baseline' in tags",
        "order_by": "val/metric9",
    },
    "where few fit": {"where": "config.seed == 77 and state == 'completed'"},
}


def measure_run_list(*, quick: bool) -> dict[str, float]:
    runs, times = (1_000, 3) if quick else (10_000, 15)
    shown = []
    with tempfile.TemporaryDirectory() as name:
        layout = ensure_store(Path(name))
        connection = connect(layout)
        fill_runs(connection, runs)
        connection.close()
        finder = StoreReader(lambda: connect(layout, read_only=True))
        for what, arguments in _SEARCHES.items():
            search = build_search(limit=_PAGE, **arguments)
            found = finder.search(search)
            assert found
            kept_s = time_call(lambda search=search: finder.search(search), times)
            whole_s = time_call(
                lambda arguments=arguments: quark.search_runs(
                    storage_dir=name, limit=_PAGE, **arguments
                ),
                times,
            )
            shown += [
                Figure(f"{what}: finder kept open, ms", kept_s * 1000, at_most=_GOAL_MS),
                Figure(f"{what}: quark.search_runs, ms", whole_s * 1000, at_most=_GOAL_MS),
            ]
        shown += _measure_pages(finder, times)
        finder.close()
    return print_figures(
        f"First page of {_PAGE} of {runs:,} runs with {_METRICS} metrics each, warm", shown
    )


def _measure_pages(finder: StoreReader, times: int) -> list[Figure]:
    """Pages of 200 runs with chosen columns, and names for completion."""
    shown = []
    for what, arguments in {**_SEARCHES, "with a count": {"count": True}}.items():
        page = build_page_search(columns=_COLUMNS, limit=_LONG_PAGE, **arguments)
        assert finder.search_page(page).rows
        taken_s = time_call(lambda page=page: finder.search_page(page), times)
        shown.append(
            Figure(
                f"{what}: page of {_LONG_PAGE}, {len(_COLUMNS)} columns, ms",
                taken_s * 1000,
                at_most=_GOAL_PAGE_MS,
            )
        )
    taken_s = time_call(lambda: finder.list_names(None, "", 100), times)
    return [*shown, Figure("names for completion, ms", taken_s * 1000, at_most=_GOAL_PAGE_MS)]


def fill_runs(connection: sqlite3.Connection, runs: int) -> None:
    """Rows as sessions leave them; a real start of each run would take minutes."""
    generator = np.random.default_rng(0)
    execute, executemany = connection.execute, connection.executemany
    execute("BEGIN IMMEDIATE")
    execute(
        "INSERT INTO project (id, name, root_path, created_us, updated_us)"
        " VALUES ('p0', 'vision', '/runs', 0, 0)"
    )
    executemany(
        "INSERT INTO name (pk, text) VALUES (?, ?)", [(pk, key) for pk, key in enumerate(_KEYS, 1)]
    )
    run_rows, config_rows, tag_rows, metric_rows = [], [], [], []
    rates = (10.0 ** generator.uniform(-5, -1, runs)).tolist()
    values = generator.random((runs, _METRICS)).tolist()
    for pk in range(1, runs + 1):
        created_us = START_US + pk * 1_000_000
        numbers = {"lr": rates[pk - 1], "seed": pk % 100, "batch_size": 32 << pk % 4}
        texts = {"optimizer": {"name": ("adamw", "sgd")[pk % 2]}, "model": f"resnet{pk % 5}"}
        tags = ["baseline"] if pk % 3 == 0 else ["ablation", "nightly"]
        run_rows.append(
            (
                pk,
                f"run{pk:08d}",
                f"run {pk}",
                ("completed", "failed")[pk % 10 == 0],
                f"run{pk:08d}",
                json.dumps(tags),
                _ELSEWHERE,
                json.dumps({"values": {**numbers, **texts}, "notes": []}),
                created_us,
                created_us,
                created_us + 60_000_000,
                created_us + 60_000_000,
                1_000,
            )
        )
        config_rows += [(pk, key, "number", number, None) for key, number in numbers.items()]
        config_rows.append((pk, "optimizer.name", "text", None, texts["optimizer"]["name"]))
        config_rows.append((pk, "model", "text", None, texts["model"]))
        tag_rows += [(pk, tag) for tag in tags]
        metric_rows += [
            (pk, name_pk, 1_000, 0, 2.5, value, value, 2.5, 999, created_us, 999)
            for name_pk, value in enumerate(values[pk - 1], 1)
        ]
    executemany(
        "INSERT INTO run (pk, id, project_id, name, status, attempt, lineage_root_run_id,"
        " run_path, strict_mode, tags, process, config, created_us, updated_us, ended_us,"
        " heartbeat_us, newest_step)"
        " VALUES (?, ?, 'p0', ?, ?, 0, ?, '/runs/x', 0, ?, ?, ?, ?, ?, ?, ?, ?)",
        run_rows,
    )
    executemany("INSERT INTO run_config VALUES (?, ?, ?, ?, ?)", config_rows)
    executemany("INSERT INTO run_tag VALUES (?, ?)", tag_rows)
    executemany(
        "INSERT INTO run_metric VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0, ?)",
        metric_rows,
    )
    execute("COMMIT")
