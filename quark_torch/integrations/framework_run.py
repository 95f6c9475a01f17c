"""A run that a framework's loop logs to: started at its first use, continued after its end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from quark_core.api import (
    EventLogger,
    MetricsLogger,
    RunStatus,
    SchemaValidationError,
    StopRequested,
    TrainingSession,
    choose_objective,
    keep_objective,
    read_config,
    to_float,
)
from quark_torch.parameters.listing import take_local

_log = logging.getLogger("quark")

STOP_EVERY_STEPS = 20
"""Processes that train together agree this often whether to stop: all of them at one step."""


class FrameworkRun:
    """Starts a run when something is logged, and ends what it has started.

    A framework says what it has in its own order: some configuration before
    the first step, some later, a test after the training's end. Configuration
    that comes before the run's start is part of the start, later one is added.
    What is logged after the end continues the run as a new attempt.

    Args:
        session: A run that the caller has started and will end; None starts one.
        arguments: What `quark.start_run` takes. With `run_id` among them,
            that run is resumed instead, and `storage_dir`, `backends`,
            `from_step` and `state` are what it may have besides.
        project: The run's project, where one is given.
        framework: The project of a run that has none.
    """

    def __init__(
        self,
        session: TrainingSession | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        project: str | None = None,
        framework: str | None = None,
    ) -> None:
        self._arguments = dict(arguments or {})
        if project is None and session is None and "run_id" not in self._arguments:
            project = framework
        if project is not None:
            self._arguments["project"] = project
        if session is not None and self._arguments:
            given = ", ".join(sorted(self._arguments))
            raise SchemaValidationError(f"session has already started, so {given} cannot be set")
        self._session = session
        self._is_own = session is None
        self._config: dict[str, Any] = {}
        self._metrics: MetricsLogger | None = None
        self._told: set[str] = set()
        if session is None:
            self._config.update(_flatten(self._arguments.pop("config", None)))
        else:
            self._take_stored(session)

    @property
    def is_started(self) -> bool:
        """Whether there is a run already."""
        return self._session is not None

    @property
    def run_id(self) -> str | None:
        """The run's id; None before it has begun. Continues nothing."""
        return None if self._session is None else self._session.run_id

    @property
    def is_to_stop(self) -> bool:
        """Whether somebody has asked the run to stop; False where it does not go on here."""
        session = self._session
        return (
            session is not None
            and session.stop_requested is not None
            and session.status == "running"
        )

    @property
    def session(self) -> TrainingSession:
        """The run's session, started or continued where it has to be.

        Raises:
            QuarkError: As `quark.start_run` and `quark.resume_run`.
        """
        if self._session is None:
            self._session = self._start()
        elif self._is_own and self._session.status != "running":
            assert self._session.run_id is not None
            _log.info("run %s continues as a new attempt", self._session.run_id)
            where: dict[str, Any] = {
                name: self._arguments[name]
                for name in ("storage_dir", "backends", "on_stop")
                if name in self._arguments
            }
            self._session = TrainingSession.resume_run(
                run_id=self._session.run_id, reopen=True, **where
            )
            self._metrics = None
        return self._session

    def resume_from(self, state: Mapping[str, Any]) -> None:
        """Continue the run that a checkpoint names, if no run was begun and none was asked for."""
        if self._session is None and "run_id" not in self._arguments and state.get("run_id"):
            kept_names = ("storage_dir", "backends", "on_stop")
            kept = {k: v for k, v in self._arguments.items() if k in kept_names}
            self._arguments = {**kept, "run_id": state["run_id"], "state": state}

    def add_config(self, values: object) -> None:
        """Add to the run's configuration; the newest value of a key counts.

        Args:
            values: Whatever `quark.start_run` takes as `config`.
        """
        added = _flatten(values)
        if all(name in self._config and self._config[name] == added[name] for name in added):
            return
        self._config.update(added)
        if self.is_started:
            run = self.session.open_run
            run.emit_lifecycle("config", read_config(self._config).to_data())

    def log(
        self, values: Mapping[str, Any], *, step: int | None = None, epoch: int | None = None
    ) -> None:
        """Log the numbers among some values; what is none is told of once, by name, and left out.

        Args:
            values: Key -> number, a tensor of one element included.
            step, epoch: At least one of the two.
        """
        numbers = {}
        for key, value in values.items():
            try:
                numbers[str(key)] = to_float(value, str(key), "log")
            except SchemaValidationError:
                numbers.update(self._read_single(str(key), value))
        if numbers:
            self._writer.log_many(numbers, step=step, epoch=epoch)

    def log_event(
        self, event_type: str, payload: Mapping[str, Any], step: int | None = None
    ) -> None:
        """Note what happened, such as a checkpoint and where it lies."""
        EventLogger(self.session).log(event_type, payload=payload, step=step)

    def flush(self) -> None:
        """Bring what was logged to the journal; never raises for delivery."""
        if self._session is not None and self._session.status == "running":
            self._session.flush("journaled")

    def end(self, status: RunStatus) -> None:
        """End the run, where it was started here and goes on."""
        if self._session is None or self._session.status != "running":
            return
        if self._is_own:
            self._session.end_run(status)
        else:
            self.flush()

    @property
    def _writer(self) -> MetricsLogger:
        session = self.session
        if self._metrics is None:
            self._metrics = MetricsLogger(session)
        return self._metrics

    def _start(self) -> TrainingSession:
        if "run_id" in self._arguments:
            session = TrainingSession.resume_run(**self._arguments)
            config, self._config = self._config, {}
            self._session = session
            self._take_stored(session)
            if config:
                self.add_config(config)
            return session
        # What is added to the configuration later takes the place of all of it.
        named = choose_objective(self._arguments.get("objective"), self._arguments.get("mode"))
        if named is not None:
            self._config = dict(keep_objective(read_config(self._config), named).values)
        return TrainingSession.start_run(config=self._config or None, **self._arguments)

    def _take_stored(self, session: TrainingSession) -> None:
        """Begin with the configuration that the run has, since a newer one takes its place."""
        reader = session.open_run.reader
        if reader is not None and session.run_id is not None:
            known = reader.load_run(session.run_id).config
            self._config.update({} if known is None else known.values)

    def _read_single(self, key: str, value: Any) -> dict[str, float]:
        """The number in a tensor of one element, or a truth value; nothing of anything else."""
        if isinstance(value, bool):
            return {key: float(value)}
        if getattr(value, "size", None) is not None and hasattr(value, "item"):
            try:
                return {key: to_float(value.item(), key, "log")}
            except (SchemaValidationError, RuntimeError, ValueError, TypeError):
                pass
        if key not in self._told:
            self._told.add(key)
            _log.warning("%s is %s, not a number, so it is not logged", key, type(value).__name__)
        return {}


