"""Which releases of `transformers` the seam into its models needs; what knows no such model runs with others, too."""

from __future__ import annotations

import transformers

from expertcast.predictors.errors import ExpertcastError

OLDEST = (5, 23)
"""Routers of older releases do not all return their logits, weights and ids, nor are all experts decorated."""


def check_release(doing: str) -> None:
    """Say that a `transformers` model cannot be worked on with what is installed.

    Args:
        doing: what is about to be done, as a line begins with it.

    Raises:
        ExpertcastError: this release is too old.
    """
    here = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if here < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ExpertcastError(
            f"{doing} a transformers model needs transformers {needed} or newer, here is {transformers.__version__}: "
            "pip install -U transformers"
        )
