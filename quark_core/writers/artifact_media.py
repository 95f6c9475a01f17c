"""Images, tables, figures, sound, video, point clouds, pages and files as artifacts."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack, overload

from quark_core.artifacts.media import (
    MATPLOTLIB_FORMATS,
    EncodedImage,
    describe_boxes,
    describe_labels,
    draw_matplotlib,
    encode_audio,
    encode_image,
    encode_masks,
    encode_points,
    encode_video,
    find_matplotlib_figure,
    identify_image,
    is_cell_image,
    is_plotly_figure,
)
from quark_core.artifacts.payload_folder import open_source, read_path
from quark_core.artifacts.payload_formats import encode_table, list_column_types
from quark_core.config.redaction import cut_text
from quark_core.errors import SchemaValidationError
from quark_core.records import ArtifactRecord
from quark_core.records.json_object import decode_json
from quark_core.records.query import spell_out
from quark_core.writers.artifact_links import LinkedArtifacts, check_aliases
from quark_core.writers.artifact_writing import Intake, PendingArtifact, Placement, describe_intake

_IMAGE = "image"
_TABLE = "table"
_FIGURE = "figure"


_MASK = "image_mask"
_CELL = "table_image"
_CAPTION_LENGTH = 2_000


class _ImageLook(NamedTuple):
    """How the images of one call are to be read."""

    layout: str | None
    normalize: bool
    box_format: str
    class_labels: Any


class MediaArtifacts(LinkedArtifacts):
    """The ways of storing an artifact that know what is in it; see `ArtifactStore`.

    What they find out goes into the record's metadata, beneath what the
    caller gives: media type, size of an image, rows and columns of a table.
    """

    @overload
    def log_image(
        self,
        name: str,
        image: list[Any] | tuple[Any, ...],
        *,
        layout: str | None = None,
        normalize: bool = False,
        caption: Sequence[str | None] | None = None,
        boxes: Sequence[Any] | None = None,
        box_format: str = "xyxy",
        masks: Sequence[Any] | None = None,
        class_labels: Mapping[int, str] | Sequence[str] | None = None,
        **place: Unpack[Placement],
    ) -> tuple[ArtifactRecord, ...]: ...

    @overload
    def log_image(
        self,
        name: str,
        image: Any,
        *,
        layout: str | None = None,
        normalize: bool = False,
        caption: str | None = None,
        boxes: Any = None,
        box_format: str = "xyxy",
        masks: Any = None,
        class_labels: Mapping[int, str] | Sequence[str] | None = None,
        **place: Unpack[Placement],
    ) -> ArtifactRecord: ...

    @spell_out(Placement)
    def log_image(
        self,
        name: str,
        image: Any,
        *,
        layout: str | None = None,
        normalize: bool = False,
        caption: Any = None,
        boxes: Any = None,
        box_format: str = "xyxy",
        masks: Any = None,
        class_labels: Mapping[int, str] | Sequence[str] | None = None,
        **place: Unpack[Placement],
    ) -> ArtifactRecord | tuple[ArtifactRecord, ...]:
        """Store an image, or each image of a list, as a PNG file.

        An existing image file is stored unchanged.

        Args:
            name: Name, or full key. The images of a list are named `name/0`, `name/1` and so on.
            image: A PIL image, NumPy array, torch tensor, matplotlib figure, path of an image file,
                or a list of them. Arrays hold integers from 0 to 255, booleans, or floats from 0 to
                1.
            layout: Axes of an array: `HW`, `HWC` or `CHW`. Defaults to `HWC` for NumPy and `CHW`
                for torch, unless only the other fits.
            normalize: Whether to scale values so that they cover the full range. Defaults to False.
            caption: Caption. For a list of images, this and the following arguments take a list.
            boxes: Boxes in pixels: mappings with `box` (four numbers) and optional `label` and
                `score`, the output of a torchvision detector, or a mapping of groups, such as
                `{"predictions": ..., "truth": ...}`. Boxes with non-finite numbers are omitted with
                a warning.
            box_format: `xyxy`, `xywh` or `cxcywh`. Defaults to `xyxy`.
            masks: Class per pixel: an array with the size of the image, or a mapping of names to
                such.
            class_labels: Names of the classes of boxes and masks, by number.
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: type `image`, format bytes. For a list, a tuple of records. Boxes, caption
            and labels are in its metadata; masks are artifacts of type `image_mask`.

        Raises:
            SchemaValidationError: The image, boxes or masks are invalid, or another argument is.
            MissingLibraryError: Pillow is not installed (extra `media`).
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        look = _ImageLook(layout, bool(normalize), box_format, class_labels)
        if not isinstance(image, (list, tuple)):
            intake = self._check("log_image", _IMAGE, name, **place)
            return self._keep_image(intake, image, look, caption, boxes, masks)
        count = len(image)
        if not count:
            raise SchemaValidationError("image must not be an empty list")
        captions = _spread(caption, count, "caption")
        all_boxes, all_masks = _spread(boxes, count, "boxes"), _spread(masks, count, "masks")
        # All names are good before the first image is stored.
        intakes = [
            self._check("log_image", _IMAGE, f"{name}/{index}", **place) for index in range(count)
        ]
        return tuple(
            self._keep_image(
                intakes[at], image[at], look, captions[at], all_boxes[at], all_masks[at]
            )
            for at in range(count)
        )

    def _keep_image(
        self,
        intake: Intake,
        image: Any,
        look: _ImageLook,
        caption: Any,
        boxes: Any,
        masks: Any,
    ) -> ArtifactRecord:
        facts: dict[str, Any] = {}
        if caption is not None:
            facts["caption"] = cut_text(str(caption), _CAPTION_LENGTH)
        if look.class_labels is not None:
            facts["class_labels"] = describe_labels(look.class_labels)
        if boxes is not None:
            facts["boxes"], left_out = describe_boxes(boxes, look.box_format)
            if left_out:
                facts["boxes_left_out"] = left_out
                _warn_once(f"image {intake.key!r}: {left_out} boxes are omitted: not finite, or "
                           "more than 1000 in a group")  # fmt: skip
        if isinstance(image, (str, os.PathLike)):
            open_source(image, "image")[0].close()
            _, found = identify_image(image)
            described = self._describe_image(intake, {**found, **facts}, masks)
            return self._keep_file(described, image)
        figure = find_matplotlib_figure(image)
        if figure is not None:
            data = draw_matplotlib(figure, "png", figure.dpi)
            found = {"media_type": MATPLOTLIB_FORMATS["png"]}
            if masks is not None:
                raise SchemaValidationError("masks: not possible for a figure. Pass an image")
            return self._keep_bytes(
                describe_intake(intake, {**found, **facts}), "bytes", "png", data
            )
        encoded = encode_image(image, look.layout, normalize=look.normalize)
        if clipped := encoded.metadata.get("clipped"):
            _warn_once(
                f"image {intake.key!r}: {clipped} values outside 0 to 1 were clipped. "
                "normalize=True rescales them. Integers from 0 to 255 are also accepted"
            )
        described = self._describe_image(intake, {**encoded.metadata, **facts}, masks)
        return self._keep_bytes(described, "bytes", encoded.extension, encoded.data)

    def _describe_image(self, intake: Intake, facts: dict[str, Any], masks: Any) -> Intake:
        """The call with all that is known of the image; its masks are stored before it."""
        if masks is None:
            return describe_intake(intake, facts)
        encoded = encode_masks(masks, facts["width"], facts["height"])
        mask_intake = intake._replace(artifact_type=_MASK, metadata=None)
        listed = []
        for mask in encoded:
            said = {"mask": mask.name, "encoding": mask.encoding, "media_type": "image/png"}
            record = self._keep_bytes(describe_intake(mask_intake, said), "bytes", "png", mask.data)
            listed.append({**said, "sha256": record.sha256, "classes": mask.classes})
        return describe_intake(intake, {**facts, "masks": listed})

    @spell_out(Placement)
    def log_table(
        self,
        name: str,
        data: Any,
        *,
        columns: Sequence[str] | None = None,
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Store a table as JSON: `{"columns": [names], "rows": [[values]]}`.

        A cell may hold an image: a PIL or matplotlib object, or a uint8 array of two or three
        dimensions. It is stored as an artifact of type `table_image`, and the cell becomes
        `{"image": hash, "width", "height"}`. Each image takes a few milliseconds.

        Args:
            name: Name, or full key.
            data: Rows (with `columns`), a mapping of columns, mappings as rows, or a table of
                pandas, Polars or pyarrow.
            columns: Column names. For a table that has names, the columns to store.
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: type `table`, format json. Its metadata has the type of each column: number,
            boolean, text, image, json or mixed.

        Raises:
            SchemaValidationError: The table or another argument is invalid.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        intake = self._check("log_table", _TABLE, name, **place)
        table = encode_table(data, columns, partial(self._keep_cell, intake))
        facts = {
            "media_type": "application/json",
            "rows": len(table["rows"]),
            "columns": len(table["columns"]),
            "column_types": list_column_types(table),
        }
        return self._keep_json(intake, table, facts)

    def _keep_cell(self, intake: Intake, value: Any) -> dict[str, Any] | None:
        """An image in a cell of a table, stored; None for what is none."""
        if not is_cell_image(value):
            return None
        figure = find_matplotlib_figure(value)
        if figure is None:
            encoded = encode_image(value, None, normalize=False)
        else:
            data = draw_matplotlib(figure, "png", figure.dpi)
            encoded = EncodedImage(data, "png", {"media_type": MATPLOTLIB_FORMATS["png"]})
        cell = describe_intake(
            intake._replace(artifact_type=_CELL, metadata=None), encoded.metadata
        )
        record = self._keep_bytes(cell, "bytes", encoded.extension, encoded.data)
        sizes: dict[str, Any] = {
            side: encoded.metadata[side] for side in ("width", "height") if side in encoded.metadata
        }
        return {"image": record.sha256, **sizes}

    @spell_out(Placement)
    def log_figure(
        self,
        name: str,
        figure: Any,
        *,
        file_format: str = "png",
        dpi: float = 150.0,
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Store a matplotlib figure as a file, or a plotly figure as JSON.

        Args:
            name: Name, or full key.
            figure: A matplotlib figure or axes, or a plotly figure.
            file_format: Format of a matplotlib figure: `png`, `svg` or `pdf`. Defaults to `png`.
            dpi: Dots per inch of a matplotlib figure. Defaults to 150.
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: type `figure`, format bytes, or json for plotly.

        Raises:
            SchemaValidationError: The figure or another argument is invalid.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        intake = self._check("log_figure", _FIGURE, name, **place)
        # `log_figure("loss", plt)` means the figure that pyplot is at.
        current = getattr(figure, "gcf", None)
        found = find_matplotlib_figure(figure if current is None else current())
        if found is not None:
            data = draw_matplotlib(found, file_format, dpi)
            facts = {"media_type": MATPLOTLIB_FORMATS[file_format], "library": "matplotlib"}
            return self._keep_bytes(describe_intake(intake, facts), "bytes", file_format, data)
        if not is_plotly_figure(figure):
            raise SchemaValidationError(
                f"figure must be a matplotlib or plotly figure, not {type(figure).__name__}"
            )
        facts = {"media_type": "application/json", "library": "plotly"}
        return self._keep_json(intake, decode_json(figure.to_json().encode()), facts)

    @spell_out(Placement, before="aliases")
    def log_file(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        artifact_type: str = "file",
        aliases: Sequence[str] | None = (),
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Store a file under its name.

        Args:
            path: Path of a regular file.
            name: Name, or full key. Defaults to the file name.
            artifact_type: Type, such as "checkpoint". Defaults to "file".
            aliases: Names for this version, such as "best".
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: format bytes, with `file_name` and `media_type` in its metadata.

        Raises:
            SchemaValidationError: The file does not exist, or an argument is invalid.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        named = check_aliases(aliases)
        open_source(path)[0].close()
        file_name = read_path(path).name
        key = file_name if name is None else name
        intake = self._check("log_file", artifact_type, key, **place)
        facts = {"file_name": file_name}
        return self._name(self._keep_file(describe_intake(intake, facts), path), named)


def _spread(values: Any, count: int, argument: str) -> Sequence[Any]:
    """What is said of each image of a list."""
    if values is None:
        return [None] * count
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
        raise SchemaValidationError(
            f"{argument} must be a sequence with one entry for each image, not "
            f"{type(values).__name__}"
        )
    if len(values) != count:
        raise SchemaValidationError(f"{argument} has {len(values)} entries for {count} images")
    return list(values)


def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)


class RecordingArtifacts(LinkedArtifacts):
    """The ways of storing what is heard, watched and read; see `ArtifactStore`."""

    @spell_out(Placement)
    def log_audio(
        self,
        name: str,
        samples: Any,
        *,
        sample_rate_hz: int | None = None,
        caption: str | None = None,
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Store audio as a WAV file; an existing audio file is stored unchanged.

        Returns when the file is on disk.

        Args:
            name: Name, or full key.
            samples: Array or tensor of shape `(samples,)`, `(samples, channels)` or `(channels,
                samples)`, with floats from -1 to 1 or 16-bit integers. Or the path of a file.
                Values out of range and non-finite values are clipped and counted as `clipped` in
                the metadata. No samples give an empty file.
            sample_rate_hz: Samples per second. Required unless `samples` is a path.
            caption: Caption.
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: type `audio`, format bytes.

        Raises:
            SchemaValidationError: The samples or the file are invalid, or another argument is.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        intake = self._check("log_audio", "audio", name, **place)
        said = _say_caption(caption)
        if isinstance(samples, (str, os.PathLike)):
            return self._keep_file(describe_intake(intake, said), samples)
        data, facts = encode_audio(samples, sample_rate_hz)
        return self._keep_bytes(describe_intake(intake, {**facts, **said}), "bytes", "wav", data)

    @spell_out(Placement)
    def log_video(
        self,
        name: str,
        frames: Any,
        *,
        fps: float = 30.0,
        caption: str | None = None,
        **place: Unpack[Placement],
    ) -> PendingArtifact:
        """Store a video file, or encode frames as MP4.

        A file is copied by a background thread: the call returns at once, unless 64 artifacts are
        waiting. The end of the run waits as long as the copy makes progress. Frames are encoded
        during the call, at about 10 ms per frame.

        Args:
            name: Name, or full key.
            frames: Path of a file, an array `(frames, height, width[, channels])`, a torch tensor
                (also `(frames, channels, height, width)`), or an iterable of arrays or PIL images
                of one size.
            fps: Frames per second. Defaults to 30.
            caption: Caption.
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            A PendingArtifact. Its `wait()` returns the record of type `video`.

        Raises:
            SchemaValidationError: The frames or the file are invalid, or another argument is.
            MissingLibraryError: PyAV is not installed (extra `media`); needed for frames.
            InvalidRunStateError: The store is closed or the run has ended.
        """
        intake = self._check("log_video", "video", name, **place)
        said = _say_caption(caption)
        if isinstance(frames, (str, os.PathLike)):
            return self._keep_later(describe_intake(intake, said), frames)
        with tempfile.TemporaryDirectory(prefix="quark-video-") as folder:
            target = Path(folder) / "video.mp4"
            try:
                facts = encode_video(frames, fps, target)
                described = describe_intake(intake, {**facts, **said})
                # Open when this returns, so that its name may go.
                return self._keep_later(described, target)
            except OSError as error:
                raise SchemaValidationError(f"frames cannot be encoded: {error}") from error

    @spell_out(Placement)
    def log_point_cloud(
        self,
        name: str,
        points: Any,
        *,
        colors: Any = None,
        caption: str | None = None,
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Store points in space as a PLY file; returns when it is on disk.

        Args:
            name: Name, or full key.
            points: Array of shape `(points, 3)` (x, y, z), `(points, 4)` with a value such as a
                class, or `(points, 6)` with red, green and blue. Non-finite points are omitted and
                counted as `non_finite` in the metadata.
            colors: Array of shape `(points, 3)`: bytes, or floats from 0 to 1.
            caption: Caption.
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: type `point_cloud`, format bytes.

        Raises:
            SchemaValidationError: The points or another argument are invalid.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        intake = self._check("log_point_cloud", "point_cloud", name, **place)
        data, facts = encode_points(points, colors)
        described = describe_intake(intake, {**facts, **_say_caption(caption)})
        return self._keep_bytes(described, "bytes", "ply", data)

    @spell_out(Placement)
    def log_html(
        self,
        name: str,
        html: Any,
        *,
        caption: str | None = None,
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Store an HTML page, which is displayed in a sandbox without scripts and network.

        Returns when it is on disk.

        Args:
            name: Name, or full key.
            html: HTML text, or the path of a file (`pathlib.Path`).
            caption: Caption.
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: type `html`, format text, or bytes for a file.

        Raises:
            SchemaValidationError: The text or file does not exist, or another argument is invalid.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        intake = self._check("log_html", "html", name, **place)
        facts = {"media_type": "text/html", **_say_caption(caption)}
        return self._keep_prose(describe_intake(intake, facts), html, "html", "html")

    @spell_out(Placement)
    def log_markdown(
        self,
        name: str,
        text: Any,
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Store a Markdown text; returns when it is on disk.

        Args:
            name: Name, or full key.
            text: The text, or the path of a file (`pathlib.Path`).
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: type `markdown`, format text, or bytes for a file.

        Raises:
            SchemaValidationError: The text or file does not exist, or another argument is invalid.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        intake = self._check("log_markdown", "markdown", name, **place)
        described = describe_intake(intake, {"media_type": "text/markdown"})
        return self._keep_prose(described, text, "text", "md")

    def _keep_prose(
        self, intake: Intake, text: Any, argument: str, extension: str
    ) -> ArtifactRecord:
        if isinstance(text, os.PathLike):
            return self._keep_file(intake, text)
        if not isinstance(text, str):
            raise SchemaValidationError(
                f"{argument} must be a str or a path, not {type(text).__name__}"
            )
        return self._keep_bytes(intake, "text", extension, text.encode("utf-8", "surrogatepass"))


def _say_caption(caption: object) -> dict[str, Any]:
    return {} if caption is None else {"caption": cut_text(str(caption), _CAPTION_LENGTH)}
