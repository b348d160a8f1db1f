"""How often each exponent occurs among a model's experts, as a picture (row E1)."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from expertcast.runtime.storage.codecs import ExponentHistogram

_LEAST = 1e-4
"""Share from which an exponent is drawn."""


def draw_exponents(histogram: ExponentHistogram, path: Path, *, codec: str, ratio: float) -> None:
    """Write a bar for each exponent, with what coding them one by one takes at least beside what the codec stores.

    Args:
        histogram: of some experts.
        path: of the picture, in any format that matplotlib writes.
        codec: that packed them.
        ratio: share of the bytes that it stores.
    """
    counts = histogram.counts.tolist()
    total, bias = sum(counts), len(counts) // 2 - 1
    seen = [exponent for exponent, count in enumerate(counts) if count >= _LEAST * total]
    shares = [counts[exponent] / total for exponent in seen]
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axis = figure.subplots()
    axis.bar([exponent - bias for exponent in seen], [100 * share for share in shares], color="#0072B2")
    axis.set(xlabel="exponent: weights of size 2^x and more", ylabel="share of the weights (%)")
    axis.set_title(
        f"{histogram.entropy:.2f} of {len(counts).bit_length() - 1} bits: {histogram.bound:.1%} of the bytes at least, "
        f"{codec} stores {ratio:.1%}",
        fontsize=10,
    )
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
