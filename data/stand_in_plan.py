"""The stand-in that a collection's early attention runs on: fitted on the train split's first tokens."""

from __future__ import annotations

from transformers import PreTrainedModel

from expertcast.data.expert_maps import TOKENS, first_windows, fit_stand_in
from expertcast.data.experts import WINDOWS
from expertcast.data.plan import Plan
from expertcast.predictors.stand_in import StandIn
from expertcast.predictors.view import MoEView


def plan_stand_in(model: PreTrainedModel, view: MoEView, plan: Plan) -> StandIn:
    """The stand-in of the rank that the plan asks for; runs the `model`, whose layers are `view`, twice over a part of
    the train split."""
    windows = first_windows(plan.windows_of(plan.documents, "train"), TOKENS)
    options = plan.options
    return fit_stand_in(model, view, windows, rank=options.early_rank or 0, batch_size=options.batch_size or WINDOWS)
