"""The calls to MLflow that the mirror makes, each with its errors translated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from quark_backends.mlflow.errors import AlreadyExists, Missing, translate
from quark_backends.mlflow.metrics import Point
from quark_core.redaction import redact_text

__all__ = ["MlflowRun", "Server"]


class MlflowRun(NamedTuple):
    """A run as MLflow has it."""

    id: str
    active: bool
    params: Mapping[str, str]
    tags: Mapping[str, str]


class Server:
    """A tracking server or store, through `MlflowClient` and nothing global.

    Every method raises `BackendUnavailable` where it must be called again
    later, and `Refused` where MLflow will never take the call.

    Args:
        mlflow: The imported library.
        uri: Tracking URI.
    """

    def __init__(self, mlflow: ModuleType, uri: str) -> None:
        self.uri = redact_text(uri)
        self._entities: Any = mlflow.entities
        with self._translated():
            self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        _silence(self._client)

    def find_experiment(self, name: str) -> tuple[str, bool] | None:
        """Id of an experiment and whether it is active, or None where there is none."""
        with self._translated():
            found = self._client.get_experiment_by_name(name)
        return found and (found.experiment_id, found.lifecycle_stage == "active")

    def create_experiment(self, name: str) -> str | None:
        """Make an experiment; its id, or None where another process was faster."""
        try:
            with self._translated():
                return str(self._client.create_experiment(name))
        except AlreadyExists:
            return None

    def restore_experiment(self, experiment_id: str) -> None:
        """Take a deleted experiment back, with its runs."""
        with self._translated():
            self._client.restore_experiment(experiment_id)

    def find_run(self, experiment_id: str, quark_run_id: str, *, deleted: bool) -> MlflowRun | None:
        """The oldest run of an experiment that mirrors a run, or None.

        Args:
            experiment_id: The experiment.
            quark_run_id: The run that is mirrored.
            deleted: Whether a deleted one counts.
        """
        views = self._entities.ViewType
        with self._translated():
            found = self._client.search_runs(
                [experiment_id],
                f"tags.`quark.run_id` = '{quark_run_id}'",
                run_view_type=views.ALL if deleted else views.ACTIVE_ONLY,
                max_results=1,
                order_by=["attributes.start_time ASC"],
            )
        return _to_run(found[0]) if found else None

    def load_run(self, run_id: str) -> MlflowRun | None:
        """A run, deleted or not; None where there is none."""
        try:
            with self._translated():
                return _to_run(self._client.get_run(run_id))
        except Missing:
            return None

    def create_run(
        self, experiment_id: str, name: str, started_ms: int, tags: Mapping[str, str]
    ) -> MlflowRun:
        """Make a run, which is running."""
        with self._translated():
            return _to_run(
                self._client.create_run(
                    experiment_id, start_time=started_ms, tags=dict(tags), run_name=name
                )
            )

    def restore_run(self, run_id: str) -> None:
        """Take a deleted run back."""
        with self._translated():
            self._client.restore_run(run_id)

    def set_running(self, run_id: str) -> None:
        """Mark a run as running, whatever it was."""
        with self._translated():
            self._client.update_run(run_id, status="RUNNING")

    def set_ended(self, run_id: str, status: str, ended_ms: int) -> None:
        """Mark a run as ended."""
        with self._translated():
            self._client.set_terminated(run_id, status=status, end_time=ended_ms)

    def log_metrics(self, run_id: str, points: Sequence[Point]) -> None:
        """Store points; those that are there already stay as they are."""
        make = self._entities.Metric
        with self._translated():
            self._client.log_batch(
                run_id,
                metrics=[make(p.name, p.value, p.timestamp_ms, p.step) for p in points],
                synchronous=True,
            )

    def log_params(self, run_id: str, params: Sequence[tuple[str, str]]) -> None:
        """Store params, which cannot be changed later."""
        make = self._entities.Param
        with self._translated():
            self._client.log_batch(run_id, params=[make(*p) for p in params], synchronous=True)

    def set_tags(self, run_id: str, tags: Sequence[tuple[str, str]]) -> None:
        """Set tags, in place of what they were."""
        make = self._entities.RunTag
        with self._translated():
            self._client.log_batch(run_id, tags=[make(*t) for t in tags], synchronous=True)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise translate(error, self.uri) from error


def _to_run(found: Any) -> MlflowRun:
    return MlflowRun(
        str(found.info.run_id),
        found.info.lifecycle_stage == "active",
        dict(found.data.params),
        dict(found.data.tags),
    )


def _silence(client: Any) -> None:
    """Keep this client from printing where an ended run is to be seen.

    It prints before it sets the status, so a closed standard output, or one
    that takes no emoji, would keep the status from being set. MLflow 3 has a
    variable for it, which would silence the user's own runs as well.
    """
    tracking: Any = getattr(client, "_tracking_client", None)
    if hasattr(tracking, "_log_url"):
        tracking._log_url = lambda _run_id: None
