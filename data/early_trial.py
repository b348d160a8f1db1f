"""Trying early attention on a plan's first window, before anything is collected."""

from __future__ import annotations

import sys
import warnings

from transformers import PreTrainedModel

from expertcast.data.batch import TraceBatch
from expertcast.data.distributed import training_share
from expertcast.data.early import EarlyAttention
from expertcast.data.early_layers import told
from expertcast.data.kept_outputs import NoExperts
from expertcast.data.plan import Plan
from expertcast.data.stream import ActivationStream
from expertcast.data.window_batch import pad_windows
from expertcast.predictors.stand_in import StandIn
from expertcast.predictors.view import MoEView


def try_early(model: PreTrainedModel, view: MoEView, plan: Plan) -> tuple[EarlyAttention | None, TraceBatch]:
    """What runs early attention over the plan's text, and the first window's tokens as a stream gives them.

    None where the plan leaves it out, or no layer of the `model`, whose layers `view` holds, can be run early. Which
    layers cannot, and why, is said on standard error.
    """
    stand_in = None if plan.options.early_rank is None else StandIn.of_shape(view.shape, 0)
    stream = ActivationStream(model, view, [], stand_in=stand_in)
    early = stream.early
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "forecasts do without early attention")  # said here
        # what is tried is attention and routers: experts would be read from a disk for it
        seen = stream.run(pad_windows(plan.windows_of(plan.documents)[:1]), NoExperts())
    if early is None:
        return None, seen
    if training_share().rank == 0:
        lines = told(early.refused) if len(view) > 1 else ["a model of one MoE layer"]
        for line in lines:
            print(f"no early attention at {line}", file=sys.stderr)
    return early if early.works else None, seen
