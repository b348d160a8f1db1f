"""Which model an artefact was made for: what it says of that, and whether a model is the one."""

from __future__ import annotations

import warnings

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.predictors.view import MoEView


def fingerprints(view: MoEView) -> dict[str, str]:
    """Members `fingerprint` and, where the experts' weights are at hand or known, `experts_fingerprint`."""
    experts = view.experts_fingerprint()
    return {"fingerprint": view.fingerprint()} | ({} if experts is None else {"experts_fingerprint": experts})


def check_fingerprints(recorded: Json, view: MoEView, what: str) -> None:
    """Compare what :func:`fingerprints` gave for the model that a predictor was trained for with those of another.

    Experts are compared where both sides know theirs: a model that is read straight into its offloaded form does not,
    nor does one in fp16. From before norms were in the fingerprint, routers alone are compared, with a warning.

    Args:
        recorded: has these members, and `model_id`.
        view: of the other model.
        what: for messages, the checkpoint.

    Raises:
        ExpertcastError: it is another model.
    """
    different = different_part(recorded, view, what)
    if different:
        raise ExpertcastError(
            f"{what} was trained for {recorded['model_id']!r} and its {different} are not those of {view.model_id!r}: "
            "train a predictor for this model with `expertcast train`"
        )


def different_part(recorded: Json, view: MoEView, what: str) -> str:
    """What of a model is not as recorded, for messages; empty where it is the one. Takes and compares what
    :func:`check_fingerprints` does."""
    if recorded["fingerprint"] == view.fingerprint():
        experts = recorded.get("experts_fingerprint")
        other = experts is not None and view.experts_fingerprint() not in (None, experts)
        return "experts' weights" if other else ""
    if recorded["fingerprint"] != view.router_fingerprint():
        return "routers' or norms' weights"
    warnings.warn(
        f"{what} was written when fingerprints were of routers alone: whether the norms and experts of "
        f"{view.model_id!r} are those it was made for is not known",
        stacklevel=4,
    )
    return ""
