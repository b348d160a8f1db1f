"""What the page begins with: the study's answers in a sentence each, made from its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.study.found import VERDICTS, Found, MissingRowError, Row, change, ms, percent, share_text, signed
from benchmarks.study.study import EVICT_ONLY

CLOSE = 0.95
"""Agreement with the exact model that still counts as its quality."""


def findings(result: Mapping[str, Any]) -> list[str]:
    """Sentences; a stage without rows says nothing."""
    found, sentences = Found(result), []
    for say in (_forecast, _classic, _prefetching, _lossy, _presets, _claims):
        with contextlib.suppress(MissingRowError):
            sentences.append(say(found))
    return sentences


def _forecast(found: Found) -> str:
    texts = []
    for share in found.shares("headline", eviction=EVICT_ONLY):
        own, bound = (found.row("headline", share=share, eviction=name) for name in (EVICT_ONLY, "belady"))
        best, closed = found.best_classic(share), found.closed(share, EVICT_ONLY)
        texts.append(
            f"{percent(closed)} at {share_text(share)} (hits {percent(best['hit_rate'])} -> "
            f"{percent(own['hit_rate'])}, belady {percent(bound['hit_rate'])})"
        )
    return (
        "**Evicting by forecast of the next tokens** closes, of the misses between the best policy that looks at the "
        f"past only and belady: {_and(texts)}."
    )


def _classic(found: Found) -> str:
    best = {share: found.best_classic(share) for share in found.shares("headline")}
    texts = [
        f"`{row['eviction']}` at {share_text(share)} ({percent(row['hit_rate'])}; "
        f"lru {percent(found.row('headline', share=share, eviction='lru')['hit_rate'])})"
        for share, row in best.items()
    ]
    return f"**Of the policies that look at the past only**, the most hits have {_and(texts)}."


def _prefetching(found: Found) -> str:
    ratio, texts = _slowest(found, "prefetch"), []
    for share in found.shares("prefetch", ratio=ratio, prefetch="none"):
        rows = found.rows("prefetch", share=share, ratio=ratio)
        best = _fastest(rows)
        plain = found.row("prefetch", share=share, ratio=ratio, eviction="lru", prefetch="none")
        texts.append(
            f"`{best['eviction']}` with `{best['prefetch']}`{_by(best)} at {share_text(share)} "
            f"({ms(best['tpot_mean_s'])} ms per token where lru on demand takes {ms(plain['tpot_mean_s'])})"
        )
    return f"**The fastest exact eviction and prefetching** over the slow link, forecasts at no cost: {_and(texts)}."


def _lossy(found: Found) -> str:
    texts = []
    for share in found.shares("lossy"):
        rows = [row for row in found.rows("lossy", share=share) if (row["agreement"] or 0.0) >= CLOSE]
        if not rows:
            raise MissingRowError
        best, plain = _fastest(rows), found.row("lossy", share=share, miss="fetch", routing="standard")
        faster = signed(change(plain["tpot_mean_s"], best["tpot_mean_s"]))
        texts.append(
            f"`{best['miss']}` with `{best['routing']}` at {share_text(share)} ({faster} tokens per second, "
            f"{percent(best['agreement'])} agreement)"
        )
    start = f"**The fastest lossy policies that agree with the exact model in {share_text(CLOSE)} or more**"
    return f"{start} of {found.result['quality_tokens']} tokens: {_and(texts)}."


def _presets(found: Found) -> str:
    ratio, texts = _slowest(found, "presets"), []
    for share in found.shares("presets", ratio=ratio):
        rows = found.rows("presets", share=share, ratio=ratio)
        exact = _fastest([row for row in rows if (row["miss"], row["routing"]) == ("fetch", "standard")])
        text = f"`{exact['preset']}` at {share_text(share)} ({ms(exact['tpot_mean_s'])} ms per token"
        best = _fastest(rows)
        if best is not exact:
            agreement = "" if best["agreement"] is None else f" at {percent(best['agreement'])} agreement"
            text += f"; with losses `{best['preset']}`, {ms(best['tpot_mean_s'])} ms{agreement}"
        texts.append(text + ")")
    return f"**Of the published systems** the fastest exact one over the slow link is {_and(texts)}."


def _claims(found: Found) -> str:
    verdicts = [each["verdict"] for each in found.result.get("claims", ())]
    if not verdicts:
        raise MissingRowError
    texts = [f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts]
    return f"**Of {len(verdicts)} claims** {_and(texts)}; they are judged one by one at the end."


def _slowest(found: Found, stage: str) -> float:
    return max(float(row["ratio"]) for row in found.rows(stage))


def _fastest(rows: Iterable[Row]) -> Row:
    return min(rows, key=lambda row: float(row["tpot_mean_s"]))


def _by(row: Row) -> str:
    return "" if row["predictor"] is None else f" by `{row['predictor']}`"


def _and(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " and " + texts[-1]
