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

import gc
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expertcast.checkpoints.checkpoint import PredictorCheckpoint as PredictorCheckpoint
    from expertcast.checkpoints.checkpoint import load_predictor as load_predictor
    from expertcast.checkpoints.checkpoint import save_predictor as save_predictor
    from expertcast.data.collect import collect as collect
    from expertcast.data.text import load_documents as load_documents
    from expertcast.data.traces import TraceDataset as TraceDataset
    from expertcast.predictors import ExpertcastError as ExpertcastError
    from expertcast.predictors import Predictor as Predictor
    from expertcast.predictors import register as register
    from expertcast.runtime.config import OffloadConfig as OffloadConfig
    from expertcast.runtime.loading import load_offloaded as load_offloaded
    from expertcast.runtime.offloading import OffloadedModel as OffloadedModel
    from expertcast.runtime.offloading import offload as offload
    from expertcast.runtime.policies import Policies as Policies
    from expertcast.training.evaluation import evaluate as evaluate
    from expertcast.training.fit import fit as fit

__version__ = "0.1.0"
UNSUPPORTED = f"expertcast runs on Linux and macOS, not on {sys.platform}: on Windows, install it in WSL"
if sys.platform in ("linux", "darwin"):
    UNSUPPORTED = ""
if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
    # Threads of torch wait for each other at the end of every operator. GNU OpenMP lets them spin there for some
    # milliseconds, and on a busy machine they keep the processor from the thread that they wait for: beside one foreign
    # process, a decode step took 4 times as long, and 1.2 times with this count. It costs nothing on a quiet machine.
    if "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = "1000"
    else:  # it has read the variable; but it spins less in a process with more threads than processors, even asleep
        _ready = threading.Event()

        def _sleep() -> None:
            try:
                sys.modules["torch"].ones(1 << 20, device="cpu").neg_()  # wakes this thread's own team
            finally:
                _ready.set()
            threading.Event().wait()

        threading.Thread(target=_sleep, name="openmp-asleep", daemon=True).start()
        _ready.wait()

_NAMES = {
    "checkpoints.checkpoint": "PredictorCheckpoint load_predictor save_predictor",
    "data.collect": "collect",
    "data.text": "load_documents",
    "data.traces": "TraceDataset",
    "predictors": "ExpertcastError Predictor register",
    "runtime.config": "OffloadConfig",
    "runtime.loading": "load_offloaded",
    "runtime.offloading": "OffloadedModel offload",
    "runtime.policies": "Policies",
    "training.evaluation": "evaluate",
    "training.fit": "fit",
}
"""Public names by module."""
_MODULE = {name: f"expertcast.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_MODULE, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import expertcast` and `expertcast --help` need not load torch.

    Garbage is not collected meanwhile: that would take a fifth of the time.
    """
    if name in _MODULE:
        collected = gc.isenabled() and "transformers" not in sys.modules
        try:
            if collected:
                gc.disable()
            return getattr(importlib.import_module(_MODULE[name]), name)
        except ModuleNotFoundError as error:
            raise importlib.import_module("expertcast.predictors.messages").missing_extra(error) from error
        finally:
            if collected:
                gc.enable()
    raise AttributeError(f"module 'expertcast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
