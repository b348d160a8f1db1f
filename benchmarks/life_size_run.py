"""Child process of one run of `benchmarks.life_size`: a command, and what it took."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import time
from contextlib import redirect_stderr
from pathlib import Path

from benchmarks.child import begin, end
from expertcast.predictors.messages import Json


def command(words: list[str], result: str) -> Json:
    """Run the command line; return the times of a result of `generate`, its reads and those of its plan."""
    from expertcast.cli import main as command_line

    with redirect_stderr(io.StringIO()) as said:
        status = command_line(words)
    if status:
        return {"refused": said.getvalue().strip().splitlines()[-1]}
    if not Path(result).exists() or "timing" not in (written := json.loads(Path(result).read_text())):
        return {}
    timing, planned = written["timing"], re.search(r"reads about (\d+) of its", said.getvalue())
    return {
        "first_token_s": age() - (timing["new_tokens"] - 1) / timing["tokens_per_s"],
        "token_ms": 1e3 / timing["tokens_per_s"],
        "reads": written["stats"]["misses"] / timing["new_tokens"],
        "planned_reads": int(planned[1]) if planned else None,
    }


def age() -> float:
    """Return the seconds since this process began."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def main() -> None:
    """Join the control groups, run, and write time and memory."""
    spec = begin()
    found = command(spec["words"], spec["result"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    found |= {"processor_s": used.ru_utime + used.ru_stime, "wall_s": age(), "disk_bytes": used.ru_inblock * 512}
    end(spec, found)


if __name__ == "__main__":
    main()
