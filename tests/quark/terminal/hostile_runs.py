"""Runs of a colleague who writes to the terminal of whoever looks at them."""

import io
import re
import sys
import unicodedata
import warnings

import quark
from quark.cli.main import main
from quark.sweeps.sweep_store import StoreLink
from quark_core.backends.coordination import NewTrial
from quark_core.records.base import start_fields
from quark_core.records.kinds.console import ConsoleRecord
from quark_core.records.sweeps import TrialResult
from quark_core.system.process import ProcessIdentity, current_process

ESCAPES = {
    "bell": "\a",
    "colour": "\x1b[31m",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://evil.example\x1b\\here\x1b]8;;\x1b\\",
    "clear": "\x1b[2J\x1b[H",
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "c1": "\x9b31m\x90q\x9c\x85",
    "backspace": "\b\b\b\x7f",
    "carriage return": "\rok",
    "line": "\ncompleted   fine",
    "bidi": "\u202egnp.exe\u202c\u2066x\u2069\u200f\u061c",
    "zero width": "a\u200bb\u200dc\u2060d\ufeffe",
    "tags": "\U000e0041\U000e0042\U000e007f",
    "line ends": "\u2028\u2029",
    "fillers": "\u3164\u115f\u00ad",
    "markup": "[red]x[/red][link=http://evil.example]y[/link][bold",
    "emoji code": ":warning:",
}
EVIL = "E" + "".join(ESCAPES.values()) + "E"
FINE = "日本語 한국어 🎉 👩‍💻 é עברית می‌خواهم ∑ …"

# Of what a name may not have none may be shown; ends of lines are the output's own.
_SHOWABLE = {"Cc": "\n", "Cf": "\u200c\u200d", "Cs": "", "Zl": "", "Zp": "", "Co": ""}
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def find_unfit(text):
    """Characters of a command's output that could steer a terminal, or hide."""
    return [
        (hex(ord(character)), text[max(0, index - 20) : index + 20])
        for index, character in enumerate(text)
        if character not in _SHOWABLE.get(unicodedata.category(character), character)
        or character in "\u3164\u115f"
    ]


def log_hostile_run(**arguments):
    """A run in which everything that takes a text has one; returns its id."""
    session = quark.start_run(
        project=arguments.pop("project", f"p{EVIL}"),
        name=f"n{EVIL}{FINE}",
        notes=f"notes{EVIL}\nsecond line",
        tags=[f"t{EVIL}", "fine"],
        config={f"k{EVIL}": f"v{EVIL}", "nested": {f"d{EVIL}": [EVIL, 1]}, "lr": 0.1},
        **arguments,
    )
    origin = {"key": "lr", "source": EVIL, "place": EVIL, "value": EVIL}
    told = {**session.open_run.config.to_data(), "origins": [origin, origin]}
    session.open_run.emit_lifecycle("config", told)
    metrics = quark.MetricsLogger(session)
    for step in range(30):
        metrics.log("train/loss", 1 / (step + 1), step=step)
        with warnings.catch_warnings(action="ignore"):
            metrics.log(f"m{EVIL[:100]}", float(step), step=step)
    events = quark.EventLogger(session)
    events.log("some_event", severity="error", status=f"s{EVIL}", payload={f"k{EVIL}": EVIL})
    session.add_tag(f"late{EVIL}")
    session.add_log(f"log{EVIL}", status=EVIL)
    session.annotate({"evil": f"f{EVIL}{FINE}", "deep": {f"k{EVIL}": [EVIL]}})
    # A path that no group can have, as another program may write it.
    session.open_run.emit_lifecycle("group", {"add": [f"g/{EVIL}", "fine"]})
    artifacts = quark.ArtifactStore(session)
    artifacts.store("some_type", "some_name", EVIL, metadata={f"k{EVIL}": EVIL})
    with quark.SampleLogger(session, "evil") as samples:
        samples.log(prompt=EVIL, completion=f"c{EVIL}{FINE}", reward=1.0, step=1, task=EVIL)
    # What another program has written as the console of a run: ours takes such sequences out.
    session.write([ConsoleRecord(*start_fields(None), "stdout", 0, f"line{EVIL}{FINE}")])
    session.flush()
    session.end_run("failed")
    return session.run_id


def open_hostile_sweeps(storage_dir):
    """Sweeps of such a colleague: one whose every text is hostile, and one that can be run."""
    link = StoreLink(storage_dir)
    store = link.store
    definition = {
        "space": {f"k{EVIL}": {"type": "choices", "values": [EVIL, 1]}},
        "metric": f"m{EVIL}",
        "mode": "max",
        "search": f"x{EVIL}",
        "constraints": [EVIL],
    }
    hostile = store.open_sweep(f"p{EVIL}", f"s{EVIL}", definition, max_failures=1)
    trials = [NewTrial(parameters={f"k{EVIL}": f"v{EVIL}{FINE}"}) for _ in range(4)]
    store.add_trials(hostile.id, trials, key="evil")
    for state, values in (("completed", (1.0,)), ("failed", None), ("suspended", None)):
        trial = store.claim_trial(
            hostile.id, request_id=state, worker=current_process(), lease_s=60.0
        )
        result = TrialResult(state=state, values=values, reason=f"why{EVIL}{FINE}")
        store.settle_trial(hostile.id, trial.number, trial.token, result, lease_s=60.0)
    store.claim_trial(
        hostile.id,
        request_id="runs",
        worker=ProcessIdentity(f"host{EVIL}", 1, EVIL),
        lease_s=60.0,
    )
    space = {"k": {"type": "choices", "values": [f"v{EVIL}{FINE}"]}}
    fine = {"space": space, "metric": "loss", "mode": "min", "search": "random", "trials": 4}
    store.open_sweep("fine", "fine", {**fine, "max_failures": 1}, max_failures=1)
    link.close()


class Output(io.TextIOWrapper):
    """A standard stream in memory."""

    def __init__(self, is_terminal=False):
        super().__init__(io.BytesIO(), encoding="utf-8", errors="surrogateescape", newline="")
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal

    @property
    def text(self):
        self.flush()
        return self.buffer.getvalue().decode("utf-8", "surrogateescape")


def run_command(monkeypatch, *arguments):
    """Runs the `quark` command as its script does; returns its status, output and errors."""
    with monkeypatch.context() as patch:
        stdout, stderr = Output(), Output()
        patch.setattr(sys, "argv", ["quark", *map(str, arguments)])
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        patch.setenv("COLUMNS", "200")
        status = 0
        try:
            main()
        except SystemExit as error:
            status = error.code or 0
        return status, stdout.text, stderr.text
