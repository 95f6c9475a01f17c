"""Instruments, and how they run in sampled steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quark_core.api import MetricsLogger, SchemaValidationError, check_name
from quark_torch.failures import InstrumentationNotices
from quark_torch.layer_filter import ROOT_NAME, LayerFilterConfig, select_modules

Measured = Mapping[str, "Tensor | float"]
"""Name -> a number, or a tensor of one dimension, such as a value for each expert."""

Choice = str | Callable[[str, nn.Module], bool]
"""Which modules: a regular expression that is searched for in a name, or a function of both."""


class Instrument:
    """Base class of custom collectors for `quark.watch(extras=[…])`.

    `select` chooses modules, and `measure` computes values from one call of a module. Hooks are
    installed in sampled steps only. `measure` runs without gradients and must not keep its
    arguments.

    Numbers are averaged over the calls of a step and become metrics `name/module/key`. A
    one-dimensional tensor becomes `name/module/key/0` and so on. An exception is logged once as
    `instrumentation_failed` and stops the collector. Modules compiled by `torch.compile` run no
    hooks; this is logged once. Recomputed calls of activation checkpointing are ignored.

    Attributes:
        name: Prefix of the metrics. Defaults to the class name.
    """

    name: str = ""

    def select(self, name: str, module: nn.Module) -> bool:
        """Return whether to measure a module; called once per module.

        Args:
            name: Name of the module, without prefixes of wrappers.
            module: The module.
        """
        raise NotImplementedError

    def measure(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> Measured | None:
        """Return the values of one call of a module, or None.

        Args:
            name: Name of the module.
            module: The module.
            args, kwargs: Arguments of the call.
            output: Output of the call.
        """
        raise NotImplementedError

    def prepare(
        self,
        name: str,  # noqa: ARG002 - for those that need it
        module: nn.Module,  # noqa: ARG002
        args: tuple[Any, ...],  # noqa: ARG002
        kwargs: dict[str, Any],  # noqa: ARG002
    ) -> dict[str, Any] | None:
        """Return changed keyword arguments for a call in a sampled step, or None.

        Called only if the class overrides it.
        """
        return None

    def attach(self, model: nn.Module) -> None:
        """Receive the model once, before `select`."""

    def explain_silence(self) -> str | None:
        """Return the reason if the calls of a step gave no value, or None."""
        return None


def make_choice(choice: Choice | None, usual: str) -> Callable[[str, nn.Module], bool]:
    """A function out of what was given as a choice of modules.

    Raises:
        SchemaValidationError: Neither a regular expression nor a function.
    """
    wanted = usual if choice is None else choice
    if callable(wanted):
        return wanted
    try:
        pattern = re.compile(wanted)
    except (re.error, TypeError) as error:
        raise SchemaValidationError(
            f"modules must be a regular expression, or a function of a name and a module: {error}"
        ) from None
    return lambda name, _: pattern.search(name) is not None


def check_instrument(instrument: object) -> Instrument:
    """Return an instrument, or refuse it.

    Raises:
        SchemaValidationError: It is none; the message says what it lacks.
    """
    if not isinstance(instrument, Instrument):
        what = instrument.__name__ if isinstance(instrument, type) else type(instrument).__name__
        raise SchemaValidationError(
            "extras must contain instances of quark.Instrument, such as quark.RouterLoad(), not "
            f"{what}"
        )
    if not instrument.name:
        instrument.name = type(instrument).__name__
    check_name(instrument.name, f"{type(instrument).__name__}.name")
    return instrument


_MOST_CALLS = 64
_MOST_ELEMENTS = 1_024
_MOST_KEYS = 2_000
# After so many probed steps without a number something is to be said.
_SILENT_STEPS = 2

_is_compiling = torch.compiler.is_compiling
_find_graph_task = torch._C._current_graph_task_id
_is_tracing = torch._C._get_tracing_state
_peek_transforms = torch._C._functorch.peek_interpreter_stack


class InstrumentSet:
    """The instruments of one watch. Not for several threads, but the model may be called from any.

    Args:
        session: A TrainingSession, or the RunContext of one.
        model: The model; modules are chosen now.
        instruments: What measures.

    Raises:
        SchemaValidationError: One is no instrument.
    """

    def __init__(
        self, session: object, model: nn.Module, instruments: Iterable[Instrument]
    ) -> None:
        # The argument may be anything; what is no iterable must say so itself.
        given: Any = instruments
        if not isinstance(given, Iterable):
            raise SchemaValidationError(
                f"extras must be a list of instruments, not {type(given).__name__}"
            )
        checked = [check_instrument(one) for one in given]
        names = [one.name for one in checked]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise SchemaValidationError(
                f"two instruments in extras have the name {twice!r}. Rename one of them"
            )
        self._metrics = MetricsLogger(session)
        run = self._metrics.open_run
        self._notices = InstrumentationNotices(run, "Instruments")
        self._is_kept = run.stream.active
        self._running = [_Running(one, self._notices) for one in checked]
        self._moment: tuple[int, int | None] | None = None
        for running in self._running:
            running.choose(model)

    def begin_step(self, step: int, epoch: int | None) -> None:
        """Begin a probed step: the hooks are in place until `end_step`."""
        if not self._is_kept:
            return
        self._moment = step, epoch
        for running in self._running:
            running.open()

    def end_step(self) -> None:
        """End the step, where one was begun: take the hooks out, and log what was measured.

        Waits for the device where tensors are on one.
        """
        moment, self._moment = self._moment, None
        if moment is None:
            return
        step, epoch = moment
        for running in self._running:
            running.close()
        for running in self._running:
            try:
                values = running.take(step)
                if values:
                    self._metrics.log_many(values, step=step, epoch=epoch)
            except Exception as error:  # noqa: BLE001 - told once; training goes on
                running.is_off = True
                self._notices.fail(f"reading {running.instrument.name}", error, step=step)

    def close(self) -> None:
        """Take the hooks out, and measure no more."""
        for running in self._running:
            running.close()
        self._moment = None
        self._metrics.close()


class _Running:
    """One instrument with its modules, and what it has measured in the step."""

    def __init__(self, instrument: Instrument, notices: InstrumentationNotices) -> None:
        self.instrument = instrument
        self.is_off = False
        self._notices = notices
        self._modules: list[tuple[str, nn.Module]] = []
        self._handles: list[RemovableHandle] = []
        self._sums: dict[str, tuple[Any, int]] = {}
        self._calls: dict[str, int] = {}
        self._silent_steps = 0
        self._changes_calls = type(instrument).prepare is not Instrument.prepare

    def choose(self, model: nn.Module) -> None:
        """Find the modules; those that are compiled are told of."""
        instrument = self.instrument
        try:
            instrument.attach(model)
            places = select_modules(model, LayerFilterConfig(leaf_modules_only=False))
            compiled = 0
            for place in places:
                name = "" if place.name == ROOT_NAME else place.name
                if not instrument.select(name, place.module):
                    continue
                if place.is_compiled:
                    compiled += 1
                else:
                    self._modules.append((place.name, place.module))
        except Exception as error:  # noqa: BLE001 - a user's class may raise anything
            self.is_off = True
            self._notices.fail(f"choosing modules for {instrument.name}", error)
            return
        if compiled:
            self._notices.warn(
                "instrument_not_measured",
                f"{instrument.name}: {compiled} modules are compiled by torch.compile and run "
                "no hooks, so they are not measured. Compile only the other modules",
                key=(instrument.name, "compiled"),
                instrument=instrument.name,
            )
        elif not self._modules:
            self._notices.warn(
                "instrument_not_measured",
                f"{instrument.name}: no module of the model matches. Choose the modules with "
                "its argument `modules`",
                key=(instrument.name, "none"),
                instrument=instrument.name,
            )

    def open(self) -> None:
        self._sums.clear()
        self._calls.clear()
        if self.is_off:
            return
        for name, module in self._modules:
            if self._changes_calls:
                before = _BeforeHook(self, name)
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            after = _AfterHook(self, name)
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def close(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def prepare(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any] | None:
        if self.is_off:
            return None
        try:
            return self.instrument.prepare(name, module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - a user's class may raise anything
            self._fail(name, error)
            return None

    def see(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        """Measure one call."""
        calls = self._calls[name] = self._calls.get(name, 0) + 1
        if self.is_off or calls > _MOST_CALLS:
            return
        try:
            with torch.no_grad():
                measured = self.instrument.measure(name, module, args, kwargs, output)
                for key, value in (measured or {}).items():
                    self._add(f"{name}/{key}", value)
        except Exception as error:  # noqa: BLE001 - a user's class may raise anything
            self._fail(name, error)

    def take(self, step: int) -> dict[str, float]:
        """The means of the step as metrics, and nothing more than the bound allows."""
        sums, self._sums = self._sums, {}
        self._note_silence(step, has_measured=bool(sums))
        names = list(sums)
        tensors = [value / count for value, count in sums.values()]
        if not tensors:
            return {}
        sizes = [tensor.numel() for tensor in tensors]
        # One way to the host for all of them.
        flat: list[float] = torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist()
        values: dict[str, float] = {}
        place = left_out = 0
        for name, tensor, size in zip(names, tensors, sizes, strict=True):
            part = flat[place : place + size]
            place += size
            stem = f"{self.instrument.name}/{name}"
            if tensor.ndim == 0:
                values[stem] = part[0]
            elif len(values) + size > _MOST_KEYS:
                left_out += size
            else:
                values.update((f"{stem}/{index}", value) for index, value in enumerate(part))
        if left_out:
            self._notices.warn(
                "instrument_bounded",
                f"{self.instrument.name}: {left_out} values are omitted, because a custom "
                f"collector may log at most {_MOST_KEYS}. Choose fewer modules",
                key=(self.instrument.name, "bound"),
                step=step,
                instrument=self.instrument.name,
            )
        return values

    def _add(self, key: str, value: Any) -> None:
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        tensor = tensor.to(torch.float32)
        if tensor.ndim > 1 or tensor.numel() > _MOST_ELEMENTS:
            raise ValueError(
                f"{key} must be a number, or a tensor with one dimension and at most "
                f"{_MOST_ELEMENTS} elements, not of shape {tuple(tensor.shape)}"
            )
        known = self._sums.get(key)
        if known is None:
            # A copy: what the model goes on with may be changed in place.
            self._sums[key] = tensor.clone(), 1
        elif known[0].shape == tensor.shape:
            self._sums[key] = known[0] + tensor, known[1] + 1

    def _note_silence(self, step: int, *, has_measured: bool) -> None:
        if has_measured or self.is_off or not self._modules:
            self._silent_steps = 0
            return
        self._silent_steps += 1
        if self._silent_steps < _SILENT_STEPS:
            return
        reason = "its modules were not called, or were compiled"
        if self._calls:
            reason = self.instrument.explain_silence() or "it found no values in the outputs"
        self._notices.warn(
            "instrument_not_measured",
            f"{self.instrument.name}: no values in {_SILENT_STEPS} sampled steps: {reason}",
            key=(self.instrument.name, "silent"),
            step=step,
            instrument=self.instrument.name,
        )

    def _fail(self, name: str, error: Exception) -> None:
        self.is_off = True
        self._notices.fail(f"{self.instrument.name} at module {name}", error)


def _is_recorded() -> bool:
    """Whether what runs now is compiled, traced, transformed or captured, rather than done."""
    if _is_compiling() or _is_tracing() is not None or _peek_transforms() is not None:
        return True
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


class _AfterHook:
    """Forward hook of one module in one probed step. A copy of it is inert."""

    __slots__ = ("_name", "_running")

    def __init__(self, running: _Running | None, name: str) -> None:
        self._running = running
        self._name = name

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        # Within backward, checkpointing runs a module that has run already.
        if self._running is None or _find_graph_task() != -1 or _is_recorded():
            return
        self._running.see(self._name, module, args, kwargs, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _AfterHook:
        return type(self)(None, self._name)

    def __reduce__(self) -> tuple[type[_AfterHook], tuple[None, str]]:
        return type(self), (None, self._name)


class _BeforeHook(_AfterHook):
    """Likewise, before the call."""

    __slots__ = ()

    def __call__(  # type: ignore[override]
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._running is None or _is_recorded():
            return None
        changed = self._running.prepare(self._name, module, args, kwargs)
        return None if changed is None else (args, changed)
