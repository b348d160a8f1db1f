"""Stand-ins for a model that know what is right: they read nothing but the texts they are given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from benchmarks.tasks.suite import Ending, Item, Reader
from torch import Tensor

VOCABULARY = 4096


def knowing(items: Sequence[Item], *, right: bool = True, late: int = 0) -> Reader:
    """Says at each place of a text the token that stands there, and of several texts believes in the right one.

    Args:
        items: all that it will be asked about.
        right: False: says that everything but this stands there, and believes in the wrong texts.
        late: says it so many places too late.
    """
    believed: dict[tuple[int, ...], tuple[tuple[int, ...], bool]] = {}
    for item in items:
        for number, text in enumerate(item.texts):
            good = all(not isinstance(each, Ending) or each.answer == number for each in item.questions)
            believed[text[:-1]] = (text, good)

    def read(ids_BS: Tensor, prefill: int) -> Tensor:
        rows = []
        for ids_S in ids_BS.tolist():
            text, good = believed[tuple(ids_S)]
            said_SV = torch.full((len(text), VOCABULARY), -10.0)
            places = torch.arange(late, len(text))
            said_SV[places, torch.tensor(text[: len(text) - late])] = 0.0 if good == right else -20.0
            rows.append(said_SV[prefill:])
        return torch.stack(rows)

    return read
