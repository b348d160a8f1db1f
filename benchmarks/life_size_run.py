"""Child process of one command of `benchmarks.life_size`: runs the command line, and writes what it took."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path


def main() -> int:
    """Join the control groups, run the command and write its time and memory."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    for group in spec["groups"]:
        (Path(group) / "cgroup.procs").write_text("0")
    from expertcast.cli import main as command_line

    status = command_line(spec["words"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "processor_s": used.ru_utime + used.ru_stime,
        "wall_s": time.time() - Path("/proc/self").stat().st_ctime,
        "peak_resident_bytes": used.ru_maxrss * 1024,
        "disk_bytes": used.ru_inblock * 512,
        "major_faults": used.ru_majflt,
    }
    Path(spec["out"]).write_text(json.dumps(found))
    return status


if __name__ == "__main__":
    sys.exit(main())
