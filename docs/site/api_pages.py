"""Writes the pages of the Python API: docs/reference/api/. See reference.py for the command.

Each file `docs/site/api/SUBJECT.md.in` is one page. It names the public names of its subject, in
their order, and holds an example of each; this is the one place that says which page a name is on.
Signatures and texts come from the code and its docstrings (Google style).

An input file holds:

    # Title                            the page's title, and an introduction below it
    <!-- setup: NAME … -->             Python that examples begin with; readers do not see it
    ## name                            a public name, then its example
    <!-- needs torch, after NAME -->   what must be installed, and the setup that comes before
"""

import ast
import functools
import inspect
import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin

INPUTS = Path(__file__).resolve().parent / "api"
WIDTH = 88
MOST_COLUMNS = 100
SECTIONS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Yields": "Yields",
    "Raises": "Raises",
    "Example": "Example",
}
CONSTANTS = {
    "ARTIFACT_STORAGE_LAYOUT": "quark_core.records.names",
    "CURRENT_SCHEMA_VERSION": "quark_core.records.schema",
    "LogIdentifier": "quark_core.records.kinds.basic",
    "__version__": "quark_core.version",
}
# Public for other parts of Quark, which call them; a program has no use for them.
CALLED_BY_QUARK = set(
    """
    *.bind *.settle *.check *.check_open *.check_places *.list_figures *.describe_heartbeat
    *.list_faults *.attach *.become_child *.finish_at_exit *.assemble *.passed *.extensions
    *.log_error *.records_machine
    AttentionEntropy.* RouterLoad.* CSVBackend.* MLflowBackend.* WandbBackend.*
    ArtifactStore.open_run DataDiagnostics.open_run EventLogger.open_run HookEngine.open_run
    MetricsLogger.open_run ParameterDiagnostics.open_run SampleLogger.open_run
    SystemTelemetry.open_run
    HookEngine.drop_step HookEngine.follow HookScheduleConfig.never_fires
    LoggingHandler.emit LoggingHandler.handle ParameterDiagnostics.has_stepped
    ParameterDiagnostics.keep_pace ParameterDiagnostics.step_totals
    ParameterDiagnosticsConfig.captures_updates PendingArtifact.fail PhaseAnalyzerThresholds.limit
    ProjectRecord.derive_id RunReport.contents RunReport.show_static
    StepTelemetryScope.counts StepTelemetryScope.mark_end StepTelemetryScope.measure_wall_times
    StepTelemetryScope.metadata StepTelemetryScope.sampled StepTelemetryScope.start_s
    StopRequest.is_complete StoredTrial.claim Sweep.hold_given
    Trial.catches Trial.claim Trial.describe_end Trial.describe_start Trial.end_failed
    Trial.finish Trial.hold Trial.objective Trial.release Trial.stop_with Trial.storage_dir
    Trial.stored Trial.summarize Trial.take Trial.take_result
    """.split()
)
# Every record has these; the page of the records says so once.
OF_ALL_RECORDS = {"id", "timestamp", "to_dict"}

_SETUP = re.compile(r"<!-- setup: (?P<name>[\w ]+)\n(?P<code>.*?)\n-->\n*", re.DOTALL)
_NAME = re.compile(r"^## (?P<name>\w+)\n", re.MULTILINE)
_FLAGS = re.compile(r"^<!-- (?P<flags>(?:needs|after) .*?) -->\n*")


class DocsError(Exception):
    """What a writer of docstrings or examples has to mend."""


@dataclass
class Subject:
    """One page: its title, its introduction, and its names with their examples."""

    file: str
    title: str
    intro: str
    examples: dict[str, str] = field(default_factory=dict)
    setups: dict[str, str] = field(default_factory=dict)


def read_subjects():
    """The pages, in the order of docs/site/api/order.txt."""
    names = (INPUTS / "order.txt").read_text("utf-8").split()
    return [read_subject(INPUTS / f"{name}.md.in") for name in names]


