"""Writes docs/reference/cli.md from the commands' own help. See reference.py for the command."""

import inspect
import re

import click

_COMMAND = re.compile(r"(\$ )?([A-Z_]+=\S+ )*quark\b")

INTRO = """\
# Command line

Each command of `quark` with its arguments, options and exit status. `quark COMMAND --help` prints
the same text.

<!-- not run: prints the help of each command -->
```console
$ quark --help
```

- `RUN` is a run ID, a unique prefix of the ID, or a run's name. `quark runs` lists runs.
- Exit status: 0 success, 1 a run or a store cannot be read or written, 2 a usage error, 3 a check
  that you asked for failed. A command that differs lists its own.
- An error is printed to stderr and starts with `quark: `.
- `-h` and `--help` work for each command and are not repeated below.
"""


def write_cli_page():
    from quark.cli.main import cli

    context = click.Context(cli, info_name="quark")
    parts = [INTRO, "## `quark`", *write_parameters(cli, context)]
    parts += [write_commands(cli, context)]
    for name, command in list_commands(cli, context):
        parts += write_command(command, context, name, 2)
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def list_commands(group, context):
    """Quark's own commands of a group, in the order of its help."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        home = getattr(inspect.unwrap(command.callback), "__module__", "") if command else ""
        if home.startswith("quark.") and not command.hidden:
            yield name, command


def write_commands(group, context):
    """The commands of a group, each with its summary and a link."""
    lines = []
    for name, command in list_commands(group, context):
        path = f"{context.command_path} {name}"
        summary = split_help(command)[0]
        lines.append(f"- [`{path}`](#{path.replace(' ', '-')}): {summary}")
    return "**Commands**\n\n" + "\n".join(lines)


def write_command(command, parent, name, level):
    context = click.Context(command, info_name=name, parent=parent)
    path = context.command_path
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    yield f"{'#' * level} `{path}`"
    paragraphs = split_help(command)
    yield paragraphs[0]
    yield f"```text\n{usage}\n```"
    yield from paragraphs[1:]
    yield from write_parameters(command, context)
    if isinstance(command, click.Group):
        yield write_commands(command, context)
        for each, sub in list_commands(command, context):
            yield from write_command(sub, context, each, level + 1)


def write_parameters(command, context):
    arguments, options = [], []
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Argument):
            if getattr(parameter, "help", None):
                arguments.append(
                    f"- `{parameter.make_metavar(context)}`: {mark_options(parameter.help)}"
                )
        elif record := parameter.get_help_record(context):
            names, text = record
            if "--help" not in names:
                options.append(f"- `{names}`: {mark_options(text)}" if text else f"- `{names}`")
    if arguments:
        yield "**Arguments**\n\n" + "\n".join(arguments)
    if options:
        yield "**Options**\n\n" + "\n".join(options)


def split_help(command):
    """The help of a command as paragraphs of Markdown; the first is its summary."""
    text = inspect.cleandoc(command.help or "").split("\f")[0]
    if command.epilog:
        text += f"\n\n{inspect.cleandoc(command.epilog)}"
    written = []
    for paragraph in re.split(r"\n\s*\n", text):
        is_kept = paragraph.startswith("\b")
        lines = paragraph.removeprefix("\b").strip("\n").splitlines()
        if re.match(r"Exit (status|code)s?:", lines[0] if lines else ""):
            written.append(write_exit_status(lines))
        elif is_kept and _COMMAND.match(lines[-1].strip()):
            if not _COMMAND.match(lines[0].strip()):  # such as "Examples:"
                written.append(f"**{lines.pop(0).rstrip(':')}**")
            code = "\n".join(f"$ {line.strip().removeprefix('$ ')}" for line in lines)
            written.append(f"<!-- not run: an example of the help -->\n```console\n{code}\n```")
        elif is_kept:
            body = "\n".join(lines)
            written.append(f"```text\n{body}\n```")
        else:
            written.append(mark_options(" ".join(lines)))
    return written


def mark_options(text):
    """Options in a text as code, and no angle bracket that Markdown would take for a tag."""

    def mark(part):
        if part.startswith("`"):
            return part
        part = re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"`\1`", part)
        return re.sub(r"<(?=[A-Za-z/])", r"\\<", part)

    return "".join(map(mark, re.split(r"(`[^`]*`)", " ".join(text.split()))))


def write_exit_status(lines):
    """`Exit status:` and its lines, `0  explained`, as a list."""
    head, _, rest = lines[0].partition(":")
    items = []
    for line in ([rest.strip()] if rest.strip() else []) + lines[1:]:
        found = re.match(r"^\s*(\d+)\s+(.*)", line)
        if found:
            items.append(f"- `{found[1]}`: {mark_options(found[2])}")
        elif items:
            items[-1] += f" {mark_options(line)}"
        elif line.strip():
            return f"**{head}:** {mark_options(' '.join(lines).partition(':')[2])}"
    return f"**{head}**\n\n" + "\n".join(items)
