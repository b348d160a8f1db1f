"""Requests per second, time to first token and time per token of resident and offloaded servers under load.

    python -m benchmarks serving --vllm-python PYTHON

Servers over the bundled model run one after another, in --rounds rounds of alternating order. Clients of OpenAI's
library send the same prompts at the same time, decoded greedily and streamed. Sides: transformers' server with the
resident model, with experts offloaded on demand, and with exact forecasts by a linear predictor (trained here), all
with continuous batching; and vLLM's server likewise, if PYTHON belongs to an environment with vLLM and the plug-in. A
quarter of the experts has slots, behind an emulated link. Each side's texts are compared with those of its resident
side, and its requests per second with other sides of the same round.

The file is written after every server; a second call resumes it. --small takes a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import openai
import psutil

from benchmarks.results import ResultFile, markdown, result_parser, shown, spread
from expertcast.checkpoints.bundled import REFERENCE
from expertcast.cli import main as command_line
from expertcast.commands.numbers import positive, positive_number
from expertcast.commands.output import say
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json

SETTINGS = ("clients", "requests", "new_tokens", "slots", "bandwidth", "threads", "train_tokens")
"""Settings that must be equal to resume a file."""
SMALL: Json = {"clients": [1, 2], "requests": 4, "new_tokens": 4, "rounds": 1, "train_tokens": 4000}
RESIDENT, ON_DEMAND, EXACT = KINDS = ("resident", "on demand", "exact")
PROMPT_WORDS, PROMPTS, _WARMING = 24, 16, 2
STARTS_S, ENDS_S, ANSWERS_S = 180.0, 30.0, 300.0
"""Time limits for a server's start and end, and for an answer."""


class Side(NamedTuple):
    """One server: its command without the port, additional environment variables, and the route of its metrics."""

    command: list[str]
    environment: dict[str, str] = {}  # noqa: RUF012
    metrics: str | None = None
    """None for resident experts."""


def sides(args: argparse.Namespace, model: str, predictor: str) -> dict[str, Side]:
    """Return all sides that can run here, by `server: kind`."""
    own = [sys.executable, "-m", "expertcast.cli", "serve", model, "--dtype", "fp32", "--slots", str(args.slots),
           "--bandwidth", str(args.bandwidth), "--continuous-batching", "--kv-tokens", "16384"]  # fmt: skip
    theirs = [sys.executable, "-m", "transformers.cli.transformers", "serve", model, "--device", "cpu", "--dtype",
              "float32", "--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "1024"]  # fmt: skip
    found = {
        f"transformers: {RESIDENT}": Side(theirs),
        f"transformers: {ON_DEMAND}": Side(own, {}, "/metrics"),
        f"transformers: {EXACT}": Side([*own, "--predictor", predictor], {}, "/metrics"),
    }
    if args.vllm_python is None:
        return found
    served = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32",
              "--max-model-len", "1024", "--enforce-eager", "--shutdown-timeout", "10"]  # fmt: skip
    cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
           "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}  # fmt: skip
    options = {"slots": args.slots, "bandwidth": args.bandwidth}
    found[f"vLLM: {RESIDENT}"] = Side(served, {**cpu, "EXPERTCAST_VLLM": "0"})
    for kind, each in ((ON_DEMAND, options), (EXACT, {**options, "predictor": predictor})):
        plugin = {**cpu, "VLLM_PLUGINS": "expertcast", "EXPERTCAST_VLLM": json.dumps(each)}
        found[f"vLLM: {kind}"] = Side(served, plugin, "/expertcast/metrics")
    return found


