"""What a tracker logs to: backends of the user's own, and Quark's mirrors by their names."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from quark_core.ranks import detect_rank

if TYPE_CHECKING:
    from quark_core.tracker.mirror_runs import MirrorRun

__all__ = ["CSVBackend", "MLflowBackend", "MirrorBackend", "TrackerBackend", "WandbBackend"]

_WANDB_OPTIONS = ("mode", "entity", "group", "job_type")


class TrackerBackend(ABC):
    """Base class of a backend of one's own, which a `Tracker` drives.

    All of its methods are called in the order of the tracker's calls, on one
    thread that is the backend's own: it may block, be slow or raise, and
    training does not notice. What it raises is logged once per reason, and
    the next call is made all the same. `close` of a socket or a file belongs
    into `finish`.

    `register_backend` makes a class known under a name; it is then made with
    the keywords `project_name`, `config`, `outdir`, `rank` and whatever else
    `setup_tracker` was given, on that same thread.
    """

    name: str = "base"

    @abstractmethod
    def log(self, metrics: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        """Take one row of values.

        Args:
            metrics: Name -> value, as it was given to `Tracker.log`.
            step: The step, where the caller gave one.
            commit: Whether the row is complete; if not, the next call goes on with it.
        """

    @abstractmethod
    def log_config(self, config: dict[str, Any]) -> None:
        """Take hyperparameters and the like, beside what came before."""

    @abstractmethod
    def finish(self) -> None:
        """Write what is left and give up files and connections. The last call."""

    def log_table(self, key: str, columns: list[str], data: list[list[Any]]) -> None:  # noqa: B027 - optional
        """Take a table; ignored unless overridden."""

    def log_image(self, key: str, image_path: str | Path, caption: str | None = None) -> None:  # noqa: B027 - optional
        """Take an image file; ignored unless overridden."""

    def log_artifacts(self, paths: dict[str, str]) -> None:  # noqa: B027 - optional
        """Take files, each under a label; ignored unless overridden."""

    def watch(self, model: Any, **kwargs: Any) -> None:  # noqa: B027 - optional
        """Look at gradients and parameters of a model; ignored unless overridden."""


class MirrorBackend(TrackerBackend):
    """A mirror of the run, as `Tracker.get_backend` returns it for Quark's own backends.

    The mirror gets what the run gets, through a lane of its own: a call here
    is a call of the tracker, and reaches every other backend too. Before it
    belongs to a tracker, calls do nothing.

    Args:
        name: Name of the backend.
        specification: How Quark is asked for it: a name or a URI.
    """

    def __init__(self, name: str, specification: str) -> None:
        self.name = name
        self.specification = specification
        self.storage_dir: Path | None = None
        self.project_name: str | None = None
        self.config: Mapping[str, Any] | None = None
        self.active = True
        self._tracker: Any = None
        self._find_run: Callable[[], MirrorRun | None] = lambda: None

    def attach(self, tracker: Any, find_run: Callable[[], MirrorRun | None]) -> None:
        """Belong to a tracker from now on."""
        self._tracker, self._find_run = tracker, find_run

    @property
    def run(self) -> MirrorRun | None:
        """What is known of the run there; None before the mirror belongs to a tracker."""
        return self._find_run()

    @property
    def run_url(self) -> str | None:
        """Address of the run's page, where it has one that is known."""
        run = self._find_run()
        return None if run is None else run.url

    def log(self, metrics: Mapping[str, Any], step: int | None = None, commit: bool = True) -> None:
        """As `Tracker.log`."""
        self._forward("log", metrics, step=step, commit=commit)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """As `Tracker.log_config`."""
        self._forward("log_config", config)

    def log_table(self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]]) -> None:
        """As `Tracker.log_table`."""
        self._forward("log_table", key, columns, data)

    def log_image(self, key: str, image_path: str | Path, caption: str | None = None) -> None:
        """As `Tracker.log_image`."""
        self._forward("log_image", key, image_path, caption=caption)

    def log_artifacts(self, paths: Mapping[str, str]) -> None:
        """As `Tracker.log_artifacts`."""
        self._forward("log_artifacts", paths)

    def watch(self, model: Any, **kwargs: Any) -> None:
        """As `Tracker.watch`."""
        self._forward("watch", model, **kwargs)

    def finish(self) -> None:
        """Nothing: the mirror ends with the run, by `Tracker.finish`."""

    def _forward(self, method: str, *arguments: Any, **keywords: Any) -> None:
        if self._tracker is not None:
            getattr(self._tracker, method)(*arguments, **keywords)


class CSVBackend(MirrorBackend):
    """metrics.csv, config.json and a CSV file per table in a folder.

    Args:
        outdir: The folder; Quark's own store goes into it as well.
        rank: Of this process; not active where it is not 0.
    """

    def __init__(self, outdir: str | os.PathLike[str], rank: int = 0) -> None:
        folder = Path(outdir).expanduser().absolute()
        super().__init__("csv", f"csv:?publish={quote(str(folder))}")
        self.storage_dir = folder
        self.active = rank == 0


class WandbBackend(MirrorBackend):
    """The W&B mirror.

    Args:
        project_name: Project there; WANDB_PROJECT or the run's project by default.
        config: Configuration of the run.
        outdir: Where Quark's store goes, and W&B's files with it.
        rank: Of this process, found by itself where it is None; not active where it is not 0.
        kwargs: `mode`, `entity`, `group` and `job_type` as of `wandb.init`, and
            `tags`; anything else is W&B's own and has no effect.
    """

    def __init__(
        self,
        project_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        outdir: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        **kwargs: Any,
    ) -> None:
        options = {"project": project_name} if project_name else {}
        for option in _WANDB_OPTIONS:
            if kwargs.get(option) is not None:
                options[option] = str(kwargs[option])
        tags = kwargs.get("tags")
        if isinstance(tags, (list, tuple, set, frozenset)) and tags:
            options["tags"] = ";".join(sorted(map(str, tags)))
        super().__init__("wandb", f"wandb:?{urlencode(options)}" if options else "wandb")
        self.storage_dir = None if outdir is None else Path(outdir).expanduser().absolute()
        self.project_name, self.config = project_name, config
        self.active = _is_first(rank)


class MLflowBackend(MirrorBackend):
    """The MLflow mirror, at MLFLOW_TRACKING_URI.

    Args:
        project_name: The run's project, which is the experiment there, unless
            MLFLOW_EXPERIMENT_NAME says another one.
        config: Configuration of the run.
        outdir: Where Quark's store goes.
        rank: Of this process, found by itself where it is None; not active where it is not 0.
        kwargs: Those of `mlflow.start_run`; `setup_tracker` takes `run_name`, `tags` and
            `description` for the run's own, and the rest has no effect.
    """

    def __init__(
        self,
        project_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        outdir: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        **kwargs: Any,  # noqa: ARG002 - so that a call written for ezpz goes through
    ) -> None:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "").strip()
        options = urlencode({"experiment": experiment}) if experiment else ""
        super().__init__("mlflow", f"mlflow:?{options}" if options else "mlflow")
        self.storage_dir = None if outdir is None else Path(outdir).expanduser().absolute()
        self.project_name, self.config = project_name, config
        self.active = _is_first(rank)


def _is_first(rank: int | None) -> bool:
    return (detect_rank().rank if rank is None else rank) == 0
