"""The page of a result: every sentence on it comes from its figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file

from disk_sides.figures import rate_name, ratio
from disk_sides.picture import draw
from disk_sides.sides import ACCELERATE, DIRECT, DISK, LLAMA, OWN, PROCESS, SIDES
from disk_sides.targets import targets
from expertcast.data.trace_writer import write_where_told
from expertcast.predictors.messages import Json

REAL_OVERLAP = 0.43
"""Recall of the previous token's experts in Qwen3-30B-A3B, on a device."""
_HEAD = ("side", "memory", "ms per token", "range", "ms to first", "GB per token", "hit rate", "GB/s waiting",
         "peak GB", "identical", "x direct", "x llama.cpp", "x accelerate")  # fmt: skip
_ABOUT = {
    OWN: "The model's own routing of a text: all sides route the same.",
    PROCESS: "Routing drawn by a process: our sides alone, with and without forecasts.",
}


def same_largest(largest: Sequence[int], truth: Path) -> Json:
    """Of a side whose arithmetic is another: the share of tokens whose largest logit is the resident model's."""
    own = load_file(truth)["logits"].argmax(-1).tolist()
    same = [one == other for one, other in zip(largest, own, strict=False)]
    return {"identical": False, "same_tokens": sum(same) / len(same)}


def write(result: Json, out: Path) -> None:
    """`disk.md` (beside the results' folder, or the JSON) and the picture beside the JSON."""
    picture = out.with_suffix(".png")
    page = out.parent.parent / "disk.md" if out.parent.name == "results" else out.with_suffix(".md")
    drawn = draw(result, picture)
    link = picture.relative_to(page.parent).as_posix() if drawn else None
    write_where_told(page, text(result, link).encode())


def text(result: Json, picture: str | None) -> str:
    """The page, in Markdown."""
    lines = [
        "# Experts on a disk, in equal memory",
        "",
        *(f"    python scripts/{command}" for command in result["commands"]),
        "",
        *_setting(result),
    ]
    lines += ["", "## Targets", "", *targets(result)]
    if picture:
        lines += ["", f"![time per token over memory]({picture})"]
    lines += ["", tables(result)]
    if "thirty" in result:
        lines += ["", *_thirty(result["thirty"])]
    return "\n".join(lines) + "\n"


def tables(result: Json) -> str:
    """A table per workload and rate of the disk."""
    rows = [row for row in result.get("results", ()) if row["side"] != DISK]
    lines: list[str] = []
    for workload in (OWN, PROCESS):
        own = [row for row in rows if row["workload"] == workload]
        if own:
            lines += [f"## Workload `{workload}`", "", _ABOUT[workload], "", *_routing(result, workload), ""]
        for throttle in dict.fromkeys(row["throttle"] for row in own):
            chosen = [row for row in own if row["throttle"] == throttle]
            lines += [f"### {rate_name(chosen[0])}", "", *_table(chosen), ""]
    failed = [run for run in result["runs"] if "failed" in run]
    lines += [f"- {run['side']}, {run['workload']}, memory {run['memory']}: {run['failed']}" for run in failed]
    return "\n".join(lines).rstrip()


