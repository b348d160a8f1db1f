"""Predictors of expert routing.

Every predictor is registered here. Tables list predictors in the order of registration.
"""

from expertcast.predictors.base import (
    Forecast,
    Predictor,
    PredictorConfig,
    RouterState,
    names,
    predictor_class,
    register,
)
from expertcast.predictors.baselines import DefaultVectors, Frequency, NextNorm, PreviousToken, QuasiHidden, RouterInput
from expertcast.predictors.early_attention import EarlyAttention
from expertcast.predictors.estimator import Estimator
from expertcast.predictors.hybrid import Hybrid
from expertcast.predictors.linear import Linear
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape, MoELayer, MoEView

register(Frequency)
register(PreviousToken)
register(RouterInput)
register(NextNorm)
register(QuasiHidden)
register(Linear)
register(EarlyAttention)
register(Estimator)
register(Hybrid)

__all__ = [
    "DefaultVectors",
    "ExpertcastError",
    "Forecast",
    "MoELayer",
    "MoEView",
    "ModelShape",
    "Predictor",
    "PredictorConfig",
    "RouterState",
    "names",
    "predictor_class",
    "register",
]
