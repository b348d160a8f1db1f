"""The stand-in that a collection's early attention runs on, in a file."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from expertcast.data import layout
from expertcast.data.tensor_files import read_tensors
from expertcast.data.writer import REMEDY, write_atomically
from expertcast.predictors.stand_in import StandIn
from expertcast.predictors.view import ModelShape


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
