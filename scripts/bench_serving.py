"""Requests per second, time to first token and time per token of servers, resident and offloaded, under load.

    python scripts/bench_serving.py --vllm-python PYTHON --out benchmarks/results/serving.json --page docs/serving.md

starts one server after another over the bundled model, in turn through --rounds rounds, and has 1, 4 and 16 of
OpenAI's own clients ask each the same prompts, greedily and streamed: transformers' server with the model resident,
with its experts offloaded on demand, and exact with forecasts by a linear predictor (trained here), one at a time
and with continuous batching; and, where PYTHON is that of an environment with vLLM and the plug-in, vLLM's, likewise. A
quarter of the experts has slots, behind an emulated link. Each side's texts are compared with those of its resident
side.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marked_page import replace_between
from serving_sides.clients import Load, ask
from serving_sides.servers import Setting, Side, running, sides

from expertcast.checkpoints.provenance import provenance
from expertcast.checkpoints.store import save_predictor
from expertcast.commands.output import new_file, say, write_json
from expertcast.data.collector import collect
from expertcast.data.discovery import find_moe_layers
from expertcast.data.models import REFERENCE, load_model, load_tokenizer
from expertcast.data.plan import TextOptions
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.runtime.benchmarking.hardware import hardware
from expertcast.training.fit import fit

BEGIN, END = "<!-- serving -->", "<!-- end of serving -->"
PROMPT_WORDS, PROMPTS = 24, 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error."""
    args = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
            result = measured(args, Path(folder))
        text = table(result)
        print(text)
        if args.out is not None:
            write_json(args.out, result)
        if args.page is not None:
            replace_between(args.page, BEGIN, END, text, "tables are")
    except ExpertcastError as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 2
    return 0


def measured(args: argparse.Namespace, folder: Path) -> Json:
    """Every side under every load, --rounds times.

    Raises:
        ExpertcastError: a server does not answer.
    """
    setting = Setting(
        model=_model(folder), predictor=str(_checkpoint(folder, args.train_tokens)), slots=args.slots,
        bandwidth=args.bandwidth, threads=args.threads, vllm=args.vllm_python,
    )  # fmt: skip
    every = [side for side in sides(setting) if not args.sides or any(word in side.name for word in args.sides)]
    chosen = [side for side in sides(setting) if side in every or any(side.name == one.like for one in every)]
    prompts = _prompts()
    loads: dict[tuple[str, int], list[Load]] = {(side.name, n): [] for side in chosen for n in args.clients}
    memory: dict[str, list[tuple[int, int]]] = {side.name: [] for side in chosen}
    hits: dict[str, float | None] = {}
    for turn in range(args.rounds):
        for side in chosen if turn % 2 == 0 else chosen[::-1]:
            say(f"round {turn + 1} of {args.rounds}: {side.name}")
            with running(side, setting, folder / "server.log") as server:
                ask(server.address, str(setting.model), prompts, clients=1, requests=2, new_tokens=4)
                before = server.resident_bytes()
                for clients in args.clients:
                    load = ask(
                        server.address, str(setting.model), prompts, clients=clients,
                        requests=max(clients, args.requests), new_tokens=args.new_tokens,
                    )  # fmt: skip
                    loads[side.name, clients].append(load)
                memory[side.name].append((before, server.resident_bytes()))
                hits[side.name] = server.hit_rate(side)
    rows = [
        {**_row(side, n, loads, memory[side.name]), "hit_rate": hits[side.name]}
        for side in chosen for n in args.clients
    ]  # fmt: skip
    command = " ".join(["bench_serving.py", *_shown(args)])
    return {**provenance(), "command": command, "hardware": hardware(), "rows": rows,
            "settings": {"slots": args.slots, "bandwidth": args.bandwidth, "threads": args.threads,
                         "requests": args.requests, "new_tokens": args.new_tokens, "rounds": args.rounds}}  # fmt: skip


