"""A predictor's tensors in a file: compared with what the predictor has before memory is taken for either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.artefacts import open_file

_Outline = dict[str, tuple[list[int], bool]]
"""By tensor: its shape, and whether it holds floating-point numbers."""


def load_into(make: Callable[[], Predictor], path: Path, remedy: str) -> Predictor:
    """The predictor that `make` makes, with the tensors of a safetensors file, in eval mode.

    It is made on the meta device first, which takes no memory: so a file's few bytes are enough to refuse a
    configuration that asks for more of them.

    Args:
        make: makes the predictor, the same one each time.
        path: of the file.
        remedy: for messages.

    Raises:
        ExpertcastError: the file is damaged, holds other tensors than the predictor has, or numbers that are not
            finite; or as `make`.
    """
    wanted = _outline(make)
    try:
        found = _outline_of(path)
        if found != wanted:
            name = next(name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name))
            raise ExpertcastError(
                f"{path} does not hold the tensors of the predictor as its config describes it ({name} is "
                f"{_told(found.get(name))}, not {_told(wanted.get(name))}); {remedy}"
            )
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ExpertcastError(f"{path} is damaged or cut short ({str(error).splitlines()[0]}); {remedy}") from error
    check_tensors(tensors, str(path), remedy)
    predictor = make()
    predictor.load_state_dict(tensors)
    return predictor.eval()


def check_tensors(tensors: Mapping[str, Tensor], what: str, remedy: str) -> None:
    """Refuse numbers that no computation can go on from.

    Args:
        tensors: by name.
        what: they belong to, for the message.
        remedy: for the message.

    Raises:
        ExpertcastError: NaN or an infinity in one of them.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ExpertcastError(f"{what}: {name} holds numbers that are not finite; {remedy}")


def _outline(make: Callable[[], Predictor]) -> _Outline:
    try:
        with torch.device("meta"):
            predictor = make()
    except (RuntimeError, OverflowError) as error:
        raise ExpertcastError(
            f"a predictor of that config and shape cannot be: {str(error).splitlines()[0]}"
        ) from error
    return {name: (list(tensor.shape), tensor.is_floating_point()) for name, tensor in predictor.state_dict().items()}


def _outline_of(path: Path) -> _Outline:
    open_file(path).close()
    with safe_open(path, framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return {name: (part.get_shape(), "F" in part.get_dtype()) for name, part in parts.items()}


def _told(tensor: tuple[list[int], bool] | None) -> str:
    if tensor is None:
        return "not there"
    return f"{tensor[0]} of {'floating-point' if tensor[1] else 'whole'} numbers"
