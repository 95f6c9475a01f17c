"""The packs that Python and JavaScript both read in their tests.

`python tests/quark/page/golden_packs.py` writes them anew; that is only right where the wire form
is meant to change.
"""

import json
from pathlib import Path

import numpy as np

from quark.page.pack import encode_pack, make_plain

FOLDER = Path(__file__).with_name("golden")


def list_packs():
    """Name -> head and columns of each."""
    nan, inf = float("nan"), float("inf")
    return {
        "empty": ({"curves": [], "cursor": "eAE"}, {}),
        "types": (
            {
                "text": 'ü 日本 <b>"quoted"</b> \\',
                "number": nan,
                "nested": [1, inf, -inf, None, True],
            },
            {
                "whole": np.array([0, -7, 2**31 - 1], dtype="i4"),
                "flags": np.array([1, 0, 0, 1, 1], dtype="u1"),
                "single": np.array([0.5, -0.25, nan, inf, -inf], dtype="f4"),
                "double": np.array([1e300, -1e-300, nan, 2**53], dtype="f8"),
                "none": np.array([], dtype="f4"),
            },
        ),
        "curves": (
            {
                "cursor": "eAE",
                "missing": ["gone/away"],
                "curves": [
                    {
                        "key": "train/acc_x40_1",
                        "name": "train/acc@1",
                        "attempt": 0,
                        "rank": None,
                        "points": 6,
                        "exact": False,
                        "non_finite": 1,
                        "low": [0.25, 3],
                        "high": [400.0, 4],
                        "unit": "step",
                    },
                    {
                        "key": "__proto__",
                        "name": "__proto__",
                        "attempt": 1,
                        "rank": 2,
                        "points": 1,
                        "exact": True,
                        "non_finite": 0,
                        "low": [1.0, 7],
                        "high": [1.0, 7],
                        "unit": "step",
                    },
                ],
            },
            {
                "0.step": np.array([0, 3], dtype="f8"),
                "0.mean": np.array([1.5, 133.5], dtype="f4"),
                "0.low": np.array([1.0, 0.25], dtype="f4"),
                "0.high": np.array([2.0, 400.0], dtype="f4"),
                "0.non_finite": np.array([0, 1], dtype="f4"),
                "0.non_finite_step": np.array([nan, 5], dtype="f8"),
                "1.step": np.array([7], dtype="f8"),
                "1.mean": np.array([1.0], dtype="f4"),
            },
        ),
        "grid": (
            {
                "kind": "layer",
                "field": "norm",
                "summary": "gradient",
                "rows": [{"name": "a.0", "type": None, "module": "a"}],
                "bins": 3,
                "steps": [0, 2],
                "exact": True,
            },
            {
                "step": np.array([0, 1, 2], dtype="f8"),
                "end": np.array([0, 1, 2], dtype="f8"),
                "cells": np.array([[1.0, nan, 3.0]], dtype="f4"),
                "bad": np.array([[0, 1, 0]], dtype="u1"),
                "base": np.array([1.0], dtype="f4"),
            },
        ),
    }


def describe(head, columns):
    """What the file beside a pack says that it holds."""
    return {
        "head": make_plain(head),
        "columns": {name: make_plain(array.ravel().tolist()) for name, array in columns.items()},
    }


if __name__ == "__main__":
    for name, (head, columns) in list_packs().items():
        (FOLDER / f"{name}.pack").write_bytes(encode_pack(head, columns))
        text = json.dumps(describe(head, columns), indent=1, ensure_ascii=False)
        (FOLDER / f"{name}.json").write_text(text + "\n")
