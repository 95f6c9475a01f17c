"""Tries an installed Quark, of a wheel or an sdist, with nothing but what it depends on.

usage: python .ci/try_installation.py [--kernel]

With --kernel the compiled kernel and the hooks of quark_torch must be there and load.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

# The folder of this script is on the path, and the checkout above it is not to be tried.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path.cwd()]


def run(folder, *command):
    done = subprocess.run(
        [sys.executable, "-P", *command], cwd=folder, capture_output=True, text=True
    )
    print(done.stdout, done.stderr, sep="", end="")
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}")
    return done.stdout


def main():
    with tempfile.TemporaryDirectory() as name:
        program = Path(name, "training.py")
        program.write_text(
            "import quark\n"
            'if __name__ == "__main__":\n'
            '    with quark.start_run(project="tried", backends="csv") as session:\n'
            "        metrics = quark.MetricsLogger(session)\n"
            "        for step in range(1000):\n"
            '            metrics.log("loss", 1.0 / (step + 1), step=step)\n'
            '        quark.ArtifactStore(session).log_table("scores", [{"a": 1}])\n'
            "        session.flush()\n"
            "    assert session.report_delivery().complete\n"
            '    print("run", session.run_id)\n',
            "utf-8",
        )
        run_id = re.search(r"run (\w+)", run(name, str(program)))[1]
        assert run_id[:8] in run(name, "-m", "quark", "runs")
        for command in ("show", "analyze", "artifacts"):
            run(name, "-m", "quark", command, run_id)
        run(name, "-m", "quark", "report", run_id, "-o", "report.html")
        assert Path(name, "report.html").stat().st_size > 10_000
        run(name, "-m", "quark", "backup", "copy")
        run(name, "-m", "quark", "ui", "--help")
    if "--kernel" in sys.argv:
        from quark_torch.kernels.loader import find_kernel, find_probing

        assert find_kernel() is not None, "the kernel is not there or does not load"
        assert find_probing() is not None, "the hooks are not there or do not load"
    print("The installation works.")


if __name__ == "__main__":
    main()
