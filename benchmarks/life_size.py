"""Commands on checkpoints of life size, each in a process of its own with a cold page cache.

    python -m benchmarks life_size FOLDER [--rounds 3] [--commands NAME ...]

FOLDER gets the files of `benchmarks.life_size_files` that are missing: 22 GB in all. Prints the least seconds of
processor and wall time of each command, and its greatest memory: of the process, and with the pages of its files. Runs
are limited to the memory in their name by a control group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.children import abilities, run
from benchmarks.conditions import ROOT
from benchmarks.life_size_files import make
from benchmarks.results import ResultFile, markdown, result_parser, write_section
from expertcast.predictors.messages import Json, format_bytes

PAGE = ROOT / "benchmarks" / "life_size.md"
_GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Command:
    """A run of `benchmarks.life_size_run`."""

    kind: str = "Q4_0"
    """Kind of the checkpoint."""
    layers: int | None = None
    memory: int | None = None
    """Limit in bytes; None: none."""
    run: str = "command"
    given: dict[str, Any] = field(default_factory=dict)
    """Arguments; {path}, {json} and {folder} in words stand for the checkpoint, a result file and an empty folder."""


def _words(line: str, result: bool = False) -> dict[str, Any]:
    return {"words": line.split(), **({"result": "{json}"} if result else {})}


_GENERATE = "generate {path} --prompt Once --new-tokens 32 --temperature 1 --seed 0 --json {json}"
_COLLECT = "collect {path} --data reference --tokens 30000 --out {folder}/traces"
COMMANDS: dict[str, Command] = {
    **{
        f"inspect {kind}": Command(kind=kind, given=_words("inspect {path} --memory 8GB"))
        for kind in ("Q4_0", "safetensors", "deepseek-v3")
    },
    **{f"generate, {size} GB": Command(memory=size * _GB, given=_words(_GENERATE, result=True)) for size in (4, 8, 20)},
    **{f"reads, {size} GB": Command(memory=size * _GB, run="reads", given={"path": "{path}"}) for size in (4, 8, 20)},
    "prompts, 12 layers": Command(layers=12, run="prompts", given={"path": "{path}"}),
    "generate safetensors, 8 GB": Command(
        kind="safetensors", memory=8 * _GB, given=_words(_GENERATE.replace("{json}", "{json} --experts int4"))
    ),
    "collect, 8 GB": Command(memory=8 * _GB, given=_words(_COLLECT)),
}
"""Runs by name: a command without further options, reads of a token beside the plan, and prompts."""


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
        rows.append([name, *seconds, *memory, _found(done[-1])])
    return markdown(["run", "processor s", "wall s", "memory", "with pages", "read from disk", ""], rows)


def _found(done: Json) -> str:
    if "first_token_s" in done:
        return f"first token after {done['first_token_s']:.1f} s"
    if "planned_bytes" in done:
        planned, read = done["planned_bytes"], done["read_bytes"]
        return (
            f"{done['slots']} slots; a token reads {format_bytes(read)}, planned {format_bytes(planned)} "
            f"({read / planned - 1:+.0%})" if planned else "all experts fit"
        )  # fmt: skip
    if "moved" in done:
        moved, hits = (", ".join(f"{each:.1%}" for each in done[key]) for key in ("moved", "hits"))
        return f"prompts move {moved} of the experts; hits of the decode steps after each {hits}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every command that the result lacks, print the table and write the page."""
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
    text = table(runs)
    print(text)
    write_section(PAGE, "Runs", f"{text}\n\n`python -m benchmarks life_size FOLDER`, {result.values['date'][:10]}")
    return 0


def _run(command: Command, folder: Path) -> Json:
    path = make(folder, command.kind, command.layers)
    with TemporaryDirectory(dir=folder) as empty:
        places = {"path": path, "json": f"{empty}/result.json", "folder": empty}

        def filled(value: Any) -> Any:
            return [filled(each) for each in value] if isinstance(value, list) else value.format(**places)

        given = {name: filled(value) for name, value in command.given.items()}
        spec = {"run": command.run, "given": given}
        return run("benchmarks.life_size_run", spec, folder=folder, memory=command.memory, cold=[path])