def _setting(result: Json) -> list[str]:
    if "model" not in result:
        return [f"{result['date']}."]
    able, settings, chip = result["abilities"], result["settings"], result["hardware"]
    model, packed, base = result["model"], result["stores"].get("bitsplit"), result["base_bytes"] / 1e9
    shape, behind = model["shape"], settings["warm"] + settings["new_tokens"]
    held = (
        "a control group holds every process and the pages of its files to it; peaks are the group's, prompt and after."
    )
    if not able["capped"]:
        held = "**no control group can be made here, so nobody is held to it**; peaks are resident sizes."
    rate = (
        "Block-I/O control groups throttle the disk from the prompt on; loading a model is not timed. Such a throttle "
        "saves up about a tenth of a second's worth while nobody reads: a side that computes between its reads may see "
        "more than the rate."
    )
    if not able["throttled"]:
        rate = "**The disk cannot be throttled here: our direct sides are paced by their reader, the others are not.**"
    lines = [
        f"{result['date']}, {chip['cpu']}, {chip['cores']} cores, everyone with {settings['threads']} threads. "
        f"{shape['L']} layers of {shape['E']} experts of {model['expert_bytes'] / 1e6:.1f} MB, "
        f"{model['experts_bytes'] / 1e9:.2f} GB of normal numbers.",
        f"Everyone reads the same text: {settings['prompt']} tokens at once, then {behind} one by one; the last "
        f"{settings['new_tokens']} are timed (accelerate: {settings['peer_steps']} after one). All is cold at first.",
        f"Memory is what our direct side takes beside slots, {base:.2f} GB, and a share of the experts' bytes; {held}",
        rate,
    ]
    if packed is not None:
        lines[0] += (
            f" bitsplit stores {packed['ratio']:.3f} of them (exponents one by one: {packed['bound']:.3f} at least)."
        )
    lines += [f"Left out: {name} ({why})." for name, why in result.get("skipped", {}).items()]
    lines = [line for each in lines for line in (each, "")]
    lines += ["In the tables `x` is how many times as fast as that side, at the same memory and rate.", ""]
    return [*lines, *(f"- `{side.name}`, {side.workload}: {side.about}" for side in SIDES)]


def _routing(result: Json, workload: str) -> list[str]:
    found = result["workloads"][workload]
    lru = ", ".join(f"{hits:.2f} at {float(share):.0%}" for share, hits in found["lru"].items())
    return [
        f"Routing: {found['source']}. Of a token's experts {found['overlap']:.2f} are the token's before it, too "
        f"(Qwen3-30B-A3B, measured by others: {REAL_OVERLAP}); {found['tokens']} tokens use {found['distinct']:.0%} "
        f"of a layer's experts; one LRU over all layers hits {lru}. "
        f"In memory the model takes {found['resident_tpot_s'] * 1e3:.0f} ms a token."
    ]


def _table(rows: Sequence[Json]) -> list[str]:
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for row in sorted(rows, key=lambda row: row["memory"]):
        low, high = row["tpot_range_s"]
        ratios = [ratio(rows, row, DIRECT), ratio(rows, row, LLAMA), ratio(rows, row, ACCELERATE)]
        waiting = row.get("rate_waiting")
        cells = [
            row["side"], f"{row['memory']:.0%}", f"{row['tpot_s'] * 1e3:.0f}", f"{low * 1e3:.0f}-{high * 1e3:.0f}",
            f"{row['ttft_s'] * 1e3:.0f}", f"{row['bytes_read'] / 1e9:.3f}",
            f"{row['hit_rate']:.2f}" if "hit_rate" in row else "", f"{waiting / 1e9:.2f}" if waiting else "",
            f"{row['peak_bytes'] / 1e9:.2f}", "yes" if row["identical"] else f"{row['same_tokens']:.0%} of tokens",
            *(f"{value:.2f}" if value is not None else "" for value in ratios),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _thirty(found: Json) -> list[str]:
    model = found["model"]
    head = ["side", "s per token", "s to first", "GB per token", "hit rate", "peak GB", "identical"]
    lines = [
        f"## {model['shape']['L']} layers of {model['shape']['E']} experts in 3 GB",
        "",
        f"Qwen3-30B-A3B's shape, cut: {found['cut']}. Experts of {model['expert_bytes'] / 1e6:.1f} MB, "
        f"{model['experts_bytes'] / 1e9:.1f} GB in all; slots for {found['memory_share']:.1%} of them; drawn routing.",
        "Logits are compared with those of a run in 64 slots without a limit; `mapped` reads it another way.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for row in found["runs"]:
        figures = [f"{row['tpot_s']:.3f}", f"{row['ttft_s']:.1f}", f"{row['bytes_read'] / 1e9:.3f}"]
        more = [f"{row['hit_rate']:.2f}", f"{row['peak_bytes'] / 1e9:.2f}", "yes" if row["identical"] else "no"]
        lines.append("| " + " | ".join([row["side"], *figures, *more]) + " |")
    return lines
