"""Order and distribution of the files over worker processes; a plugin of pytest that the Makefile names."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

LONGEST = (
    "scripts/test_kill_commands.py", "benchmarks/test_side_by_side.py", "package/test_readme.py",
    "training/test_resume.py", "scripts/test_mutate", "tests/hub/", "training/test_fit.py", "families/", "package/",
    "training/", "drafts/",
)  # fmt: skip
"""Parts of paths of files that take long: begun first, or one worker is at them long after the others are done."""
TOGETHER = {
    "running": ("tests/hub/",),
    "fitted_predictors": (
        "training/test_fit.py", "training/test_baselines.py", "training/test_calibration.py",
        "checkpoints/test_store.py", "data/test_traced.py", "predictors/test_folded.py",
    ),
}  # fmt: skip
"""Session fixtures that take ten seconds, and the files that share each: one worker runs them all."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, the others in the usual order (workers are told not to reorder them)."""

    def place(item: pytest.Item) -> int:
        return next((rank for rank, part in enumerate(LONGEST) if part in item.nodeid), len(LONGEST))

    items.sort(key=place)


class ByFixture(LoadFileScheduling):
    """A file goes to one worker as a whole, with the files of :data:`TOGETHER`."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return next((name for name, parts in TOGETHER.items() if any(part in file for part in parts)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFixture:
    return ByFixture(config, log)
