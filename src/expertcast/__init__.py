"""expertcast: forecast the experts a Mixture-of-Experts model routes to next, and hide their transfers."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expertcast.runtime.config import OffloadConfig
    from expertcast.runtime.loading import load_offloaded
    from expertcast.runtime.offloading import OffloadedModel, offload

__version__ = "0.1.0"
UNSUPPORTED = f"expertcast runs on Linux and macOS, not on {sys.platform}: on Windows, install it in WSL"
if sys.platform in ("linux", "darwin"):
    UNSUPPORTED = ""
__all__ = ["OffloadConfig", "OffloadedModel", "__version__", "load_offloaded", "offload"]

_LAZY = {
    "OffloadConfig": "expertcast.runtime.config",
    "OffloadedModel": "expertcast.runtime.offloading",
    "load_offloaded": "expertcast.runtime.loading",
    "offload": "expertcast.runtime.offloading",
}


def __getattr__(name: str) -> Any:
    """`expertcast.offload` on first use: `import expertcast` and `expertcast --help` need not load torch."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'expertcast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
