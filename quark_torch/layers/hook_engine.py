"""HookEngine: what the layers of a model give, and the gradients in them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import torch
from torch import nn

from quark_core.api import check_step
from quark_torch.checks import check_model, check_type, take_step
from quark_torch.failures import do_each
from quark_torch.layer_filter import (
    SelectedModule,
    list_types,
    name_modules,
    select_modules,
)
from quark_torch.layers.compiled_hooks import CompiledHooks
from quark_torch.layers.config import HookEngineConfig
from quark_torch.layers.eager_hooks import EvaluationWatch, ProbedStep
from quark_torch.layers.recording import (
    MAX_LISTED,
    GradientScale,
    LayerRecording,
    StepScale,
    read_gradient_scale,
)
from quark_torch.layers.watched_module import Site, UnitRule, find_saturation, find_unit_rules
from quark_torch.parameters.listing import list_optimizers
from quark_torch.parameters.optimizers import (
    OptimizerFinder,
    OptimizerMembership,
    describe_foreign,
    list_foreign,
)

_INT64_MAX = 2**63 - 1
_LISTED = 8
# Their records may be made later, by a device that is behind.
_KEPT_EVALUATIONS = 16


class HookEngine(LayerRecording):
    """Recorder of activation and gradient statistics of layers.

    Hooks are installed during sampled steps. In a compiled model they stay installed. With dropout
    or batch normalization, a hook on the model also detects evaluation between steps, which is
    recorded as `evaluation` in the metadata. The hooks do not change outputs or gradients, and do
    not keep tensors.

    A wrapped model (DDP, FSDP, `torch.compile`) is recorded under the names without the wrapper.
    Call `begin_step`, `end_step` and `step` from one thread. The model may be called from any
    thread.

    A failure is logged once as `instrumentation_failed` and disables the module concerned. It does
    not reach the training, unless `raise_on_error` is set.

    Attributes:
        finder: Detector of replaced optimizers and of a GradScaler.

    Args:
        session: A TrainingSession, or its RunContext.
        model: Model. Its modules are selected now.
        optimizer: Optimizer or optimizers. Modules with trainable parameters outside them are
            marked with `in_optimizer: false`. An optimizer without a parameter of the model is
            reported by an event.
        config: Options. Defaults to `HookEngineConfig()`.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
    """

    def __init__(
        self,
        session: object,
        model: nn.Module,
        optimizer: Any = None,
        *,
        config: HookEngineConfig | None = None,
    ) -> None:
        if config is None:
            config = HookEngineConfig()
        check_type(config, "config", HookEngineConfig)
        check_model(model)
        optimizers = list_optimizers(optimizer)
        self._config = config
        self._is_due: Callable[[int], bool] = config.schedule.is_due
        self._probed: ProbedStep | None = None
        # The last one that was probed, whose gradients may come too late.
        self._ended: tuple[int, Any] | None = None
        self._probes = 0
        self._is_closing = False
        self._overhead = Overhead()
        selected = select_modules(model, config.filters)
        rules = find_unit_rules(model)
        self._sites = [self._make_site(chosen, rules[id(chosen.module)]) for chosen in selected]
        self._membership = OptimizerMembership(optimizers)
        self._scaler = config.grad_scaler
        self.finder = OptimizerFinder(
            model,
            optimizers,
            self._membership.follow,
            self._take_scaler if config.grad_scaler is None else None,
        )
        # Of a wrapped model it is what is wrapped that has its mode set in any case.
        trained = next(place.module for place in name_modules(model))
        self._model = weakref.ref(model)
        self._trained = None if config.include_eval else weakref.ref(trained)
        self._evaluations = EvaluationWatch(
            trained, [(chosen.name, chosen.module) for chosen in selected]
        )
        self._first_parameter = next(model.parameters(), None)
        self._compiled: CompiledHooks | None = None
        super().__init__(session, batch_size=config.batch_size)
        raises = config.raise_on_error
        self._raises = self._run.strict if raises is None else raises
        try:
            self._instrument(model, selected)
        except Exception:
            # The run counts its writers.
            do_each(self.finder.detach, self._remove_compiled, super().close)
            raise

    def _instrument(self, model: nn.Module, selected: Sequence[SelectedModule]) -> None:
        """Begin to look at the model and its optimizers, and tell what is odd about them."""
        config = self._config
        self.finder.attach()
        is_compiled = [
            chosen.is_compiled if config.compiled is None else config.compiled
            for chosen in selected
        ]
        pairs = list(zip(self._sites, is_compiled, strict=True))
        self._eager = [site for site, is_it in pairs if not is_it]
        later = [site for site, is_it in pairs if is_it]
        if later:
            self._compiled = CompiledHooks(
                self,
                later,
                forward=config.capture_forward,
                backward=config.capture_backward,
                trained=self._trained,
            )
            # A hook on a compiled model would have it compiled again.
            self._evaluations.end()
        if self._evaluations.is_waiting:
            self.finder.on_step = self._note_optimizer_step
        self._warn_of_setup(model, has_parameters=self._first_parameter is not None)

    @property
    def instrumented_module_names(self) -> tuple[str, ...]:
        """Names of the recorded modules in model order, without prefixes of wrappers."""
        return tuple(site.name for site in self._sites)

    @property
    def optimizer(self) -> Any:
        """Followed optimizers, as a tuple; assign new ones if they are replaced.

        A new optimizer is also detected at its first step, unless that step is compiled.

        Raises:
            SchemaValidationError: The assigned value is not an optimizer.
        """
        return tuple(self.finder.optimizers)

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self.finder.name(list_optimizers(optimizer))

    def should_probe(self, step: int) -> bool:
        """Return whether a step is sampled.

        Args:
            step: Step.

        Raises:
            SchemaValidationError: `step` is not a non-negative integer.
        """
        return self._is_due(take_step(self._run, step, _NO_STEP))

    def follow(self, is_due: Callable[[int], bool]) -> None:
        """Use a function instead of the schedule to decide whether a step is sampled."""
        self._is_due = is_due

    def begin_step(self, step: int, *, epoch: int | None = None) -> bool:
        """Begin a step; if it is sampled, install the hooks until `end_step`.

        If the previous step is still open, it is ended with a `probe_left_open` event.

        Args:
            step: Step; it may decrease.
            epoch: Epoch, or None.

        Returns:
            Whether the step is sampled.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            InvalidRunStateError: The engine is closed or the run has ended.
        """
        if self._closed or self._run.refusal is not None:
            self._check_open("begin_step")
        if type(step) is not int or step < 0 or step > _INT64_MAX:
            step = take_step(self._run, step, _NO_STEP)
        if epoch is not None and (type(epoch) is not int or epoch < 0 or epoch > _INT64_MAX):
            epoch = check_step(epoch, "epoch")
        if self._probed is not None:
            self._end_left_open()
        if self._ended is not None:
            self._check_late_gradients()
        if self._evaluations.is_active:
            self._evaluations.begin_step(step)
        if self._compiled is not None:
            self._compiled.prepare(self._choose_device())
        if not self._is_due(step):
            return False
        # Where nothing is kept, as on the other ranks, the answer is the same: what a
        # caller does on it may be a collective.
        if self._run.stream.active:
            self._open_probe(step, epoch)
        return True

    def end_step(self) -> None:
        """End the step and remove the hooks; does nothing if no step is open."""
        probed = self._probed
        if probed is None:
            return
        began = perf_counter_ns()
        self._probed = None
        compiled = self._compiled
        try:
            if compiled is not None:
                compiled.close()
                compiled.collect(
                    probed.moment,
                    probed.scale,
                    self._check_compiled,
                    self._tell_of_late_gradients,
                )
        except Exception as error:
            self._tell_failure("reading what a compiled model wrote", error)
            if self._raises:
                raise
        finally:
            probed.close()
            self._tell_failures()
            self._tell_unread(probed.moment[0])
        self._ended = probed.moment[0], probed.tape
        self._evaluations.end_step()
        self._probes += 1
        self._tell_of_left_out(probed)
        if compiled is None and not probed.tape.calls and not self._is_closing:
            self._tell_of_no_calls(probed)
        if probed.measurements.dropped:
            self._tell(
                "probe_dropped",
                "warning",
                f"{probed.measurements.dropped} tensors of step {probed.moment[0]} were not "
                "measured, because the device was still busy with earlier ones",
            )
        self._overhead.end_probe(probed.tape.spent_ns + perf_counter_ns() - began)
        self._check_overhead()

    def drop_step(self) -> None:
        """Discard the open step: remove the hooks and record nothing more of it."""
        probed, self._probed = self._probed, None
        if probed is not None:
            if self._compiled is not None:
                self._compiled.close()
            probed.close()

    def step(self, step: int, *, epoch: int | None = None) -> _StepScope:
        """Return a context manager for a step: `begin_step`, then `end_step`.

        Its value is the result of `begin_step`.

        Args:
            step: Step; it may decrease.
            epoch: Epoch, or None.
        """
        return _StepScope(self, step, epoch)

    def settle(self) -> None:
        """Record pending measurements of a device, after a brief wait."""
        if self._compiled is not None:
            self._compiled.poll(must_wait=True)
        super().settle()

    def close(self) -> None:
        """Remove the hooks and accept no more steps; reading still works.

        Modules without a call in a sampled step are reported in one `modules_never_called` event. A
        second call does nothing.

        Raises:
            SessionStoreError: In strict mode, the primary store's first delivery error.
        """
        if self._closed:
            return
        # After others, a step that nothing was called in is one that never took place.
        self._is_closing = self._probes > 0
        failure = do_each(
            self.finder.detach,
            self.end_step,
            self._evaluations.end,
            self._check_late_gradients,
            self.settle,
            self._remove_compiled,
            self._tell_of_never_called,
        )
        if failure is not None:
            self._tell_failure("closing the HookEngine", failure)
        super().close()
        if failure is not None and self._raises:
            raise failure

    def _remove_compiled(self) -> None:
        if self._compiled is not None:
            self._compiled.remove()

    def _tell_of_never_called(self) -> None:
        never = [site.name for site in self._sites if site.is_missing]
        if self._probes and never and len(never) < len(self._sites):
            self._tell(
                "modules_never_called",
                "info",
                f"{len(never)} of {len(self._sites)} hooked modules were not called in a "
                "sampled training step, so they have no summaries. One example is the out_proj "
                "of a MultiheadAttention, which uses its weights directly",
                modules=never[:MAX_LISTED],
                module_count=len(never),
            )

    def _make_site(self, chosen: SelectedModule, units: UnitRule) -> Site:
        config = self._config
        saturation = None
        if config.saturation_threshold is not None:
            kinds = list_types(chosen.module)
            fitting = [kind for kind in config.saturation_module_types if kind in kinds]
            if fitting:
                kind = fitting[0].rpartition(".")[2]
                saturation = find_saturation(chosen.module, kind, config.saturation_threshold)
        return Site(chosen, units, config.dead_unit_epsilon, saturation)

    def _open_probe(self, step: int, epoch: int | None) -> None:
        began = perf_counter_ns()
        self._overhead.begin_probe(began)
        config = self._config
        outside = self._membership.find_outside(self._sites)
        if outside != self.outside:
            # Records of earlier steps are still being made, and have what held then.
            self.settle()
            self.outside = outside
        self.finder.look_again()
        scale = StepScale(self._read_scale())
        probed = ProbedStep(
            self,
            (step, epoch),
            forward=config.capture_forward,
            backward=config.capture_backward,
            every_output=config.capture_all_outputs,
            scale=scale,
            raises=self._raises,
            trained=self._trained,
            max_calls=config.max_calls_per_step,
            is_sharded=self._has_shards(),
        )
        probed.install(self._eager)
        if self._compiled is not None:
            self._compiled.poll(must_wait=False)
            self._compiled.open()
        else:
            self._listen(step)
        self._probed = probed
        probed.tape.spent_ns += perf_counter_ns() - began

    def _listen(self, step: int) -> None:
        """Keep what was seen of evaluations for this step's records, and look for the next one."""
        seen = self._evaluations.take()
        if seen:
            self.evaluations[step] = seen
            for old in list(self.evaluations)[:-_KEPT_EVALUATIONS]:
                del self.evaluations[old]
        try:
            self._evaluations.probe()
        except Exception as error:  # noqa: BLE001 - such as a scripted model, which takes no hook
            self._evaluations.end()
            self._tell_failure("listening for evaluations", error)

    def _note_optimizer_step(self) -> None:
        """In a step that is not probed, evaluations are looked for from the optimizer's on."""
        evaluations = self._evaluations
        if not evaluations.is_waiting:
            self.finder.on_step = None
            return
        try:
            evaluations.note_step()
        except Exception as error:  # noqa: BLE001 - the user's step must go on
            evaluations.end()
            self._tell_failure("listening for evaluations", error)

    def _read_scale(self) -> GradientScale | None:
        try:
            return read_gradient_scale(self._scaler)
        except Exception as error:
            self._tell_failure("reading the scale of the gradients", error)
            if self._raises:
                raise
            return None

    def _take_scaler(self, scaler: Any) -> None:
        """A GradScaler makes a step; the gradients that have come in this one are of its scale."""
        was_known, self._scaler = self._scaler is not None, scaler
        probed, before = self._probed, self._probes
        if probed is not None:
            try:
                probed.scale.source = read_gradient_scale(scaler)
            except Exception as error:  # noqa: BLE001 - the user's step must go on
                self._tell_failure("reading the scale of the gradients", error)
            before += self._raises
        if before and not was_known:
            self._tell(
                "grad_scaler_found",
                "warning",
                f"a {type(scaler).__name__} was detected after {before} sampled steps. The "
                "layer gradients of those steps are multiplied by its scale, without a mark. "
                "Later ones are divided by it. To avoid this, pass it as grad_scaler",
                probes_before=before,
            )

    def _end_left_open(self) -> None:
        probed = self._probed
        assert probed is not None
        self.end_step()
        self._tell(
            "probe_left_open",
            "warning",
            f"step {probed.moment[0]} was not ended, so it ended when the next one began. Use "
            "`with hooks.step(...)`, which always ends it",
            step=probed.moment[0],
        )

    def _has_shards(self) -> bool:
        """Whether the model has distributed parameters now; it may have been given them lately."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return False
        model = self._model()
        return model is not None and any(hasattr(p, "placements") for p in model.parameters())

    def _choose_device(self) -> torch.device:
        first = self._first_parameter
        return torch.device("cpu") if first is None else first.device

    def _check_compiled(self, calls: int) -> None:
        if calls:
            return
        self._tell(
            "compiled_without_hooks",
            "warning",
            "a sampled step of the compiled model recorded nothing. The model was compiled "
            "before the hooks were added, was not called, or was only called in evaluation "
            "(include_eval=True records that). Create the HookEngine before the first call of "
            "the compiled model, or call torch._dynamo.reset() after creating it",
        )

    def _check_late_gradients(self) -> None:
        """Tell of gradients that came after the step that was probed last."""
        if self._ended is None:
            return
        (step, tape), self._ended = self._ended, None
        if tape.late:
            self._tell_of_late_gradients(step, tape.late)

    def _tell_of_late_gradients(self, step: int, count: int) -> None:
        self._tell(
            "backward_outside_step",
            "warning",
            f"{count} gradients of outputs of step {step} arrived after the end of the step and "
            "are not recorded, nor are those of other steps. Call backward() between begin_step "
            "and end_step, or inside `with hooks.step(...)`",
            step=step,
            gradient_count=count,
        )

    def _tell_of_left_out(self, probed: ProbedStep) -> None:
        tape, step = probed.tape, probed.moment[0]
        if tape.evaluations:
            self._tell(
                "evaluation_left_out",
                "info",
                f"{tape.evaluations} module calls in step {step} were not training (the model "
                "was in eval() mode, or there were no gradients). They are omitted in all "
                "steps. include_eval=True records them",
                step=step,
                call_count=tape.evaluations,
            )
        if tape.surplus:
            most = self._config.max_calls_per_step
            self._tell(
                "calls_left_out",
                "warning",
                f"modules were called more than {most} times in step {step}. {tape.surplus} "
                "calls are omitted, and further calls in other steps too. To record more, raise "
                "max_calls_per_step in HookEngineConfig",
                step=step,
                call_count=tape.surplus,
            )

    def _tell_of_no_calls(self, probed: ProbedStep) -> None:
        if not self._eager:
            return
        if probed.tape.evaluations:
            self._tell(
                "probe_without_training",
                "warning",
                "a sampled step called the model only in eval() mode or without gradients, so it "
                "recorded nothing. Call model.train() before the step, or pass include_eval=True",
                step=probed.moment[0],
            )
            return
        self._tell(
            "probe_empty",
            "warning",
            "a sampled step called none of the hooked modules. Call the model between "
            "begin_step and end_step. If you apply torch.compile after creating the HookEngine, "
            "pass HookEngineConfig(compiled=True)",
        )

    def _check_overhead(self) -> None:
        percent = self._overhead.percent_too_much()
        if percent is None:
            return
        every = self._config.schedule.every_n_steps
        self._tell(
            "instrumentation_overhead",
            "warning",
            f"sampling takes {percent:.1f} % of the training time at every_n_steps={every}. To "
            "reduce this, raise every_n_steps, or filter for fewer modules",
            overhead_percent=round(percent, 1),
            every_n_steps=every,
        )

    def _warn_of_setup(self, model: nn.Module, *, has_parameters: bool) -> None:
        config = self._config
        if config.schedule.never_fires:
            self._tell(
                "schedule_never_fires",
                "warning",
                "the HookEngine samples no step: its schedule has every_n_steps=None and no "
                "explicit_steps",
            )
        for index, optimizer in list_foreign(model, self.finder.optimizers):
            self._tell(
                "optimizer_of_another_model",
                "warning",
                describe_foreign(index, optimizer),
                key=("optimizer_of_another_model", index),
            )
        if not self._sites:
            there = [
                f"{place.name or '(model)'}: {type(place.module).__name__}"
                for place in name_modules(model)
            ]
            few = ", ".join(there[:_LISTED]) + (", …" if len(there) > _LISTED else "")
            self._tell(
                "filter_matches_nothing",
                "warning",
                f"the HookEngine hooks no module: none matches {config.filters.describe()}. The "
                f"model has {len(there)} modules: {few}",
                modules=there[:_LISTED],
            )
        elif not has_parameters:
            self._tell(
                "model_without_parameters",
                "warning",
                f"the model ({type(model).__name__}) has no parameters, so it has no gradients "
                "unless its input requires some",
            )


class _StepScope:
    """A step in a `with`; yields whether it is probed."""

    __slots__ = ("_engine", "_epoch", "_step")

    def __init__(self, engine: HookEngine, step: int, epoch: int | None) -> None:
        self._engine = engine
        self._step = step
        self._epoch = epoch

    def __enter__(self) -> bool:
        return self._engine.begin_step(self._step, epoch=self._epoch)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._engine.end_step()
        except Exception:
            # The user's exception must not be replaced by ours.
            if error is None:
                raise


_NO_STEP = "step must be a non-negative integer, not None"
_WARM_UP_PROBES = 3
_COUNTED_PROBES = 20
_LIMIT_PERCENT = 5.0


class Overhead:
    """Holds the time that probes took against the time that went by.

    The first probes are left out, which load and compile things. What is
    between two probes counts, so that it is the share at the cadence used.
    """

    def __init__(self) -> None:
        self._probes = 0
        self._began_ns = 0
        self._spent_ns = 0
        self._is_news = False
        self._percent: float | None = None

    def begin_probe(self, now_ns: int) -> None:
        """A probe begins: what went by since an earlier one began is training and probing."""
        if self._probes == _WARM_UP_PROBES:
            self._began_ns = now_ns
        elif self._probes >= _WARM_UP_PROBES + _COUNTED_PROBES and self._percent is None:
            training_ns = now_ns - self._began_ns - self._spent_ns
            self._percent = 100.0 * self._spent_ns / max(1, training_ns)
            self._is_news = True

    def end_probe(self, spent_ns: int) -> None:
        """A probe has ended, and took so long."""
        if self._percent is None and self._probes >= _WARM_UP_PROBES:
            self._spent_ns += spent_ns
        self._probes += 1

    def percent_too_much(self) -> float | None:
        """The share of the training time in percent where it is over 5; told once."""
        percent, self._is_news = (self._percent if self._is_news else None), False
        return percent if percent is not None and percent > _LIMIT_PERCENT else None
