"""A Transformers `TrainerCallback`: `Trainer(..., callbacks=[QuarkCallback(project="nlp")])`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from quark_core.api import TrainingSession
from quark_torch.integrations.framework_run import (
    STOP_EVERY_STEPS,
    FrameworkRun,
    NonFiniteCount,
    find_end_status,
)

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

    The `Trainer` takes losses that are not finite out of what it logs
    (`logging_nan_inf_filter`). They are counted here, in `train/non_finite_losses`; where all
    losses of a logged mean were such, `train/loss` is NaN, and so is `train/grad_norm` where all
    gradients were.

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
        self._run = FrameworkRun(session, arguments, project=project, framework="transformers")
        self._count = NonFiniteCount()
        self._has_found = False
        self._hook: Any = None

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
        model: Any = kwargs.get("model")
        if getattr(model, "config", None) is not None:
            described = model.config
            config["model"] = described if isinstance(described, dict) else described.to_dict()
        self._run.add_config(config)
        self._run.session  # noqa: B018 - it starts here
        self._leave_model()
        # A hook would have a compiled model compiled in pieces; its gradients are looked at.
        if isinstance(model, torch.nn.Module) and not getattr(args, "torch_compile", False):
            self._hook = model.register_forward_hook(self._see_output)

    def _see_output(self, model: torch.nn.Module, _: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._count.note_loss(output)

    def _leave_model(self) -> None:
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look whether the gradients are finite; the `Trainer` may clip none, and log none."""
        del args, control
        model = kwargs.get("model")
        if state.is_world_process_zero and isinstance(model, torch.nn.Module):
            self._count.note_gradients(model.parameters())

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
        if "loss" in logs:
            self._tell_non_finite(values, int(state.global_step))
        epoch = logs.get("epoch", state.epoch)
        self._run.log(
            values, step=int(state.global_step), epoch=None if epoch is None else int(epoch)
        )

    def _tell_non_finite(self, values: dict[str, Any], step: int) -> None:
        """Put into what is logged what the Trainer has taken out of it."""
        window = self._count.take()
        if not self._has_found and (window.bad_losses or window.bad_gradients):
            self._has_found = True
            message = (
                f"{window.bad_losses} of {window.losses} losses and {window.bad_gradients} of "
                f"{window.gradients} gradients are not finite. The loss that the Trainer logs "
                "does not show this, but train/non_finite_losses and train/non_finite_gradients do"
            )
            self._run.log_event("non_finite_loss", {"message": message}, step)
        if not self._has_found:
            return
        values["train/non_finite_losses"] = window.bad_losses
        values["train/non_finite_gradients"] = window.bad_gradients
        if 0 < window.losses == window.bad_losses:
            values["train/loss"] = math.nan
        if 0 < window.gradients == window.bad_gradients:
            values["train/grad_norm"] = math.nan

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
            _log.warning("checkpoint %s does not record its run: %s", folder, error)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run; what is evaluated afterwards continues it."""
        del args, control, kwargs
        self._leave_model()
        if state.is_world_process_zero:
            self._run.end("completed")

    def close(self, error: BaseException | None = None) -> None:
        """End the run where `train` has raised: as failed, or interrupted by Ctrl-C."""
        self._leave_model()
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
