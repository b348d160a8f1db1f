"""A step for test_gpu_day.py: what it does is its name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_steps.day import Day


def run(day: Day) -> bool:
    day.save(begun=True)
    match day.step.name:
        case "works":
            return True
        case "fails":
            raise ValueError("what was wrong")
        case "half":
            failed = day.attempt("this", lambda: bool(1 / 0))
            return day.attempt("that", lambda: True) and failed
        case "dies":
            os._exit(3)
        case "hangs":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            day.save(child=child.pid)
            time.sleep(600)
    raise AssertionError(day.step.name)
