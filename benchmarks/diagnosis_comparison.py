"""How often a comparison of runs is right, and what it costs.

    python benchmarks/diagnosis_comparison.py [PART ...] [--quick] [--json FILE]

`pairs`: single runs of one configuration, where every better or worse is
false. `groups`: five seeds against five, as they are and with a true shift of
two standard deviations between seeds. `size`: two runs of a million points.
The networks are really trained; the parts lie in the folder `comparing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comparing.rates import measure_groups, measure_pairs
from comparing.size import measure_sizes
from figures import run_parts

PARTS: dict[str, Callable[..., Any]] = {
    "pairs": measure_pairs,
    "groups": measure_groups,
    "size": measure_sizes,
}


def main() -> None:
    run_parts(__doc__, PARTS, quick="fewer seeds, draws and points")


if __name__ == "__main__":
    main()
