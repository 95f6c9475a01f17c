"""Images, tables, figures and files as artifacts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from quark_core.artifacts.images import (
    MATPLOTLIB_FORMATS,
    draw_matplotlib,
    encode_image,
    find_matplotlib_figure,
    identify_image,
    is_plotly_figure,
)
from quark_core.artifacts.payload_folder import open_source
from quark_core.artifacts.payloads import encode_payload
from quark_core.artifacts.tables import encode_table
from quark_core.errors import SchemaValidationError
from quark_core.records import ArtifactRecord
from quark_core.records.json_object import decode_json, normalize_object
from quark_core.writers.artifact_intake import ArtifactIntake

__all__ = ["MediaArtifacts"]

_IMAGE = "image"
_TABLE = "table"
_FIGURE = "figure"


class MediaArtifacts(ArtifactIntake):
    """The ways of storing an artifact that know what is in it; see `ArtifactStore`.

    What they find out goes into the record's metadata, beneath what the
    caller gives: media type, size of an image, rows and columns of a table.
    """

    def log_image(
        self,
        name: str,
        image: Any,
        *,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        layout: str | None = None,
        normalize: bool = False,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store an image as a PNG file; an image file that exists as it is.

        Args:
            name: Its name, or its whole key.
            image: A PIL image, a numpy array, a torch tensor, a matplotlib
                figure, or the path of an image file. Of an array: integers
                from 0 to 255, booleans, or floats from 0 to 1.
            layout: Of an array: HW, HWC or CHW; by default HWC for numpy and
                CHW for torch, unless only the other one fits.
            normalize: Spread the values from the smallest to the largest.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            The record: type `image`, format bytes.

        Raises:
            SchemaValidationError: No such image, or another bad argument.
            MissingLibraryError: Pillow is not installed (extra `media`).
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        intake = self._check("log_image", _IMAGE, name, namespace, step, epoch, metadata, timestamp)
        if isinstance(image, (str, os.PathLike)):
            open_source(image, "image")[0].close()
            _, facts = identify_image(image)
            return self._keep_file(_describe(intake, facts), image)
        figure = find_matplotlib_figure(image)
        if figure is not None:
            data = draw_matplotlib(figure, "png", figure.dpi)
            return self._keep_bytes(
                _describe(intake, {"media_type": MATPLOTLIB_FORMATS["png"]}), "bytes", "png", data
            )
        encoded = encode_image(image, layout, normalize=bool(normalize))
        if clipped := encoded.metadata.get("clipped"):
            warnings.warn(
                f"image {intake.key!r}: {clipped} values lie outside of 0 to 1 and were cut off; "
                "normalize=True spreads them instead, and integers stand for 0 to 255",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._keep_bytes(
            _describe(intake, encoded.metadata), "bytes", encoded.extension, encoded.data
        )

    def log_table(
        self,
        name: str,
        data: Any,
        *,
        columns: Sequence[str] | None = None,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store a table as JSON: `{"columns": [names], "rows": [[values]]}`.

        Args:
            name: Its name, or its whole key.
            data: Rows (with `columns`), a mapping of columns, mappings as
                rows, or a table of pandas, Polars or pyarrow.
            columns: Names of the columns; of a table that has names, which
                ones to take.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            The record: type `table`, format json.

        Raises:
            SchemaValidationError: No such table, or another bad argument.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        intake = self._check("log_table", _TABLE, name, namespace, step, epoch, metadata, timestamp)
        table = encode_table(data, columns)
        facts = {
            "media_type": "application/json",
            "rows": len(table["rows"]),
            "columns": len(table["columns"]),
        }
        return self._keep_bytes(
            _describe(intake, facts), "json", "json", encode_payload(table, "json")
        )

    def log_figure(
        self,
        name: str,
        figure: Any,
        *,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        file_format: str = "png",
        dpi: float = 150.0,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store a figure: of matplotlib as a file, of plotly as its JSON.

        Args:
            name: Its name, or its whole key.
            figure: A figure, or axes, of matplotlib; a figure of plotly.
            file_format: Of matplotlib: png, svg or pdf.
            dpi: Of matplotlib: dots per inch.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            The record: type `figure`, format bytes, or json for plotly.

        Raises:
            SchemaValidationError: No such figure, or another bad argument.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        intake = self._check(
            "log_figure", _FIGURE, name, namespace, step, epoch, metadata, timestamp
        )
        # `log_figure("loss", plt)` means the figure that pyplot is at.
        current = getattr(figure, "gcf", None)
        found = find_matplotlib_figure(figure if current is None else current())
        if found is not None:
            data = draw_matplotlib(found, file_format, dpi)
            facts = {"media_type": MATPLOTLIB_FORMATS[file_format], "library": "matplotlib"}
            return self._keep_bytes(_describe(intake, facts), "bytes", file_format, data)
        if not is_plotly_figure(figure):
            raise SchemaValidationError(
                f"figure must be one of matplotlib or plotly, not {type(figure).__name__}"
            )
        facts = {"media_type": "application/json", "library": "plotly"}
        payload = encode_payload(decode_json(figure.to_json().encode()), "json")
        return self._keep_bytes(_describe(intake, facts), "json", "json", payload)

    def log_file(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        artifact_type: str = "file",
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store a file under its own name; `store_file` with less to say.

        Args:
            path: A regular file that can be read.
            name: Its name, or its whole key; the file's name by default.
            artifact_type: Such as `checkpoint`.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            The record: format bytes, with `file_name` and `media_type` in its metadata.

        Raises:
            SchemaValidationError: No such file, or another bad argument.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        open_source(path)[0].close()
        given: Any = path
        try:
            file_name = PurePath(os.fsdecode(os.fspath(given))).name
        except TypeError:
            raise SchemaValidationError(f"path must be a path, not {type(path).__name__}") from None
        intake = self._check(
            "log_file",
            artifact_type,
            file_name if name is None else name,
            namespace,
            step,
            epoch,
            metadata,
            timestamp,
        )
        facts = {"file_name": file_name}
        return self._keep_file(_describe(intake, facts), path)


def _describe(intake: Any, facts: Mapping[str, Any]) -> Any:
    """The call with what is known of the payload beneath the caller's own metadata."""
    return intake._replace(
        metadata=normalize_object({**facts, **(intake.metadata or {})}, "metadata")
    )
