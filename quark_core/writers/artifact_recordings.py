"""Sound, moving pictures, points in space, pages and prose as artifacts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quark_core.artifacts.point_clouds import encode_points
from quark_core.artifacts.recordings import encode_audio, encode_video
from quark_core.config.redaction import cut_text
from quark_core.errors import SchemaValidationError
from quark_core.records import ArtifactRecord
from quark_core.writers.artifact_background import PendingArtifact
from quark_core.writers.artifact_intake import Intake, describe_intake
from quark_core.writers.artifact_links import LinkedArtifacts

_CAPTION_LENGTH = 2_000


class RecordingArtifacts(LinkedArtifacts):
    """The ways of storing what is heard, watched and read; see `ArtifactStore`."""

    def log_audio(
        self,
        name: str,
        samples: Any,
        *,
        sample_rate_hz: int | None = None,
        caption: str | None = None,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store sound as a WAV file; an audio file that exists as it is.

        Returns when it is on the disk.

        Args:
            name: Its name, or its whole key.
            samples: `(samples,)`, `(samples, channels)` or `(channels, samples)`, of numpy or
                torch: floats from -1 to 1 or integers of 16 bits; or the path of a file. What
                lies beyond is cut off and counted in the metadata (`clipped`), as is what is
                not finite. Of no samples at all it is an empty file.
            sample_rate_hz: Samples per second; needed unless it is a file.
            caption: A text below it.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            The record: type `audio`, format bytes.

        Raises:
            SchemaValidationError: No such samples or file, or another bad argument.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        intake = self._check(
            "log_audio", "audio", name, namespace, step, epoch, metadata, timestamp
        )
        said = _say_caption(caption)
        if isinstance(samples, (str, os.PathLike)):
            return self._keep_file(describe_intake(intake, said), samples)
        data, facts = encode_audio(samples, sample_rate_hz)
        return self._keep_bytes(describe_intake(intake, {**facts, **said}), "bytes", "wav", data)

    def log_video(
        self,
        name: str,
        frames: Any,
        *,
        fps: float = 30.0,
        caption: str | None = None,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> PendingArtifact:
        """Store a video: a file as it is, or frames as MP4.

        A file is taken by a thread, a piece at a time, however large: this returns at once
        (unless 64 wait already), and the run's end waits as long as it gets on. Frames are
        encoded before this returns, which takes about a hundredth of a second for each.

        Args:
            name: Its name, or its whole key.
            frames: The path of a file; an array `(frames, height, width[, channels])`, of torch
                `(frames, channels, height, width)` too; or frames one after the other: arrays
                or PIL images of one size.
            fps: Of frames: how many per second.
            caption: A text below it.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            A PendingArtifact: its `wait()` gives the record, of type `video`, format bytes.

        Raises:
            SchemaValidationError: No such frames or file, or another bad argument.
            MissingLibraryError: Of frames: PyAV is not installed (extra `media`).
            InvalidRunStateError: As in `store`.
        """
        intake = self._check(
            "log_video", "video", name, namespace, step, epoch, metadata, timestamp
        )
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

    def log_point_cloud(
        self,
        name: str,
        points: Any,
        *,
        colors: Any = None,
        caption: str | None = None,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store points in space as a PLY file. Returns when it is on the disk.

        Args:
            name: Its name, or its whole key.
            points: `(points, 3)`: x, y, z; `(points, 4)` with a value besides, such as a class;
                `(points, 6)` with red, green, blue. Those that are not finite are left out, and
                counted in the metadata (`non_finite`).
            colors: `(points, 3)`: bytes, or floats from 0 to 1.
            caption: A text below it.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            The record: type `point_cloud`, format bytes.

        Raises:
            SchemaValidationError: No such points, or another bad argument.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        intake = self._check(
            "log_point_cloud", "point_cloud", name, namespace, step, epoch, metadata, timestamp
        )
        data, facts = encode_points(points, colors)
        described = describe_intake(intake, {**facts, **_say_caption(caption)})
        return self._keep_bytes(described, "bytes", "ply", data)

    def log_html(
        self,
        name: str,
        html: Any,
        *,
        caption: str | None = None,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store a page of HTML as it is; it is shown in a sandbox, without scripts or a network.

        Returns when it is on the disk.

        Args:
            name: Its name, or its whole key.
            html: The text, or the path of a file (`pathlib.Path`).
            caption: A text below it.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            The record: type `html`, format text; of a file bytes.

        Raises:
            SchemaValidationError: No such text or file, or another bad argument.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        intake = self._check("log_html", "html", name, namespace, step, epoch, metadata, timestamp)
        facts = {"media_type": "text/html", **_say_caption(caption)}
        return self._keep_prose(describe_intake(intake, facts), html, "html", "html")

    def log_markdown(
        self,
        name: str,
        text: Any,
        *,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store a text in Markdown. Returns when it is on the disk.

        Args:
            name: Its name, or its whole key.
            text: The text, or the path of a file (`pathlib.Path`).
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            The record: type `markdown`, format text; of a file bytes.

        Raises:
            SchemaValidationError: No such text or file, or another bad argument.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        intake = self._check(
            "log_markdown", "markdown", name, namespace, step, epoch, metadata, timestamp
        )
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
