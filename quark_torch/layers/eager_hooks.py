"""Eager hooks: those of a sampled step, and those of a model that is evaluated."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quark_torch.kernels.compiled_probing import find_hooks
from quark_torch.kernels.loader import find_kernel
from quark_torch.layer_filter import depends_on_mode
from quark_torch.layers.recording import (
    OF_GRADIENTS,
    Failure,
    InertWhenCopied,
    LayerReading,
    LayerRecording,
    Modes,
    PlainTape,
    StepScale,
    TapeReading,
    make_hook_types,
)
from quark_torch.layers.watched_module import Site, find_functions, trace_scope
from quark_torch.measuring.device_probe import Probe
from quark_torch.measuring.tensor_reading import pack_limits
from quark_torch.measuring.tensor_statistics import Wanted

# Eager hooks: what they are, and what one probed step takes with them.
#
# Forward hooks are there during a probed step only. Gradients come by hooks of
# the tensors that the modules gave, set in the forward hook: full backward
# hooks break in-place modules and see no dict, list or dataclass. A tensor is
# reduced when it is seen and never kept, since what follows may overwrite it.
#
# Activation checkpointing runs modules a second time inside of backward. The
# second run gives no activation records. With the reentrant kind it is the run
# whose outputs get gradients, so there its calls get the indexes that they had
# in the first run: both are known by the autograd function that runs them.

_is_compiling = torch.compiler.is_compiling
_find_graph_task = torch._C._current_graph_task_id
_is_tracing = torch._C._get_tracing_state
_peek_transforms = torch._C._functorch.peek_interpreter_stack


@dataclass(slots=True, eq=False, repr=False)
class ForwardHook(InertWhenCopied):
    """Hook of one module in one probed step. A copy of it is inert."""

    _site: Site
    _probed: ProbedStep

    def __call__(self, module: nn.Module, _args: object, output: object) -> None:
        """Take the statistics; returns None, since anything else would replace the output."""
        if _is_compiling():
            return
        self._probed.see_output(self._site, module, output)


@dataclass(slots=True, eq=False, repr=False)
class GradientHook(InertWhenCopied):
    """Hook of one tensor that a module gave. A copy of it is inert."""

    _site: Site
    _probed: ProbedStep
    _call_index: int
    _path: str | None
    _micro_batch: int
    _scope: str | None
    _fired: int = 0

    def __call__(self, gradient: Tensor) -> None:
        """Take the statistics; returns None, since anything else would replace the gradient."""
        if _is_compiling():
            return
        fired, self._fired = self._fired, self._fired + 1
        self._probed.see_gradient(
            self._site,
            gradient,
            self._call_index,
            self._path,
            self._micro_batch,
            fired,
            self._scope,
        )


class ProbedStep:
    """One step between `begin_step` and `end_step` whose layers are looked at.

    Attributes:
        recording: Who makes the records.
        moment: Step and epoch.
        measurements: Where tensors are measured.
        scale: What tells the scale of the gradients, once the step has ended.
        tape: What its hooks share.

    Args:
        forward, backward, every_output, raises, max_calls: As of the config.
        trained: The model, where calls that are no training are left out.
        is_sharded: Whether the model has distributed parameters.
    """

    def __init__(
        self,
        recording: LayerRecording,
        moment: tuple[int, int | None],
        *,
        forward: bool,
        backward: bool,
        every_output: bool,
        scale: StepScale,
        raises: bool,
        trained: weakref.ref[nn.Module] | None,
        max_calls: int,
        is_sharded: bool,
    ) -> None:
        self.recording = recording
        self.moment = moment
        self.measurements = Probe()
        self.scale = scale
        self._forward = forward
        self._backward = backward
        self._every_output = every_output
        self._trained = trained
        self._max_calls = max_calls
        self._is_sharded = is_sharded
        self._raises = raises
        # What fails when the record is made later raises nowhere.
        self._later = not raises
        self._lock = threading.Lock()
        self._handles: list[RemovableHandle] = []
        self._places: list[tuple[dict[int, Any], int]] = []
        self._unfinished: dict[tuple[int, Site], deque[tuple[int, int]]] = {}
        self._hooks: Any = find_hooks() if self._later and not is_sharded else None
        self.tape: Any = PlainTape() if self._hooks is None else self._open_tape()

    def install(self, sites: list[Site]) -> None:
        """Put the forward hooks in place."""
        places = self._places
        make = None if self._hooks is None else self.tape.make_call
        for site in sites:
            module = site.module()
            if site.failed or module is None:
                continue
            calls = site.calls = count()
            if make is None:
                hook: Any = ForwardHook(site, self)
            else:
                hook = make(self, site, site.module, calls, site.find_units, site.limits)
            try:
                if site.key is None:
                    self._handles.append(site.register(module, hook))
                else:
                    # As registering it does, at a quarter of its price, with the key it had.
                    hooks = module._forward_hooks
                    hooks[site.key] = hook
                    places.append((hooks, site.key))
            except Exception as error:  # noqa: BLE001 - such as a scripted module, which takes none
                self.fail(site, "registering a forward hook", error)

    def _open_tape(self) -> Any:
        kernel = find_kernel()
        assert kernel is not None
        reading = TapeReading(self.recording, self.moment, self.scale)
        tape = self._hooks.Tape(
            self.measurements.order,
            reading,
            *make_hook_types(self._hooks),
            kernel.address,
            kernel.level,
            self._forward,
            self._backward,
            pack_limits(OF_GRADIENTS),
            self._trained,
            self._max_calls,
        )
        reading.tape = tape
        return tape

    def close(self) -> None:
        """Remove every hook and end the measurements; a second call does nothing."""
        if not self.tape.is_open:
            return
        self.tape.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for hooks, key in self._places:
            hooks.pop(key, None)
        self._places.clear()
        self._unfinished.clear()
        self.measurements.finish()

    def fail(self, site: Site, where: str, error: Exception) -> None:
        """Switch off a module's hooks; where failures are to be raised, end the probe and raise."""
        site.failed = True
        self.recording._note_failure(Failure(where, site.name, error, self.moment[0]))
        if self._raises:
            self.recording._tell_failures()
            self.close()
            raise error

    def measure(self, tensor: Tensor, wanted: Wanted, reading: LayerReading) -> None:
        """Measure a tensor, from any thread; backward has one for each device."""
        measurements = self.measurements
        dropped = measurements.dropped
        if tensor.is_cpu and not self._later:
            is_read = measurements.add(tensor, wanted, reading)
        else:
            with self._lock:
                is_read = measurements.add(tensor, wanted, reading, later=self._later)
        if not is_read and dropped == measurements.dropped:
            self._note_unread(reading.module[0], tensor)

    def _note_unread(self, name: str, tensor: Tensor) -> None:
        error = self.measurements.error
        reason = f"a {type(tensor).__name__} on {tensor.device.type}"
        self.recording._note_unread(name, reason if error is None else f"{reason}: {error}")
        if error is not None and self._raises:
            raise error

    def see_output(self, site: Site, module: nn.Module, output: object) -> None:
        """Take what a module gave; never raises, unless failures are to be raised."""
        # A shallow copy shares the hooks; replicas of DataParallel are the module itself.
        if site.module() is not module and not getattr(module, "_is_replica", False):
            return
        tape = self.tape
        if tape.is_open and not site.failed:
            began = perf_counter_ns()
            try:
                self.take_output(site, output)
            except Exception as error:  # noqa: BLE001 - it must not reach the user's forward
                self.fail(site, "forward hook", error)
            finally:
                tape.spent_ns += perf_counter_ns() - began

    def see_gradient(
        self,
        site: Site,
        gradient: Tensor,
        call_index: int,
        path: str | None,
        micro_batch: int,
        backward_index: int,
        scope: str | None = None,
    ) -> None:
        """Take a gradient; never raises, unless failures are to be raised."""
        tape = self.tape
        if tape.is_open and not site.failed:
            began = perf_counter_ns()
            try:
                self.take_gradient(
                    site, gradient, call_index, path, micro_batch, backward_index, scope
                )
            except Exception as error:  # noqa: BLE001 - it must not reach the user's backward
                self.fail(site, "gradient hook", error)
            finally:
                tape.spent_ns += perf_counter_ns() - began
        elif not tape.is_open:
            tape.late += 1

    def take_gradient(
        self,
        site: Site,
        gradient: Tensor,
        call_index: int,
        path: str | None,
        micro_batch: int,
        backward_index: int,
        scope: str | None = None,
    ) -> None:
        """Measure a gradient of what a module gave."""
        reading = LayerReading(
            self.recording,
            site.identity,
            "backward",
            self.moment,
            call_index,
            None if gradient.is_nested else tuple(gradient.shape),
            path,
            micro_batch,
            backward_index,
            self.scale,
            scope=scope,
        )
        self.tape.saw_backward = True
        self.measure(gradient, OF_GRADIENTS, reading)

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
            if self._is_evaluation(grad_enabled):
                self.tape.evaluations += 1
                return
            if self.tape.saw_backward:
                self.tape.saw_backward = False
                self.tape.micro_batch += 1
            site.was_called = True
            self.tape.calls += 1
            call_index, micro_batch = next(site.calls), self.tape.micro_batch
            if call_index >= self._max_calls:
                self.tape.surplus += 1
                return
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
            scope = trace_scope(tensor) if self._is_sharded else None
            if self._forward and not is_again:
                shape, unit_dim = None, None
                if not tensor.is_nested:
                    shape, unit_dim = tuple(tensor.shape), site.units.choose(tensor)
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
                    scope=scope,
                )
                self.measure(tensor, wanted, reading)
            if self._backward and grad_enabled and tensor.requires_grad and not tensor.is_meta:
                hook = GradientHook(site, self, call_index, path, micro_batch, scope)
                handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                if tensor.is_leaf:
                    # A module gave a parameter: the hook would stay on it.
                    self._handles.append(handle)

    def _is_evaluation(self, grad_enabled: bool) -> bool:
        """Whether a call is no training, and such calls are left out."""
        if self._trained is None:
            return False
        trained = self._trained()
        if trained is not None and not trained.training:
            return True
        # A reentrant checkpoint calls without gradients first.
        return not grad_enabled and find_functions()[0] is None

    def _note_first_call(self, site: Site, call_index: int, micro_batch: int) -> None:
        function, _ = find_functions()
        if function is not None:
            key = (id(function), site)
            self._unfinished.setdefault(key, deque()).append((call_index, micro_batch))

    def _find_first_call(self, site: Site, grad_enabled: bool) -> tuple[int, int] | None:
        """Which call a second run inside of backward repeats; None where it gets no gradient."""
        inner, outer = find_functions()
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
            "a CUDA graph is being captured. Its replays run no hooks, so its layers have no "
            "summaries",
            reason="cuda_graph_capture",
        )


