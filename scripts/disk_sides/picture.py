"""The picture of a result: time per token over memory."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from disk_sides.figures import rate_name
from disk_sides.sides import OWN
from expertcast.predictors.messages import Json

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#767676")
_MARKERS = ("o", "s", "^", "D", "P", "X", "v")


def draw(result: Json, path: Path) -> bool:
    """Time per token over memory, a panel per rate; False where there is nothing to draw."""
    rows = [row for row in result.get("results", ()) if row["workload"] == OWN and "tpot_s" in row]
    rates = list(dict.fromkeys(row["throttle"] for row in rows))
    if not rows:
        return False
    names = list(dict.fromkeys(row["side"] for row in rows))
    figure = Figure(figsize=(3.6 * len(rates) + 1.2, 3.8), layout="constrained")
    for panel, rate in zip(figure.subplots(1, len(rates), sharey=True, squeeze=False)[0], rates, strict=True):
        for number, name in enumerate(names):
            own = sorted((r["memory"], r["tpot_s"]) for r in rows if (r["side"], r["throttle"]) == (name, rate))
            shares, times = [100 * share for share, _ in own], [time for _, time in own]
            colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
            panel.plot(shares, times, color=colour, marker=marker, label=name)
        title = rate_name(next(row for row in rows if row["throttle"] == rate))
        panel.set(yscale="log", title=title, xlabel="memory, % of the experts")
        panel.title.set_fontsize(9)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#DDDDDD", linewidth=0.6)
    figure.axes[0].set_ylabel("time per token (s, median)")
    figure.axes[-1].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    return True
