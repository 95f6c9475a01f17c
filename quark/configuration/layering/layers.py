"""`Layers`: named sources of settings in an order, and what they make together."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar, overload

from quark.configuration.layering.command_line import (
    CommandLine,
    Given,
    ParsedArguments,
    parse_arguments,
    parse_value,
    read_command_line,
)
from quark.configuration.layering.config_files import read_config_file
from quark.configuration.layering.layered_config import (
    ARGPARSE_DEFAULT,
    COMMAND_LINE,
    NOWHERE,
    Assignment,
    LayeredConfig,
    Resolution,
    find_place,
    get_memory,
    list_leaves,
    name_place,
    note_changed_lists,
    print_manual,
    revert,
)
from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import flatten_json

LayerFunction = Callable[[LayeredConfig], object]

_ENVIRONMENT = "environment"
# How alike a key must be to one that is there to count as a misspelling of it.
_LIKENESS = 0.8


class Stage(IntEnum):
    """When a layer is applied: those of a later stage see, and replace, what is there by then."""

    DEFAULT = 0
    NAMED = 1
    FILE = 2
    ENVIRONMENT = 3
    COMMAND_LINE = 4
    LAZY = 5


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One source of settings.

    Attributes:
        name: What it is called.
        apply: Writes its settings into a configuration.
        place: Where it stands.
        stage: When it is applied.
        priority: Its order within the stage: the highest comes last.
        after: Layers that it needs, which are applied before it.
        default: Whether it takes part unasked.
        number: Which one it is, of those that were added.
        function: The function behind it, or None.
    """

    name: str
    apply: LayerFunction
    place: str | None
    stage: Stage
    priority: float
    after: tuple[str, ...]
    default: bool
    number: int
    function: Callable[..., object] | None = None


class LayerPass:
    """One call of a layer's function; it knows which part of it counts.

    Args:
        config: The configuration that the function writes to.
        layer: The layer.
        again: Whether the function is called once more, after the command line: then its lazy
            blocks count, and nothing else.
    """

    def __init__(self, config: LayeredConfig, layer: Layer, *, again: bool) -> None:
        self.has_lazy_block = False
        self._config = config
        self._place = layer.place
        self._again = again
        # A block in a lazy layer, or in another block, counts as what is around it.
        self._is_inside = layer.stage is Stage.LAZY
        self._kept = self._take()

    def _take(self) -> tuple[dict[str, Any], dict[str, list[Assignment]]]:
        return self._config.to_dict(), get_memory(self._config).copy()

    @contextmanager
    def enter_lazy_block(self) -> Iterator[None]:
        """Let a block count in the second call alone."""
        if self._is_inside:
            yield
            return
        self.has_lazy_block = True
        before = self._kept if self._again else self._take()
        if self._again:
            revert(self._config, *before)
        self._is_inside = True
        try:
            yield
        except Exception:
            # What it asks for may not be there before the command line has said it.
            if self._again:
                raise
        finally:
            self._is_inside = False
            if self._again:
                note_changed_lists(self._config, self._place)
                self._kept = self._take()
            else:
                revert(self._config, *before)

    def finish(self) -> None:
        """Remember what the function has done unseen, or take back what does not count."""
        if self._again:
            revert(self._config, *self._kept)
        else:
            note_changed_lists(self._config, self._place)