def read_subject(path):
    text = path.read_text("utf-8")
    setups = {found["name"]: found["code"] for found in _SETUP.finditer(text)}
    head, *parts = _NAME.split(_SETUP.sub("", text))
    title, _, intro = head.partition("\n")
    subject = Subject(path.name.removesuffix(".md.in"), title.removeprefix("# "), intro.strip())
    subject.setups = setups
    for name, example in zip(parts[::2], parts[1::2], strict=True):
        subject.examples[name] = example.strip()
    return subject


# Names


def find_function(thing):
    """The function that an attribute of a class stands for, or None."""
    if isinstance(thing, property):
        thing = thing.fget
    elif isinstance(thing, functools.cached_property):
        thing = thing.func
    elif isinstance(thing, classmethod | staticmethod):
        thing = thing.__func__
    return inspect.unwrap(thing) if inspect.isfunction(thing) else None


def is_property(thing):
    return isinstance(thing, property | functools.cached_property)


@functools.cache
def read_module(name):
    """The definitions of a module by qualified name, as syntax trees."""
    found = {}

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                marks = [ast.unparse(each) for each in child.decorator_list]
                if not any(mark.endswith((".setter", "overload")) for mark in marks):
                    found[prefix + child.name] = child
                walk(child, f"{prefix}{child.name}.")

    walk(ast.parse(Path(sys.modules[name].__file__).read_text("utf-8")), "")
    return found


def find_node(thing):
    return read_module(thing.__module__)[thing.__qualname__]


def list_members(cls):
    """(name, attribute) of what a class of Quark shows: its own and what it inherits."""
    owners = [base for base in cls.__mro__ if base.__module__.startswith("quark")]
    known = {}
    for base in reversed(owners):
        for name, thing in vars(base).items():
            known.pop(name, None)
            known[name] = thing
    shown = []
    for base in owners:
        for name, thing in vars(base).items():
            is_own = known.get(name) is thing
            if is_own and not name.startswith("_") and find_function(thing) is not None:
                shown.append((name, thing))
    hidden = ("*.{}", cls.__name__ + ".{}", cls.__name__ + ".*")
    return [
        (name, thing)
        for name, thing in shown
        if not {form.format(name) for form in hidden} & CALLED_BY_QUARK
    ]


# Signatures


def write_default(node, names):
    """A default as a reader has to know it; a private constant by its value."""
    text = ast.unparse(node)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "field":
        given = {each.arg: each.value for each in node.keywords}
        if "default_factory" in given:
            made = ast.unparse(given["default_factory"])
            return {"dict": "{}", "list": "[]"}.get(made, f"{made}()")
        return write_default(given["default"], names) if "default" in given else None
    if isinstance(node, ast.Constant | ast.Tuple | ast.UnaryOp):
        return re.sub(r"'([^'\"]*)'", r'"\1"', text)
    try:
        value = eval(text, dict(names))  # a constant of Quark's own source
    except Exception as error:
        raise DocsError(f"the default {text} cannot be read: {error}") from error
    if isinstance(value, str | int | float | tuple | None):
        return re.sub(r"'([^'\"]*)'", r'"\1"', repr(value))
    return "..."


def write_type(node, names):
    """An annotation; a named choice of words is written out: `Literal["min", "max"]`."""

    def expand(name):
        value = names.get(name[0]) or find_words(name[0])
        if get_origin(value) is not Literal:
            return name[0]
        return "Literal[" + ", ".join(f'"{word}"' for word in get_args(value)) + "]"

    text = ast.unparse(node).replace("'", '"')
    if text.startswith(("Literal", "ClassVar")):
        return text
    return re.sub(r"(?<![\w.\"])[A-Z]\w+", expand, text)


@functools.cache
def find_words(name):
    """A choice of words that a module imports for its annotations alone."""
    for module in sorted(name for name in sys.modules if name.startswith("quark")):
        value = getattr(sys.modules[module], "__dict__", {}).get(name)
        if get_origin(value) is Literal:
            return value
    return None


