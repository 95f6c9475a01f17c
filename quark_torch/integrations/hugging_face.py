"""A Transformers `TrainerCallback`: `Trainer(..., callbacks=[QuarkCallback(project="nlp")])`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from quark_core.sessions.session import TrainingSession
from quark_torch.integrations.framework_run import (
    STOP_EVERY_STEPS,
    FrameworkRun,
    find_end_status,
)

__all__ = ["QuarkCallback"]

_log = logging.getLogger("quark")
_STATE = "quark_run.json"


class QuarkCallback(TrainerCallback):
    """Logs what the `Trainer` logs, on the process of rank zero.

    The training arguments and the model's configuration become the run's
    configuration under `trainer` and `model`, `global_step` the step. Keys are
    `train/…`, `eval/…` and `test/…`, as in the Trainer's other callbacks. Each
    checkpoint is noted with its path and gets a file that names the run, so
    that `train(resume_from_checkpoint=…)` continues the run.

    A run that somebody has asked to stop (`quark stop`) ends as at its last step, with a
    checkpoint unless `save_strategy` is "no".

    A training that raises ends as failed when the process ends, or where the
    callback's `close` is called.

    Args:
        project: As in `quark.start_run`, as is every further argument. With
            `run_id` that run is resumed instead.
        session: A run that the caller has started and will end.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        session: TrainingSession | None = None,
        **arguments: Any,
    ) -> None:
        if project is not None:
            arguments["project"] = project
        elif session is None and "run_id" not in arguments:
            arguments["project"] = "transformers"
        self._run = FrameworkRun(session, arguments)

    @property
    def session(self) -> TrainingSession:
        """The session, for everything else that Quark can log."""
        return self._run.session

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the run, or continue the one that the checkpoint names."""
        del control
        if not state.is_world_process_zero:
            return
        if state.global_step > 0:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self._run.resume_from(_read_state(folder))
        config: dict[str, Any] = {"trainer": args.to_sanitized_dict()}
        model = kwargs.get("model")
        if getattr(model, "config", None) is not None:
            described = model.config  # type: ignore[union-attr]
            config["model"] = described if isinstance(described, dict) else described.to_dict()
        self._run.add_config(config)
        self._run.session  # noqa: B018 - it starts here

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop where somebody has asked for it, all processes at one step."""
        del kwargs
        if self._shall_stop(args, int(state.global_step)):
            control.should_training_stop = True
            control.should_save = control.should_save or _saves(args)

    def _shall_stop(self, args: Any, step: int) -> bool:
        if args.world_size <= 1:
            return self._run.is_to_stop
        if step % STOP_EVERY_STEPS or not torch.distributed.is_initialized():
            return False
        flag = torch.tensor(int(self._run.is_to_stop), device=args.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag.item())

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Log the numbers."""
        del args, control
        if not state.is_world_process_zero or not logs:
            return
        values = {_rename(key): value for key, value in logs.items() if key != "epoch"}
        epoch = logs.get("epoch", state.epoch)
        self._run.log(
            values, step=int(state.global_step), epoch=None if epoch is None else int(epoch)
        )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the checkpoint, and put the run's name into it."""
        del control, kwargs
        if not state.is_world_process_zero or not self._run.is_started:
            return
        step = int(state.global_step)
        folder = Path(args.output_dir) / f"checkpoint-{step}"
        self._run.log_event(
            "checkpoint_saved",
            {"path": str(folder), "best": str(state.best_model_checkpoint or "") == str(folder)},
            step=step,
        )
        try:
            text = json.dumps(self._run.session.state_dict(step=step))
            (folder / _STATE).write_text(text, encoding="utf-8")
        except OSError as error:
            _log.warning("checkpoint %s does not name its run: %s", folder, error)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run; what is evaluated afterwards continues it."""
        del args, control, kwargs
        if state.is_world_process_zero:
            self._run.end("completed")

    def close(self, error: BaseException | None = None) -> None:
        """End the run where `train` has raised: as failed, or interrupted by Ctrl-C."""
        self._run.end(find_end_status(error))


def _saves(args: Any) -> bool:
    strategy = args.save_strategy
    return str(getattr(strategy, "value", strategy)) != "no"


def _rename(key: str) -> str:
    # Not `train_…`: the mean loss of the whole training is no point of `train/loss`.
    for prefix in ("eval", "test"):
        if key.startswith(f"{prefix}_"):
            return f"{prefix}/{key.removeprefix(f'{prefix}_')}"
    return f"train/{key}"


def _read_state(folder: Path) -> Mapping[str, Any]:
    try:
        loaded = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