class Resolver:
    """Applies the layers of one `Layers`, and of its namespaces, for one command line."""

    def __init__(
        self,
        layers: Layers,
        said: CommandLine,
        parsed: ParsedArguments | None,
        environ: Mapping[str, str],
    ) -> None:
        self._said = said
        self._parsed = parsed
        self._environ = environ
        self._spaces = list(_list_spaces(layers, ""))
        self._chosen = _choose(self._spaces, said.layers)
        self._ordered = {
            prefix: _sort(each, self._chosen[prefix], prefix) for prefix, each in self._spaces
        }
        self._late: list[tuple[str, Layers, Layer]] = []
        self._out = Resolution(LayeredConfig())
        self._memory = get_memory(self._out.config)

    def resolve(self) -> Resolution:
        """Apply everything, in its order."""
        for prefix, _ in self._spaces:
            if prefix:
                self._out.config.setdefault(prefix, {})
        self._memory.by_key.clear()
        self._take_parser_defaults()
        for stage in (Stage.DEFAULT, Stage.NAMED, Stage.FILE):
            self._apply_stage(stage)
        self._read_texts()
        self._take_environment()
        self._take_command_line()
        for prefix, layers, layer in self._late:
            self._call(prefix, layers, layer, again=True)
        self._apply_stage(Stage.LAZY)
        for prefix, layers in self._spaces:
            left = (name for name in layers._layers if name not in self._chosen[prefix])
            self._out.left_out += [_join(prefix, name) for name in left]
        self._memory.source, self._memory.place = "code", None
        return self._out

    def _apply_stage(self, stage: Stage) -> None:
        for prefix, layers in self._spaces:
            for layer, applied_in in self._ordered[prefix]:
                if applied_in is stage:
                    self._call(prefix, layers, layer)

    def _call(self, prefix: str, layers: Layers, layer: Layer, *, again: bool = False) -> None:
        config = self._out.config[prefix] if prefix else self._out.config
        name = _join(prefix, layer.name)
        self._memory.source, self._memory.place = name, None
        before, now = layers._pass, LayerPass(config, layer, again=again)
        layers._pass = now
        try:
            layer.apply(config)
        except SchemaValidationError:
            raise
        except Exception as error:
            error.add_note(f"in the layer {name!r} ({layer.place})")
            raise
        finally:
            layers._pass = before
        self._memory.place = None
        now.finish()
        if now.has_lazy_block and not again:
            self._late.append((prefix, layers, layer))
        said = f"{name}, its lazy block" if again else name
        self._out.applied.append((said, layer.place))

    def _read_texts(self) -> None:
        for prefix, layers in self._spaces:
            for function in layers._manuals:
                texts = LayeredConfig()
                function(texts)
                for key, text in list_leaves(texts):
                    self._out.texts[_join(prefix, key)] = str(text)

    def _take_parser_defaults(self) -> None:
        parsed = self._parsed
        if parsed is None:
            return
        defaults = {key: value for key, value in parsed.values.items() if key not in parsed.given}
        for key, value in defaults.items():
            self._set(key, value, ARGPARSE_DEFAULT, parsed.options.get(key, key))
        if defaults:
            self._out.applied.append((f"{ARGPARSE_DEFAULT}s", None))

    def _take_environment(self) -> None:
        took = False
        for prefix, layers in self._spaces:
            for start in layers._prefixes:
                for name in sorted(self._environ):
                    if not name.startswith(start) or name == start:
                        continue
                    key = name[len(start) :].lower().replace("__", ".").strip(".")
                    if key:
                        value = parse_value(self._environ[name], name)
                        self._set(_join(prefix, key), value, _ENVIRONMENT, name)
                        took = True
        if took:
            self._out.applied.append((_ENVIRONMENT, None))

    def _take_command_line(self) -> None:
        parsed = self._parsed
        took = bool(self._said.settings)
        if parsed is not None:
            for key in sorted(parsed.given & parsed.values.keys()):
                place = parsed.options.get(key, key)
                self._set(key, parsed.values[key], COMMAND_LINE, place)
                took = True
        for setting in self._said.settings:
            if not setting.insists:
                self._refuse_misspelling(setting)
            written = setting.place if setting.place.startswith("-") else None
            self._set(setting.key, setting.value, COMMAND_LINE, written)
        if took:
            self._out.applied.append((COMMAND_LINE, None))

    def _refuse_misspelling(self, setting: Given) -> None:
        config = self._out.config
        if setting.key in config or setting.key in self._out.texts:
            return
        known = {path for path, _ in list_leaves(config)} | set(self._out.texts)
        near = difflib.get_close_matches(setting.key, sorted(known), 1, _LIKENESS)
        if near:
            raise SchemaValidationError(
                f"{setting.place.rstrip('=')} on the command line: the config has no key "
                f"{setting.key!r}; did you mean {near[0]!r}? To add a new key, write "
                f"+{setting.key}=VALUE"
            )

    def _set(self, key: str, value: Any, source: str, place: str | None) -> None:
        self._memory.source, self._memory.place = source, place or NOWHERE
        self._out.config[key] = value


