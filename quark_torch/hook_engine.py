"""HookEngine: what the layers of a model give, and the gradients in them."""

from __future__ import annotations

from time import perf_counter_ns
from types import TracebackType
from typing import Any

import torch
from torch import nn

from quark_core.errors import SchemaValidationError
from quark_core.query import check_index
from quark_torch.compiled_hooks import CompiledHooks
from quark_torch.hook_config import HookEngineConfig
from quark_torch.hook_site import Site
from quark_torch.layer_filter import (
    LayerFilterConfig,
    SelectedModule,
    list_types,
    name_modules,
    select_modules,
)
from quark_torch.layer_recording import LayerRecording, read_gradient_scale
from quark_torch.layer_traits import Layout, find_layouts, find_saturation
from quark_torch.optimizer_membership import OptimizerMembership
from quark_torch.overhead import Overhead
from quark_torch.probes import ProbedStep
from quark_torch.schedule import HookScheduleConfig

__all__ = ["HookEngine", "HookEngineConfig", "HookScheduleConfig", "LayerFilterConfig"]

_INT64_MAX = 2**63 - 1
_LISTED = 8
_MAX_LISTED = 200


class HookEngine(LayerRecording):
    """Records summaries of activations and of the gradients in them, at the steps that are due.

    Hooks are in the model during a probed step only, so that the other steps
    run none of this; in a compiled model they stay, and cost nothing there at
    the other steps. The hooks change no output and no gradient, and reduce
    every tensor at once, without keeping it.

    A model that is given as a wrapper (DDP, FSDP, `torch.compile`) is looked at
    under the names that it has without it. A copy or a pickle of the model
    carries inert hooks at most. `begin_step`, `end_step` and `step` are called
    from one thread; the model may be called from any.

    What fails in here switches off the module at fault, is told once as an
    event `instrumentation_failed`, and never reaches the model's forward or
    backward, unless `raise_on_error` (by default the session's `strict_mode`) says so.

    Args:
        session: A TrainingSession, or the RunContext of one.
        model: The model; its modules are chosen now.
        optimizer: The optimizer (or several); a module whose trainable parameters it
            does not have gets `in_optimizer: false` into its records' metadata.
        config: What is looked at, and when.

    Raises:
        SchemaValidationError: A bad argument; the message names it. Among them
            is an optimizer that has no parameter of the model.
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
        elif not isinstance(config, HookEngineConfig):
            raise SchemaValidationError(
                f"config must be a HookEngineConfig, not a {type(config).__name__}"
            )
        if not isinstance(model, nn.Module):
            raise SchemaValidationError(
                f"model must be a torch.nn.Module, not a {type(model).__name__}"
            )
        membership = OptimizerMembership(model, optimizer)
        super().__init__(session, batch_size=config.batch_size)
        self._config = config
        self._is_due = config.schedule.is_due
        raises = config.raise_on_error
        self._raises = self._run.strict if raises is None else raises
        self._probed: ProbedStep | None = None
        self._probes = 0
        self._is_closing = False
        self._overhead = Overhead()
        selected = select_modules(model, config.filters)
        layouts = find_layouts(model)
        sites = [self._make_site(chosen, layouts.get(id(chosen.module))) for chosen in selected]
        self._sites = sites
        self._membership = membership
        is_compiled = [
            chosen.is_compiled if config.compiled is None else config.compiled
            for chosen in selected
        ]
        self._eager = [site for site, is_it in zip(sites, is_compiled, strict=True) if not is_it]
        later = [site for site, is_it in zip(sites, is_compiled, strict=True) if is_it]
        self._compiled: CompiledHooks | None = None
        if later:
            self._compiled = CompiledHooks(
                self, later, forward=config.capture_forward, backward=config.capture_backward
            )
        first = next(model.parameters(), None)
        self._first_parameter = first
        self._warn_of_setup(model, has_parameters=first is not None)

    @property
    def instrumented_module_names(self) -> tuple[str, ...]:
        """Names of the instrumented modules, in the model's order, without prefixes of wrappers."""
        return tuple(site.name for site in self._sites)

    def should_probe(self, step: int) -> bool:
        """Whether the schedule has a step probed.

        Raises:
            SchemaValidationError: `step` is no non-negative integer.
        """
        return self._is_due(_check_step(step))

    def begin_step(self, step: int, *, epoch: int | None = None) -> bool:
        """Begin a step: if it is due, put the hooks in place until `end_step`.

        A step that was begun before and not ended is ended, with one event
        `probe_left_open`.

        Args:
            step: Step counter; it may go backwards.
            epoch: Epoch counter, or None.

        Returns:
            Whether the step is probed.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            InvalidRunStateError: The engine is closed or the run has ended.
        """
        if self._closed or self._run.refusal is not None:
            self._check_open("begin_step")
        if type(step) is not int or step < 0 or step > _INT64_MAX:
            step = _check_step(step)
        if epoch is not None and (type(epoch) is not int or epoch < 0 or epoch > _INT64_MAX):
            epoch = check_index(epoch, "epoch")
        if self._probed is not None:
            self._end_left_open()
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
        """End the step: take the hooks out. Does nothing where none is open."""
        probed = self._probed
        if probed is None:
            return
        began = perf_counter_ns()
        self._probed = None
        compiled = self._compiled
        try:
            if compiled is not None:
                compiled.close()
                compiled.collect(probed.moment, probed.scale, self._check_compiled)
        except Exception as error:
            self._tell_failure("reading what a compiled model wrote", error)
            if self._raises:
                raise
        finally:
            probed.close()
        self._probes += 1
        if compiled is None and not probed.tape.calls and not self._is_closing:
            self._tell_of_no_calls()
        if probed.measurements.dropped:
            self._tell(
                "probe_dropped",
                "warning",
                f"{probed.measurements.dropped} tensors of step {probed.moment[0]} were not "
                "measured: the device was still busy with the ones before",
            )
        self._overhead.end_probe(probed.tape.spent_ns + perf_counter_ns() - began)
        self._check_overhead()

    def step(self, step: int, *, epoch: int | None = None) -> _StepScope:
        """A context manager around a step: `begin_step`, whose answer it yields, and `end_step`.

        Args:
            step: Step counter; it may go backwards.
            epoch: Epoch counter, or None.
        """
        return _StepScope(self, step, epoch)

    def settle(self) -> None:
        """Record what a device is still working out; waits for it for a moment at most."""
        if self._compiled is not None:
            self._compiled.poll(must_wait=True)
        super().settle()

    def close(self) -> None:
        """Take the hooks out and take no more steps; reading still works.

        Modules that no probed step has called are told in one event
        `modules_never_called`. A second call does nothing.

        Raises:
            SessionStoreError: In strict mode, the primary's first delivery error.
        """
        if self._closed:
            return
        # After others, a step that nothing was called in is one that never took place.
        self._is_closing = self._probes > 0
        self.end_step()
        self.settle()
        if self._compiled is not None:
            self._compiled.remove()
        never = [site.name for site in self._sites if site.is_missing]
        if self._probes and never and len(never) < len(self._sites):
            self._tell(
                "modules_never_called",
                "info",
                f"{len(never)} of {len(self._sites)} instrumented modules were never called in a "
                "probed step, so that there are no summaries of them; such is the out_proj of a "
                "MultiheadAttention, whose weights are used without it",
                modules=never[:_MAX_LISTED],
                module_count=len(never),
            )
        super().close()

    def _make_site(self, chosen: SelectedModule, layout: Layout | None) -> Site:
        config = self._config
        saturation = None
        if config.saturation_threshold is not None:
            kinds = list_types(chosen.module)
            fitting = [kind for kind in config.saturation_module_types if kind in kinds]
            if fitting:
                kind = fitting[0].rpartition(".")[2]
                saturation = find_saturation(chosen.module, kind, config.saturation_threshold)
        return Site(chosen, layout, config.dead_unit_epsilon, saturation)

    def _open_probe(self, step: int, epoch: int | None) -> None:
        began = perf_counter_ns()
        self._overhead.begin_probe(began)
        config = self._config
        outside = self._membership.find_outside(self._sites)
        if outside != self.outside:
            # Records of earlier steps are still being made, and have what held then.
            self.settle()
            self.outside = outside
        scale = None
        try:
            scale = read_gradient_scale(config.grad_scaler)
        except Exception as error:
            self._tell_failure("reading the scale of the gradients", error)
            if self._raises:
                raise
        probed = ProbedStep(
            self,
            (step, epoch),
            forward=config.capture_forward,
            backward=config.capture_backward,
            every_output=config.capture_all_outputs,
            scale=scale,
            raises=self._raises,
        )
        probed.install(self._eager)
        if self._compiled is not None:
            self._compiled.poll(must_wait=False)
            self._compiled.open()
        self._probed = probed
        probed.tape.spent_ns += perf_counter_ns() - began

    def _end_left_open(self) -> None:
        probed = self._probed
        assert probed is not None
        self.end_step()
        self._tell(
            "probe_left_open",
            "warning",
            f"step {probed.moment[0]} was begun and not ended, so it was ended when the next one "
            "began; `with hooks.step(...)` ends it whatever happens",
            step=probed.moment[0],
        )

    def _choose_device(self) -> torch.device:
        first = self._first_parameter
        return torch.device("cpu") if first is None else first.device

    def _check_compiled(self, calls: int) -> None:
        if calls:
            return
        self._tell(
            "compiled_without_hooks",
            "warning",
            "a probed step of the compiled model gave nothing: it was compiled before the hooks "
            "came, or was not called. Make the HookEngine before the first call of the compiled "
            "model, or call torch._dynamo.reset() after making it",
        )

    def _tell_of_no_calls(self) -> None:
        if not self._eager:
            return
        self._tell(
            "probe_empty",
            "warning",
            "a probed step called none of the instrumented modules: call the model between "
            "begin_step and end_step. If torch.compile is applied after the HookEngine is made, "
            "give HookEngineConfig(compiled=True)",
        )

    def _check_overhead(self) -> None:
        percent = self._overhead.percent_too_much()
        if percent is None:
            return
        every = self._config.schedule.every_n_steps
        self._tell(
            "instrumentation_overhead",
            "warning",
            f"probing takes {percent:.1f} % of the training time at every_n_steps={every}; a "
            "larger every_n_steps, or a filter on fewer modules, takes less",
            overhead_percent=round(percent, 1),
            every_n_steps=every,
        )

    def _warn_of_setup(self, model: nn.Module, *, has_parameters: bool) -> None:
        config = self._config
        if config.schedule.never_fires:
            self._tell(
                "schedule_never_fires",
                "warning",
                "the HookEngine probes no step: its schedule has every_n_steps=None and no "
                "explicit_steps",
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
                f"the HookEngine instruments nothing: no module fits {config.filters.describe()}. "
                f"The model has {len(there)} modules: {few}",
                modules=there[:_LISTED],
            )
        elif not has_parameters:
            self._tell(
                "model_without_parameters",
                "warning",
                f"the model, a {type(model).__name__}, has no parameters: there are no gradients "
                "to record, unless its input requires some",
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


def _check_step(step: object) -> int:
    number = check_index(step, "step")
    if number is None:
        raise SchemaValidationError("step must be a non-negative integer, not None")
    return number
