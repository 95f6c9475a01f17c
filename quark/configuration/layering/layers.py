"""`Layers`: named sources of settings in an order, and what they make together."""

from __future__ import annotations

import inspect
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

from quark.configuration.layering.assignments import find_place, name_place
from quark.configuration.layering.command_line import read_command_line
from quark.configuration.layering.file_layers import read_config_file
from quark.configuration.layering.layered_config import LayeredConfig, get_memory
from quark.configuration.layering.parsers import parse_arguments
from quark.configuration.layering.resolving import (
    Layer,
    LayerFunction,
    LayerPass,
    Resolver,
    Stage,
)
from quark_core.errors import SchemaValidationError

F = TypeVar("F", bound=LayerFunction)

_RESERVED = frozenset({"manual"})


class Layers:
    """A configuration made of layers: functions, files, the environment, the command line.

    layers = quark.Layers()

    @layers.add(default=True)
    def defaults(c):
        c.lr = 0.001

    @layers.add(priority=1)
    def high_lr(c):
        c.lr = 0.01

    config = layers.resolve()        # train.py high_lr batch_size=64

    They are applied in this order, and the last one counts: layers with `default=True`; those
    that the command line names, and what they come `after`; files; environment variables; settings
    of the command line; lazy layers, which see all of these. Within each of these by `priority`,
    then as they were added.

    `Layers(model=…, data=…)` keeps several apart, each in a namespace of its own: both may have a
    key `lr`.

    Threads: one at a time.

    Args:
        namespaces: Layers of their own, by the key that they lie under.

    Raises:
        SchemaValidationError: A namespace that is none.
    """

    def __init__(self, **namespaces: Layers) -> None:
        for name, each in namespaces.items():
            if not isinstance(each, Layers):
                raise SchemaValidationError(
                    f"Layers: namespace {name} must be a Layers, not {type(each).__name__}"
                )
            if name.startswith("__") or name in dir(LayeredConfig):
                raise SchemaValidationError(
                    f"Layers: {name!r} is the name of a method of a configuration; take another"
                )
        self._namespaces = dict(namespaces)
        self._layers: dict[str, Layer] = {}
        self._manuals: list[LayerFunction] = []
        self._prefixes: list[str] = []
        self._pass: LayerPass | None = None

    @overload
    def add(self, function: F, /) -> F: ...

    @overload
    def add(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        default: bool | None = None,
        priority: float = 0,
        after: str | Iterable[str] = (),
        lazy: bool = False,
    ) -> Callable[[F], F]: ...

    def add(
        self,
        function: LayerFunction | None = None,
        /,
        *,
        name: str | None = None,
        default: bool | None = None,
        priority: float = 0,
        after: str | Iterable[str] = (),
        lazy: bool = False,
    ) -> Any:
        """Add a function that writes settings into the configuration that it is given.

        It should do nothing else: one with a block `with layers.lazy():` is called twice.

        Args:
            function: The function; it stays what it is.
            name: What the command line calls it; the function's name by default.
            default: Whether it takes part unasked. Of a lazy layer that is so by default, of
                others not: they take part where the command line names them, or another layer
                that takes part comes after them.
            priority: The highest is applied last, among layers of one kind.
            after: Names of layers that it needs: they take part with it, and before it.
            lazy: Apply it after the command line, to work out what depends on that.

        Raises:
            SchemaValidationError: The name is taken or no word, or an argument is bad.
        """

        def take(given: LayerFunction) -> LayerFunction:
            if not callable(given):
                raise SchemaValidationError(
                    f"Layers.add: a layer is a function, not a {type(given).__name__}"
                )
            called = name if name is not None else getattr(given, "__name__", type(given).__name__)
            is_default = lazy if default is None else default
            stage = Stage.DEFAULT if is_default else Stage.NAMED
            self._keep(
                called, given, _find_definition(given), Stage.LAZY if lazy else stage,
                priority=priority, after=after, default=is_default, function=given,
            )  # fmt: skip
            return given

        return take if function is None else take(function)

    def add_file(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        default: bool = True,
        priority: float = 0,
        after: str | Iterable[str] = (),
        optional: bool = False,
    ) -> None:
        """Add a file: JSON, TOML or, with the extra `yaml`, YAML. It is read at `resolve`.

        Mappings in it are merged into what is there; each setting knows its line. What it says
        counts more than any function that is not lazy. Nothing in it is evaluated.

        Args:
            path: The file, from the working directory where it is relative.
            name: What the command line calls it; the file's name without its ending by default.
            default: Whether it takes part unasked.
            priority, after: As of `add`.
            optional: Whether it may be absent.

        Raises:
            SchemaValidationError: The name is taken or no word, or an argument is bad.
        """
        if not isinstance(path, (str, Path)):
            raise SchemaValidationError(
                f"Layers.add_file: path must be a path, not {type(path).__name__}"
            )
        file = Path(path)

        def read(config: LayeredConfig) -> None:
            if optional and not file.exists():
                return
            found = read_config_file(file)
            memory = get_memory(config)
            shown = name_place(str(file))
            for key, value in _flatten(found.values):
                line = found.lines.get(key)
                memory.place = shown if line is None else f"{shown}:{line}"
                config.update({key: value})

        self._keep(
            file.stem if name is None else name, read, name_place(str(file)), Stage.FILE,
            priority=priority, after=after, default=default, words=name is not None,
        )  # fmt: skip

    def add_environment(self, prefix: str) -> None:
        """Read settings from environment variables that begin with a prefix, at `resolve`.

        With `TRAIN_`, TRAIN_LR=0.01 is `lr` and TRAIN_MODEL__LR=0.1 is `model.lr`; values are read
        as those of the command line. They count more than files.

        Raises:
            SchemaValidationError: No prefix, or `QUARK_`, whose variables are settings of Quark.
        """
        if not isinstance(prefix, str) or not prefix or prefix.upper().startswith("QUARK_"):
            raise SchemaValidationError(
                f"Layers.add_environment: prefix must be a text such as 'TRAIN_', got {prefix!r}"
            )
        self._prefixes.append(prefix)

    def manual(self, function: F) -> F:
        """Let a function say what settings are: it is given a configuration to write texts into.

        @layers.manual
        def texts(c):
            c.lr = "learning rate of the optimizer"
        """
        self._manuals.append(function)
        return function

    @contextmanager
    def lazy(self) -> Iterator[None]:
        """Mark a block of a layer's function that is to be applied after the command line.

        @layers.add(default=True)
        def model(c):
            c.model, c.depth = "resnet50", 50
            with layers.lazy():
                if c.model == "resnet101":
                    c.depth = 101

        The function is called twice: first all but the block counts, then the block alone, which
        sees what the command line says.
        """
        now = self._pass
        if now is None:
            raise SchemaValidationError("Layers.lazy() belongs into the function of a layer")
        with now.enter_lazy_block():
            yield

    def resolve(
        self,
        argv: Sequence[str] | None = None,
        *,
        parser: ArgumentParser | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> LayeredConfig:
        """Apply all layers that take part, and return what they make.

        The command line names layers (`high_lr`, or `model.high_lr` in a namespace) and gives
        settings: `lr=0.01`, `--lr 0.01`, `--lr=0.01`, `optimizer.name=adam`. A value is read as
        JSON, and what is none is a text: `model=resnet101`; `version=%1.0%` is the text `1.0`. A
        key that looks like a misspelling of one that is there is refused; `+key=value` insists.
        `manual` prints the layers, each setting with its origins and what is known of it, and ends
        the program.

        Args:
            argv: The command line without the name of the program; `sys.argv[1:]` by default.
            parser: A parser that is asked first. Its defaults count least of all, what the command
                line gives of it counts as settings do; what it does not know is read here. Its
                `--help` works as ever.
            environ: Environment variables, for `add_environment`; those of the process by default.

        Raises:
            SchemaValidationError: A word that names no layer, a value that cannot be read, layers
                that come after each other in a circle, a file that cannot be read.
            SystemExit: After `manual`.
        """
        arguments = list(sys.argv[1:] if argv is None else argv)
        parsed = None if parser is None else parse_arguments(parser, arguments)
        said = read_command_line(arguments if parsed is None else parsed.rest)
        variables = os.environ if environ is None else environ
        resolution = Resolver(self, said, parsed, variables).resolve()
        if said.asks_for_manual:
            from quark.configuration.layering.manual import print_manual

            print_manual(resolution)
            raise SystemExit(0)
        return resolution.config

    def __repr__(self) -> str:
        names = [*self._layers, *(f"{name}=…" for name in self._namespaces)]
        return f"Layers({', '.join(names)})"

    def _keep(
        self,
        name: str,
        apply: LayerFunction,
        place: str | None,
        stage: Stage,
        *,
        priority: float,
        after: str | Iterable[str],
        default: bool,
        function: Callable[..., object] | None = None,
        words: bool = True,
    ) -> None:
        if not isinstance(name, str) or not name or (words and not _is_word(name)):
            raise SchemaValidationError(
                f"Layers: a layer's name must be a word that a command line can say, got {name!r}"
            )
        if name in _RESERVED:
            raise SchemaValidationError(f"Layers: {name!r} has a meaning of its own; take another")
        if name in self._layers:
            raise SchemaValidationError(
                f"Layers: there is a layer {name!r} already ({self._layers[name].place}); name "
                "this one by name="
            )
        if not isinstance(priority, (int, float)) or isinstance(priority, bool):
            raise SchemaValidationError(f"Layers: priority must be a number, got {priority!r}")
        needed = (after,) if isinstance(after, str) else tuple(after)
        if not all(isinstance(each, str) for each in needed):
            raise SchemaValidationError(f"Layers: after must be names of layers, got {after!r}")
        self._layers[name] = Layer(
            name, apply, place, stage, priority, needed, bool(default), len(self._layers), function
        )


def _find_definition(function: Callable[..., object]) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return find_place()
    return name_place(code.co_filename, code.co_firstlineno)


def _flatten(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _is_word(name: str) -> bool:
    return not name.startswith("-") and "=" not in name and not any(map(str.isspace, name))