def list_parameters(function):
    """The parameters of a function as texts, without self and cls; `**x: Unpack[T]` by its keys."""
    node, names = find_node(function), function.__globals__
    args = node.args
    given = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(given) - len(args.defaults)) + list(args.defaults)
    shown = []

    def add(arg, default, prefix=""):
        text = prefix + arg.arg
        if arg.annotation is not None:
            text += f": {write_type(arg.annotation, names)}"
        if default is not None:
            equals = " = " if arg.annotation is not None else "="
            text += equals + write_default(default, names)
        shown.append(text)

    for number, (arg, default) in enumerate(zip(given, defaults, strict=True)):
        if not (number == 0 and arg.arg in ("self", "cls")) and not arg.arg.startswith("_"):
            add(arg, default)
        if number + 1 == len(args.posonlyargs) and shown:
            shown.append("/")
    if args.vararg and "Never" not in ast.unparse(args.vararg):
        add(args.vararg, None, "*")
    elif args.kwonlyargs or is_unpacked(args.kwarg):
        shown.append("*")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        add(arg, default)
    if is_unpacked(args.kwarg):
        kind = eval(args.kwarg.annotation.slice.id, dict(names))
        for key, hint in inspect.get_annotations(kind).items():
            text = str(getattr(hint, "__forward_arg__", hint)).replace("'", '"')
            shown.append(f"{key}: {text} = ...")
    elif args.kwarg and "Never" not in ast.unparse(args.kwarg):
        add(args.kwarg, None, "**")
    return shown


def is_unpacked(kwarg):
    return kwarg is not None and "Unpack[" in ast.unparse(kwarg)


def write_def(name, function, *, prefix="", first=()):
    """A function's signature as Python: on one line where that fits, else a line a parameter."""
    parameters = [*first, *list_parameters(function)]
    returns = find_node(function).returns
    arrow = f" -> {write_type(returns, function.__globals__)}" if returns is not None else ""
    one = f"{prefix}def {name}({', '.join(parameters)}){arrow}: ..."
    if len(one) <= WIDTH:
        return one
    if not parameters:
        kinds = ast.unparse(returns.slice).removeprefix("(").removesuffix(")")
        return f"def {name}() -> {ast.unparse(returns.value)}[\n    {kinds}\n]: ..."
    inner = "".join(f"{prefix}    {each},\n" for each in parameters)
    return f"{prefix}def {name}(\n{inner}{prefix}){arrow}: ..."


def write_class(cls):
    """A class's signature: its fields, or its constructor."""
    node = find_node(cls)
    bases = [base.__name__ for base in cls.__bases__ if issubclass(base, Exception)]
    head = f"class {node.name}{f'({bases[0]})' if bases else ''}:"
    made = find_function(vars(cls).get("__init__"))
    if made is not None and "__init__" in {getattr(each, "name", "") for each in node.body}:
        if bases or is_made_by_quark(cls):
            return f"{head} ..."
        return f"{head}\n{write_def('__init__', made, prefix='    ', first=['self'])}"
    names = vars(sys.modules[cls.__module__])
    lines = []
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and not each.target.id.startswith("_"):
            kind = write_type(each.annotation, names)
            if not kind.startswith("ClassVar"):
                default = write_default(each.value, names) if each.value else None
                lines.append(write_field(each.target.id, kind, default))
    return "\n".join([head, *lines]) if lines else f"{head} ..."


def write_field(name, kind, default):
    """A field as ruff would format it: a long tuple has a line for each item."""
    line = f"    {name}: {kind}{f' = {default}' if default else ''}"
    if len(line) <= MOST_COLUMNS or not default:
        return line
    items = "".join(
        f"        {ast.unparse(item)},\n" for item in ast.parse(default).body[0].value.elts
    )
    items = items.replace("'", '"')
    return f"    {name}: {kind} = (\n{items}    )"


def is_made_by_quark(cls):
    """Whether programs get objects of a class from a function, and make none themselves."""
    return re.search(r"\b(made|returned) by\b", inspect.getdoc(cls).lower()) is not None


# Docstrings


