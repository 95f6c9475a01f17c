"""Where the same points could have gone: a row a point in SQLite, Parquet, DuckDB."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = Any
PointRow = tuple[str, str, int, int, float]

_TABLE = """
CREATE TABLE point (
    run TEXT NOT NULL, key TEXT NOT NULL, step INTEGER NOT NULL,
    time_us INTEGER NOT NULL, value REAL NOT NULL, PRIMARY KEY (run, key, step)
)
"""


def list_rows(run: str, keys: Sequence[str], times: Array, values: Array) -> list[PointRow]:
    """A tuple a point, all metrics of a step before the next step."""
    return [
        (run, key, step, time_us, value)
        for step, (time_us, line) in enumerate(zip(times.tolist(), values.tolist(), strict=True))
        for key, value in zip(keys, line, strict=True)
    ]


class RowTable:
    """The plain way: a row a point in SQLite, in the order in which a series is read.

    Args:
        path: Its file.
        durable: Whether a commit waits for the disk.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'OFF'}")
        self.connection.execute(f"{_TABLE} WITHOUT ROWID")

    def write(self, rows: Sequence[PointRow]) -> None:
        """Store rows in one transaction."""
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany("INSERT INTO point VALUES (?, ?, ?, ?, ?)", rows)
        self.connection.execute("COMMIT")

    def read(self, run: str, key: str) -> tuple[Array, Array]:
        """Steps and values of a series, over a connection of its own."""
        connection = sqlite3.connect(self.path)
        rows = connection.execute(
            "SELECT step, value FROM point WHERE run = ? AND key = ? ORDER BY step", (run, key)
        )
        # Numpy reads the rows as they come, which is quicker than a list of them.
        points = np.fromiter(rows, dtype=[("step", "i8"), ("value", "f8")])
        connection.close()
        return np.ascontiguousarray(points["step"]), np.ascontiguousarray(points["value"])

    def measure_bytes(self) -> int:
        """Size of the file, once the WAL is in it."""
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return self.path.stat().st_size

    def close(self) -> None:
        """Give up the connection."""
        self.connection.close()


class ParquetFile:
    """One series in a Parquet file. Needs pyarrow."""

    def __init__(self, path: Path, steps: Array, times: Array, values: Array) -> None:
        import pyarrow
        from pyarrow import parquet

        self.path = path
        encodings = {
            "step": "DELTA_BINARY_PACKED",
            "time_us": "DELTA_BINARY_PACKED",
            "value": "BYTE_STREAM_SPLIT",
        }
        parquet.write_table(
            pyarrow.table({"step": steps, "time_us": times, "value": values}),
            path,
            compression="zstd",
            use_dictionary=False,
            column_encoding=encodings,
        )

    def read(self) -> tuple[Array, Array]:
        """Steps and values."""
        from pyarrow import parquet

        table = parquet.read_table(self.path, columns=["step", "value"])
        return table["step"].to_numpy(), table["value"].to_numpy()

    def measure_bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size


class DuckDbTable:
    """A row a point in DuckDB. Needs duckdb."""

    def __init__(self, path: Path, run: str, key: str, *columns: Array) -> None:
        import duckdb
        import pyarrow

        self.path = path
        steps, times, values = columns
        points = pyarrow.table(  # noqa: F841 - the statement below finds it by its name
            {
                "run": [run] * len(steps),
                "key": [key] * len(steps),
                "step": steps,
                "time_us": times,
                "value": values,
            }
        )
        connection = duckdb.connect(str(path))
        connection.execute("CREATE TABLE point AS SELECT * FROM points")
        connection.close()

    def read(self, run: str, key: str) -> tuple[Array, Array]:
        """Steps and values of a series, over a connection of its own."""
        import duckdb

        connection = duckdb.connect(str(self.path), read_only=True)
        found = connection.execute(
            "SELECT step, value FROM point WHERE run = ? AND key = ? ORDER BY step", (run, key)
        ).fetchnumpy()
        connection.close()
        return found["step"], found["value"]

    def measure_bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size
