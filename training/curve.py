"""The learning curve: recall against training tokens (Fig. 9 of Speculating Experts)."""

from __future__ import annotations

from collections.abc import Sequence

from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, PredictorConfig
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.predictors.linear import LinearConfig
from expertcast.predictors.progress import Progress
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit
from expertcast.training.options import FitOptions

PAPER = "estimator (paper's form)"
PAPER_PARAMETERS = 200_000
"""One network serves all layers there, so a parameter costs as many times more work as there are layer pairs."""
BATCH = 4096
VALIDATION_SHARE = 8
"""Choosing costs tokens too: a budget of N tokens has N / 8 validation tokens beside it, as the split itself has."""


def learning_curve(traces: TraceDataset, counts: Sequence[int], *, ahead: int = 1) -> dict[str, dict[str, float]]:
    """Mean recall@k on the test split of `linear` and both forms of `estimator`, each fitted on so many tokens.

    Returns:
        Per form `{str(tokens): recall}`.

    Raises:
        ExpertcastError: a count is under 1 or above the tokens of the train split.
    """
    available = traces.token_count("train")
    for count in counts:
        if not 1 <= count <= available:
            raise ExpertcastError(
                f"learning curve at {count} tokens: give 1 to {available}, what the train split has, or collect more"
            )
    forms: dict[str, tuple[str, PredictorConfig]] = {
        "linear": ("linear", LinearConfig(ahead=(ahead,))),
        "estimator": ("estimator", EstimatorConfig(ahead=(ahead,))),
        PAPER: ("estimator", EstimatorConfig(ahead=(ahead,), form="paper", parameters=PAPER_PARAMETERS)),
    }
    curve: dict[str, dict[str, float]] = {form: {} for form in forms}
    fits = [(count, form) for count in counts for form in forms]
    for count, form in (bar := Progress("learning curve", unit="fit", steps=fits)):
        options = FitOptions(tokens=count, validation_tokens=max(1, count // VALIDATION_SHARE), progress=False)
        name, config = forms[form]
        predictor = fit(name, traces, config=config, options=options).predictor
        evaluation = evaluate({form: predictor}, traces.batches("test", BATCH), traces.view, ahead=ahead, chained=False)
        curve[form][str(count)] = evaluation.recall(form)
        bar.set_postfix_str(f"{form} at {count}: {curve[form][str(count)]:.4f}", refresh=False)
    return curve
