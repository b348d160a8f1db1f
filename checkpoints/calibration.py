"""How a predictor's logits are read as probabilities, in config.json: by distance, three numbers per layer pair."""

from __future__ import annotations

from pathlib import Path

from expertcast.predictors.base import Predictor
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.log_odds import LogOdds
from expertcast.predictors.plain import Json

_MEMBER = "calibration"


def readings_of(predictor: Predictor) -> Json:
    """The member of config.json; none for a predictor that is not calibrated."""
    if not predictor.calibration:
        return {}
    pairs = {
        str(ahead): [[own.slope, own.root, own.offset] for own in each] for ahead, each in predictor.calibration.items()
    }
    return {_MEMBER: pairs}


def calibrate(predictor: Predictor, config: Json, path: Path, remedy: str) -> None:
    """Give a predictor the readings that config.json holds for it; none from before there were any.

    Args:
        predictor: is given them.
        config: the contents of config.json.
        path: of that file, for messages.
        remedy: for messages.

    Raises:
        ExpertcastError: a distance that the predictor does not look, or too few or too many pairs.
    """
    readings: dict[str, list[list[float]]] = config.get(_MEMBER, {})
    distances = {str(ahead): ahead for ahead in predictor.ahead}
    for name, pairs in readings.items():
        if name not in distances:
            raise ExpertcastError(f"{path}: calibration.{name[:20]!r} is no distance of {list(distances)}; {remedy}")
        expected = predictor.shape.layers - distances[name]
        if len(pairs) != expected:
            raise ExpertcastError(f"{path}: calibration.{name} has {len(pairs)} layer pairs of {expected}; {remedy}")
    predictor.calibration = {distances[name]: [LogOdds(*pair) for pair in pairs] for name, pairs in readings.items()}
