"""One call for everything: layers, parameters, FLOPs and telemetry of a training loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from quark_core.api import (
    InvalidRunStateError,
    OpenRun,
    StepRates,
    StepTelemetryScope,
    SystemTelemetry,
    SystemTelemetryConfig,
    find_next_step,
    resolve_target,
    spell_out,
)
from quark_torch.checks import check_flags, take_step
from quark_torch.failures import InstrumentationNotices, do_each
from quark_torch.instruments.instrument import Instrument, InstrumentSet
from quark_torch.layer_filter import LayerFilterConfig, name_modules
from quark_torch.layers.config import HookEngineConfig
from quark_torch.layers.hook_engine import HookEngine
from quark_torch.parameters.config import ParameterDiagnosticsConfig
from quark_torch.parameters.diagnostics import ParameterDiagnostics
from quark_torch.parameters.listing import hold_parameters, list_optimizers
from quark_torch.parameters.optimizers import OptimizerPace, list_foreign
from quark_torch.schedule import HookScheduleConfig

# What has no use any more, and cannot leave PyTorch's hooks while it goes through them.
_left: list[Any] = []


class Watching(Protocol):
    """What has its steps counted, as far as that must know it: a `TrainingWatch`."""

    parameters: ParameterDiagnostics | None

    @property
    def optimizer(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that are followed now."""

    def close(self) -> None:
        """End everything."""


