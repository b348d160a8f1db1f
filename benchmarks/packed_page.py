"""The page of `benchmarks.packed`, from the figures in its JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from expertcast.predictors.messages import Json

PEER = "llama.cpp"
_HEAD = ("side", "ms per token", "range", "s to first token", "GB per token", "hit rate", "peak GB", "x peer")
_ASKED = (
    ("5 times the peer at 50%", 0.5, "tpot_s", 5.0),
    ("2 times the peer at 75%", 0.75, "tpot_s", 2.0),
    (".9 of the peer with all in memory", None, "tpot_s", 0.9),
    (".5 of the peer, prompt of 512", 0.5, "ttft_s", 0.5),
    (".5 of the peer, prompt of 512, all in memory", None, "again_s", 0.5),
)
"""What, share of memory, figure, and how many times as fast as the peer's best mode packed experts should be."""


def page(result: Json) -> str:
    """Markdown.

    Args:
        result: what the JSON file holds.
    """
    model, settings, rows = result["model"], result["settings"], result["results"]
    beside = ", ".join(f"{name} {nbytes / 1e9:.2f} GB" for name, nbytes in result.get("beside", {}).items())
    stores = "; ".join(
        f"{name}: {made['bytes'] / 1e9:.2f} GB, first run {made['first_run_s']:.0f} s"
        for name, made in result.get("stores", {}).items()
    )
    lines = [
        "# Packed experts, in equal memory", "", f"    {result['command']}" if "command" in result else "",
        f"{result['date']}, {settings['threads']} threads for everyone. {model['layers']} layers of {model['experts']} experts of "
        f"{model['weights'] / 1e6:.1f} M weights, top {model['top_k']}, vocabulary {model['vocabulary']}: "
        f"{model['experts_bytes'] / 1e9:.2f} GB of experts in Q4_0, which everyone reads from one file.", "",
        f"Everyone reads the same text: a prompt at once, then {settings['warm']} + {settings['new_tokens']} tokens one by one, "
        "the last of which are timed. All is cold at first.", "",
        "A control group holds every process and the pages of its files to a limit: what llama.cpp takes beside the experts, "
        f"64 MiB, and a share of the packed experts. Beside their experts sides take: {beside}.", "",
        f"Stores: {stores or 'none'}.", "", "## Asked", "", *_targets(rows), "",
    ]  # fmt: skip
    for memory, throttle, prompt in dict.fromkeys((row["memory"], row["throttle"], row["prompt"]) for row in rows):
        group = [row for row in rows if (row["memory"], row["throttle"], row["prompt"]) == (memory, throttle, prompt)]
        limit = next((row["limit_bytes"] for row in group if row.get("limit_bytes")), None)
        space = "all in memory" if memory is None else f"memory for {memory:.0%} ({(limit or 0) / 1e9:.2f} GB)"
        disk = f"disk held to {throttle / 1e9:g} GB/s" if throttle else "disk as it is"
        lines += [f"## Prompt of {prompt}, {space}, {disk}", "", *_table(group), ""]
    return "\n".join(lines)


def best(rows: Sequence[Json], of: Callable[[Json], bool], figure: str) -> Json | None:
    """The row with the lowest figure of those that have it."""
    return min((row for row in rows if of(row) and row.get(figure)), key=lambda row: row[figure], default=None)


def _targets(rows: Sequence[Json]) -> list[str]:
    lines = []
    for what, memory, figure, least in _ASKED:
        there = [row for row in rows if row["memory"] == memory]
        for throttle, prompt in dict.fromkeys((row["throttle"], row["prompt"]) for row in there):
            here = [row for row in there if (row["throttle"], row["prompt"]) == (throttle, prompt)]
            ours = best(here, lambda row: row["side"].startswith("packed"), figure)
            peer = best(here, lambda row: row["side"].startswith(PEER), figure)
            if ours is None or peer is None or (figure != "tpot_s" and prompt < 512):
                continue
            times = peer[figure] / ours[figure]
            disk = f"{throttle / 1e9:g} GB/s" if throttle else "disk as it is"
            said = f"**{'yes' if times >= least else 'no'}**, {times:.2f} ({ours['side']}; {peer['side']})"
            lines.append(f"- {what}, {disk}, prompt of {prompt}: {said}")
    return lines


def _table(rows: Sequence[Json]) -> list[str]:
    peer = best(rows, lambda row: row["side"].startswith(PEER), "tpot_s")
    lines = ["| " + " | ".join(_HEAD) + " |", "|---" * len(_HEAD) + "|"]
    for row in rows:
        cells = [row["side"], row["failed"], *[""] * (len(_HEAD) - 2)] if "failed" in row else _cells(row, peer)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cells(row: Json, peer: Json | None) -> list[str]:
    low, high = row["tpot_range_s"]
    again = f" ({row['again_s']:.2f} again)" if row.get("again_s") else ""
    hits = "" if row.get("hit_rate") is None else f"{row['hit_rate']:.2f}"
    return [
        row["side"], f"{row['tpot_s'] * 1e3:.1f}", f"{low * 1e3:.1f}-{high * 1e3:.1f}", f"{row['ttft_s']:.2f}{again}",
        f"{row['bytes_read'] / 1e9:.3f}", hits, f"{row['peak_bytes'] / 1e9:.2f}",
        "" if peer is None else f"{peer['tpot_s'] / row['tpot_s']:.2f}",
    ]  # fmt: skip
