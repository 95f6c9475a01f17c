"""Types that plugins have told how to fingerprint, installed as distributions."""

import json

PLUGIN = """
import sys
from quark_core.hookspecs import hookimpl


class plugin:
    @staticmethod
    @hookimpl
    def quark_register_fingerprints():
        sys.asked = getattr(sys, "asked", 0) + 1
        return {
            "molecules.Molecule": lambda molecule: {"formula": molecule.formula, "at": molecule.at},
            "molecules.Broken": lambda value: 1 / 0,
            "molecules.Wrong": "no function",
        }
"""
BROKEN = """
from quark_core.hookspecs import hookimpl


class plugin:
    @staticmethod
    @hookimpl
    def quark_register_fingerprints():
        raise RuntimeError("no")
"""
MOLECULES = """
class Molecule:
    def __init__(self, formula, at):
        self.formula, self.at = formula, at


class Broken(Molecule):
    pass
"""
SCRIPT = """
import json, sys
import quark
import molecules

with quark.start_run(project="p", storage_dir=".") as session:
    session.fingerprint("known", {"a": [1.0, 2.0]}).wait()
    before = getattr(sys, "asked", 0)
    one = session.fingerprint("one", molecules.Molecule("H2O", [0.5, 1.5])).wait()
    same = session.fingerprint("same", molecules.Molecule("H2O", [0.5, 1.5])).wait()
    other = session.fingerprint("other", molecules.Molecule("H2O", [0.5, 2.5])).wait()
    broken = session.fingerprint("broken", molecules.Broken("H2O", [])).wait()
    data = session.fingerprint_data("data", molecules.Molecule("H2O", [0.5, 1.5])).wait(30)
print(json.dumps({
    "before": before, "asked": sys.asked, "level": one.level, "same": one.digest == same.digest,
    "other": one.digest != other.digest, "broken": broken.level,
    "values": one.sketch["parts"][0]["values"], "data": data.digest == one.digest,
}))
"""


def test_a_plugin_says_how_its_types_are_fingerprinted(install, run_python):
    install("molecule-fingerprints", "molecules", PLUGIN)
    install("broken-fingerprints", "broken", BROKEN)
    (install.site / "molecules.py").write_text(MOLECULES)
    done = run_python(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "before": 0,
        "asked": 1,
        "level": "full",
        "same": True,
        "other": True,
        "broken": "type",
        "values": [0.5, 1.5],
        "data": True,
    }
    assert "broken" in done.stderr
    assert "molecules.Wrong" in done.stderr
