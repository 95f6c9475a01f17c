"""`quark export`: a run as files of other programs."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import click
import msgspec

from quark.cli.completion import RUN
from quark.cli.options import option, takes_options
from quark.cli.store_access import SOURCE, RunSource
from quark.cli.texts import make_progress
from quark_core.backends.contract import SupportsSearch
from quark_core.config.arguments import check_run_id
from quark_core.errors import UnknownKindError
from quark_core.formatting import format_bytes, format_count
from quark_core.records import RECORD_TYPES, LifecycleRecord
from quark_core.records.query import Query
from quark_core.records.schema import CURRENT_SCHEMA_VERSION

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.run_summary import StoredRun
    from quark_core.records.columns import Columns, TableField
    from quark_core.records.query import Query

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
        from quark_core.records.columns import build_arrow_schema

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
        from quark_core.records.columns import table_fields

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
        from quark_core.records.columns import table_fields

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
            raise click.ClickException(f"{target} already exists. To overwrite it, pass --force.")


def _list_cells(columns: Columns, field: TableField) -> list[Any]:
    """The cells of a field in CSV."""
    import numpy as np

    from quark_core.records.columns import encode_canonical

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
    from quark_core.errors import import_library

    return import_library("pyarrow.parquet", "arrow", "--format parquet")


def _check_kinds(_context: click.Context, _option: click.Parameter, kinds: Any) -> tuple[str, ...]:
    known = _list_kinds()
    for kind in kinds:
        if kind not in known:
            choices = ", ".join(map(repr, known))
            raise click.BadParameter(f"{kind!r} is not a kind of record. Choose {choices}.")
    return tuple(dict.fromkeys(kinds))


@click.command()
@takes_options
def export(
    *,
    run: str = RUN,
    file_format: str = option(
        "File format; parquet needs pyarrow.", "--format", type=click.Choice(FORMATS), required=True
    ),
    kinds: tuple[str, ...] = option(
        "Only records of this kind (metric, event, layer …). Repeatable.",
        "-k",
        "--kind",
        callback=_check_kinds,
        show_default="every kind of the run",
    ),
    output: Path | None = option(
        "Output directory, or the file of a single --kind.",
        "-o",
        show_default="a directory with the run's ID",
    ),
    source: RunSource = SOURCE,
    all_attempts: bool = option("Include points that a later attempt replaced."),
    force: bool = option("Overwrite existing files."),
) -> None:
    """Export a run to Parquet, CSV or JSON Lines.

    RUN is a run ID, unique prefix or name. Writes one file for each kind of record,
    and run.json with the run, its config and its environment. The files appear
    together or not at all. Existing files are kept, unless you pass --force.
    """
    from quark_core.runs.reading import iterate

    check_format(file_format)
    targets = _Targets.choose(output, file_format, kinds)
    store, stored = source.reader, source.find(run)
    run_id = str(stored.run.id)
    if line := source.describe_unstored(run_id):
        click.echo(line, err=True)
    # Whose id it is, the store says, which may be anybody's.
    directory = targets.directory or Path(check_run_id(run_id))
    query = Query(all_attempts=all_attempts)
    try:
        with FileSet(directory, force=force) as files, _Progress(store, run_id, query) as progress:
            # What is in the way is told before the work, not after it.
            files.check_free(targets.name_run(), *map(targets.name, kinds))
            for kind in kinds or _list_kinds():
                parts = progress.follow(kind, iterate(store, run_id, kind, query))
                name = targets.name(kind)
                try:
                    files.write(name, file_format, kind, parts, optional=not kinds)
                except UnknownKindError as error:
                    if kinds:
                        raise
                    click.echo(f"quark: {kind} records are not exported: {error}", err=True)
            files.write_json(targets.name_run(), _describe(stored, files.rows))
    except KeyboardInterrupt:
        click.echo("quark: interrupted; incomplete files were removed", err=True)
        sys.exit(130)
    except OSError as error:
        # Without its file names, which are temporary ones.
        raise click.ClickException(
            f"--output {directory} cannot be written: {error.strerror or error}"
        ) from error
    click.echo(
        f"{format_count(sum(files.rows.values()), 'row')}, {format_bytes(files.size_bytes)} in "
        f"{format_count(len(files.written), 'file')}: {', '.join(map(str, files.written))}"
    )
    if (not kinds or "artifact" in kinds) and files.rows.get(targets.name("artifact")):
        click.echo(f"To copy its artifacts: quark artifacts {run} --output DIR{source.arguments}")


@dataclass(frozen=True, slots=True)
class _Targets:
    """Where an export goes.

    Attributes:
        directory: Where its files lie; None for a directory of the run's id.
        suffix: Of the files with records.
        file_name: Of the only such file, or None.
    """

    directory: Path | None
    suffix: str
    file_name: str | None = None

    @classmethod
    def choose(cls, output: Path | None, file_format: str, kinds: tuple[str, ...]) -> _Targets:
        """Tell whether --output is a directory or a file: that is what ends like one."""
        suffix = f".{file_format}"
        if str(output) == "-":
            raise click.UsageError(
                "--output - is not supported: export does not write to stdout. "
                "Pass a directory or a file."
            )
        if output is not None and output.suffix[1:] not in FORMATS and output.is_file():
            raise click.UsageError(
                f"--output {output} is an existing file. Pass a directory, or with one --kind "
                f"a file that ends in '{suffix}'."
            )
        if output is None or output.is_dir() or output.suffix[1:] not in FORMATS:
            return cls(output, suffix)
        if output.suffix != suffix:
            raise click.UsageError(
                f"--output {output} does not end in '{suffix}', as --format {file_format} requires."
            )
        if len(kinds) != 1:
            raise click.UsageError(
                f"--output {output} is a single file, which needs exactly one --kind. "
                "Pass a directory for several."
            )
        return cls(output.parent, suffix, output.name)

    def name(self, kind: str) -> str:
        """Name of the file of a kind."""
        return self.file_name or f"{kind}{self.suffix}"

    def name_run(self) -> str:
        """Name of the file that describes the run."""
        return "run.json" if self.file_name is None else f"{Path(self.file_name).stem}.run.json"


class _Progress:
    """A bar on stderr that counts rows; none where stderr is no terminal."""

    def __init__(self, store: SupportsRead, run_id: str, query: Query) -> None:
        from rich.progress import TimeElapsedColumn

        self._store = store
        self._run_id = run_id
        self._bar = make_progress("{task.completed:,.0f} rows", TimeElapsedColumn())
        # Summaries leave out what is hidden.
        self._knows_total = not self._bar.disable and not query.all_attempts

    def follow(self, kind: str, parts: Iterator[Columns]) -> Iterator[Columns]:
        """The same parts, counted as they pass."""
        total = None
        if self._knows_total and kind == "metric":
            total = _count_metrics(self._store, self._run_id)
        task = self._bar.add_task(kind, total=total)
        for part in parts:
            yield part
            self._bar.advance(task, part.count)
        self._bar.update(task, total=self._bar.tasks[task].completed)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()


def _count_metrics(store: SupportsRead, run_id: str) -> int | None:
    """How many points a run has, where the store knows it without reading them."""
    reader: object = store
    if not isinstance(reader, SupportsSearch):
        return None
    return sum(metric.count for metric in reader.summarize(run_id).metrics.values())


def _list_kinds() -> tuple[str, ...]:
    """Kinds that can be exported: what run.json tells is not among them."""
    return tuple(kind for kind in RECORD_TYPES if kind != LifecycleRecord.KIND)


def _describe(stored: StoredRun, rows: dict[str, int]) -> dict[str, Any]:
    return {"schema_version": CURRENT_SCHEMA_VERSION, **stored.to_dict(), "rows": rows}
