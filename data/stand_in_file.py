"""The stand-in that a collection's early attention runs on: fitted on the train split's first tokens, in a file."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save
from transformers import PreTrainedModel

from expertcast.data import layout
from expertcast.data.expert_maps import TOKENS, first_windows, fit_stand_in
from expertcast.data.experts import WINDOWS
from expertcast.data.kept_outputs import KeptOutputs
from expertcast.data.plan import Plan, Window
from expertcast.data.tensor_files import read_tensors
from expertcast.data.writer import REMEDY, write_atomically
from expertcast.predictors.stand_in import StandIn
from expertcast.predictors.view import ModelShape, MoEView


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


def write_stand_in(folder: Path, stand_in: StandIn) -> None:
    """Keep a stand-in in the folder of traces."""
    write_atomically(folder / layout.STAND_IN_FILE, save(stand_in.as_tensors()))


def read_stand_in(folder: Path, shape: ModelShape, rank: int) -> StandIn:
    """The stand-in in a folder of traces, of a model of this `shape` and of this `rank`.

    Raises:
        ExpertcastError: its file is not right.
    """
    like = StandIn.of_shape(shape, rank, "meta").as_tensors()
    tensors, _ = read_tensors(folder / layout.STAND_IN_FILE, like, REMEDY)
    return StandIn(**tensors)
