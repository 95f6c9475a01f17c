import sys

from .settings import load
from .training.loop import run

run(load(sys.argv[1] if len(sys.argv) > 1 else "tides.json"))
