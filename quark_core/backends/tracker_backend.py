"""Backends of a tracker: custom classes, and Quark's mirrors by name."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlencode

from quark_core.errors import InvalidRunStateError
from quark_core.ranks.launches import detect_rank

if TYPE_CHECKING:
    from quark_core.backends.contract import MirrorRun


class TrackerBackend(ABC):
    """Base class of custom backends for a `Tracker`.

    The methods are called in order, in a thread of the backend. They may be slow or raise: training
    is not affected. Each cause of an exception is logged once, and later calls are made anyway.
    Close files and sockets in `finish`.

    A class registered with `register_backend` is created in the same thread, with the keywords
    `project_name`, `config`, `outdir`, `rank` and the further arguments of `setup_tracker`.
    """

    name: str = "base"

    @abstractmethod
    def log(self, metrics: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        """Receive one row of values.

        Args:
            metrics: Name -> value, as passed to `Tracker.log`.
            step: Step, or None.
            commit: Whether the row is complete. If False, the next call continues it.
        """

    @abstractmethod
    def log_config(self, config: dict[str, Any]) -> None:
        """Receive hyperparameters, in addition to earlier ones."""

    @abstractmethod
    def finish(self) -> None:
        """Write the rest and close files and connections; the last call."""

    def log_table(self, key: str, columns: list[str], data: list[list[Any]]) -> None:  # noqa: B027 - optional
        """Receive a table; ignored unless overridden."""

    def log_image(self, key: str, image_path: str | Path, caption: str | None = None) -> None:  # noqa: B027 - optional
        """Receive an image file; ignored unless overridden."""

    def log_artifacts(self, paths: dict[str, str]) -> None:  # noqa: B027 - optional
        """Receive files as label -> path; ignored unless overridden."""

    def watch(self, model: Any, **kwargs: Any) -> None:  # noqa: B027 - optional
        """Watch gradients and parameters of a model; ignored unless overridden."""


class MirrorBackend(TrackerBackend):
    """A mirror of the run, as `Tracker.get_backend` returns it for Quark's own backends.

    The mirror gets what the run gets, through a lane of its own: a call here
    is a call of the tracker, and reaches every other backend too. One that is
    given to no tracker stands alone: its first call starts a run with this one
    mirror, which `finish` or the end of the process ends.

    Args:
        name: Name of the backend.
        specification: How Quark is asked for it: a name or a URI.

    Attributes:
        make_tracker: Makes the tracker of a mirror that stands alone; `quark.tracker` sets it.
    """

    make_tracker: ClassVar[Callable[[list[MirrorBackend]], Any] | None] = None

    def __init__(self, name: str, specification: str) -> None:
        self.name = name
        self.specification = specification
        self.storage_dir: Path | None = None
        self.project_name: str | None = None
        self.config: Mapping[str, Any] | None = None
        self.active = True
        self._tracker: Any = None
        self._find_run: Callable[[], MirrorRun | None] = lambda: None
        self._stands_alone = False
        self._beginning = threading.RLock()

    def attach(self, tracker: Any, find_run: Callable[[], MirrorRun | None]) -> None:
        """Attach to a tracker, and end a run that the backend started alone."""
        with self._beginning:
            if not self._stands_alone or self._tracker is not None:
                self.finish()
                self._stands_alone = False
            self._tracker, self._find_run = tracker, find_run

    @property
    def run(self) -> MirrorRun | None:
        """Data of the run in the mirror, or None before a tracker uses the backend."""
        return self._find_run()

    @property
    def run_url(self) -> str | None:
        """URL of the run's page, or None if unknown."""
        run = self._find_run()
        return None if run is None else run.url

    def log(self, metrics: Mapping[str, Any], step: int | None = None, commit: bool = True) -> None:
        """Log a row of values; see `Tracker.log`."""
        self._forward("log", metrics, step=step, commit=commit)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Merge hyperparameters into the config; see `Tracker.log_config`."""
        self._forward("log_config", config)

    def log_table(self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]]) -> None:
        """Log a table; see `Tracker.log_table`."""
        self._forward("log_table", key, columns, data)

    def log_image(self, key: str, image_path: str | Path, caption: str | None = None) -> None:
        """Log an image; see `Tracker.log_image`."""
        self._forward("log_image", key, image_path, caption=caption)

    def log_artifacts(self, paths: Mapping[str, str]) -> None:
        """Log files; see `Tracker.log_artifacts`."""
        self._forward("log_artifacts", paths)

    def watch(self, model: Any, **kwargs: Any) -> None:
        """Watch a model; see `Tracker.watch`."""
        self._forward("watch", model, **kwargs)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for delivery; see `Tracker.flush`."""
        return True if self._tracker is None else bool(self._tracker.flush(timeout_s))

    def finish(self) -> None:
        """End the run of a backend that is used without a Tracker.

        With a Tracker, `Tracker.finish` ends it.
        """
        if self._stands_alone and self._tracker is not None:
            self._tracker.finish()

    def _forward(self, method: str, *arguments: Any, **keywords: Any) -> None:
        if not self.active:
            return
        if self._tracker is None:
            self._begin_alone()
        getattr(self._tracker, method)(*arguments, **keywords)

    def _begin_alone(self) -> None:
        make_tracker = type(self).make_tracker
        if make_tracker is None:
            raise InvalidRunStateError(
                f"{type(self).__name__} needs the tracker to start runs. Import it from quark "
                f"(`from quark import {type(self).__name__}`)"
            )
        with self._beginning:
            if self._tracker is None:
                self._stands_alone = True
                make_tracker([self])


def is_first(rank: int | None) -> bool:
    """Whether a rank leads the others; None is that of this process."""
    return (detect_rank().rank if rank is None else rank) == 0


class ProjectMirror(MirrorBackend):
    """A mirror that knows its project, on the first rank only.

    Args:
        name: Name of the backend.
        options: The backend's options, as they stand behind `?` in its URI.
        project_name: The run's project.
        config: Configuration of the run.
        outdir: Where Quark's store goes.
        rank: Of this process, found by itself where it is None; not active where it is not 0.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, str],
        project_name: str | None,
        config: Mapping[str, Any] | None,
        outdir: str | os.PathLike[str] | None,
        rank: int | None,
    ) -> None:
        super().__init__(name, f"{name}:?{urlencode(options)}" if options else name)
        self.storage_dir = None if outdir is None else Path(outdir).expanduser().absolute()
        self.project_name, self.config = project_name, config
        self.active = is_first(rank)