@contextmanager
def running(name: str, side: Side, threads: int, log: Path) -> Iterator[str]:
    """Run a side's server inside this context; yield its URL.

    Raises:
        ExpertcastError: the server ended before it answered, or did not answer in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **side.environment}
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + STARTS_S
    with log.open("wb") as lines:
        process = psutil.Popen(
            [*side.command, "--port", str(port)], env=environment, stdout=lines, stderr=subprocess.STDOUT
        )
        try:
            while True:
                with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
                if process.poll() is not None or time.monotonic() > until:
                    last = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
                    raise ExpertcastError(f"{name} does not answer: {last}")
                time.sleep(0.1)
            yield address
        finally:
            every = [process]
            with suppress(psutil.NoSuchProcess):
                every += process.children(recursive=True)
                process.terminate()
            for left in psutil.wait_procs(every, timeout=ENDS_S)[1]:
                left.kill()


def ask(address: str, model: str, asked: Sequence[str], tokens: int, clients: int) -> tuple[list[Json], float]:
    """Send prompts with some simultaneous clients; return the whole answers and the seconds of all.

    An answer has `prompt` and `text` as hashes, the seconds to its first token, `first_s`, and those from there to its
    end per token, `per_token_s`.
    """
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=ANSWERS_S)

    def one(prompt: str) -> Json | None:
        start, text, times, counted = time.perf_counter(), "", list[float](), 0
        with suppress(openai.OpenAIError):
            for part in client.completions.create(
                model=model, prompt=prompt, max_tokens=tokens, temperature=0, stream=True,
                stream_options={"include_usage": True},
            ):  # fmt: skip
                counted = counted if part.usage is None else part.usage.completion_tokens
                if part.choices and part.choices[0].text:
                    text += part.choices[0].text
                    times.append(time.perf_counter() - start)
        if not times or not counted:  # the stream ended before its text or its count
            return None
        hashes = {name: hashlib.sha256(each.encode()).hexdigest()[:16] for name, each in
                  (("prompt", prompt), ("text", text))}  # fmt: skip
        return {**hashes, "tokens": counted, "first_s": times[0],
                "per_token_s": (times[-1] - times[0]) / max(1, counted - 1)}  # fmt: skip

    with ThreadPoolExecutor(clients) as pool, client:
        start = time.perf_counter()
        answers = [answer for answer in pool.map(one, asked) if answer is not None]
        return answers, time.perf_counter() - start


def counts(address: str, name: str, side: Side) -> list[float]:
    """Return a server's expert hits and misses since its start; zeros for resident experts.

    Raises:
        ExpertcastError: its page counts no experts, so nothing is offloaded.
    """
    if side.metrics is None:
        return [0.0, 0.0]
    with urllib.request.urlopen(address + side.metrics, timeout=30) as page:
        lines = page.read().decode().splitlines()
    found = [
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"expertcast_expert_{what}_total"))
        for what in ("hits", "misses")
    ]
    if not sum(found):
        raise ExpertcastError(f"{name}: {side.metrics} counts no experts, so nothing is offloaded")
    return found


def measure(name: str, side: Side, args: argparse.Namespace, model: str, log: Path) -> Iterator[Json]:
    """Run a server under every load; yield one run per load.

    Raises:
        ExpertcastError: the server does not answer, or offloads nothing.
    """
    documents = [document.text for document in load_documents(REFERENCE)]
    prompts = [" ".join(text.split()[:PROMPT_WORDS]) for text in documents[:: len(documents) // PROMPTS]][:PROMPTS]
    with running(name, side, args.threads, log) as address:
        ask(address, model, prompts[:_WARMING], 4, 1)
        before = counts(address, name, side)
        for clients in args.clients:
            asked = [prompts[number % PROMPTS] for number in range(max(clients, args.requests))]
            answers, seconds = ask(address, model, asked, args.new_tokens, clients)
            if not answers:
                raise ExpertcastError(f"{name} answered none of {clients} clients: {log.read_text()[-500:]}")
            after = counts(address, name, side)
            hits, misses = (new - old for new, old in zip(after, before, strict=True))
            before = after
            yield {"side": name, "clients": clients, "requests_per_s": len(answers) / seconds, "hits": hits,
                   "misses": misses, "lost": len(asked) - len(answers), "answers": answers}  # fmt: skip


def rows(runs: Sequence[Json]) -> list[Json]:
    """Return one row per side and load: figures of all its answers, and requests per second over those of other sides
    of the same round."""
    found = []
    runs = sorted(runs, key=lambda run: (run["side"].partition(": ")[0], KINDS.index(run["side"].partition(": ")[2])))
    speed = {(run["side"], run["clients"], run["round"]): run["requests_per_s"] for run in runs}
    for side, clients in dict.fromkeys(key[:2] for key in speed):
        own = [run for run in runs if (run["side"], run["clients"]) == (side, clients)]
        server, _, kind = side.rpartition(": ")
        right = {(answer["prompt"], answer["text"]) for run in runs if run["side"] == f"{server}: {RESIDENT}"
                 for answer in run["answers"]}  # fmt: skip
        answers = [answer for run in own for answer in run["answers"]]
        hits, misses = (sum(run[name] for run in own) for name in ("hits", "misses"))
        row: Json = {
            "side": side, "clients": clients, "answers": len(answers), "lost": sum(run["lost"] for run in own),
            "same": sum((answer["prompt"], answer["text"]) in right for answer in answers),
            "requests_per_s": spread(run["requests_per_s"] for run in own),
            "hit_rate": hits / (hits + misses) if hits + misses else None,
        }  # fmt: skip
        for name in ("first_s", "per_token_s"):
            each = sorted(answer[name] for answer in answers)
            row |= {name: statistics.median(each), f"{name}_p95": each[int(0.95 * (len(each) - 1))]}
        for name, other, fits in (
            ("resident", f"{server}: {RESIDENT}", kind != RESIDENT),
            ("on_demand", f"{server}: {ON_DEMAND}", kind == EXACT),
        ):
            both = [run for run in own if fits and (other, clients, run["round"]) in speed]
            row[name] = spread(run["requests_per_s"] / speed[other, clients, run["round"]] for run in both)
        found.append(row)
    return found


def page(found: Sequence[Json]) -> str:
    """Return the table."""
    lines = [
        [row["side"], str(row["clients"]), shown(row["requests_per_s"], digits=2),
         *(f"{1e3 * row[name]:.0f}" for name in ("first_s", "first_s_p95", "per_token_s", "per_token_s_p95")),
         "" if row["hit_rate"] is None else f"{row['hit_rate']:.2f}", f"{row['same']} of {row['answers']}",
         str(row["lost"]), *(shown(row[name], digits=2) for name in ("resident", "on_demand"))]
        for row in found
    ]  # fmt: skip
    head = ["server", "clients", "requests/s", "ms to first token", "p95", "ms per token", "p95", "hits", "same texts",
            "lost", "of resident", "of on demand"]  # fmt: skip
    return markdown(head, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the result lacks, and print the table."""
    parser = _parser()
    if parser.parse_args(arguments).small:
        parser.set_defaults(**SMALL)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as scratch:
        model, traces, predictor = (str(Path(scratch) / name) for name in ("model", "traces", "checkpoint"))
        if args.vllm_python is not None and shutil.which(args.vllm_python) is None:
            raise ExpertcastError(f"--vllm-python {args.vllm_python} does not exist: use another interpreter")
        every = sides(args, model, predictor)
        servers = {name.rpartition(":")[0] for name in every if any(word in name for word in args.sides)}
        if not servers:
            raise ExpertcastError(f"--sides {args.sides} selects none of {', '.join(every)}")
        file = ResultFile(args, {name: getattr(args, name) for name in SETTINGS})
        runs: list[Json] = file.values["runs"]
        done = {(run["side"], run["round"]) for run in runs}
        names = [name for name in every if name.rpartition(":")[0] in servers]
        due = [(n, name) for n in range(args.rounds) for name in names[:: -1 if n % 2 else 1] if (name, n) not in done]
        if due:
            say(f"the model, and a predictor fitted on {args.train_tokens} tokens")
            load_model(REFERENCE, dtype="fp32").save_pretrained(model)
            load_tokenizer(REFERENCE).save_pretrained(model)
            collect = ["collect", model, "--dtype", "fp32", "--data", REFERENCE, "--early-rank", "none"]
            for words in ([*collect, "--tokens", str(args.train_tokens), "--out", traces],
                          ["train", traces, "--predictor", "linear", "--out", predictor]):  # fmt: skip
                if command_line(words):
                    return 2
        for number, name in due:
            say(f"round {number + 1} of {args.rounds}: {name}")
            found = list(measure(name, every[name], args, model, Path(scratch) / "log"))
            runs += [{"round": number, **run} for run in found]
            file.values["rows"] = rows(runs)
            file.write()
        servers = ", ".join(dict.fromkeys(run["side"].partition(":")[0] for run in runs))
        file.publish(f"Requests, {servers}", page(rows(runs)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = result_parser("serving", __doc__)
    parser.add_argument("--vllm-python", metavar="PYTHON", help="interpreter with vLLM and the plug-in")
    parser.add_argument("--sides", nargs="*", default=[""], metavar="WORD", help="only servers with one of these words")
    parser.add_argument("--clients", nargs="+", type=positive, default=[1, 4, 16], help="(default: 1 4 16)")
    for name, default, help in (
        ("requests", 16, "requests per load"), ("new-tokens", 24, "tokens per request"),
        ("rounds", 2, "rounds through all servers"), ("slots", 192, "slots for 768 experts"),
        ("threads", 2, "threads per server"), ("train-tokens", 60_000, "tokens to train the predictor"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"{help} (default: %(default)s)")
    parser.add_argument("--bandwidth", type=positive_number, default=1.2e8, help="bytes/s (default: %(default)g)")
    parser.add_argument("--small", action="store_true", help="three servers, few tokens, one round: a minute")
    return parser
