"""A pytest plugin: `datasets` cannot be imported."""

from __future__ import annotations

import sys

sys.modules["datasets"] = None  # type: ignore[assignment]
