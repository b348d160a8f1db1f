"""Forecast which experts a Mixture-of-Experts model will route to next, and hide the transfers of their weights.

The three steps, each also a command of `expertcast`:

    import expertcast

    traces = expertcast.collect(model, tokenizer, expertcast.load_documents("my.parquet"), "traces", tokens=200_000)
    fitted = expertcast.fit("estimator", traces)                                     # train: minutes on a CPU
    scores = expertcast.evaluate({"estimator": fitted.predictor}, traces.batches("test", 1024), traces.view)
    expertcast.save_predictor(fitted.predictor, "checkpoint", view=traces.view)
    with expertcast.offload(model, predictor="checkpoint", memory="8GB") as offloaded:   # deploy
        offloaded.generate(**inputs)

To add a predictor, subclass `Predictor` and decorate the class with `register`. Invalid input raises `ExpertcastError`
with a message of one line: the problem, then the remedy. Each public name has an example in its docstring.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expertcast.checkpoints.checkpoint import PredictorCheckpoint, load_predictor, save_predictor
    from expertcast.data.collect import collect
    from expertcast.data.text import load_documents
    from expertcast.data.traces import TraceDataset
    from expertcast.predictors import ExpertcastError, Predictor, register
    from expertcast.runtime.config import OffloadConfig
    from expertcast.runtime.loading import load_offloaded
    from expertcast.runtime.offloading import OffloadedModel, offload
    from expertcast.runtime.policies import Policies
    from expertcast.training.evaluation import evaluate
    from expertcast.training.fit import fit

__version__ = "0.1.0"
UNSUPPORTED = f"expertcast runs on Linux and macOS, not on {sys.platform}: on Windows, install it in WSL"
if sys.platform in ("linux", "darwin"):
    UNSUPPORTED = ""
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    # Threads of torch wait for each other at the end of every operator. GNU OpenMP lets them spin there for some
    # milliseconds, and on a busy machine they keep the processor from the thread that they wait for: beside one foreign
    # process, a decode step took 4 times as long, and 1.2 times with this count. It costs nothing on a quiet machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
__all__ = [
    "ExpertcastError",
    "OffloadConfig",
    "OffloadedModel",
    "Policies",
    "Predictor",
    "PredictorCheckpoint",
    "TraceDataset",
    "__version__",
    "collect",
    "evaluate",
    "fit",
    "load_documents",
    "load_offloaded",
    "load_predictor",
    "offload",
    "register",
    "save_predictor",
]

_LAZY = {
    "ExpertcastError": "expertcast.predictors",
    "OffloadConfig": "expertcast.runtime.config",
    "OffloadedModel": "expertcast.runtime.offloading",
    "Policies": "expertcast.runtime.policies",
    "Predictor": "expertcast.predictors",
    "PredictorCheckpoint": "expertcast.checkpoints.checkpoint",
    "TraceDataset": "expertcast.data.traces",
    "collect": "expertcast.data.collect",
    "evaluate": "expertcast.training.evaluation",
    "fit": "expertcast.training.fit",
    "load_documents": "expertcast.data.text",
    "load_offloaded": "expertcast.runtime.loading",
    "load_predictor": "expertcast.checkpoints.checkpoint",
    "offload": "expertcast.runtime.offloading",
    "register": "expertcast.predictors",
    "save_predictor": "expertcast.checkpoints.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import expertcast` and `expertcast --help` need not load torch."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'expertcast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
