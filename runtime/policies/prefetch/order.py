"""The order in which a selection's experts are copied.

T tokens, E routed experts per layer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def likeliest_first(chosen_TE: npt.NDArray[np.bool_], probability_TE: npt.NDArray[np.floating]) -> list[int]:
    """Experts that are chosen for any token, by falling probability summed over tokens; equal ones by number."""
    experts = np.flatnonzero(chosen_TE.any(axis=0))
    order = np.argsort(-probability_TE.sum(axis=0)[experts], kind="stable")
    return [int(expert) for expert in experts[order]]