def _list_spaces(layers: Layers, prefix: str) -> Iterator[tuple[str, Layers]]:
    """The namespaces of a `Layers` and then itself, each with the key that it lies under."""
    for name, inner in layers._namespaces.items():
        yield from _list_spaces(inner, _join(prefix, name))
    yield prefix, layers


def _choose(spaces: Sequence[tuple[str, Layers]], words: Sequence[str]) -> dict[str, set[str]]:
    """Prefix of each namespace -> names of its layers that take part.

    Raises:
        SchemaValidationError: A word names no layer.
    """
    chosen = {
        prefix: {each.name for each in layers._layers.values() if each.default}
        for prefix, layers in spaces
    }
    for word in words:
        above, _, name = word.rpartition(".")
        named = [
            prefix
            for prefix, layers in spaces
            if (name in layers._layers and prefix == above) or word in layers._layers
        ]
        if not named:
            raise SchemaValidationError(_describe_unknown(word, spaces))
        for prefix in named:
            layers = dict(spaces)[prefix]
            chosen[prefix].add(word if word in layers._layers else name)
    for prefix, layers in spaces:
        waiting = list(chosen[prefix])
        while waiting:
            layer = layers._layers[waiting.pop()]
            for needed in layer.after:
                _check_needed(layers, layer, needed, prefix)
                if needed not in chosen[prefix]:
                    chosen[prefix].add(needed)
                    waiting.append(needed)
    return chosen


