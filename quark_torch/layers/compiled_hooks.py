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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.hooks import RemovableHandle

from quark_torch.layers.recording import (
    GradientScale,
    InertWhenCopied,
    LayerReading,
    LayerRecording,
)
from quark_torch.layers.watched_module import Site, UnitRule, find_functions
from quark_torch.measuring.tensor_statistics import Partial, TensorStatistics, Wanted, conclude

# Rows of statistics that compiled code writes into buffers, and what is read of them.
#
# The operations are those that a compiler fuses with what makes the tensors.

ROWS = 16
"""Calls of a module in one step of which there are rows."""
SPARE = ROWS
"""The row after them, for what belongs to none of them."""
MAX_DIMS = 8
FIELDS = 13
"""Fields of a row before the sizes of the tensor."""
WIDTH = FIELDS + MAX_DIMS

_find_graph_task = torch._C._current_graph_task_id
_libraries: list[Any] = []


def summarize(
    tensor: Tensor,
    near_zero: float,
    saturation: tuple[float, float] | None,
    unit_dim: int | None,
) -> Tensor:
    """The statistics of a tensor as one row, made of operations that a compiler fuses.

    The moments are those around the mean, with totals in float64 where the
    device has it.
    """
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    values = tensor.detach()
    values = values.abs() if values.dtype.is_complex else values
    values = values if values.dtype == torch.float64 else values.to(torch.float32)
    finite = torch.isfinite(values)
    count = finite.sum()
    mean = torch.where(finite, values, 0.0).sum(dtype=wide) / count.clamp(min=1)
    centred = torch.where(finite, values - mean, 0.0)
    squares = (centred * centred).sum(dtype=wide)
    magnitudes = values.abs()
    zeros = (magnitudes <= near_zero).sum()
    none = torch.zeros((), dtype=wide, device=tensor.device)
    saturated, dead = none, none
    if saturation is not None:
        low, high = saturation
        saturated = (((values <= low) | (values >= high)) & finite).sum()
    units = 0
    if unit_dim is not None:
        units = tensor.shape[unit_dim]
        others = [dim for dim in range(tensor.dim()) if dim != unit_dim]
        dead = (magnitudes.amax(others) <= near_zero).sum()
    found = [
        none + 1.0,
        count,
        torch.isnan(values).sum(),
        torch.isinf(values).sum(),
        mean,
        squares,
        torch.where(finite, values, torch.inf).amin(),
        torch.where(finite, values, -torch.inf).amax(),
        zeros,
        saturated,
        dead,
        none + units,
        none + tensor.dim(),
        *(none + size for size in tensor.shape),
    ]
    found += [none] * (WIDTH - len(found))
    return torch.stack([value.to(wide) for value in found])


class _GradientTap(torch.autograd.Function):
    """Gives what it gets, and writes the statistics of the gradient into a row."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        """Give a copy, which the compiler does without, and in-place modules may change."""
        # Not among the saved tensors, which a checkpoint makes again.
        ctx.rows, ctx.place = rows, place
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Write the row of the call that the gradient is of."""
        ctx.rows.data.index_put_((ctx.place,), summarize(gradient, 0.0, None, None))
        return gradient, None, None