_MAX_DEPTH = 6
_MAX_TENSORS = 64
_MAX_VISITS = 1024


def find_tensors(output: object, *, every: bool) -> list[tuple[str | None, Tensor]]:
    """Tensors of an output, with where they are in it, such as `1.0` or `logits`.

    Tuples, lists, mappings, dataclasses and packed sequences are searched,
    six levels deep. At most 64 tensors are found.

    Args:
        output: What a module's forward returned.
        every: All of them; otherwise only the primary one, which is the first
            of floating point or complex numbers, or else the first.
    """
    if isinstance(output, Tensor):
        return [(None, output)]
    first: tuple[str | None, Tensor] | None = None
    found: list[tuple[str | None, Tensor]] = []
    for place in _walk(output):
        if every:
            found.append(place)
            if len(found) == _MAX_TENSORS:
                break
        elif place[1].dtype.is_floating_point or place[1].dtype.is_complex:
            return [place]
        elif first is None:
            first = place
    return [first] if first is not None else found


def _walk(output: object) -> Iterator[tuple[str | None, Tensor]]:
    # With a list of its own instead of recursion: outputs may be deep, or hold themselves.
    waiting: list[tuple[str, object, int]] = [("", output, 0)]
    for _ in range(_MAX_VISITS):
        if not waiting:
            return
        path, value, depth = waiting.pop()
        if isinstance(value, Tensor):
            yield path or None, value
        elif depth < _MAX_DEPTH:
            prefix = f"{path}." if path else ""
            items = [(f"{prefix}{key}", item, depth + 1) for key, item in _list_items(value)]
            waiting += reversed(items)


