"""What a predictor is compared with in its checkpoint's metrics and card: recall of forecasts that need no training."""

from __future__ import annotations

from expertcast.data.traces import TraceSource
from expertcast.predictors import Predictor, predictor_class
from expertcast.predictors.frequency import Frequency
from expertcast.predictors.plain import Json
from expertcast.predictors.previous_token import PreviousToken
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit_counts
from expertcast.training.options import FitOptions
from expertcast.training.scoring import device_of

TOKENS = 50_000
"""That are counted at most: a running model would be run over all its text once more."""
BATCH = 4096


def baseline_recall(source: TraceSource, split: str, ahead: int) -> Json:
    """Recall@k of the most used experts and of the previous token's.

    Args:
        source: whose train split is counted.
        split: that scores.
        ahead: layers ahead that forecasts look.

    Returns:
        By predictor, `mean` and `per_layer`, target layers `ahead`..L-1.

    Raises:
        ExpertcastError: a split without tokens.
    """
    counted = fit_counts(Frequency, source, Frequency.config_class(ahead=(ahead,)), FitOptions(tokens=TOKENS)).predictor
    made: dict[str, Predictor] = {}
    for name in (Frequency.name, PreviousToken.name):
        cls = predictor_class(name)
        predictor = cls(cls.config_class(ahead=(ahead,)), source.view.shape)
        predictor.load_state_dict(counted.state_dict())
        made[name] = predictor.to(device_of(source.view)).bind(source.view).eval()
    found = evaluate(made, source.batches(split, BATCH), source.view, ahead=ahead, chained=False).as_dict()
    return dict(found["recall_at_k"])
