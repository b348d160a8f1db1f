"""A benchmark's runs over time: a Chrome trace, and a picture of two steps."""

from __future__ import annotations

from pathlib import Path

from expertcast.runtime.benchmarking.bench import Bench
from expertcast.runtime.recording.timeline import draw_steps
from expertcast.runtime.recording.timeline import write_timeline as write_trace


def write_timeline(path: Path, measured: Bench) -> dict[str, str]:
    """Chrome trace of the last repetition of every run, and a PNG of two decode steps, on demand above prefetch."""
    recorders = {name: run.recorder for name, run in measured.runs.items() if run.recorder is not None}
    write_trace(path, recorders)
    written = {"trace": str(path)}
    for pair in (("on_demand", "exact"), ("on_demand_cache", "exact_cache")):
        if "picture" not in written and all(name in recorders for name in pair):
            written["picture"] = str(path.with_suffix(".png"))
            draw_steps({name: recorders[name] for name in pair}, path.with_suffix(".png"), steps=2)
    return written
