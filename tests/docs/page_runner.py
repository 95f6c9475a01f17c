"""Runs the blocks of pages as a reader would: python -m page_runner FOLDER PAGE...

Each page has an empty folder and one namespace. Its Python blocks are executed in order, its
console and sh blocks by bash in the same folder. A text block right after a block is what that
one prints: its words must be in what was printed. An example that a comment marks begins anew, in
a folder of its own. The first block that fails ends the process with its page and line.
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

from blocks import list_words, read_page

COMMAND_TIMEOUT_S = 120


class BlockError(Exception):
    """A block did not do what its page says."""


def run_page(path, folder):
    page, environment = read_page(path), dict(os.environ)
    names, printed, is_skipped = enter(folder, path), None, False
    for number, block in enumerate(page.blocks):
        where = f"{page.name}:{block.line}"
        if block.begins:
            set_environment(environment)
            names, printed = enter(folder / f"example-{number}", path), None
            is_skipped = any(importlib.util.find_spec(need) is None for need in block.needs)
        if is_skipped:
            continue
        if block.language == "text":
            if printed is not None and block.follows:
                compare(block.text, printed, where)
            printed = None
        elif block.not_run:
            printed = None
        elif block.language == "python":
            printed = run_python(block, path, names, where)
        elif block.language in ("console", "sh"):
            printed = run_shell(block, names, where)
        else:
            printed = None


def enter(folder, path):
    """Goes into a new folder; the names that a page or an example begins with."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    return {"__name__": "__main__", "__file__": str(path)}


def set_environment(environment):
    os.environ.clear()
    os.environ.update(environment)


def run_python(block, path, names, where):
    out = io.StringIO()
    # The line numbers of a traceback are those of the page.
    source = "\n" * (block.line - 1) + block.text
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(source, str(path), "exec", dont_inherit=True), names)
        except BaseException as error:
            if type(error).__name__ == block.fails_with:
                print(error)
                return out.getvalue()
            raise BlockError(
                f"{where}: {traceback.format_exc()}\nprinted:\n{out.getvalue()}"
            ) from None
    if block.fails_with:
        raise BlockError(f"{where}: it should have raised {block.fails_with}")
    return out.getvalue()


def run_shell(block, names, where):
    """Runs the commands of a block; what a console block shows beside them is compared."""
    commands, shown = [], []
    if block.language == "sh":
        commands = [block.text]
    else:
        for line in block.text.splitlines():
            if line.startswith("$ "):
                commands.append(line[2:])
            elif commands and commands[-1].endswith("\\"):
                commands[-1] += "\n" + line
            else:
                shown.append(line)
    script = "\n".join(replace_names(command, names) for command in commands)
    status, printed = run_script(script)
    if status != block.status:
        raise BlockError(f"{where}: exit status {status}\n{script}\n{printed}")
    compare("\n".join(shown), printed, where)
    return printed


def run_script(script):
    """Exit status and output of a script; what it has started ends with it where it hangs."""
    with subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            printed, _ = shell.communicate(timeout=COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            raise BlockError(f"{script}\nhas not ended after {COMMAND_TIMEOUT_S} s") from None
    return shell.returncode, printed


def replace_names(command, names):
    """Words in capitals are the page's placeholders: RUN is what its Python names RUN.

    REPLACE is a dictionary of texts that a reader would replace too, such as a folder.
    """
    for old, new in names.get("REPLACE", {}).items():
        command = command.replace(old, str(new))
    known = {
        name: value
        for name, value in names.items()
        if name.isupper() and isinstance(value, str | Path)
    }
    return re.sub(
        r"(?<![\w$-])[A-Z][A-Z_]+(?![\w=-])",
        lambda found: shlex.quote(str(known[found[0]])) if found[0] in known else found[0],
        command,
    )


def compare(shown, printed, where):
    """Words that a page shows and the program has not printed are an error; figures vary."""
    missing = [word for word in list_words(shown) if word not in printed]
    if missing:
        raise BlockError(f"{where}: not printed: {missing}\nprinted was:\n{printed}")


def main():
    home, environment = Path(sys.argv[1]), dict(os.environ)
    warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
    for number, path in enumerate(map(Path, sys.argv[2:])):
        # What a page sets is not there in the next one.
        set_environment(environment)
        try:
            run_page(path, home / str(number))
        except BlockError as error:
            sys.__stderr__.write(f"{error}\n")
            sys.exit(1)


if __name__ == "__main__":
    main()
