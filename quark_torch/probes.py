"""Eager hooks: what they are, and what one probed step takes with them.

Forward hooks are there during a probed step only. Gradients come by hooks of
the tensors that the modules gave, set in the forward hook: full backward
hooks break in-place modules and see no dict, list or dataclass. A tensor is
reduced when it is seen and never kept, since what follows may overwrite it.

Activation checkpointing runs modules a second time inside of backward. The
second run gives no activation records. With the reentrant kind it is the run
whose outputs get gradients, so there its calls get the indexes that they had
in the first run: both are known by the autograd function that runs them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from itertools import count
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quark_torch.layer_filter import SelectedModule, describe_type
from quark_torch.layer_recording import GradientScale, LayerReading, LayerRecording
from quark_torch.layer_traits import Layout, choose_unit_dim
from quark_torch.outputs import find_tensors
from quark_torch.statistics import Probe, Wanted

__all__ = ["ForwardHook", "GradientHook", "InertHook", "ProbedStep", "Site"]

_OF_GRADIENTS = Wanted(near_zero=0.0)
_MAX_FRAMES = 400

_is_compiling = torch.compiler.is_compiling
_find_graph_task = torch._C._current_graph_task_id
_is_tracing = torch._C._get_tracing_state
_peek_transforms = torch._C._functorch.peek_interpreter_stack


class Site:
    """One instrumented module.

    Attributes:
        name, kind, aliases: Its name, class and other names.
        module: The module, weakly.
        layout: Where its output has its units.
        near_zero: Epsilon of its activations.
        saturation: Its bounds, or None.
        calls: Counts its calls in the step.
        was_called: Whether it ever was.
        failed: Whether its hooks failed, and so do nothing any more.
    """

    __slots__ = (
        "aliases",
        "calls",
        "failed",
        "kind",
        "layout",
        "module",
        "name",
        "near_zero",
        "saturation",
        "was_called",
    )

    def __init__(
        self,
        selected: SelectedModule,
        layout: Layout | None,
        near_zero: float,
        saturation: tuple[float, float] | None,
    ) -> None:
        self.name = selected.name
        self.kind = describe_type(selected.module)
        self.aliases = selected.aliases
        self.module = weakref.ref(selected.module)
        self.layout = layout
        self.near_zero = near_zero
        self.saturation = saturation
        self.calls = count()
        self.was_called = False
        self.failed = False

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...]]:
        """Name, class and other names."""
        return self.name, self.kind, self.aliases

    @property
    def is_missing(self) -> bool:
        """Whether it was never called, though it could have been, unlike a list of modules."""
        module = self.module()
        is_list = module is not None and type(module).forward is nn.Module.forward
        return not (self.was_called or self.failed or is_list)


class InertHook:
    """What a copy or a pickle of a model has in the place of a hook; does nothing."""

    def __call__(self, *_: object, **__: object) -> None:
        """Do nothing."""


class ForwardHook:
    """Hook of one module in one probed step. A copy of it is inert."""

    __slots__ = ("_probed", "_site")

    def __init__(self, site: Site, probed: ProbedStep) -> None:
        self._site = site
        self._probed = probed

    def __call__(self, module: nn.Module, _args: object, output: object) -> None:
        """Take the statistics; returns None, since anything else would replace the output."""
        if _is_compiling():
            return
        site, probed = self._site, self._probed
        # A shallow copy shares the hooks; replicas of DataParallel are the module itself.
        if site.module() is not module and not getattr(module, "_is_replica", False):
            return
        if probed.is_open and not site.failed:
            began = perf_counter_ns()
            try:
                probed.take_output(site, output)
            except Exception as error:  # noqa: BLE001 - it must not reach the user's forward
                probed.fail(site, "forward hook", error)
            finally:
                probed.spent_ns += perf_counter_ns() - began

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()


class GradientHook:
    """Hook of one tensor that a module gave. A copy of it is inert."""

    __slots__ = ("_call_index", "_fired", "_micro_batch", "_path", "_probed", "_site")

    def __init__(
        self, site: Site, probed: ProbedStep, call_index: int, path: str | None, micro_batch: int
    ) -> None:
        self._site = site
        self._probed = probed
        self._call_index = call_index
        self._path = path
        self._micro_batch = micro_batch
        self._fired = 0

    def __call__(self, gradient: Tensor) -> None:
        """Take the statistics; returns None, since anything else would replace the gradient."""
        if _is_compiling():
            return
        site, probed = self._site, self._probed
        if probed.is_open and not site.failed:
            began = perf_counter_ns()
            try:
                reading = LayerReading(
                    probed.recording,
                    site.identity,
                    "backward",
                    probed.moment,
                    self._call_index,
                    None if gradient.is_nested else tuple(gradient.shape),
                    self._path,
                    self._micro_batch,
                    self._fired,
                    probed.scale,
                )
                self._fired += 1
                probed.saw_backward = True
                probed.measure(gradient, _OF_GRADIENTS, reading)
            except Exception as error:  # noqa: BLE001 - it must not reach the user's backward
                probed.fail(site, "gradient hook", error)
            finally:
                probed.spent_ns += perf_counter_ns() - began

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()


class ProbedStep:
    """One step between `begin_step` and `end_step` whose layers are looked at.

    Attributes:
        recording: Who makes the records.
        moment: Step and epoch.
        measurements: Where tensors are measured.
        scale: What tells the scale of the gradients, or None.
        is_open: Whether hooks still take anything.
        spent_ns: Time that the hooks took.
        calls: Calls of modules that were seen.
        saw_backward: Whether gradients came since the last forward.
    """

    def __init__(
        self,
        recording: LayerRecording,
        moment: tuple[int, int | None],
        *,
        forward: bool,
        backward: bool,
        every_output: bool,
        scale: GradientScale | None,
        raises: bool,
    ) -> None:
        self.recording = recording
        self.moment = moment
        self.measurements = Probe()
        self.scale = scale
        self.is_open = True
        self.spent_ns = 0
        self.calls = 0
        self.saw_backward = False
        self._forward = forward
        self._backward = backward
        self._every_output = every_output
        self._raises = raises
        # The scale may be another one when the record is made, and what fails then raises nowhere.
        self._later = scale is None and not raises
        self._micro_batch = 0
        self._lock = threading.Lock()
        self._handles: list[RemovableHandle] = []
        self._unfinished: dict[tuple[int, Site], deque[tuple[int, int]]] = {}

    def install(self, sites: list[Site]) -> None:
        """Register the forward hooks."""
        handles = self._handles
        for site in sites:
            site.calls = count()
            module = site.module()
            if site.failed or module is None:
                continue
            try:
                handles.append(module.register_forward_hook(ForwardHook(site, self)))
            except Exception as error:  # noqa: BLE001 - such as a scripted module, which takes none
                self.fail(site, "registering a forward hook", error)

    def close(self) -> None:
        """Remove every hook and end the measurements; a second call does nothing."""
        if not self.is_open:
            return
        self.is_open = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unfinished.clear()
        self.measurements.finish()

    def fail(self, site: Site, where: str, error: Exception) -> None:
        """Switch off a module's hooks; where failures are to be raised, end the probe and raise."""
        site.failed = True
        self.recording._tell_failure(where, error, module=site.name, step=self.moment[0])
        if self._raises:
            self.close()
            raise error

    def measure(self, tensor: Tensor, wanted: Wanted, reading: LayerReading) -> None:
        """Measure a tensor, from any thread; backward has one for each device."""
        if tensor.is_cpu and not self._later:
            self.measurements.add(tensor, wanted, reading)
        else:
            with self._lock:
                self.measurements.add(tensor, wanted, reading, later=self._later)

    def take_output(self, site: Site, output: object) -> None:
        """Measure what a module gave, and have its gradient measured when it comes."""
        if _is_tracing() is not None or _peek_transforms() is not None:
            return
        grad_enabled = torch.is_grad_enabled()
        is_again = _find_graph_task() != -1
        if is_again:
            found = self._find_first_call(site, grad_enabled)
            if found is None:
                return
            call_index, micro_batch = found
        else:
            if self.saw_backward:
                self.saw_backward = False
                self._micro_batch += 1
            site.was_called = True
            self.calls += 1
            call_index, micro_batch = next(site.calls), self._micro_batch
            if not grad_enabled and self._backward:
                self._note_first_call(site, call_index, micro_batch)
        if type(output) is Tensor:
            tensors: list[tuple[str | None, Tensor]] = [(None, output)]
        else:
            tensors = find_tensors(output, every=self._every_output)
        for path, tensor in tensors:
            if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                self._tell_of_capture()
                return
            if self._forward and not is_again:
                shape, unit_dim = None, None
                if not tensor.is_nested:
                    shape, unit_dim = tuple(tensor.shape), choose_unit_dim(tensor, site.layout)
                wanted = Wanted(site.near_zero, site.saturation, unit_dim)
                reading = LayerReading(
                    self.recording,
                    site.identity,
                    "forward",
                    self.moment,
                    call_index,
                    shape,
                    path,
                    micro_batch,
                )
                self.measure(tensor, wanted, reading)
            if self._backward and grad_enabled and tensor.requires_grad and not tensor.is_meta:
                hook = GradientHook(site, self, call_index, path, micro_batch)
                handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                if tensor.is_leaf:
                    # A module gave a parameter: the hook would stay on it.
                    self._handles.append(handle)

    def _note_first_call(self, site: Site, call_index: int, micro_batch: int) -> None:
        function, _ = _find_functions()
        if function is not None:
            key = (id(function), site)
            self._unfinished.setdefault(key, deque()).append((call_index, micro_batch))

    def _find_first_call(self, site: Site, grad_enabled: bool) -> tuple[int, int] | None:
        """Which call a second run inside of backward repeats; None where it gets no gradient."""
        inner, outer = _find_functions()
        waiting = self._unfinished.get((id(outer), site)) if outer is not None else None
        if not waiting:
            return None
        found = waiting.popleft()
        if not grad_enabled and inner is not None:
            # One checkpoint within another: there is a third run to come.
            self._unfinished.setdefault((id(inner), site), deque()).append(found)
        return found

    def _tell_of_capture(self) -> None:
        self.recording._tell(
            "probe_skipped",
            "warning",
            "a CUDA graph is being captured: its replays run no hooks, so that no layer summaries "
            "come of what is in it",
            reason="cuda_graph_capture",
        )


def _find_functions() -> tuple[object | None, object | None]:
    """The autograd functions around the caller.

    Returns:
        The outermost one whose forward runs, up to the nearest one whose
        backward runs; and that one.
    """
    inner: object | None = None
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            function = frame.f_locals.get("ctx")
            if code.co_name == "backward":
                return inner, function
            inner = function
        if frame.f_back is None:
            break
        frame = frame.f_back
    return inner, None
