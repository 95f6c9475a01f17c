"""Sets in a child process what TESTS_BOUNDS says, as each module is imported; see wide_bounds.py.

Python imports this by its name at its start where the folder is on PYTHONPATH. Nothing of Quark is
imported here: tests count what a program imports.
"""

import json
import os
import sys
from importlib.machinery import PathFinder


class BoundSetter:
    """Finds the modules that have a bound to be set, and sets it once they have run."""

    def __init__(self, bounds):
        self.bounds = bounds

    def find_spec(self, name, path=None, target=None):
        if name not in self.bounds:
            return None
        # It is none of the modules that a program imports, which runs name.
        sys.modules.pop("sitecustomize", None)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            run = spec.loader.exec_module

            def run_and_set(module):
                run(module)
                for bound, value in self.bounds[name].items():
                    # One that is called otherwise by now must be noticed.
                    assert hasattr(module, bound), f"{name} has no {bound}"
                    setattr(module, bound, value)

            spec.loader.exec_module = run_and_set
        return spec


if os.environ.get("TESTS_BOUNDS"):
    sys.meta_path.insert(0, BoundSetter(json.loads(os.environ["TESTS_BOUNDS"])))