class StepCounter:
    """Begins and ends the steps of a watch where its optimizers step, until the loop does.

    A step of the loop ends with its optimizer's step. Of several optimizers it ends with the last
    of those that step in turn; where one steps more often than others, with that one's. So
    micro-batches are parts of a step, and one that a GradScaler leaves out is none.

    It holds its watch, which nobody else may, until the run ends or the loop counts by itself.

    Args:
        watch: The watch.
        turn: Called with the number of each step that begins, as the one before it ends.
        model: Its model, whose optimizers count where none was named.
        run: The run.
    """

    def __init__(
        self, watch: Watching, turn: Callable[[int], None], model: nn.Module, run: OpenRun
    ) -> None:
        self._watch: Watching | None = watch
        self._turn: Callable[[int], None] | None = turn
        self._model = weakref.ref(model)
        self._run = run
        self._number: int | None = None
        self._stepped: set[int] = set()
        self._lead: int | None = None
        self._totals: list[int] = []
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._is_asked = False
        _clear_left()
        self._handle = register_optimizer_step_post_hook(self._see)
        run.writers.add(self)

    def bind(self) -> None:
        """Nothing is bound to the run's stream."""

    def settle(self) -> None:
        """The run ends, and nobody may have closed the watch."""
        watch = self._watch
        if watch is not None:
            watch.close()

    def leave(self) -> bool:
        """Count no more; returns whether a step was begun."""
        if self._watch is not None:
            self._watch = self._turn = None
            _left.append(self._handle)
            if not self._is_asked:
                _clear_left()
        return self._number is not None

    def _see(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        """An optimizer of the process has stepped."""
        watch, turn = self._watch, self._turn
        # A compiled step would be broken into pieces by it.
        if watch is None or turn is None or torch.compiler.is_compiling():
            return
        self._is_asked = True
        try:
            if self._run.is_over:
                self.leave()
            elif self._ends_step(watch, optimizer):
                number = find_next_step(self._run) if self._number is None else self._number
                self._number = number + 1
                turn(self._number)
        finally:
            self._is_asked = False

    def _ends_step(self, watch: Watching, optimizer: torch.optim.Optimizer) -> bool:
        named = watch.optimizer or tuple(one for one in self._known if self._known[one])
        totals = [] if watch.parameters is None else list(watch.parameters.step_totals)
        if totals:
            # Of a wrapper and what it wraps it is told there which step is the step.
            before = [*self._totals, *(0 for _ in totals)]
            self._totals = totals
            stepped = [one for one, *n in zip(named, totals, before, strict=False) if n[0] != n[1]]
            if not stepped:
                return False
            optimizer = stepped[0]
        elif optimizer not in named and (watch.optimizer or not self._is_own(optimizer)):
            return False
        own = {id(one) for one in (*named, optimizer)}
        key = id(optimizer)
        if self._lead is None or self._lead not in own:
            self._lead = None
            if len(own) == 1:
                return True
        if key == self._lead or key in self._stepped or self._stepped | {key} >= own:
            if key in self._stepped:
                # It does not wait for the others, and its first step was counted with none.
                self._lead, self._number = key, (self._number or 0) + (self._lead is None)
            self._stepped.clear()
            return True
        self._stepped.add(key)
        return False

    def _is_own(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._known.get(optimizer)
        if known is None:
            model = self._model()
            own = set() if model is None else {id(each) for each in model.parameters()}
            known = self._known[optimizer] = not own.isdisjoint(hold_parameters(optimizer))
        return known


def _clear_left() -> None:
    while _left:
        _left.pop().remove()


# The first steps warm up what is compiled or chosen at run time.
_COUNTED_STEP = 2
# Where every step is probed, one of them is counted all the same.
_LAST_STEP = 8


class _FlopMode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch says no types
    """Adds up the FLOPs of matrix products, convolutions and attention that run below it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=out))
        return out


def count_flops(function: Callable[[], Any]) -> int:
    """Count the FLOPs of matrix products, convolutions and attention in a function.

    The backward pass is included. A multiply-add counts as two. The formulas are those of
    `torch.utils.flop_counter`. Recomputed activations count again. Compiled code is not seen.

    Args:
        function: Function that runs one step. Call `count_flops` once, outside the loop.

    Returns:
        The number of FLOPs, or 0 if none of these operations ran.

    Example:
        quark.count_flops(lambda: model(x).sum().backward())
    """
    mode = _FlopMode()
    with mode:
        function()
    return mode.flops


class StepFlops:
    """Counts one early step of a loop, and from then on knows what a step does.

    Args:
        model: The model; where a part of it is compiled nothing is counted.
        notices: Who tells.
    """

    def __init__(self, model: nn.Module, notices: InstrumentationNotices) -> None:
        self._notices = notices
        self._mode: _FlopMode | None = None
        self._steps = 0
        self._flops: float | None = None
        self._is_done = any(place.is_compiled for place in name_modules(model))
        if self._is_done:
            self._tell("the model is compiled, so its operations cannot be counted")

    def __call__(self) -> float | None:
        """FLOPs of a step; None as long as that is not known."""
        return self._flops

    def begin_step(self, *, is_probed: bool) -> None:
        """Count this step, where it is the one."""
        self.end_step()
        if self._is_done:
            return
        self._steps += 1
        if self._steps < _COUNTED_STEP or (is_probed and self._steps < _LAST_STEP):
            return
        if torch.compiler.is_compiling():
            return
        self._is_done = True
        try:
            mode = _FlopMode()
            mode.__enter__()  # type: ignore[no-untyped-call]
            self._mode = mode
        except Exception as error:  # noqa: BLE001 - training goes on without
            self._notices.fail("counting FLOPs", error)

    def end_step(self) -> None:
        """End the step that is counted."""
        mode, self._mode = self._mode, None
        if mode is None:
            return
        try:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - training goes on without
            self._notices.fail("counting FLOPs", error)
            return
        if mode.flops:
            self._flops = float(mode.flops)
        else:
            self._tell("the counted step had no matrix product, convolution or attention")

    def _tell(self, reason: str) -> None:
        self._notices.warn(
            "flops_not_counted",
            f"the FLOPs of a step are unknown: {reason}. Pass flops_per_step as a number, or "
            "flops_per_token",
        )


class TrainingWatch:
    """Instrumentation of a training loop, returned by `quark.watch`.

    Attributes:
        hooks: The HookEngine, or None.
        parameters: The ParameterDiagnostics, or None.
        telemetry: The SystemTelemetry, or None.
    """

    def __init__(
        self,
        run: OpenRun,
        hooks: HookEngine | None,
        parameters: ParameterDiagnostics | None,
        telemetry: SystemTelemetry | None,
        pace: OptimizerPace,
        instruments: InstrumentSet | None = None,
        flops: StepFlops | None = None,
        *,
        model: nn.Module,
    ) -> None:
        self.hooks = hooks
        self.parameters = parameters
        self.telemetry = telemetry
        self._pace = pace
        self._instruments = instruments
        self._flops = flops
        if hooks is not None:
            hooks.follow(pace.probes)
            if parameters is not None:
                parameters.finder.lead(hooks.finder)
        self._run = run
        self._notices = InstrumentationNotices(run, "TrainingWatch")
        self._closed = False
        self._named: tuple[torch.optim.Optimizer, ...] | None = None
        self._step: int | None = None
        self._epoch: int | None = None
        self._metadata: Mapping[str, Any] | None = None
        self._scope: StepTelemetryScope | None = None
        self._counter: StepCounter | None = StepCounter(self, self._turn, model, run)

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"TrainingWatch({self._run.context.describe()}{closed})"

    @property
    def optimizer(self) -> Any:
        """Followed optimizers, as a tuple; assign new ones if they are replaced.

        A new optimizer is also detected at its first step, unless that step is compiled.

        Raises:
            SchemaValidationError: The assigned value is not an optimizer.
        """
        if self._named is not None:
            return self._named
        parts = [part for part in (self.parameters, self.hooks) if part is not None]
        return parts[0].optimizer if parts else ()

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._named = list_optimizers(optimizer)
        # What is still to be said of this step is of those that have stepped in it.
        if self.parameters is None or not self.parameters.has_stepped:
            self._follow_named()

    def step(
        self, step: int, *, epoch: int | None = None, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Begin a training step and end the previous one; the first line of the loop body.

        If the loop does not call it, the optimizer's steps count, from the second on.

        Parameters are recorded when a step ends, after the optimizer step and before the next
        `zero_grad`. With gradient accumulation, they are recorded in the first later step in which
        the optimizer steps.

        Args:
            step: Step.
            epoch: Epoch, or None.
            metadata: JSON values for the records of telemetry and parameters.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            InvalidRunStateError: The watch is closed or the run has ended.
        """
        if self._closed:
            raise InvalidRunStateError("step: this watch is closed")
        checked = take_step(self._run, step)
        self._stop_counting()
        self._end_step()
        self._begin_step(checked, epoch, metadata)

    def _turn(self, step: int) -> None:
        """An optimizer has ended a step of a loop that counts none itself: begin the next one.

        What fails is told of by an event; in strict mode it is raised.

        Args:
            step: Its number.
        """
        # A halt is for the loop's own call, and not for the optimizer's.
        if self._closed or self._run.refusal is not None:
            return
        try:
            if self._step is None:
                # Those that came before were not looked at, so that something is due now.
                self._pace.skip(step)
            self._end_step()
            self._begin_step(step, None, None)
        except Exception as error:  # noqa: BLE001 - the user's step must go on
            self._stop_counting()
            self._notices.fail("counting steps", error)

    def _stop_counting(self) -> None:
        """Leave the steps to the loop; one that was begun for it is none, and says nothing."""
        counter, self._counter = self._counter, None
        if counter is None or not counter.leave() or self._step is None:
            return
        self._step = self._scope = None
        if self._flops is not None:
            self._flops.end_step()
        if self._instruments is not None:
            self._instruments.end_step()
        if self.hooks is not None:
            self.hooks.drop_step()

    def _begin_step(self, checked: int, epoch: int | None, metadata: Any) -> None:
        self._step, self._epoch, self._metadata = checked, epoch, metadata
        if self.telemetry is not None:
            self._scope = self.telemetry.start_step(checked, epoch=epoch, metadata=metadata)
        is_probed = False
        if self.hooks is not None:
            is_probed = self.hooks.begin_step(checked, epoch=epoch)
        elif self._instruments is not None or self._flops is not None:
            is_probed = self._pace.probes(checked)
        if self._instruments is not None and is_probed:
            self._instruments.begin_step(checked, epoch)
        if self._flops is not None:
            self._flops.begin_step(is_probed=is_probed)

    def count(
        self,
        *,
        tokens: float | None = None,
        samples: float | None = None,
        flops: float | None = None,
    ) -> None:
        """Add the amount of work of the step in this process, for telemetry rates.

        Args:
            tokens, samples, flops: Amounts, or None.

        Raises:
            SchemaValidationError: An amount is not a finite non-negative number. The message names
                it.
        """
        if self._scope is not None:
            self._scope.count(tokens=tokens, samples=samples, flops=flops)

    def mark_data_ready(self) -> None:
        """Mark that the batch is on its device; the time before counts as data time."""
        if self._scope is not None:
            self._scope.mark_data_ready()

    def close(self) -> None:
        """End the last step and remove the instrumentation; a second call does nothing.

        A failure is logged as `instrumentation_failed` and does not affect the run.

        Raises:
            Exception: In strict mode, the first failure, after everything is closed.
        """
        if self._closed:
            return
        self._closed = self._pace.is_last = True
        failure = do_each(self._stop_counting, self._end_step, *self._close_parts())
        if failure is not None:
            self._notices.fail("close", failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        if self._closed:
            return
        # A step that was broken off says nothing of its parameters.
        self._closed = True
        self._step = None
        failure = do_each(self._stop_counting, *self._close_parts())
        if failure is not None:
            # In a strict run too: the user's exception must not be replaced by ours.
            do_each(partial(self._notices.fail, "close", failure))

    def _end_step(self) -> None:
        """Do what is left of the step that was begun last, each part whatever the others raise."""
        if self._step is None:
            return
        step, self._step = self._step, None
        scope, self._scope = self._scope, None
        try:
            if self._flops is not None:
                self._flops.end_step()
            if self._instruments is not None:
                self._instruments.end_step()
        finally:
            self._end_parts(step, scope)

    def _end_parts(self, step: int, scope: StepTelemetryScope | None) -> None:
        try:
            if self.hooks is not None:
                self.hooks.end_step()
        finally:
            try:
                if self.parameters is None:
                    self._pace.end(step, (), bool)
                else:
                    self.parameters.keep_pace(
                        self._pace, step, epoch=self._epoch, metadata=self._metadata
                    )
            finally:
                if self._named is not None:
                    self._follow_named()
                if scope is not None:
                    scope.finish()

    def _follow_named(self) -> None:
        if self._named is None:
            return
        named, self._named = self._named, None
        for part in (self.hooks, self.parameters):
            if part is not None:
                part.optimizer = named

    def _close_parts(self) -> list[Callable[[], object]]:
        parts = (self._instruments, self.hooks, self.parameters, self.telemetry)
        ends = [] if self._flops is None else [self._flops.end_step]
        return [*ends, *(part.close for part in parts if part is not None)]


@spell_out(StepRates, before="extras")
def watch(
    session: object,
    model: nn.Module,
    optimizer: Any | Sequence[Any] | None = None,
    *,
    every_n_steps: int = 50,
    layers: bool = True,
    parameters: bool = True,
    distributions: bool = False,
    telemetry: bool = True,
    include_types: Sequence[str] = (),
    include_name_patterns: Sequence[str] = (),
    include_eval: bool = False,
    grad_scaler: Any = None,
    extras: Sequence[Instrument] = (),
    **rates: Unpack[StepRates],
) -> TrainingWatch:
    """Record layer, parameter and system statistics of a PyTorch training loop.

    Call `watch.step(step)` as the first line of the loop body. Every `every_n_steps` steps,
    activations, gradients, weights and updates are summarized. They are read in a step in which the
    optimizer steps, so with gradient accumulation they may come a few micro-batches later.

    Args:
        session: A TrainingSession, or its RunContext.
        model: Model to train.
        optimizer: Optimizer or optimizers. Those of other models are reported by an event. A new
            optimizer is detected, or assigned with `watch.optimizer = …`.
        every_n_steps: Interval in steps. Defaults to 50. If the loop skips a multiple, layers and
            parameters are sampled at the next step.
        layers: Whether to summarize activations and gradients of layers. Defaults to True.
        parameters: Whether to summarize weights, gradients and updates of parameters. Defaults to
            True.
        distributions: Whether to record histograms of parameters. Defaults to False.
        telemetry: Whether to time steps and read system metrics. Defaults to True.
        include_types, include_name_patterns: Layers to record, as in `LayerFilterConfig`. Defaults
            to all.
        include_eval: Whether to also summarize layers in `eval()` mode or without gradients.
            Defaults to False.
        grad_scaler: GradScaler in use, or a function that returns its scale. Gradients are divided
            by the scale. If omitted, it is detected at its first step. A `grad_scaler_found` event
            reports layers that were sampled before.
        extras: Custom collectors, such as `quark.RouterLoad()`.
        tokens_per_step, samples_per_step, flops_per_token, precision, peak_flops_per_s: See
            `SystemTelemetry`. `watch.count(tokens=…)` sets the amount per step.
        flops_per_step: See `SystemTelemetry`. "model" counts the FLOPs once, in an early step that
            is not sampled.

    Returns:
        The watch, which is also a context manager.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.

    Example:
        with quark.watch(session, model, optimizer, every_n_steps=50) as watch:
            for step, batch in enumerate(loader):
                watch.step(step)
    """
    check_flags(layers=layers, parameters=parameters, distributions=distributions)
    check_flags(telemetry=telemetry, include_eval=include_eval)
    schedule = HookScheduleConfig(every_n_steps=every_n_steps)
    engine = diagnostics = sampled = instruments = flops = None
    # What was made is closed where the next part cannot be made.
    with ExitStack() as made:
        if layers:
            chosen: Any = {
                "include_types": include_types,
                "include_name_patterns": include_name_patterns,
            }
            config = HookEngineConfig(
                schedule=schedule,
                filters=LayerFilterConfig(**chosen),
                grad_scaler=grad_scaler,
                include_eval=include_eval,
            )
            # Those of other models are told of once, by who looks at parameters.
            hooked = _list_own(model, optimizer) if parameters else optimizer
            engine = HookEngine(session, model, hooked, config=config)
            made.callback(engine.close)
        if parameters:
            seen = ParameterDiagnosticsConfig(
                schedule=schedule,
                capture_distributions=distributions,
                distribution_types=("value", "gradient", "update"),
                grad_scaler=grad_scaler,
            )
            diagnostics = ParameterDiagnostics(session, model, optimizer, config=seen)
            made.callback(diagnostics.close)
        if telemetry:
            sampling = SystemTelemetryConfig(sample_every_n_steps=every_n_steps)
            if rates.get("flops_per_step") == "model":
                notices = InstrumentationNotices(resolve_target(session), "TrainingWatch")
                flops = rates["flops_per_step"] = StepFlops(model, notices)
            sampled = SystemTelemetry(session, config=sampling, **rates)  # type: ignore[arg-type]
            made.callback(sampled.close)
        if extras:
            instruments = InstrumentSet(session, model, extras)
        pace = OptimizerPace(every_n_steps)
        made.pop_all()
    run = resolve_target(session)
    return TrainingWatch(run, engine, diagnostics, sampled, pace, instruments, flops, model=model)


def _list_own(model: object, optimizer: Any) -> Any:
    """The optimizers but for those of other models; as they are given where there is no model."""
    if not isinstance(model, nn.Module):
        return optimizer
    given = list_optimizers(optimizer)
    foreign = [one for _, one in list_foreign(model, given)]
    return [one for one in given if one not in foreign]
