"""The stand-in for early attention that a collection asks for."""

from __future__ import annotations

from transformers import PreTrainedModel

from expertcast.data.expert_maps import TOKENS, first_windows, fit_stand_in
from expertcast.data.experts import WINDOWS
from expertcast.data.kept_outputs import KeptOutputs
from expertcast.data.plan import Plan, Window
from expertcast.predictors.stand_in import StandIn
from expertcast.predictors.view import MoEView


def plan_stand_in(model: PreTrainedModel, view: MoEView, plan: Plan, keep: KeptOutputs | None = None) -> StandIn:
    """The stand-in of the rank that the plan asks for.

    Args:
        model: is run over a part of the train split, in the batches in which a collection by one process runs it.
        view: its MoE layers.
        plan: of the collection.
        keep: gets what the experts put out.
    """
    options = plan.options
    return fit_stand_in(
        model, view, _windows(plan), rank=options.early_rank or 0, batch_size=options.batch_size or WINDOWS,
        keep=keep,
    )  # fmt: skip


def kept_bytes(model: PreTrainedModel, view: MoEView, plan: Plan) -> int:
    """What is kept of the `plan`'s text, in bytes; `view` are the `model`'s layers."""
    windows = _windows(plan)
    batches = -(-len(windows) // (plan.options.batch_size or WINDOWS))
    return KeptOutputs.nbytes(view, sum(len(window.token_ids) for window in windows), batches, model.dtype.itemsize)


def _windows(plan: Plan) -> list[Window]:
    return first_windows(plan.windows_of(plan.documents, "train"), TOKENS)
