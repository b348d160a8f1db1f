"""The results page of the policy study, from its rows alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.study import tables
from benchmarks.study.findings import findings
from benchmarks.study.found import UNKNOWN, VERDICTS, Found, MissingRowError, share_text
from benchmarks.study.study import LITERAL, PREFILL
from benchmarks.study.tables import wrapped

TITLE = "# Policies: what to keep, load and drop"
SECTIONS: tuple[tuple[str, tables.Section], ...] = (
    ("Evicting by forecast", tables.forecasting),
    ("Eviction, nothing prefetched", tables.eviction),
    ("Prefetching the next layer's experts", tables.prefetching),
    ("Miss handling and routing", tables.lossy),
    ("Published systems", tables.presets),
    ("Replaying accesses one by one", tables.replay),
)


def page(result: Mapping[str, Any]) -> str:
    """Markdown."""
    parts = [
        _introduction(result),
        "## What was found\n\n" + _points(findings(result)),
        "## How it was measured\n\n" + _points(_method(result)),
    ]
    for title, section in SECTIONS:
        with contextlib.suppress(MissingRowError):
            parts.append(f"## {title}\n\n{section(Found(result))}")
    return "\n\n".join([*parts, _claims(result)]) + "\n"


def _introduction(result: Mapping[str, Any]) -> str:
    shape = result["shape"]
    text = f"""Made by the command above; every row lies in `results/policies.json`, and no number on this page was
        typed in. The study goes in SpecMD's stages (row A27 of
        [docs/systems.md](../docs/systems.md)): eviction, then prefetching, then miss handling and routing, then
        published systems. One model, `{result["model"]}`: {shape["L"]} layers of
        {shape["E"]} experts, {shape["K"]} per token, one text at a time. **What held here held on a small model; what
        did not may hold on a large one.**"""
    quick = "\n\n**A run with --quick: it shows that everything runs, its numbers mean nothing.**"
    command = f"    python -m benchmarks.study {result['command'].partition(' ')[2]}"
    return f"{TITLE}\n\n{command}\n\n{wrapped(text)}{quick if result['quick'] else ''}"


def _method(result: Mapping[str, Any]) -> list[str]:
    shape, fixed = result["shape"], result["fixed"]
    stages = {each["stage"]: each for each in result["stages"]}
    whole, sample = stages["headline"], stages["eviction"]
    links = " and ".join(
        f"{machine['ratio']:g} times (`{machine['ratio']:g}x`, {machine['bandwidth'] / 1e6:.0f} MB/s)"
        for machine in result["machines"]
    )
    block_bytes = ", ".join(f"{name} {count}" for name, count in result["block_bytes"].items())
    predictor = "" if fixed["predictor"] is None else f" by `{fixed['predictor']}`"
    quality = f"""{result["quality_tokens"]} tokens of the test split's texts were scored, prefilled and decoded as they
        are simulated, by the runtime with the same policies, copies made at once. *Agreement* is the share of tokens
        with the exact model's first choice, *KL* nats per token from it. The simulator replays the routing of the exact
        model: what lossy policies change in the routing that follows is in the quality, not in the speed."""
    return [
        f"""Recorded routing of the test split ({result["test_tokens"]} tokens) is replayed in virtual time by the
        policies of the runtime themselves, one event per layer: {whole["steps"]} decode steps in {whole["texts"]} texts
        for the first table. All else takes the beginnings of {sample["texts"]} of the texts, {sample["steps"]} decode
        steps. Each text's first {PREFILL} tokens are prefilled.""",
        f"""A layer computes for 1 ms, so a token takes {shape["L"]} ms without any waiting. The link copies a token's
        {shape["K"]} experts of a layer in {links} that time. Bytes of an expert: {block_bytes}. Forecasts cost no
        time here; `scripts/bench_simulator.py` measures those for the next tokens.""",
        f"""*Capacity* is the share of all {shape["L"] * shape["E"]} experts that fit. A *hit* is an expert that had a
        slot, arrived or on its way, when its router had run. A *collision* is a miss of an expert that was evicted
        earlier in the same pass. *Waiting* is time per token that computing stood still for copies. TPOT and TTFT are
        means.""",
        f"Quality: {quality if result['quality_tokens'] else 'not measured in this run.'}",
        f"""`{LITERAL}` is Least-Stale as the paper words it; `lhu` is `lfu` as long as nothing comes in a lower
        precision.""",
        f"""Lossy policies run with `{fixed["eviction"]}` eviction and `{fixed["prefetch"]}` prefetching{predictor}: the
        least time per token over the slow link among those that need neither a trained predictor nor the link's
        pace.""",
    ]


def _claims(result: Mapping[str, Any]) -> str:
    claims = result["claims"]
    rules = """Judged by the rows with fixed rules (`benchmarks/study/claims_*.py`): *held* in every setting
        measured, *did not hold* in none, *held in part* otherwise. Percentages before the counts are capacities."""
    parts = [f"## What held and what did not\n\n{wrapped(rules)}"]
    for verdict in VERDICTS:
        if own := [each for each in claims if each["verdict"] == verdict]:
            lines = [f"**{each['claim']}** ({each['source']}).{_measured(each)}" for each in own]
            parts.append(f"### {verdict.capitalize()}: {len(own)} of {len(claims)}\n\n{_points(lines)}")
    reasons = dict.fromkeys(f"{share_text(row['share'])}: {row['reason']}" for row in result["skipped"])
    return "\n\n".join([*parts, *([f"## Left out\n\n{_points(reasons)}"] if reasons else [])])


def _measured(claim: Mapping[str, str]) -> str:
    return "" if claim["verdict"] == UNKNOWN else f" Here: {claim['measured']}."


def _points(sentences: Iterable[str]) -> str:
    return "\n".join(wrapped(f"- {sentence}", "  ") for sentence in sentences)
