"""Requests per second, time to first token and time per token of resident and offloaded servers under load.

    python -m benchmarks serving --vllm-python PYTHON

The benchmark starts one server after another over the bundled model, in --rounds rounds. 1, 4 and 16 clients of
OpenAI's library send the same prompts, decoded greedily and streamed. Sides: transformers' server with the resident
model, with experts offloaded on demand, and with exact forecasts by a linear predictor (trained here), each one request
at a time and with continuous batching; and vLLM's server likewise, if PYTHON belongs to an environment with vLLM and
the plug-in. A quarter of the experts has slots, behind an emulated link. Every second round reverses the order of sides
and loads. Each side's texts are compared with those of its resident side, and its requests per second with other sides
of the same round.

The file is written after every server; a second call resumes it. --small takes a minute.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.results import ResultFile, result_parser
from benchmarks.serving_clients import ask, figures, kept
from benchmarks.serving_sides import Running, Setting, chosen, running, sides
from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.checkpoints.provenance import provenance
from expertcast.commands.numbers import positive, positive_number
from expertcast.commands.output import say
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.plan import TextOptions
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.training.fit import fit

SETTINGS = ("clients", "requests", "new_tokens", "slots", "bandwidth", "threads", "train_tokens")
"""Settings that must be equal to resume a file."""
SMALL: Json = {"clients": [1, 2], "requests": 4, "new_tokens": 4, "rounds": 1, "train_tokens": 4000,
               "sides": ["one by one"]}  # fmt: skip
PROMPT_WORDS, PROMPTS = 24, 16
_WARMING = 2
_T = TypeVar("_T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = read_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
        Bench(args, Path(folder)).measure()
    return 0


class Bench:
    """Runs the missing measurements and writes the result file.

    Args:
        args: arguments of the command line.
        folder: folder for the model, the predictor and logs.

    Raises:
        ExpertcastError: the file to resume has other settings, or no side is selected.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        if args.vllm_python is not None and shutil.which(args.vllm_python) is None:
            raise ExpertcastError(f"--vllm-python {args.vllm_python} does not exist: use another interpreter")
        self._setting = Setting(
            model=folder / "model", predictor=str(folder / "checkpoint"), slots=args.slots, bandwidth=args.bandwidth,
            threads=args.threads, vllm=args.vllm_python,
        )  # fmt: skip
        every = sides(self._setting)
        self._sides = chosen(every, args.sides or ())
        if not self._sides:
            raise ExpertcastError(f"--sides {args.sides} selects none of {', '.join(e.name for e in every)}")
        self._file = ResultFile(args, {name: getattr(args, name) for name in SETTINGS})
        self.result = self._file.values
        self._revision = provenance()["git_revision"]

    def measure(self) -> None:
        """Measure every side under every load, --rounds times.

        Raises:
            ExpertcastError: a server does not answer.
        """
        known, rounds = {(run["side"], run["round"]) for run in self.result["runs"]}, range(self._args.rounds)
        due = [(n, side) for n in rounds for side in alternating(self._sides, n) if (side.name, n) not in known]
        if due:
            prepare(self._setting.model, Path(self._setting.predictor), self._args.train_tokens)
        for number, side in due:
            say(f"round {number + 1} of {self._args.rounds}: {side.name}")
            with running(side, self._setting, self._folder / "server.log") as server:
                measured = self._measured(server, number)
            run = {"side": side.name, "round": number, "git_revision": self._revision}
            self.result["runs"].append({**run, **measured})
            self._write()

    def _measured(self, server: Running, number: int) -> Json:
        model, asked, loads = str(self._setting.model), prompts(), []
        ask(server.address, model, asked, clients=1, requests=_WARMING, new_tokens=4)
        counts = server.counts()
        for clients in alternating(self._args.clients, number):
            load = ask(
                server.address, model, asked, clients=clients, requests=max(clients, self._args.requests),
                new_tokens=self._args.new_tokens,
            )  # fmt: skip
            if not load.answers:
                raise ExpertcastError(f"{server.side.name} answered none of {clients} clients: {server.last_lines()}")
            before, counts = counts, server.counts()
            loads.append(kept(load, clients, before, counts))
        return {"loads": loads}

    def _write(self) -> None:
        self.result |= figures(self.result)
        self._file.write()


def prepare(model: Path, checkpoint: Path, tokens: int) -> None:
    """Write the bundled model to files and train a linear predictor, whose inputs both servers provide.

    Args:
        model: folder for model and tokenizer.
        checkpoint: folder for the predictor.
        tokens: training tokens.
    """
    say(f"the model, and a predictor fitted on {tokens} tokens")
    tokenizer = load_tokenizer(REFERENCE)
    load_model(REFERENCE, dtype="fp32").save_pretrained(model)
    tokenizer.save_pretrained(model)
    loaded = load_model(str(model), dtype="fp32")
    options = TextOptions(tokens=tokens, early_rank=None)
    traces = collect(loaded, tokenizer, load_documents(REFERENCE), checkpoint.parent / "traces", options)
    save_predictor(fit("linear", traces).predictor, checkpoint, view=find_moe_layers(loaded))


def prompts() -> list[str]:
    """Return the beginnings of bundled documents."""
    documents = [document.text for document in load_documents(REFERENCE)]
    return [" ".join(text.split()[:PROMPT_WORDS]) for text in documents[:: len(documents) // PROMPTS]][:PROMPTS]


def alternating(each: Sequence[_T], number: int) -> list[_T]:
    """Return the items in order, or reversed in every second round."""
    return list(each if number % 2 == 0 else each[::-1])


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; --small changes the defaults."""
    return _parser(small=_parser().parse_args(arguments).small).parse_args(arguments)


def _parser(*, small: bool = False) -> argparse.ArgumentParser:
    parser = result_parser("serving", __doc__)
    parser.add_argument(
        "--vllm-python", metavar="PYTHON", help="interpreter of an environment with vLLM and the plug-in"
    )
    parser.add_argument("--sides", nargs="*", metavar="WORDS", help="only sides whose name contains one of these")
    parser.add_argument(
        "--clients", nargs="+", type=positive, default=[1, 4, 16], help="simultaneous clients (default: 1 4 16)"
    )
    parser.add_argument("--requests", type=positive, default=16, help="requests per load (default: %(default)s)")
    parser.add_argument("--new-tokens", type=positive, default=24, help="tokens per request (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=2, help="rounds through all servers (default: %(default)s)")
    parser.add_argument("--slots", type=positive, default=192, help="slots for 768 experts (default: %(default)s)")
    parser.add_argument(
        "--bandwidth", type=positive_number, default=1.2e8, help="bytes per second (default: %(default)g)"
    )
    parser.add_argument("--threads", type=positive, default=2, help="threads per server (default: %(default)s)")
    parser.add_argument(
        "--train-tokens", type=positive, default=60_000, help="tokens to train the predictor (default: %(default)s)"
    )
    parser.add_argument("--small", action="store_true", help="three servers, few tokens, one round: a minute")
    parser.set_defaults(**(SMALL if small else {}))
    return parser