def find_end_status(error: BaseException | None) -> RunStatus:
    """How a run ends whose training has raised an error, or has not."""
    if error is None:
        return "completed"
    return "interrupted" if isinstance(error, (KeyboardInterrupt, StopRequested)) else "failed"


def _flatten(values: object) -> dict[str, Any]:
    return {} if values is None else dict(read_config(values).values)


class NonFiniteWindow(NamedTuple):
    """What was seen since the last window, in this process."""

    losses: int
    bad_losses: int
    gradients: int
    bad_gradients: int


class NonFiniteCount:
    """Counts on the device, and waits for it only where a window is taken."""

    def __init__(self) -> None:
        self._seen = [0, 0]
        # Of losses and of gradients: device -> how many were bad, on that device.
        self._bad: list[dict[torch.device, torch.Tensor]] = [{}, {}]

    def note_loss(self, output: object) -> None:
        """A forward pass has ended with this: a loss, or what has one as a model gives it."""
        loss = _find_loss(output)
        if loss is not None:
            self._note(0, ~loss.detach().isfinite().all())

    def note_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """An optimizer is about to step on these; of sharded ones the local part is looked at."""
        alike: dict[torch.device, list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is None or parameter.grad.layout is not torch.strided:
                continue
            local = take_local(parameter.grad)[0].detach()
            if local.numel():
                alike.setdefault(local.device, []).append(local)
        flags = [
            # The largest element overflows in no number format, as another norm may.
            ~torch.stack([norm.float() for norm in torch._foreach_norm(group, torch.inf)])
            .isfinite()
            .all()
            for group in alike.values()
        ]
        if flags:
            self._note(1, torch.stack([flag.to(flags[0].device) for flag in flags]).any())

    def take(self) -> NonFiniteWindow:
        """What was seen since the last call."""
        seen, self._seen = self._seen, [0, 0]
        bad, self._bad = self._bad, [{}, {}]
        found = [sum(int(count.item()) for count in each.values()) for each in bad]
        return NonFiniteWindow(seen[0], found[0], seen[1], found[1])

    def _note(self, kind: int, is_bad: torch.Tensor) -> None:
        self._seen[kind] += 1
        bad, one = self._bad[kind], is_bad.long()
        known = bad.get(one.device)
        bad[one.device] = one if known is None else known + one


def _find_loss(output: Any) -> torch.Tensor | None:
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, (tuple, list)):
        output = output[0] if output else None
        if isinstance(output, torch.Tensor) and output.ndim:
            return None  # logits, of a model that works out no loss
    elif not isinstance(output, torch.Tensor):
        output = getattr(output, "loss", None)
    is_loss = isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel()
    return take_local(output)[0] if is_loss else None
