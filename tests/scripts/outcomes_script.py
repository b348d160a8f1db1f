"""Prints what class each of these ends is: `python -m tests.scripts.outcomes_script DIR`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from scripts import fault_trials
from scripts.fault_trials import outcome

NAMED = "expertcast: experts.safetensors is damaged\n"


def _says(text: str, status: int) -> Callable[[], int]:
    def work() -> int:
        sys.stderr.write(text)
        return status

    return work


def _allocates() -> int:
    return len(bytearray(1 << 40))


def _waits() -> int:
    time.sleep(60)
    return 0


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "experts.safetensors").touch()
    works = [_says("", 0), _says(NAMED, 2), _says("expertcast: no\n", 2), _says(NAMED + "more\n", 2), _says(NAMED, 3)]
    for work in [*works, _allocates, _waits]:
        ended = fault_trials.run(work, folder, fault_trials.Limits(seconds=1.0, memory=1 << 30))
        print(outcome(ended, 1, 1, folder, False)[0])
    ended = fault_trials.run(_says("", 0), folder, fault_trials.Limits())
    print(*outcome(ended, {"a": [1, 2]}, {"a": [1, 3]}, folder, False))
    print(outcome(ended, 1, 2, folder, True)[0])


if __name__ == "__main__":
    main()
