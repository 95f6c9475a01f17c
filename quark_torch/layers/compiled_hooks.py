"""Hooks for what `torch.compile` has taken over.

They are in the model before it is compiled and stay there: a compiled frame
does not see hooks that come or go. Each looks at a switch, on which the
compiler guards, so that there are two graphs: one without any of this for
the steps that are not probed, and one in which the statistics are fused into
what makes the tensors. While they are there, what is compiled has guards on
hooks, which PyTorch leaves out by default: code of a model without hooks would
be taken for another one of its class. Rows of numbers go into buffers made beforehand, and
gradients are seen by an autograd function that changes nothing, since hooks of
tensors, like lists that grow, would break the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quark_torch.layers.compiled_rows import (
    FIELDS,
    MAX_DIMS,
    ROWS,
    SPARE,
    WIDTH,
    observe,
    read_row,
    register_operator,
)
from quark_torch.layers.recording import GradientScale, LayerReading, LayerRecording
from quark_torch.layers.site import Site
from quark_torch.layers.tape import InertHook
from quark_torch.layers.traits import UnitRule


class Switch:
    """Whether the step is probed; compiled code has a graph for each answer."""

    def __init__(self) -> None:
        self.is_on = False


class CompiledHook:
    """Permanent hook of one module. A copy of it is inert.

    Attributes:
        activations, gradients: A row for each of the first calls of a step, or
            None before the first step.
        calls: How many calls there were.
    """

    def __init__(
        self,
        switch: Switch,
        site: Site,
        forward: bool,
        backward: bool,
        trained: weakref.ref[nn.Module] | None,
    ) -> None:
        self.switch = switch
        self.trained = trained
        self.units: UnitRule = site.units
        self.near_zero = site.near_zero
        self.saturation = site.saturation
        self.forward = forward
        self.backward = backward
        self.activations: Tensor | None = None
        self.gradients: Tensor | None = None
        self.calls: Tensor | None = None

    def prepare(self, device: torch.device) -> None:
        """Make the buffers; compiled code takes them as they are, so this is done once."""
        wide = torch.float32 if device.type == "mps" else torch.float64
        with torch.inference_mode(False), torch.no_grad():
            self.activations = torch.zeros(ROWS + 1, WIDTH, dtype=wide, device=device)
            self.gradients = torch.zeros(ROWS + 1, WIDTH, dtype=wide, device=device)
            self.calls = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(self, _module: nn.Module, _args: object, output: Any) -> Any:
        """Write the statistics of the output; returns one like it, or None for no other."""
        if not self.switch.is_on:
            return None
        if torch.compiler.is_exporting():
            return None
        if self.trained is not None:
            model = self.trained()
            if model is not None and not model.training:
                return None
        if isinstance(output, Tensor):
            return self._take(output)
        if type(output) is tuple or type(output) is list:
            for index, item in enumerate(output):
                if isinstance(item, Tensor) and item.dtype.is_floating_point:
                    taken = self._take(item)
                    if taken is None:
                        return None
                    items = [*output[:index], taken, *output[index + 1 :]]
                    return tuple(items) if type(output) is tuple else items
        return None

    def _take(self, tensor: Tensor) -> Tensor | None:
        activations, gradients, calls = self.activations, self.gradients, self.calls
        if activations is None or gradients is None or calls is None:
            return None
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_nested:
            return None
        if tensor.device != activations.device or tensor.is_meta or tensor.numel() == 0:
            return None
        if tensor.dim() > MAX_DIMS:
            return None
        unit_dim = self.units.choose_static(tensor)
        low, high = self.saturation or (None, 0.0)
        backward = self.backward and torch.is_grad_enabled() and tensor.requires_grad
        taken: Tensor = observe(
            tensor,
            activations,
            gradients,
            calls,
            self.near_zero,
            low,
            high,
            unit_dim,
            self.forward,
            backward,
            self.trained is not None and not torch.is_grad_enabled(),
        )
        return taken if backward else None

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()


class CompiledHooks:
    """The permanent hooks of one engine."""

    def __init__(
        self,
        recording: LayerRecording,
        sites: list[Site],
        *,
        forward: bool,
        backward: bool,
        trained: weakref.ref[nn.Module] | None,
    ) -> None:
        self._recording = recording
        self._switch = Switch()
        self._hooks = [
            CompiledHook(self._switch, site, forward, backward, trained) for site in sites
        ]
        self._sites = sites
        self._handles: list[RemovableHandle] = []
        self._is_prepared = False
        self._waiting: list[Callable[[bool], bool]] = []
        self._late: list[Tensor] = []
        self._last_step: int | None = None
        register_operator()
        _guard_hooks(self)
        try:
            for site, hook in zip(sites, self._hooks, strict=True):
                module = site.module()
                if module is not None:
                    self._handles.append(module.register_forward_hook(hook))
        except BaseException:
            self.remove()
            raise

    def prepare(self, device: torch.device) -> None:
        """Before the first step, when the model is where it is to be: make the buffers."""
        if not self._is_prepared:
            self._is_prepared = True
            for hook, site in zip(self._hooks, self._sites, strict=True):
                module = site.module()
                own = None if module is None else next(module.parameters(), None)
                hook.prepare(device if own is None else own.device)

    def open(self) -> None:
        """From now on the graph with the statistics runs.

        What backward has written since the step before belongs to that one,
        which has ended: it is emptied, and counted.
        """
        rows = [hook.gradients for hook in self._hooks if hook.gradients is not None]
        with torch.inference_mode(False), torch.no_grad():
            self._late = [gradients[:ROWS, 0].sum() for gradients in rows]
            for gradients in rows:
                gradients.zero_()
        self._switch.is_on = True

    def close(self) -> None:
        """From now on the other one runs."""
        self._switch.is_on = False

    def collect(
        self,
        moment: tuple[int, int | None],
        scale: GradientScale | None,
        tell: Callable[[int], None],
        tell_late: Callable[[int, int], None],
    ) -> None:
        """Make records of the rows, and empty them.

        On a GPU they are copied without waiting, and made into records later.

        Args:
            moment: Step and epoch.
            scale: What tells the scale of the gradients, or None.
            tell: Gets the number of calls, once it is known.
            tell_late: Gets the step that was probed before, and how many
                gradients came after it had ended, if any did.
        """
        buffers: list[Tensor] = []
        for hook in self._hooks:
            assert hook.activations is not None
            assert hook.gradients is not None
            assert hook.calls is not None
            buffers += (hook.activations, hook.gradients, hook.calls)
        last, self._last_step = self._last_step, moment[0]
        with torch.inference_mode(False), torch.no_grad():
            late = [count.to("cpu", non_blocking=True) for count in self._late]
            copies = [buffer.to("cpu", non_blocking=True, copy=True) for buffer in buffers]
            for buffer in buffers:
                buffer.zero_()
        events: list[Any] = []
        for device in {buffer.device for buffer in buffers if buffer.is_cuda}:
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)

        def deliver(must_wait: bool) -> bool:
            if not must_wait and not all(event.query() for event in events):
                return False
            for event in events:
                event.synchronize()
            tell(self._record(copies, moment, scale))
            if last is not None and (count := int(sum(each.item() for each in late))):
                tell_late(last, count)
            return True

        self._waiting.append(deliver)
        self.poll(must_wait=False)

    def poll(self, *, must_wait: bool) -> None:
        """Make records of what has arrived, or of everything."""
        self._waiting = [deliver for deliver in self._waiting if not deliver(must_wait)]

    def remove(self) -> None:
        """Take the hooks out of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _unguard_hooks(self)

    def _tell_of_checkpoint(self, site: Site) -> None:
        self._recording._tell(
            "compiled_in_checkpoint",
            "warning",
            f"{site.name} is in compiled code that an activation checkpoint runs a second time in "
            "backward, so that there are no summaries of the gradients in it. Compile the model, "
            "or the module that calls the checkpoint, in place of what the checkpoint runs",
            module=site.name,
        )

    def _tell_of_surplus(self, site: Site, step: int, calls: int) -> None:
        self._recording._tell(
            "calls_left_out",
            "warning",
            f"{site.name} was called {calls} times in step {step}: of compiled code {ROWS} calls "
            "of each module are recorded, and the others are left out, here and in other steps",
            step=step,
            call_count=calls - ROWS,
        )

    def _record(
        self, copies: list[Tensor], moment: tuple[int, int | None], scale: GradientScale | None
    ) -> int:
        total = 0
        for index, site in enumerate(self._sites):
            activations, gradients, counted = copies[3 * index : 3 * index + 3]
            calls = int(counted.item())
            total += calls
            if gradients[SPARE, 0]:
                self._tell_of_checkpoint(site)
            site.was_called = site.was_called or calls > 0
            if calls > ROWS:
                self._tell_of_surplus(site, moment[0], calls)
            for call_index in range(min(calls, ROWS)):
                for direction, rows in (("forward", activations), ("backward", gradients)):
                    row = rows[call_index].tolist()
                    if row[0] == 0.0:
                        continue
                    is_gradient = direction == "backward"
                    reading = LayerReading(
                        self._recording,
                        site.identity,
                        "backward" if is_gradient else "forward",
                        moment,
                        call_index,
                        tuple(int(size) for size in row[FIELDS : FIELDS + int(row[12])]),
                        scale=scale if is_gradient else None,
                    )
                    reading(read_row(row, has_saturation=not is_gradient and bool(site.saturation)))
        return total


_guarding: weakref.WeakSet[CompiledHooks] = weakref.WeakSet()
_setting: list[bool] = []


def _guard_hooks(hooks: CompiledHooks) -> None:
    """Have code that is compiled from now on tell modules with hooks from those without."""
    from torch._dynamo import config

    if not _guarding:
        _setting[:] = [config.skip_nnmodule_hook_guards]
        config.skip_nnmodule_hook_guards = False
    _guarding.add(hooks)


def _unguard_hooks(hooks: CompiledHooks) -> None:
    from torch._dynamo import config

    if hooks in _guarding:
        _guarding.discard(hooks)
        if not _guarding:
            config.skip_nnmodule_hook_guards = _setting.pop()