def _describe_unknown(word: str, spaces: Sequence[tuple[str, Layers]]) -> str:
    names = [_join(prefix, name) for prefix, layers in spaces for name in layers._layers]
    near = difflib.get_close_matches(word[:100], names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    listed = ", ".join(names[:20]) or "none"
    return (
        f"{word[:100]!r} on the command line is not a layer{hint} The layers are: {listed}. To "
        "set a config value, write key=value"
    )


def _check_needed(layers: Layers, layer: Layer, needed: str, prefix: str) -> None:
    found = layers._layers.get(needed)
    name = _join(prefix, layer.name)
    if found is None:
        near = difflib.get_close_matches(needed, list(layers._layers), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SchemaValidationError(
            f"the layer {name!r} ({layer.place}) comes after {needed!r}, which is not a layer{hint}"
        )
    if found.stage > max(layer.stage, Stage.NAMED):
        raise SchemaValidationError(
            f"the layer {name!r} ({layer.place}) cannot come after {needed!r}, which is applied "
            f"later as a {found.stage.name.lower()} layer"
        )


def _sort(layers: Layers, chosen: set[str], prefix: str) -> list[tuple[Layer, Stage]]:
    """Layers, and when they are applied: by stage and priority, each after those that it needs.

    Raises:
        SchemaValidationError: Some come after each other in a circle; the message names it.
    """
    taken = [each for each in layers._layers.values() if each.name in chosen]
    stages: dict[str, Stage] = {}

    def bring_forward(layer: Layer, stage: Stage, above: tuple[str, ...]) -> None:
        """What a default layer needs is applied among the defaults."""
        if layer.name in above:
            circle = [*above[above.index(layer.name) :], layer.name]
            shown = " -> ".join(_join(prefix, name) for name in circle)
            raise SchemaValidationError(f"the order of the layers is circular: {shown}")
        stage = min(stage, layer.stage)
        if stages.get(layer.name, Stage.LAZY + 1) <= stage:
            return
        stages[layer.name] = stage
        for needed in layer.after:
            bring_forward(layers._layers[needed], stage, (*above, layer.name))

    for layer in taken:
        bring_forward(layer, layer.stage, ())
    taken.sort(key=lambda each: (stages[each.name], each.priority, each.number))
    done: dict[str, Layer] = {}

    def emit(layer: Layer) -> None:
        if layer.name not in done:
            for needed in layer.after:
                emit(layers._layers[needed])
            done[layer.name] = layer

    for layer in taken:
        emit(layer)
    return [(layer, stages[layer.name]) for layer in done.values()]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


F = TypeVar("F", bound=LayerFunction)

_RESERVED = frozenset({"manual"})


class Layers:
    """Config built from layers: functions, files, environment variables, command line.

    Layers are applied in this order, and the last one wins:

    - layers with `default=True`
    - layers that the command line names, after the layers in their `after`
    - files
    - environment variables
    - values from the command line
    - lazy layers, which see all of the above

    Within each group, they are sorted by `priority`, then by order of addition. Not thread-safe.

    Args:
        **namespaces: Layers for a part of the config, as in `Layers(model=…, data=…)`. Both
            parts may have a key `lr`.

    Raises:
        SchemaValidationError: A namespace is not a `Layers` object.

    Example:
        layers = quark.Layers()

        @layers.add(default=True)
        def defaults(c):
            c.lr = 0.001

        config = layers.resolve()  # train.py lr=0.01
    """

    def __init__(self, **namespaces: Layers) -> None:
        for name, each in namespaces.items():
            if not isinstance(each, Layers):
                raise SchemaValidationError(
                    f"Layers: {name} must be a Layers, not {type(each).__name__}"
                )
            if name.startswith("__") or name in dir(LayeredConfig):
                raise SchemaValidationError(
                    f"Layers: {name!r} is the name of a config method. Choose another name"
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
        """Add a function that sets values in the config it is given.

        The function should have no other effect: one with a `with layers.lazy():` block is called
        twice.

        Args:
            function: The function. It is returned unchanged.
            name: Name for the command line. Defaults to the function's name.
            default: Whether to apply the layer if the command line does not name it. Defaults to
                True for lazy layers, else False.
            priority: Order within a group; the highest is applied last. Defaults to 0.
            after: Names of layers that are applied with this layer and before it.
            lazy: Whether to apply the layer after the command line. Defaults to False.

        Raises:
            SchemaValidationError: The name is taken or not an identifier, or an argument is
                invalid.
        """

        def take(given: LayerFunction) -> LayerFunction:
            if not callable(given):
                raise SchemaValidationError(
                    f"Layers.add: a layer must be a function, not {type(given).__name__}"
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
        """Add a JSON, TOML or YAML file (extra `yaml`) that is read by `resolve`.

        Mappings are merged, and each value records its line. A file overrides all functions that
        are not lazy. Its content is not evaluated.

        Args:
            path: Path of the file, absolute or relative to the working directory.
            name: Name for the command line. Defaults to the file name without extension.
            default: Whether to apply the file if the command line does not name it. Defaults to
                True.
            priority: Order within the files; the highest is applied last. Defaults to 0.
            after: Names of layers that are applied with this file and before it.
            optional: Whether the file may be missing. Defaults to False.

        Raises:
            SchemaValidationError: The name is taken or not an identifier, or an argument is
                invalid.
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
            for key, value in flatten_json(found.values):
                line = found.lines.get(key)
                memory.place = shown if line is None else f"{shown}:{line}"
                config.update({key: value})

        self._keep(
            file.stem if name is None else name, read, name_place(str(file)), Stage.FILE,
            priority=priority, after=after, default=default, words=name is not None,
        )  # fmt: skip

    def add_environment(self, prefix: str) -> None:
        """Read values from environment variables with a prefix, when `resolve` is called.

        With `TRAIN_`, TRAIN_LR=0.01 sets `lr` and TRAIN_MODEL__LR=0.1 sets `model.lr`. Values are
        parsed like those of the command line. They override files.

        Args:
            prefix: Prefix of the variables.

        Raises:
            SchemaValidationError: The prefix is empty or `QUARK_`.
        """
        if not isinstance(prefix, str) or not prefix or prefix.upper().startswith("QUARK_"):
            raise SchemaValidationError(
                f"Layers.add_environment: prefix must be a str such as 'TRAIN_', got {prefix!r:.60}"
            )
        self._prefixes.append(prefix)

    def manual(self, function: F) -> F:
        """Register a function that describes the values.

        The function gets a config and writes a description for each key.

        Example:
            @layers.manual
            def texts(c):
                c.lr = "learning rate of the optimizer"
        """
        self._manuals.append(function)
        return function

    @contextmanager
    def lazy(self) -> Iterator[None]:
        """Mark a block of a layer function that is applied after the command line.

        The function is called twice: once for everything outside the block, then for the block
        alone. The block sees the values from the command line.

        Example:
            @layers.add(default=True)
            def model(c):
                c.model, c.depth = "resnet50", 50
                with layers.lazy():
                    if c.model == "resnet101":
                        c.depth = 101
        """
        now = self._pass
        if now is None:
            raise SchemaValidationError("Layers.lazy() must be called in a layer's function")
        with now.enter_lazy_block():
            yield

    def resolve(
        self,
        argv: Sequence[str] | None = None,
        *,
        parser: ArgumentParser | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> LayeredConfig:
        """Apply the layers and return the config.

        The command line names layers (`high_lr`, or `model.high_lr` in a namespace) and sets
        values: `lr=0.01`, `--lr 0.01`, `--lr=0.01`, `optimizer.name=adam`. A value is parsed as
        JSON, else it is a string. `version=%1.0%` is the string `1.0`.

        A key that looks like a misspelled key is rejected. Use `+key=value` to set it anyway.
        `manual` prints the layers, the values with their origins and their descriptions, and exits.

        Args:
            argv: Command line without the program name. Defaults to `sys.argv[1:]`.
            parser: An ArgumentParser that reads the command line first. Its defaults have the
                lowest priority. Arguments that it does not know are read as described above.
            environ: Environment variables for `add_environment`. Defaults to `os.environ`.

        Raises:
            SchemaValidationError: An unknown layer, an unreadable value or file, or a cycle of
                `after`.
            SystemExit: After `manual`.
        """
        arguments = list(sys.argv[1:] if argv is None else argv)
        parsed = None if parser is None else parse_arguments(parser, arguments)
        said = read_command_line(arguments if parsed is None else parsed.rest)
        variables = os.environ if environ is None else environ
        resolution = Resolver(self, said, parsed, variables).resolve()
        if said.asks_for_manual:
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
                f"Layers: the name of a layer must be a single word, got {name!r}"
            )
        if name in _RESERVED:
            raise SchemaValidationError(f"Layers: {name!r} is a reserved name. Choose another name")
        if name in self._layers:
            raise SchemaValidationError(
                f"Layers: the layer {name!r} already exists ({self._layers[name].place}). "
                "Pass another name with name="
            )
        if not isinstance(priority, (int, float)) or isinstance(priority, bool):
            raise SchemaValidationError(f"Layers: priority must be a number, got {priority!r:.60}")
        needed = (after,) if isinstance(after, str) else tuple(after)
        if not all(isinstance(each, str) for each in needed):
            raise SchemaValidationError(f"Layers: after must be layer names, got {after!r:.60}")
        self._layers[name] = Layer(
            name, apply, place, stage, priority, needed, bool(default), len(self._layers), function
        )


def _find_definition(function: Callable[..., object]) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return find_place()
    return name_place(code.co_filename, code.co_firstlineno)


def _is_word(name: str) -> bool:
    return not name.startswith("-") and "=" not in name and not any(map(str.isspace, name))
