"""The core that other engines' fronts stand on, and that it imports without transformers and the training libraries.

    python scripts/core_imports.py

prints how many modules it has.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

CORE = (
    "expertcast.checkpoints",
    "expertcast.data.batch",
    "expertcast.data.live",
    "expertcast.data.machine",
    "expertcast.data.trace_format",
    "expertcast.data.trace_writer",
    "expertcast.data.traces",
    "expertcast.predictors",
    "expertcast.runtime.config",
    "expertcast.runtime.engine.cache",
    "expertcast.runtime.engine.drift",
    "expertcast.runtime.engine.engine",
    "expertcast.runtime.engine.speculation",
    "expertcast.runtime.experimental.device_engine",
    "expertcast.runtime.links",
    "expertcast.runtime.policies",
    "expertcast.runtime.pools",
    "expertcast.runtime.recording",
    "expertcast.runtime.storage.codecs",
    "expertcast.runtime.storage.disk_store",
    "expertcast.runtime.storage.layout",
    "expertcast.runtime.storage.memory",
    "expertcast.runtime.storage.slots",
    "expertcast.runtime.storage.store",
)
"""Modules, and packages with all that is in them."""
SEAM = ("accelerate", "datasets", "lightning", "matplotlib", "tensorboard", "torchmetrics", "transformers")
"""What none of them imports: a front may bring another release of it, or none."""
ON_CUDA = "triton_kernels"
"""Last part of the names of modules that are imported where CUDA is."""


def modules() -> list[str]:
    """The core's modules by name."""
    found = []
    for name in CORE:
        found.append(name)
        module = importlib.import_module(name)
        if hasattr(module, "__path__"):
            found += [each.name for each in pkgutil.walk_packages(module.__path__, f"{name}.")]
    return [name for name in found if not name.endswith(f".{ON_CUDA}")]


def main() -> None:
    """Import all of it; an import that fails says which."""
    sys.modules.update(dict.fromkeys(SEAM))  # None: importing it raises ModuleNotFoundError
    names = modules()
    for name in names:
        importlib.import_module(name)
    print(f"{len(names)} modules")


if __name__ == "__main__":
    main()
