"""What `expertcast bench` prints: its result, as it goes into the JSON, in words and one table per prompt."""

from __future__ import annotations

from expertcast.predictors.plain import Json, aligned


def describe(result: Json) -> str:
    """The whole result as text."""
    shape = ", ".join(f"{key}={value}" for key, value in result["shape"].items())
    weights = "random weights" if result["random_weights"] else "its own weights"
    lines = [
        f"{result['target']} ({weights}; {shape}; {result['dtype']}), {result['new_tokens']} new tokens, "
        f"{result['repetitions']} repetitions, {result['hardware']['threads']} threads",
        f"routing: {result['routing']}",
    ]
    for prompt in result["prompts"].values():
        lines += ["", *describe_prompt(prompt)]
    if "timeline" in result:
        lines += ["", "wrote " + " and ".join(result["timeline"].values())]
    return "\n".join(lines)


def describe_prompt(prompt: Json) -> list[str]:
    """One prompt's table, with what the figures are measured against."""
    speed = f"{prompt['bandwidth'] / 1e9:.3g} GB/s emulated" if "bandwidth" in prompt else "the machine's own link"
    lines = [f"prompt of {prompt['prompt_tokens']} tokens, {speed}, identical means as {prompt['compared_with']}"]
    if "measured_routing" in prompt:
        lines.append("routing came out as " + ", ".join(f"{k} {v:.3g}" for k, v in prompt["measured_routing"].items()))
    lines.append(runs_table(prompt["runs"]))
    if "drafts" in prompt:
        lines += ["", drafts_table(prompt["drafts"]), ""]
    if prompt["resident"] is not None:
        lines.append(f"resident model: {prompt['resident']['tpot_s'] * 1e3:.2f} ms per token")
    if "advice" in prompt:
        errors = ", ".join(
            f"{name} {error['relative_error']:+.0%}" for name, error in prompt["advice"]["errors"].items()
        )
        lines.append(f"advise would expect, against what was measured: {errors}")
    if "peer" in prompt:
        lines.append("accelerate: " + peer_text(prompt["peer"]))
    return lines


def drafts_table(drafts: Json) -> str:
    """A row per draft."""
    rows: list[tuple[str, ...]] = [
        ("draft", "TPOT ms", "x none", "tokens/cycle", "MB/token", "extra MB", "identical", "why")
    ]
    for name, run in drafts.items():
        governor: Json = next(iter(run["governor"].get("by_sequences", {}).values()), {})
        rows.append(
            (
                name,
                f"{run['tpot_s'] * 1e3:.2f}",
                f"{run['over_none']:.2f}",
                _number(governor.get("tokens_per_cycle")),
                f"{run['bytes_per_token'] / 1e6:.2f}",
                f"{run['memory_bytes'] / 1e6:.1f}",
                "yes" if run["identical"] else "no",
                governor["reasons"][-1]["reason"] if governor.get("reasons") else "",
            )
        )
    return aligned(rows)


def runs_table(runs: Json) -> str:
    """A row per run."""
    rows: list[tuple[str, ...]] = [
        ("run", "TPOT ms", "quartiles", "compute", "copy", "idle", "TTFT s", "MB/token", "hits", "overlap", "link",
         "x bound", "identical")
    ]  # fmt: skip
    for name, run in runs.items():
        first, third = run["tpot_quartiles_s"]
        rows.append(
            (
                name,
                f"{run['tpot_s'] * 1e3:.2f}",
                f"{first * 1e3:.1f}-{third * 1e3:.1f}",
                *(f"{run[key] * 1e3:.2f}" for key in ("compute_s", "copy_s", "idle_s")),
                f"{run['ttft_s']:.3f}",
                f"{run['bytes_per_token'] / 1e6:.2f}",
                f"{run['hit_rate']:.3f}",
                *(_figure(run, key) for key in ("overlap_efficiency", "link_utilisation", "tpot_over_bound")),
                "yes" if run["identical"] else "no",
            )
        )
    return aligned(rows)


def peer_text(found: Json) -> str:
    """accelerate's time per token, and what it means here."""
    text = f"{found['tpot_s'] * 1e3:.2f} ms per token, moves {found['moved_bytes'] / 1e6:.1f} MB per token"
    if found["least_tpot_s"] is not None:
        text += f" (at least {found['least_tpot_s'] * 1e3:.1f} ms over this link)"
    return text if found["note"] == "measured" else f"{text}; {found['note']}"


def _figure(run: Json, key: str) -> str:
    """A figure, or why it is not given."""
    return str(run["not_given"].get(key) or _number(run[key]))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
