"""Page of `benchmarks.packed`, made of the figures in its JSON files."""

from __future__ import annotations

from collections.abc import Sequence

from expertcast.predictors.messages import Json

TITLE = "# Packed experts, in equal memory\n\n"
PEER, EXPANDED = "llama.cpp", "expanded"
_LONG = 512
"""Tokens of a prompt whose time is compared."""
_HEAD = ("side", "ms per token", "range", "s to first token", "GB per token", "hit rate", "slots", "peak GB", "x peer")
_ASKED = (
    (5.0, PEER, 0.5, "tpot_s"),
    (2.0, PEER, 0.75, "tpot_s"),
    (0.9, PEER, None, "tpot_s"),
    (0.5, PEER, 0.5, "ttft_s"),
    (0.5, PEER, 0.75, "ttft_s"),
    (0.5, PEER, None, "again_s"),
    (2.5, EXPANDED, 0.5, "tpot_s"),
    (1.8, EXPANDED, None, "tpot_s"),
)
"""How many times as fast as whom packed experts should be, at which share of memory, and by which figure."""
_FIGURES = {"tpot_s": "a token", "ttft_s": "the prompt", "again_s": "a prompt, nothing cold"}


def page(result: Json) -> str:
    """Markdown.

    Args:
        result: what the JSON file holds.
    """
    model, settings, rows = result["model"], result["settings"], result["results"]
    beside = ", ".join(
        f"{name} {nbytes / 1e9:.2f} GB (prompt of {prompt})"
        for name, taken in result.get("beside", {}).items()
        for prompt, nbytes in taken.items()
    )
    stores = "".join(
        f"\nThe store, {name}: {made['bytes'] / 1e9:.2f} GB"
        + (f", made and first used in {made['first_run_s']:.0f} s." if made["first_run_s"] else ".")
        for name, made in result.get("stores", {}).items()
    )
    text = (
        f"""## {model["shape"]}, {model["kind"]}

    {result["command"]}

{result["date"]}, {settings["threads"]} threads for every side.
{model["layers"]} layers of {model["experts"]} experts of {model["weights"] / 1e6:.1f} M weights, top {model["top_k"]},
vocabulary {model["vocabulary"]}: {model["experts_bytes"] / 1e9:.2f} GB of experts in {model["kind"]}, all read from one
file. llama.cpp is the wheel as it ships (AVX2); `lazy auto` reads tensors of more than 4 GB lazily, here none;
`moe_cache_size` needs a GPU. Repacked copies are memory of their own.

Every side reads the same tokens: a prompt at once, then {settings["warm"]} tokens one by one, and
{settings["new_tokens"]} more, which are timed. Files are not in the page cache at first.

A control group limits the memory of every process and of the pages of its files: the memory that llama.cpp takes beside
the experts, 64 MiB, and a share of the experts' bytes in the file. The larger memory of our sides beside their experts,
and another 64 MiB, is subtracted from their slots. Memory beside the experts:
{beside}.
{stores}

{"".join(f"- {note}" + chr(10) for note in result.get("notes", []))}
{_fidelity(result.get("fidelity", []))}### Targets

"""
        + "\n".join(_targets(rows))
        + "\n\n"
    )
    for memory, throttle, prompt in dict.fromkeys((row["memory"], row["throttle"], row["prompt"]) for row in rows):
        group = [row for row in rows if (row["memory"], row["throttle"], row["prompt"]) == (memory, throttle, prompt)]
        limit = next((row["limit_bytes"] for row in group if row.get("limit_bytes")), 0)
        space = "all in memory" if memory is None else f"memory for {memory:.0%} ({limit / 1e9:.2f} GB)"
        text += f"### Prompt of {prompt}, {space}, {_disk(throttle)}\n\n" + "\n".join(_table(group)) + "\n\n"
    return text.rstrip() + "\n"


def _disk(throttle: float | None) -> str:
    return f"disk held to {throttle / 1e9:g} GB/s" if throttle else "disk as it is"


def _fidelity(found: Sequence[Json]) -> str:
    if not found:
        return ""
    what = {"packed": "packed against the same weights expanded", "rounded": "rounded and expanded against bf16",
            "kernel": "expanded, eager against grouped kernels"}  # fmt: skip
    lines = ["| form | | KL, nats | same token | perplexity | of the other |", "|---|---|---|---|---|---|"]
    for each in found:
        for name, words in what.items():
            row = each[name]
            lines.append(
                f"| {each['form']} | {words} | {row['kl']:.5f} | {row['agreement']:.4f} | {row['perplexity']:.3f} "
                f"| {row['perplexity_against']:.3f} |"
            )
    return f"### Fidelity, the bundled model, {found[0]['tokens']} tokens\n\n" + "\n".join(lines) + "\n\n"


def best(rows: Sequence[Json], whose: str, figure: str) -> Json | None:
    """The row with the lowest figure, of sides whose name begins so."""
    having = (row for row in rows if row["side"].startswith(whose) and row.get(figure))
    return min(having, key=lambda row: row[figure], default=None)


def _targets(rows: Sequence[Json]) -> list[str]:
    lines = []
    for least, whom, memory, figure in _ASKED:
        there = [row for row in rows if row["memory"] == memory and (figure == "tpot_s" or row["prompt"] >= _LONG)]
        for throttle, prompt in dict.fromkeys((row["throttle"], row["prompt"]) for row in there):
            here = [row for row in there if (row["throttle"], row["prompt"]) == (throttle, prompt)]
            ours, other = best(here, "packed", figure), best(here, whom, figure)
            if ours is not None and other is not None:
                times = other[figure] / ours[figure]
                space = "all in memory" if memory is None else f"{memory:.0%}"
                lines.append(
                    f"- {least:g} times {whom}, {space}, {_disk(throttle)}, {_FIGURES[figure]}, prompt of {prompt}: "
                    f"**{'yes' if times >= least else 'no'}**, {times:.2f} ({ours['side']}; {other['side']})"
                )
    return lines


def _table(rows: Sequence[Json]) -> list[str]:
    peer = best(rows, PEER, "tpot_s")
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
        f"{row['bytes_read'] / 1e9:.3f}", hits, str(row.get("slots") or ""),
        f"{row['peak_bytes'] / 1e9:.2f}",
        "" if peer is None else f"{peer['tpot_s'] / row['tpot_s']:.2f}",
    ]  # fmt: skip