def observe(
    tensor: Tensor,
    activations: Tensor,
    gradients: Tensor,
    calls: Tensor,
    near_zero: float,
    low: float | None,
    high: float,
    unit_dim: int | None,
    forward: bool,
    backward: bool,
    only_in_checkpoint: bool,
) -> Tensor:
    """Write the row of an activation, and have that of its gradient written.

    With `only_in_checkpoint` only where an autograd function runs it, as a
    reentrant checkpoint does.

    Compiled code that a checkpoint around it runs again writes into the spare
    row, since it cannot know which call it repeats.

    The compiler takes a call of it as it is into its graph, and looks into it
    only when it makes code of that: a backend that runs the graph as Python
    runs this too, also when a checkpoint does so again inside of backward.
    Buffers are changed behind the back of autograd, which would find fault
    with a checkpoint whose inputs change.
    """
    if _find_graph_task() != -1:
        if get_proxy_mode() is not None:
            gradients.data[SPARE].fill_(1.0)
        return tensor.clone() if backward else tensor
    if only_in_checkpoint and get_proxy_mode() is None and find_functions()[0] is None:
        return tensor
    # A checkpoint would count the call once more to have it, and get the row of another.
    with _kept_for_backward() as is_traced:
        place = calls.data.clamp(max=ROWS - 1)
        if is_traced:
            again = torch.ops.quark.runs_again(calls.data, only_in_checkpoint)
            place = torch.where(again, SPARE, place)
    if forward:
        saturation = None if low is None else (low, high)
        row = summarize(tensor, near_zero, saturation, unit_dim)
        activations.data.index_put_((place,), row)
    calls.data.add_(~again if is_traced else 1)
    if not backward:
        return tensor
    taken: Tensor = _GradientTap.apply(tensor, gradients, place)  # type: ignore[no-untyped-call]
    return taken


@cache
def register_operator() -> None:
    """Make the operator known by which compiled code is told that it runs once more.

    Of code for a whole graph nothing of Python is left, so that a checkpoint
    around it, which runs it a second time inside of backward, shows by this only.
    """
    # Not when this is imported, since it loads the compiler.
    torch.compiler.allow_in_graph(observe)  # type: ignore[no-untyped-call]
    library: Any = torch.library.Library("quark", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("runs_again(Tensor calls, bool only_in_checkpoint) -> Tensor")
    library.impl("runs_again", _runs_again, "CompositeExplicitAutograd")
    library.impl("runs_again", _make_meta, "Meta")
    _libraries.append(library)


def _runs_again(calls: Tensor, only_in_checkpoint: bool) -> Tensor:
    is_spare = _find_graph_task() != -1 or (only_in_checkpoint and find_functions()[0] is None)
    return torch.full_like(calls, is_spare, dtype=torch.bool)


def _make_meta(calls: Tensor, only_in_checkpoint: bool) -> Tensor:  # noqa: ARG001 - the operator's
    return torch.empty_like(calls, dtype=torch.bool)


@contextmanager
def _kept_for_backward() -> Iterator[bool]:
    """What compiled code makes in here is kept for its backward, and not made a second time.

    Yields whether code is being made.
    """
    tracing = get_proxy_mode()
    if tracing is None:
        yield False
        return
    graph = tracing.tracer.graph
    before = len(graph.nodes)
    yield True
    for node in islice(reversed(graph.nodes), len(graph.nodes) - before):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def read_row(row: list[float], *, has_saturation: bool) -> TensorStatistics:
    """The statistics that a row holds."""
    finite, nans, infinite, near_zero, saturated, dead, units = (
        int(row[place]) for place in (1, 2, 3, 8, 9, 10, 11)
    )
    mean, squares, low, high = row[4:8]
    part = Partial(finite, nans, infinite, near_zero, saturated, mean, squares, low, high)
    # Of the saturation it matters only whether it was wanted.
    wanted = Wanted(near_zero=0.0, saturation=(0.0, 0.0) if has_saturation else None)
    count = finite + nans + infinite
    return conclude(part, count, wanted, units=(units, dead) if units else None)


class Switch:
    """Whether the step is probed; compiled code has a graph for each answer."""

    def __init__(self) -> None:
        self.is_on = False


class CompiledHook(InertWhenCopied):
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
            f"{site.name} is in compiled code that an activation checkpoint runs again in "
            "backward, so its gradients cannot be summarized. Compile the model, or the module "
            "that calls the checkpoint, instead of the code inside the checkpoint",
            module=site.name,
        )

    def _tell_of_surplus(self, site: Site, step: int, calls: int) -> None:
        self._recording._tell(
            "calls_left_out",
            "warning",
            f"{site.name} was called {calls} times in step {step}. In compiled code, only "
            f"{ROWS} calls of each module are recorded. Further calls are omitted in all steps",
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