def table(result: Json) -> str:
    """The rows, side by side, in Markdown."""
    settings = result["settings"]
    lines = [
        f"    python scripts/{result['command']}", "",
        f"Bundled model in fp32, {settings['threads']} threads, {settings['slots']} slots for 768 experts, emulated",
        f"link of {settings['bandwidth'] / 1e6:.0f} MB/s; {settings['requests']} requests of {settings['new_tokens']}",
        f"tokens under each load, {settings['rounds']} rounds, medians. *Hits*: of the experts asked for, those",
        "that had a slot, over the last round. *Same texts*: as the server's resident side.",
        "",
        "| server | clients | requests/s | ms to first token | p95 | ms per token | p95 | hits | same texts | lost |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in result["rows"]:
        figures = [f"{row[name] * 1e3:.0f}" for name in ("first_s", "first_s_p95", "per_token_s", "per_token_s_p95")]
        hits = "" if row["hit_rate"] is None else f"{row['hit_rate']:.2f}"
        cells = [row["side"], str(row["clients"]), f"{row['requests_per_s']:.2f}", *figures, hits]
        lines.append("| " + " | ".join([*cells, f"{row['same']} of {row['answers']}", str(row["lost"])]) + " |")
    return "\n".join(lines)


def _row(
    side: Side, clients: int, loads: dict[tuple[str, int], list[Load]], memory: list[tuple[int, int]]
) -> dict[str, Any]:
    answers = [answer for load in loads[side.name, clients] for answer in load.answers]
    if not answers:
        raise ExpertcastError(f"{side.name} answered nobody of {clients} clients: look at its log")
    first = [answer.first_s for answer in answers]
    each = [answer.per_token_s for answer in answers if answer.tokens > 1] or [0.0]
    like = [load for (name, _), each in loads.items() if name == side.like for load in each]
    expected: dict[int, set[str]] = {}  # in batches a resident side need not agree with itself
    for answer in (answer for load in like for answer in load.answers):
        expected.setdefault(answer.prompt, set()).add(answer.text)
    return {
        "side": side.name, "clients": clients, "answers": len(answers),
        "lost": sum(load.lost for load in loads[side.name, clients]),
        "same": sum(answer.text in expected.get(answer.prompt, ()) for answer in answers),
        "requests_per_s": statistics.median(len(load.answers) / load.seconds for load in loads[side.name, clients]),
        "first_s": statistics.median(first), "first_s_p95": _p95(first),
        "per_token_s": statistics.median(each), "per_token_s_p95": _p95(each),
        "memory_bytes": [list(pair) for pair in memory],
    }  # fmt: skip


def _p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def _model(folder: Path) -> Path:
    """The bundled model with its tokenizer, as files that every server reads."""
    load_model(REFERENCE, dtype="fp32").save_pretrained(folder / "model")
    load_tokenizer(REFERENCE).save_pretrained(folder / "model")
    return folder / "model"


def _checkpoint(folder: Path, tokens: int) -> Path:
    """A linear predictor of that model: what both servers' layers see is enough for it."""
    model, tokenizer = load_model(str(folder / "model"), dtype="fp32"), load_tokenizer(REFERENCE)
    options = TextOptions(tokens=tokens, early_rank=None)
    traces = collect(model, tokenizer, load_documents(REFERENCE), folder / "traces", options)
    save_predictor(fit("linear", traces).predictor, folder / "checkpoint", view=find_moe_layers(model))
    return folder / "checkpoint"


def _prompts() -> list[str]:
    """Beginnings of bundled documents."""
    documents = [document.text for document in load_documents(REFERENCE)]
    return [" ".join(text.split()[:PROMPT_WORDS]) for text in documents[:: len(documents) // PROMPTS]][:PROMPTS]


def _shown(args: argparse.Namespace) -> list[str]:
    """The command's options but for this machine's places."""
    shown = ["--vllm-python", "PYTHON"] if args.vllm_python else []
    for name in (
        "sides",
        "clients",
        "slots",
        "bandwidth",
        "requests",
        "new_tokens",
        "rounds",
        "threads",
        "train_tokens",
    ):
        value = getattr(args, name)
        if value != _parser().get_default(name):
            shown += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return [*shown, "--out", "benchmarks/results/serving.json", "--page", "docs/serving.md"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", metavar="PYTHON", help="of an environment with vLLM and the plug-in")
    parser.add_argument("--sides", nargs="*", metavar="WORDS", help="only sides with any of these in their name")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16], help="at once (default: 1 4 16)")
    parser.add_argument("--requests", type=int, default=16, help="under each load (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=24, help="of each request (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="through all servers (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=192, help="of 768 experts (default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, default=1.2e8, help="bytes per second (default: %(default)g)")
    parser.add_argument("--threads", type=int, default=2, help="of each server (default: %(default)s)")
    parser.add_argument(
        "--train-tokens", type=int, default=60_000, help="to fit the predictor on (default: %(default)s)"
    )
    parser.add_argument("--out", type=new_file, help="JSON file to write")
    parser.add_argument("--page", type=Path, help="page whose marked part becomes the table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
