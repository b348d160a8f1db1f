"""Ways to run a model side by side: resident, forecasts executed, experts left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertcast.checkpoints.checkpoint import load_predictor
from expertcast.commands.predictors import is_checkpoint
from expertcast.data.traces import TraceDataset
from expertcast.predictors import predictor_class
from expertcast.predictors.hybrid import PAPER, Hybrid, HybridConfig
from expertcast.predictors.messages import Json
from expertcast.runtime import OffloadConfig
from expertcast.runtime.policies import Policies
from expertcast.training.fit import fit
from expertcast.training.scoring import FitOptions, Fitted, validation_recall

RESIDENT, SURE = "resident", "estimator where sure"
ROUTER, ESTIMATOR, HYBRID, HYBRID_PAPER = "quasi_hidden", "estimator", "hybrid", "hybrid_paper"
NAMES = {ROUTER: "router", ESTIMATOR: "estimator", HYBRID: "hybrid", HYBRID_PAPER: "hybrid, paper's rule"}
"""What is always executed, and the row's name."""
LOSSY = {"drop": Policies(prefetch="none", miss="drop"), "activeevict": "activeevict"}
OPTIONS = FitOptions(validation_tokens=16_384, progress=True)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to run the model."""

    config: OffloadConfig | None
    alone: bool = False
    """Texts are read one at a time: what they do to each other in a cache is no part of it."""
    executes: str = ""
    """Whose forecasts are executed at every layer; rows that execute the same are measured once."""


def fitted_predictors(given: Sequence[str], traces: TraceDataset, low_recall: float) -> dict[str, Fitted]:
    """Checkpoints loaded, everything else fitted on the train split, and hybrids by either rule chosen among them.

    Args:
        given: checkpoints and names; the router's forecast and the estimator are always among what comes back.
        traces: what is fitted and chosen on.
        low_recall: of the hybrid by the paper's rule.
    """
    fitted: dict[str, Fitted] = {}
    for word in given:
        if is_checkpoint(word):
            predictor = load_predictor(word, traces.view)
            fitted[predictor.name] = Fitted(predictor=predictor)
        else:
            predictor_class(word)
    words = [word for word in given if not is_checkpoint(word)]
    for name in (ROUTER, ESTIMATOR, *words):
        if name not in fitted:
            fitted[name] = fit(name, traces, options=OPTIONS, known=fitted)
    best = HybridConfig(candidates=[name for name in fitted if name != HYBRID])
    paper = HybridConfig(rule=PAPER, low_recall=low_recall)
    for name, config in ((HYBRID, best), (HYBRID_PAPER, paper)):
        if name not in fitted:
            fitted[name] = fit(HYBRID, traces, config=config, options=OPTIONS, known=fitted)
    return fitted


def forecast_rows(slots: int, traces: TraceDataset, fitted: Mapping[str, Fitted]) -> dict[str, Row]:
    """Each predictor executed at every layer, the estimator also only where it is sure; by name, in the table's order.

    Args:
        slots: experts that fit.
        traces: whose validation split says where the estimator is sure.
        fitted: the predictors.
    """
    rows = {}
    for name in dict.fromkeys([*NAMES, *fitted]):
        config = OffloadConfig(predictor=fitted[name].predictor, mode="speculate", slots=slots)
        members = {choice["predictor"] for choice in choices(fitted[name])} or {name}
        rows[NAMES.get(name, name)] = Row(config=config, executes=members.pop() if len(members) == 1 else name)
    estimator = fitted[ESTIMATOR].predictor
    recall_P = validation_recall({ESTIMATOR: estimator}, traces, 1, OPTIONS)[ESTIMATOR]
    sure = tuple(layer for layer, value in enumerate(recall_P.tolist(), start=1) if value >= OffloadConfig.min_recall)
    config = OffloadConfig(predictor=estimator, mode="hybrid", layers=sure, slots=slots)
    rows[SURE] = Row(config=config, executes=ESTIMATOR if len(sure) == len(recall_P) else "")
    return rows


def lossy_rows(slots: int) -> dict[str, Row]:
    """What leaves experts out, with so many slots."""
    return {
        name: Row(config=OffloadConfig(policies=policies, slots=slots), alone=True) for name, policies in LOSSY.items()
    }


def choices(fitted: Fitted) -> list[Json]:
    """Whom a hybrid has chosen where; nothing of another predictor."""
    predictor = fitted.predictor
    return [dict(choice) for choice in predictor.config.choices] if isinstance(predictor, Hybrid) else []
