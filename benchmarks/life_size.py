"""Commands on checkpoints of life size, each in a process of its own with a cold page cache.

    python -m benchmarks life_size FOLDER --page benchmarks/life_size.md

FOLDER gets the files of `benchmarks.life_size_files` that are missing: 17 GB on the disk. Prints the medians of seconds
and milliseconds, and the greatest memory: of the process, and with the pages of its files. Runs are limited to the
memory in their name by a control group. `train`, `eval` and the last `generate` use what the command before wrote.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.children import abilities, run
from benchmarks.life_size_files import SPARSE, make
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
    """Its words; {path}, {json} and {folder} stand for the checkpoint, a result, and a folder that they share."""
    recorded: bool = False
    """Whether routers follow recorded routing."""


_GENERATE = "generate {path} --prompt Once --temperature 1 --seed 0 --json {json} --new-tokens"
_COLLECT = "collect {path} --data reference --tokens 30000 --out {folder}/traces"
COMMANDS: dict[str, Command] = {
    **{f"inspect {kind}": Command(kind=kind, line="inspect {path} --memory 8GB") for kind in ("Q4_0", *SPARSE)},
    **{
        f"{name}, {size} GB": Command(memory=size * _GB, line=f"{_GENERATE} {tokens}", recorded=tokens > 256)
        for name, tokens in (("generate Q4_0", 256), ("recorded routing", 384))
        for size in (4, 8, 20)
    },
    "generate gpt-oss-20b, 8 GB": Command(kind="gpt-oss-20b", memory=8 * _GB, line=f"{_GENERATE} 16"),
    "generate safetensors, 8 GB": Command(kind="safetensors", memory=8 * _GB, line=f"{_GENERATE} 16"),
    "generate safetensors as int4, 8 GB": Command(
        kind="safetensors", memory=8 * _GB, line=f"{_GENERATE} 16 --experts int4"
    ),
    "generate Q4_0, 2 GB": Command(memory=2 * _GB, line=f"{_GENERATE} 16"),
    "collect Q4_0, 8 GB": Command(memory=8 * _GB, line=_COLLECT),
    "train, 8 GB": Command(memory=8 * _GB, line="train {folder}/traces --predictor linear --out {folder}/trained"),
    "train estimator, 8 GB": Command(
        memory=8 * _GB, line="train {folder}/traces --predictor estimator --out {folder}/estimator"
    ),
    "eval, 8 GB": Command(memory=8 * _GB, line="eval {folder}/traces --predictor linear={folder}/trained"),
    "generate with the predictor, 8 GB": Command(
        memory=8 * _GB, line=f"{_GENERATE} 256 --predictor {{folder}}/trained"
    ),
}
"""Commands by name."""
_COLUMNS: dict[str, tuple[str, Callable[[list[float]], float], Callable[[float], str]]] = {
    "processor s": ("processor_s", median, "{:.1f}".format),
    "wall s": ("wall_s", median, "{:.1f}".format),
    "memory": ("peak_resident_bytes", max, format_bytes),
    "with pages": ("peak_bytes", max, format_bytes),
    "read from disk": ("disk_bytes", max, format_bytes),
    "written": ("written_bytes", max, format_bytes),
    "first token, s": ("first_token_s", median, "{:.1f}".format),
    "ms a token": ("token_ms", median, "{:.0f}".format),
    "reads a token": ("reads", median, "{:.0f}".format),
    "later": ("later_reads", median, "{:.1f}".format),
    "planned": ("planned_reads", median, "{:.0f}".format),
}
"""Key, reduction and form of each column."""


def table(runs: Sequence[Json]) -> str:
    """Return one row for each command: medians of times and reads over its rounds, and the greatest sizes."""
    rows = []
    for name in dict.fromkeys(each["command"] for each in runs):
        own = [each for each in runs if each["command"] == name]
        done = [each for each in own if "failed" not in each]
        cells = [
            shown(reduced(found)) if (found := [each[key] for each in done if each.get(key) is not None]) else ""
            for key, reduced, shown in _COLUMNS.values()
        ]
        why = {str(each.get("failed") or each.get("refused") or "") for each in own} - {""}
        rows.append([name, *cells, "; ".join(sorted(why))])
    return markdown(["run", *_COLUMNS, "refused"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every command that the result lacks, and print the table."""
    parser = result_parser("life_size", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    result = ResultFile(args, {"limits": abilities()}, args.folder)
    runs = result.values["runs"]
    for number in range(args.rounds):
        for name in args.commands:
            if not any((each["command"], each["round"]) == (name, number) for each in runs):
                runs.append({"command": name, "round": number, **_run(COMMANDS[name], args.folder)})
                result.write()
    result.publish("Commands", table(runs))
    return 0


def _run(command: Command, folder: Path) -> Json:
    path, shared = make(folder, command.kind), folder / "written"
    places = {"path": path, "json": shared / "result.json", "folder": shared}
    words = command.line.format(**places).split()
    places["json"].unlink(missing_ok=True)
    if "--out" in words:
        shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
    shared.mkdir(exist_ok=True)
    before, spec = _nbytes(shared), {"words": words, "result": str(places["json"]), "recorded": command.recorded}
    found = run("benchmarks.life_size_run", spec, memory=command.memory, cold=[path])
    return {**found, "written_bytes": _nbytes(shared) - before}


def _nbytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
