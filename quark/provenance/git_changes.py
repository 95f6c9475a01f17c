"""What the tracked files of a git tree differ in from its commit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

from quark_core.config.redaction import redact_code

MOST_DIFF_BYTES = 1_000_000
"""No more of a diff is kept."""

# Neither a lock nor a program of somebody's: whatever the tree's configuration asks for.
_COMMAND = (
    *("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "diff", "HEAD"),
    *("--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty"),
)
_CUT = "\n[the rest of the diff is not kept]\n"


def read_git_diff(root: Path, timeout_s: float) -> str | None:
    """The diff against HEAD without secrets, at most `MOST_DIFF_BYTES`; None where git fails.

    Args:
        root: Top of the tree.
        timeout_s: How long git may take; it is ended then.
    """
    environ = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # A file, so that neither a pipe that is full nor much of memory is in the way.
        with tempfile.TemporaryFile() as out:
            subprocess.run(
                _COMMAND,
                cwd=root,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
                check=True,
            )
            out.seek(0)
            data = out.read(MOST_DIFF_BYTES + 1)
        text = redact_code(data[:MOST_DIFF_BYTES].decode("utf-8", "replace"))
        return text + _CUT if len(data) > MOST_DIFF_BYTES else text
    return None
