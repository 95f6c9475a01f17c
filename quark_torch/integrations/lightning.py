"""A Lightning `Logger`: `Trainer(logger=QuarkLogger(project="vision"))`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from lightning.fabric.utilities.logger import _add_prefix, _convert_params
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ImportError:
    from lightning_fabric.utilities.logger import _add_prefix, _convert_params
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
    from pytorch_lightning.utilities.rank_zero import rank_zero_only

from quark_core.api import RunStatus, StopRequested, TrainingSession
from quark_torch.integrations.framework_run import STOP_EVERY_STEPS, FrameworkRun, NonFiniteCount

if TYPE_CHECKING:
    from argparse import Namespace


class QuarkLogger(Logger):
    """Logs what a Lightning module logs, on rank zero.

    Hyperparameters become the configuration, `global_step` the step, and the
    `epoch` that Lightning adds to each call the epoch. A run ends as
    completed, failed or interrupted; `Trainer.test` after `Trainer.fit`
    continues it. Where somebody has asked the run to stop (`quark stop`), the
    trainer's `should_stop` is set, and it ends as by early stopping.

    Args:
        project: As in `quark.start_run`, as is every further argument. With
            `run_id` that run is resumed instead.
        session: A run that the caller has started and will end.
        prefix: Put before each metric's key, with a slash.
        log_checkpoints: Whether each checkpoint is noted as an event, with its path.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        session: TrainingSession | None = None,
        prefix: str = "",
        log_checkpoints: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self._name = project or (session.project_name if session is not None else "lightning")
        self._storage_dir = arguments.get("storage_dir")
        self._prefix = prefix
        self._log_checkpoints = log_checkpoints
        self._noted: set[str] = set()
        self._run = FrameworkRun(session, arguments, project=project, framework="lightning")
        self._stopper = _Stopper(self._run)

    @property
    def name(self) -> str:
        """The project."""
        return self._name

    @property
    def version(self) -> str:
        """The run's id; "" on other ranks and before the run has begun."""
        return self._run.run_id or ""

    @property
    def save_dir(self) -> str | None:
        """The storage root, under which Lightning puts its checkpoints."""
        return str(Path(self._storage_dir or ".").resolve())

    @property
    @rank_zero_experiment  # type: ignore[untyped-decorator,unused-ignore]
    def experiment(self) -> TrainingSession:
        """The session, for everything else that Quark can log."""
        return self._run.session

    @rank_zero_only  # type: ignore[untyped-decorator,unused-ignore]
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Add to the run's configuration."""
        del args, kwargs
        self._run.add_config(_convert_params(params))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Take up the trainer, which Lightning names here, to stop it where that is asked for."""
        del input_array
        trainer = getattr(model, "_trainer", None)
        if trainer is not None and self._stopper not in trainer.callbacks:
            trainer.callbacks.append(self._stopper)

    @rank_zero_only  # type: ignore[untyped-decorator,unused-ignore]
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics at a step; the entry `epoch` is the epoch."""
        values = dict(metrics)
        epoch = values.pop("epoch", None)
        named = _add_prefix(values, self._prefix, "/") if self._prefix else values
        at_epoch = None if epoch is None else int(epoch)
        if step is None and at_epoch is None:
            at_epoch = 0
        named = {**named, **self._stopper.take_non_finite(self._prefix)}
        self._run.log(named, step=step, epoch=at_epoch)

    @rank_zero_only  # type: ignore[untyped-decorator,unused-ignore]
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Note the checkpoints that are new, each with its path."""
        if not self._log_checkpoints or not self._run.is_started:
            return
        best = str(checkpoint_callback.best_model_path or "")
        last = str(getattr(checkpoint_callback, "last_model_path", "") or "")
        paths = [*checkpoint_callback.best_k_models, best, last]
        for path in dict.fromkeys(filter(None, map(str, paths))):
            if path not in self._noted:
                self._noted.add(path)
                score = checkpoint_callback.best_k_models.get(path)
                payload = {
                    "path": path,
                    "best": path == best,
                    "monitor": checkpoint_callback.monitor,
                    "score": None if score is None else float(score),
                }
                self._run.log_event("checkpoint_saved", payload)

    @rank_zero_only  # type: ignore[untyped-decorator,unused-ignore]
    def save(self) -> None:
        """Bring what was logged to the journal."""
        self._run.flush()

    @rank_zero_only  # type: ignore[untyped-decorator,unused-ignore]
    def finalize(self, status: str) -> None:
        """End the run as Lightning's loop has ended."""
        self._run.end(_find_status(status))


class _Stopper(Callback):
    """Stops the trainer where somebody has asked for it, on all ranks at one step.

    It also counts losses and gradients that are not finite: a module may log neither.
    """

    def __init__(self, run: FrameworkRun) -> None:
        super().__init__()
        self._run = run
        self._count = NonFiniteCount()
        self._has_found = False

    def take_non_finite(self, prefix: str) -> dict[str, float]:
        """What was counted since the last call, as metrics; nothing until something was found."""
        window = self._count.take()
        self._has_found = self._has_found or bool(window.bad_losses or window.bad_gradients)
        if not self._has_found:
            return {}
        above = f"{prefix}/train" if prefix else "train"
        found: dict[str, float] = {
            f"{above}/non_finite_losses": window.bad_losses,
            f"{above}/non_finite_gradients": window.bad_gradients,
        }
        if 0 < window.gradients == window.bad_gradients:
            found[f"{above}/grad_norm"] = math.nan
        return found

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Look whether the gradients are finite."""
        del pl_module
        if trainer.is_global_zero:
            groups = optimizer.param_groups
            self._count.note_gradients(one for group in groups for one in group["params"])

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *__: Any, **___: Any) -> None:
        """Look, which on a single rank costs nothing."""
        if trainer.is_global_zero:
            self._count.note_loss(outputs)
        shall = self._run.is_to_stop
        if trainer.world_size > 1:
            if trainer.fit_loop.total_batch_idx % STOP_EVERY_STEPS:
                return
            shall = trainer.strategy.reduce_boolean_decision(shall, all=False)
        if shall:
            trainer.should_stop = True


def _find_status(status: str) -> RunStatus:
    if isinstance(sys.exc_info()[1], (KeyboardInterrupt, StopRequested)) or status == "aborted":
        return "interrupted"
    return "completed" if status in ("success", "finished") else "failed"
