"""What a script promises on its last line, without ending its run, is kept."""

import os
import subprocess
import sys

import pytest

import quark

LAST_LINES = {
    "log_directory": "quark.ArtifactStore(session).log_directory(sys.argv[2], name='it')",
    "log_video": "quark.ArtifactStore(session).log_video('it', sys.argv[2] + '/0.mp4', step=0)",
}
BEGINNING = """
import sys, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1])
print(session.id, flush=True)
"""


@pytest.mark.parametrize("last_line", ["log_directory", "log_video"])
def test_what_is_promised_on_the_last_line_is_kept(tmp_path, last_line):
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(100):
        (folder / f"{number}.mp4").write_bytes(os.urandom(20_000))
    code = BEGINNING + LAST_LINES[last_line]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "QUARK_QUIET": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "not stored" not in done.stderr
    run = quark.open_run(done.stdout.strip(), tmp_path)
    assert run.status == "completed"
    kept = list(quark.ArtifactStore(run).read())
    assert len(kept) == (101 if last_line == "log_directory" else 1)
