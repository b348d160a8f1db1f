"""Commands on checkpoints of life size, each in a process of its own with a cold page cache.

    python -m benchmarks life_size FOLDER [--rounds 3]

FOLDER gets the files of `benchmarks.life_size_files` that are missing: 17.3 GB in all. Prints the least seconds of
processor and wall time of each command, and its greatest memory: of the process, and with the pages of its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.children import abilities, run
from benchmarks.life_size_files import make
from benchmarks.results import ResultFile, result_parser
from expertcast.predictors.messages import Json, aligned, format_bytes

COMMANDS: dict[str, tuple[str, list[str]]] = {
    f"inspect {kind}": (kind, ["inspect", "{path}", "--memory", "8GB"])
    for kind in ("Q4_0", "safetensors", "deepseek-v3")
}
"""Kind of the checkpoint and words of each command."""


def table(runs: Sequence[Json]) -> str:
    """Return one row for each command: the least time and the greatest memory of its rounds."""
    rows = [["command", "processor s", "wall s", "memory", "with pages"]]
    for name in dict.fromkeys(each["command"] for each in runs):
        own = [each for each in runs if each["command"] == name]
        done = [each for each in own if "failed" not in each]
        if not done:
            rows.append([name, own[0]["failed"], "", "", ""])
            continue
        seconds = [f"{min(each[key] for each in done):.1f}" for key in ("processor_s", "wall_s")]
        memory = [format_bytes(max(each[key] for each in done)) for key in ("peak_resident_bytes", "peak_bytes")]
        rows.append([name, *seconds, *memory])
    return aligned(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every command that the result lacks, and print the table."""
    parser = result_parser("life_size", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    result = ResultFile(args, {"limits": abilities(args.folder)}, args.folder)
    runs = result.values["runs"]
    for number in range(args.rounds):
        for name in args.commands:
            if any((each["command"], each["round"]) == (name, number) for each in runs):
                continue
            kind, words = COMMANDS[name]
            path = make(args.folder, kind)
            spec = {"words": [word.format(path=path) for word in words]}
            found = run("benchmarks.life_size_run", spec, folder=args.folder, cold=[path])
            runs.append({"command": name, "round": number, **found})
            result.write()
    print(table(runs))
    return 0
