"""Commands on checkpoints of life size, each in a process of its own with a cold page cache.

    python -m benchmarks life_size FOLDER [--rounds 3] [--commands NAME ...]

FOLDER gets the files of `benchmarks.life_size_files` that are missing: 22 GB in all. Prints the least seconds of
processor and wall time of each command, and its greatest memory: of the process, and with the pages of its files. Runs
are limited to the memory in their name by a control group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.children import abilities, run
from benchmarks.life_size_files import make
from benchmarks.results import ResultFile, markdown, result_parser
from expertcast.predictors.messages import Json, format_bytes

_GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Command:
    """A run of `benchmarks.life_size_run`."""

    kind: str = "Q4_0"
    """Kind of the checkpoint."""
    memory: int | None = None
    """Limit in bytes; None: none."""
    line: str
    """Its words; {path}, {json} and {folder} stand for the checkpoint, a result file and an empty folder."""


_GENERATE = "generate {path} --prompt Once --new-tokens 32 --temperature 1 --seed 0 --json {json}"
_COLLECT = "collect {path} --data reference --tokens 30000 --out {folder}/traces"
COMMANDS: dict[str, Command] = {
    **{f"inspect {kind}": Command(kind=kind, line="inspect {path} --memory 8GB")
       for kind in ("Q4_0", "safetensors", "deepseek-v3")},
    **{f"generate, {size} GB": Command(memory=size * _GB, line=_GENERATE) for size in (4, 8, 20)},
    "generate safetensors, 8 GB": Command(kind="safetensors", memory=8 * _GB, line=f"{_GENERATE} --experts int4"),
    "collect, 8 GB": Command(memory=8 * _GB, line=_COLLECT),
}  # fmt: skip
"""Commands by name."""


def table(runs: Sequence[Json]) -> str:
    """Return one row for each command: the least time and the greatest memory of its rounds, and what it found."""
    rows = []
    for name in dict.fromkeys(each["command"] for each in runs):
        own = [each for each in runs if each["command"] == name]
        done = [each for each in own if "failed" not in each]
        if not done:
            rows.append([name, "", "", "", "", "", own[0]["failed"]])
            continue
        seconds = [f"{min(each[key] for each in done):.1f}" for key in ("processor_s", "wall_s")]
        sizes = ("peak_resident_bytes", "peak_bytes", "disk_bytes")
        memory = [format_bytes(max(each[key] for each in done)) for key in sizes]
        rows.append(
            [name, *seconds, *memory, f"{done[-1]['first_token_s']:.1f}" if "first_token_s" in done[-1] else ""]
        )
    return markdown(["run", "processor s", "wall s", "memory", "with pages", "read from disk", "first token s"], rows)


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
            runs.append({"command": name, "round": number, **_run(COMMANDS[name], args.folder)})
            result.write()
    print(table(runs))
    return 0


def _run(command: Command, folder: Path) -> Json:
    path = make(folder, command.kind)
    with TemporaryDirectory(dir=folder) as empty:
        places = {"path": path, "json": f"{empty}/result.json", "folder": empty}
        spec = {"words": command.line.format(**places).split(), "result": places["json"]}
        return run("benchmarks.life_size_run", spec, folder=folder, memory=command.memory, cold=[path])
