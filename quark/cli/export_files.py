"""The files that `quark export` writes: their formats, and how they come to be whole."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import click
import msgspec

if TYPE_CHECKING:
    from quark_core.records.columns import Columns
    from quark_core.records.dataframes import TableField

_BUFFER_BYTES = 1 << 20


class RecordFile(Protocol):
    """A file that takes the rows of one kind, part by part."""

    def write(self, columns: Columns) -> None:
        """Append rows."""

    def close(self) -> None:
        """Finish the file."""


class ParquetFile:
    """Parquet: the Arrow table of the columns, in row groups of about `PART_ROWS`."""

    def __init__(self, path: Path, kind: str) -> None:
        from quark_core.records.dataframes import build_arrow_schema

        parquet = _import_parquet()
        self._writer = parquet.ParquetWriter(path, build_arrow_schema(kind), compression="zstd")
        self._kind = kind
        self._waiting: list[Columns] = []
        self._waiting_rows = 0

    def write(self, columns: Columns) -> None:
        """Append rows; a store may give them in parts that are too small for row groups."""
        from quark_core.runs.reading import PART_ROWS

        self._waiting.append(columns)
        self._waiting_rows += columns.count
        if self._waiting_rows >= PART_ROWS:
            self._write_group()

    def close(self) -> None:
        """Write what waits, and the footer."""
        try:
            self._write_group()
        finally:
            self._writer.close()

    def _write_group(self) -> None:
        from quark_core.records.columns import Columns

        if self._waiting:
            rows = Columns.concatenate(self._kind, self._waiting)
            self._waiting, self._waiting_rows = [], 0
            self._writer.write_table(rows.to_arrow())


class CsvFile:
    """CSV as RFC 4180 has it, with a header; None is an empty cell."""

    def __init__(self, path: Path, kind: str) -> None:
        from quark_core.records.dataframes import table_fields

        self._fields = table_fields(kind)
        self._file = path.open("w", buffering=_BUFFER_BYTES, encoding="utf-8", newline="")
        self._writer = csv.writer(self._file)
        self._writer.writerow([field.name for field in self._fields])

    def write(self, columns: Columns) -> None:
        """Append rows."""
        cells = [_list_cells(columns, field) for field in self._fields]
        self._writer.writerows(zip(*cells, strict=True))

    def close(self) -> None:
        """Bring the rest to the file."""
        self._file.close()


class JsonLinesFile:
    """One `to_dict()` of a record a line; NaN and the infinities are strings."""

    def __init__(self, path: Path, kind: str) -> None:
        from quark_core.records.dataframes import table_fields

        self._floats = [field.name for field in table_fields(kind) if field.encoding == "f"]
        self._file = path.open("wb", buffering=_BUFFER_BYTES)

    def write(self, columns: Columns) -> None:
        """Append rows."""
        for record in columns.to_records():
            line = record.to_dict()
            for name in self._floats:
                line[name] = _spell(line[name])
            self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Bring the rest to the file."""
        self._file.close()


_WRITERS: dict[str, type[ParquetFile | CsvFile | JsonLinesFile]] = {
    "parquet": ParquetFile,
    "csv": CsvFile,
    "jsonl": JsonLinesFile,
}
FORMATS = tuple(_WRITERS)
"""What `--format` takes; also the files' suffixes."""


def check_format(file_format: str) -> None:
    """See that a format's library is there, before anything is written.

    Raises:
        MissingLibraryError: It is not; the message says what to install.
    """
    if file_format == "parquet":
        _import_parquet()


class FileSet:
    """Files of one directory that appear together at the end of a `with` block, or not at all.

    They are written under temporary names. Where the block is left by an
    exception (Ctrl-C too), those are removed.

    Args:
        directory: Where to; made where it is missing.
        force: Overwrite what is there.

    Attributes:
        written: Paths of the files, as they came.
        rows: File name -> how many rows it has.
        size_bytes: Of all files together; at the end of the block.
    """

    def __init__(self, directory: Path, *, force: bool) -> None:
        self._directory = directory
        self._force = force
        self._made_directory = False
        self._temporary: dict[Path, Path] = {}
        self.rows: dict[str, int] = {}
        self.size_bytes = 0

    @property
    def written(self) -> list[Path]:
        """Paths of the files, in the order in which they were written."""
        return list(self._temporary)

    def check_free(self, *names: str) -> None:
        """Refuse names of files that exist, unless they may be overwritten."""
        for name in names:
            self._check_free(self._directory / name)

    def write(
        self, name: str, file_format: str, kind: str, parts: Iterator[Columns], *, optional: bool
    ) -> None:
        """Write rows to a file; where it is optional and there are none, to none."""
        first = next(parts, None)
        if first is None and optional:
            return
        file: RecordFile = _WRITERS[file_format](self._begin(name), kind)
        self.rows[name] = 0
        with contextlib.closing(file):
            while first is not None:
                file.write(first)
                self.rows[name] += first.count
                first = next(parts, None)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON value to a file, for people and programs."""
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        self._begin(name).write_text(text + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._publish()
        finally:
            for temporary in self._temporary.values():
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            if self._made_directory:
                with contextlib.suppress(OSError):  # what was published stays in it
                    self._directory.rmdir()

    def _begin(self, name: str) -> Path:
        target = self._directory / name
        self._check_free(target)
        if not self._directory.exists():
            self._directory.mkdir(parents=True)
            self._made_directory = True
        temporary = self._directory / f".{name}.{os.getpid()}.partial"
        self._temporary[target] = temporary
        return temporary

    def _publish(self) -> None:
        for target in self._temporary:
            self._check_free(target)
        for target, temporary in self._temporary.items():
            self.size_bytes += temporary.stat().st_size
            temporary.replace(target)

    def _check_free(self, target: Path) -> None:
        if not self._force and os.path.lexists(target):
            raise click.ClickException(f"{target} exists; --force overwrites it")


def _list_cells(columns: Columns, field: TableField) -> list[Any]:
    """The cells of a field in CSV."""
    import numpy as np

    from quark_core.records.dataframes import encode_canonical

    values = columns[field.source]
    if field.encoding == "u":
        texts: list[str] = np.datetime_as_string(values.astype("datetime64[us]")).tolist()
        return [f"{text}Z" for text in texts]
    cells: list[Any] = values.tolist()
    if field.encoding in ("j", "l"):
        return [None if cell is None else encode_canonical(cell) for cell in cells]
    if field.encoding == "f" and not np.isfinite(values).all():
        cells = [_spell(cell) for cell in cells]
    if field.nullable and field.encoding in ("i", "f"):
        nulls = columns.is_null(field.source).tolist()
        cells = [None if null else cell for null, cell in zip(nulls, cells, strict=True)]
    return cells


def _spell(value: float | None) -> float | str | None:
    """A number as JSON can hold it: what is not finite becomes a text, as it does in payloads."""
    if value is None or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _import_parquet() -> Any:
    from quark_core.records.dataframes import import_library

    return import_library("pyarrow.parquet", "arrow", "--format parquet")