@dataclass
class Docstring:
    """A docstring taken apart: its text, and its sections by name."""

    text: str
    sections: dict[str, str]


def read_docstring(thing):
    node = find_node(thing)
    doc = ast.get_docstring(node)
    if not doc:
        raise DocsError(f"{thing.__module__}.{thing.__qualname__} has no docstring")
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", doc, flags=re.MULTILINE)
    sections = {
        name: textwrap.dedent(body).strip("\n")
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    return Docstring(parts[0].strip(), sections)


def get_summary(thing):
    first = read_docstring(thing).text.split("\n\n")[0]
    return " ".join(first.split())


def write_text(text):
    """The text of a docstring as Markdown: paragraphs on one line each, lists kept."""
    paragraphs = []
    for paragraph in re.split(r"\n\n", text):
        lines = paragraph.splitlines()
        if lines and lines[0].startswith("    "):
            paragraphs.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
            continue
        joined = []
        for line in lines:
            if joined and not line.startswith("- "):
                joined[-1] += " " + line.strip()
            else:
                joined.append(line.strip())
        # A list that follows its introduction at once needs an empty line before it.
        if len(joined) > 1 and not joined[0].startswith("- "):
            joined.insert(1, "")
        paragraphs.append("\n".join(joined))
    return "\n\n".join(paragraphs)


def write_items(body, owner):
    """`name, other: text` as a list."""
    items = []
    for line in body.splitlines():
        if line.startswith((" ", "\t")) and items:
            items[-1] += " " + line.strip()
        elif line.strip():
            items.append(line.strip())
    written = []
    for item in items:
        names, colon, text = item.partition(": ")
        if not colon:
            raise DocsError(f"{owner}: {item!r} is not 'name: text'")
        marked = ", ".join(f"`{name.strip()}`" for name in names.split(","))
        written.append(f"- {marked}: {text}")
    return "\n".join(written)


def write_sections(doc, owner, leave_out=()):
    parts = []
    for name, body in doc.sections.items():
        if name in leave_out or name == "Example":
            continue
        if name in ("Returns", "Yields"):
            parts.append(f"**{SECTIONS[name]}:** {' '.join(body.split())}")
        else:
            parts.append(f"**{SECTIONS[name]}**\n\n{write_items(body, owner)}")
    return parts


# Pages


def write_signature(code):
    return f"<!-- not run: a signature -->\n```python\n{code}\n```"


class PageWriter:
    """Writes one page; `shown` is the function -> anchor of all methods that a page has already."""

    def __init__(self, subject, quark, shown):
        self.subject = subject
        self.quark = quark
        self.shown = shown
        self.parts = []

    def write(self):
        subject = self.subject
        self.parts = [f"# {subject.title}", subject.intro]
        for name in subject.examples:
            self.write_name(name)
        return "\n\n".join(part for part in self.parts if part) + "\n"

    def write_name(self, name):
        thing = getattr(self.quark, name)
        self.parts.append(f"## `{name}`{find_addition(self.subject, self.quark, name)}")
        if name in CONSTANTS:
            self.parts.append(write_constant(name, CONSTANTS[name]))
            self.write_example(name)
            return
        function = thing if inspect.isclass(thing) else inspect.unwrap(thing)
        if inspect.ismethod(function):
            function = function.__func__
        self.shown[function] = (self.subject.file, name.lower())
        doc = read_docstring(function)
        code = write_class(thing) if inspect.isclass(thing) else write_def(name, function)
        self.parts += [write_signature(code), write_text(doc.text)]
        self.parts += write_sections(doc, name)
        self.write_example(name)
        if inspect.isclass(thing):
            self.write_members(thing)

    def write_example(self, name):
        example = self.subject.examples[name]
        flags = _FLAGS.match(example)
        needs = after = ""
        if flags:
            for flag in flags["flags"].split(", "):
                word, _, rest = flag.partition(" ")
                needs, after = (rest, after) if word == "needs" else (needs, rest)
            example = example[flags.end() :]
        self.parts.append(f"<!-- example{f': needs {needs}' if needs else ''} -->")
        if after:
            self.parts.append(f"<!-- hidden\n{self.subject.setups[after]}\n-->")
        self.parts.append(f"**Example**\n\n{example}")

    def write_members(self, cls):
        properties, methods, elsewhere = [], [], []
        is_record = any(base.__name__ == "Record" for base in cls.__mro__)
        for name, thing in list_members(cls):
            function = find_function(thing)
            if name in OF_ALL_RECORDS and is_record:
                continue
            if is_property(thing):
                kind = find_node(function).returns
                typed = f" (`{ast.unparse(kind)}`)".replace("'", '"') if kind is not None else ""
                text = " ".join(read_docstring(function).text.split())
                properties.append(f"- `{name}`{typed}: {text}")
            elif function in self.shown:
                elsewhere.append(f"[`{name}`]({self.relate(self.shown[function])})")
            else:
                methods.append((name, function))
        if properties:
            self.parts.append("**Properties**\n\n" + "\n".join(properties))
        if elsewhere:
            self.parts.append(f"**Methods described elsewhere:** {', '.join(elsewhere)}")
        for name, function in methods:
            self.write_method(cls, name, function)

    def write_method(self, cls, name, function):
        owner = f"{cls.__name__}.{name}"
        self.shown[function] = (self.subject.file, get_anchor(owner))
        doc = read_docstring(function)
        self.parts += [f"### `{owner}`", write_signature(write_def(name, function))]
        self.parts.append(write_text(doc.text))
        self.parts += write_sections(doc, owner)

    def relate(self, place):
        file, anchor = place
        return f"#{anchor}" if file == self.subject.file else f"{file}.md#{anchor}"


def find_addition(subject, quark, name):
    """What sets a heading apart whose anchor another name of the page has: `Sweep`, `sweep`."""
    alike = [each for each in subject.examples if each.lower() == name.lower()]
    return " (class)" if len(alike) > 1 and inspect.isclass(getattr(quark, name)) else ""


def get_anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def write_constant(name, module):
    """The text below an assignment in a module."""
    tree = ast.parse(Path(sys.modules[module].__file__).read_text("utf-8"))
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        targets = [getattr(node, "target", None), *getattr(node, "targets", [])]
        is_it = name in {getattr(target, "id", None) for target in targets}
        if is_it and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return write_text(inspect.cleandoc(after.value.value))
    raise DocsError(f"{module}.{name} has no text below it")


def get_name_summary(quark, name):
    if name in CONSTANTS:
        return write_constant(name, CONSTANTS[name]).split("\n\n")[0]
    thing = getattr(quark, name)
    function = thing if inspect.isclass(thing) else inspect.unwrap(thing)
    return get_summary(function.__func__ if inspect.ismethod(function) else function)


def write_index(subjects, quark):
    parts = [(INPUTS / "index.md.in").read_text("utf-8").strip()]
    parts.append(
        "\n".join(
            f"- [{subject.title}]({subject.file}.md): {first_sentence(subject.intro)}"
            for subject in subjects
        )
    )
    for subject in subjects:
        lines = []
        for name in subject.examples:
            anchor = get_anchor(f"{name}{find_addition(subject, quark, name)}")
            link = f"[`{name}`]({subject.file}.md#{anchor})"
            lines.append(f"- {link}: {get_name_summary(quark, name)}")
        parts.append(f"## {subject.title}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def first_sentence(text):
    paragraphs = [each for each in text.split("\n\n") if not each.startswith("<!--")]
    return " ".join(paragraphs[0].split())


def write_api_pages():
    """File name -> text of each page."""
    import quark

    subjects = read_subjects()
    named = [name for subject in subjects for name in subject.examples]
    if sorted(named) != sorted(quark.__all__):
        wrong = sorted(set(named) ^ set(quark.__all__))
        raise DocsError(f"on no page, on two, or not public: {wrong}")
    shown = {}
    pages = {f"{each.file}.md": PageWriter(each, quark, shown).write() for each in subjects}
    return {"index.md": write_index(subjects, quark), **pages}