def _list_items(value: Any) -> list[tuple[object, object]]:
    if isinstance(value, (str, bytes)):
        return []
    if isinstance(value, Mapping):
        return list(value.items())
    if type(value).__name__ == "PackedSequence":
        return [("data", value.data)]
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)
        ]
    return []


# So many evaluations are looked for in steps that are not probed, in so many steps.
_ENOUGH = 8
_MOST_STEPS = 50_000
# Training passes outside of a step that has begun, before it is given up: several optimizers may
# step in one.
_MOST_STRAYS = 3


class EvaluationWatch:
    """Notes in which mode modules are when the model is called without gradients.

    It listens by a hook on the model itself: from a probed step's begin to the
    next training pass, and, until it has seen a few evaluations, also from the
    optimizer's step to there in the other steps, so that evaluations are seen
    on either side of a step's begin. The training pass takes the hook out.
    Where several do without a step's begin, because steps are begun in another
    way, it listens there no more. On a model in which no mode matters it does
    nothing.

    A call in evaluation mode counts for more than one in training mode, such as
    a pass that makes labels.

    Args:
        model: The model, without its wrappers; held weakly.
        modules: Instrumented modules by name; of those that depend on the mode
            it is noted.

    Attributes:
        is_active: Whether it is to be told of each step's begin.
        is_waiting: Whether it is to be told of the optimizer's steps.
    """

    def __init__(self, model: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._model = weakref.ref(model)
        self._modules = [
            (name, weakref.ref(module)) for name, module in modules if depends_on_mode(module)
        ]
        self._hook = _PassHook(self)
        self._key: int | None = None
        self._is_placed = self._in_step = self._is_done = False
        self._step = 0
        self._seen = 0
        self._steps_left = _MOST_STEPS
        self._strays = 0
        self._found: dict[int, dict[str, bool]] = {}
        self.is_active = self.is_waiting = bool(self._modules)

    def begin_step(self, step: int) -> None:
        """A step begins: what came before it was seen or not."""
        if self._is_placed and not self.is_waiting:
            self._remove()
        self._step, self._is_done, self._in_step, self._strays = step, False, False, 0
        self.is_active = self.is_waiting

    def probe(self) -> None:
        """The step that has begun is probed."""
        self._in_step = True
        self._place()

    def end_step(self) -> None:
        """The probed step has ended."""
        self._in_step = False

    def note_step(self) -> None:
        """An optimizer of the model is about to step."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.is_waiting = False
        elif not self._is_placed:
            self._place()

    def end(self) -> None:
        """Listen no more."""
        self.is_active = self.is_waiting = False
        if self._is_placed:
            self._remove()

    def take(self) -> dict[str, Modes]:
        """The modes of each module in what was seen since the last call; empty for nothing."""
        found, self._found = self._found, {}
        taken: dict[str, Modes] = {}
        for step, modes in found.items():
            for name, is_training in modes.items():
                taken[name] = (*taken.get(name, ()), (step, is_training))
        return taken

    def see(self, model: nn.Module) -> None:
        """The model is called."""
        if model is not self._model():
            return
        if torch.is_grad_enabled():
            if not self._in_step:
                self._strays += 1
                self.is_waiting &= self._strays <= _MOST_STRAYS
                self._remove()
            return
        is_training = model.training
        is_known = self._step in self._found
        if self._is_done or (is_training and is_known):
            return
        self._seen += not is_known
        if self._seen >= _ENOUGH:
            self.is_waiting = False
        # Single modules in training mode in a model that is not are so on purpose.
        self._is_done = not is_training
        self._found[self._step] = {
            name: is_training and module.training
            for name, reference in self._modules
            if (module := reference()) is not None
        }
        if len(self._found) > _ENOUGH:
            del self._found[next(iter(self._found))]

    def _place(self) -> None:
        model = self._model()
        if model is None or self._is_placed or not self._modules:
            return
        if self._key is None:
            self._key = model.register_forward_pre_hook(self._hook).id
        else:
            # As registering it does, at a fraction of its price, with the key it had.
            model._forward_pre_hooks[self._key] = self._hook
        self._is_placed = self.is_active = True

    def _remove(self) -> None:
        self._is_placed = self._in_step = False
        model = self._model()
        if model is not None and self._key is not None:
            model._forward_pre_hooks.pop(self._key, None)


class _PassHook(InertWhenCopied):
    """Hook of the model. A copy of it is inert."""

    __slots__ = ("_watch",)

    def __init__(self, watch: EvaluationWatch) -> None:
        self._watch = weakref.ref(watch)

    def __call__(self, module: nn.Module, _arguments: object) -> None:
        if _is_compiling():
            return
        watch = self._watch()
        if watch is not None:
            watch.see(module)
