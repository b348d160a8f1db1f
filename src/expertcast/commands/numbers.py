"""Numbers in words of the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

N = TypeVar("N", int, float)


def _reader(kind: Callable[[str], N], fits: Callable[[N], bool], expected: str) -> Callable[[str], N]:
    """Return a parser of numbers that refuses others than `fits`."""

    def read(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is no {expected}")
        return value

    return read


BANDWIDTHS = {"pcie3": 12e9, "pcie4": 25e9, "pcie5": 50e9}
"""Bytes per second of large page-locked copies over 16 lanes, about 80% of the standards' nominal rates."""
positive = _reader(int, lambda value: value >= 1, "whole number of 1 or more")
not_negative_whole = _reader(int, lambda value: value >= 0, "whole number of 0 or more")
seed = _reader(int, lambda value: 0 <= value < 2**63, "whole number from 0 to 2^63 - 1")
positive_number = _reader(float, lambda value: 0 < value < math.inf, "number above 0")
not_negative = _reader(float, lambda value: 0 <= value < math.inf, "number of 0 or more")


bandwidth = _reader(
    lambda text: BANDWIDTHS[text] if text in BANDWIDTHS else float(text),
    lambda value: value > 0,
    f"bandwidth: give bytes per second such as 4e9, or {', '.join(BANDWIDTHS)}",
)
"""Bytes per second, or a name for them."""
TYPES = {"int": int, "float": float, **{name: value for name, value in globals().items() if callable(value)}}
"""Parsers of values by their names in `frozen.json`; the command itself checks other types."""
