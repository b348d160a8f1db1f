"""The command line: `expertcast COMMAND ...`. Parsing and output only; the work is in other modules.

Exit status 0, or 2 with one line on standard error that names what was wrong and what to do.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from expertcast import __version__

SHAPES = (
    "qwen3-30b-a3b, gpt-oss-20b, gpt-oss-120b, glm-4.7-flash, olmoe-1b-7b, mixtral-8x7b, qwen3-235b-a22b, reference"
)
DATA_HELP = "hub data set id, or local .parquet/.jsonl/.txt files with a column `text`, or `reference` (bundled text)"
MODEL_HELP = "local folder or hub id of a transformers model, or `reference` (the bundled model)"


BENCH_MODES = ("on_demand", "exact", "speculate", "hybrid")
PRACTICAL_BANDWIDTH = {"pcie3": 12e9, "pcie4": 25e9, "pcie5": 50e9}
"""Bytes per second of large page-locked copies over 16 lanes, some 80% of what the standards name."""
BANDWIDTH_HELP = "emulate a link of this bandwidth: a number, or pcie3, pcie4, pcie5 (12, 25, 50 GB/s)"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, not argparse's two."""
        self.exit(2, f"expertcast: {message}; see `{self.prog} --help`\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; a test freezes it."""
    parser = _Parser(prog="expertcast", description=__import__("expertcast").__doc__)
    parser.add_argument("--version", action="version", version=f"expertcast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, text, add in (
        ("demo", "everything below on the bundled reference model; writes demo.json", _add_demo),
        ("collect", "run a model over text and store router inputs, logits and default vectors", _add_collect),
        ("train", "fit a predictor on traces, or online on a running model", _add_train),
        ("eval", "score predictors on traces: recall@k per layer and the rest", _add_eval),
        ("generate", "generate with experts offloaded and forecast", _add_generate),
        ("bench", "time per token of offloaded decoding in every mode, for a model or a shape", _add_bench),
        ("advise", "measure link and layers, and say whether and how to prefetch", _add_advise),
        (
            "simulate",
            "what is kept, loaded and dropped: policies over recorded routing, in virtual time",
            _add_simulate,
        ),
        ("inspect", "say what a model, traces folder or checkpoint is", _add_inspect),
    ):
        command = commands.add_parser(name, help=text, description=text)
        add(command)
        command.add_argument("--json", type=Path, metavar="PATH", help="write the results there as well")
        command.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (default: torch's own)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = build_parser().parse_args(argv)
    _quiet_libraries()
    from expertcast.predictors.errors import ExpertcastError  # after parsing: --help must not wait for torch

    try:
        result, text = _run(args)
        if os.environ.get("RANK", "0") != "0":  # under torchrun one rank speaks for all
            return 0
        if args.json is not None:
            from expertcast.commands import write_json

            write_json(args.json, result)
    except ExpertcastError as error:
        print(f"expertcast: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("expertcast: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    print(text)
    return 0


def _run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from expertcast import advise_command, bench_commands, commands, demo, simulate_commands

    def options_of(cls: Any, args: argparse.Namespace) -> Any:
        import dataclasses

        given = vars(args) | {"device": commands.device_of(args)}
        return cls(**{field.name: given[field.name] for field in dataclasses.fields(cls) if field.name in given})

    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    functions: dict[str, Any] = {
        "demo": demo.run,
        "collect": commands.collect,
        "train": commands.train,
        "eval": commands.evaluate,
        "generate": commands.generate,
        "bench": lambda args: bench_commands.bench(options_of(bench_commands.BenchOptions, args)),
        "advise": lambda args: advise_command.advise(options_of(advise_command.AdviseOptions, args)),
        "simulate": simulate_commands.simulate,
        "inspect": commands.inspect,
    }
    outcome: tuple[dict[str, Any], str] = functions[args.command](args)
    return outcome


def _quiet_libraries() -> None:
    """Keep other libraries' progress and notices out of the output, unless the user asked for them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_MININTERVAL", "0.5")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return value


def _not_negative(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _positive_number(text)


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _bandwidth(text: str) -> float:
    """Bytes per second: a number, or the name of a bus of 16 lanes with what it reaches in practice."""
    try:
        value = PRACTICAL_BANDWIDTH[text] if text in PRACTICAL_BANDWIDTH else float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        names = ", ".join(PRACTICAL_BANDWIDTH)
        raise argparse.ArgumentTypeError(f"{text!r} is no bandwidth: give bytes per second such as 4e9, or {names}")
    return value


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=_positive, default=120_000, help="tokens to collect (default: %(default)s)")
    parser.add_argument("--steps", type=_positive, default=300, help="steps of the estimator (default: %(default)s)")


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="auto", choices=("auto", "bf16", "fp16", "fp32"), help="dtype to load in")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: cuda when there is one)")


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--window", type=_positive, default=256, help="tokens per window (default: %(default)s)")
    parser.add_argument("--batch-size", type=_positive, default=8, help="windows per forward (default: %(default)s)")


def _add_collect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--data", required=True, nargs="+", metavar="D", help=DATA_HELP)
    parser.add_argument("--tokens", required=True, type=_positive, metavar="N", help="tokens to collect")
    parser.add_argument("--out", required=True, type=Path, metavar="TRACES", help="folder to write; resumed if begun")
    _add_text_options(parser)
    _add_model_options(parser)


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="TRACES|MODEL", help="traces folder, or a model to train on online (--data)")
    parser.add_argument("--predictor", required=True, metavar="NAME", help="registry name of the predictor")
    parser.add_argument("--out", required=True, type=Path, metavar="CKPT", help="checkpoint folder to write")
    parser.add_argument("--ahead", type=_positive, nargs="+", default=[1], help="layers ahead (default: 1)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="fields of the predictor's config")
    parser.add_argument("--tokens", type=_positive, metavar="N", help="train on at most so many tokens")
    parser.add_argument("--data", nargs="+", metavar="D", help=DATA_HELP + "; with MODEL only")
    parser.add_argument("--log", type=Path, metavar="DIR", help="TensorBoard logs")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    _add_text_options(parser)
    _add_model_options(parser)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, metavar="TRACES", help="traces folder")
    parser.add_argument(
        "--predictor",
        required=True,
        nargs="+",
        metavar="NAME|CKPT",
        help="names are fitted on the train split and scored on the test split; checkpoints are scored on all",
    )
    parser.add_argument("--split", choices=("train", "validation", "test", "all"), help="documents that score")
    parser.add_argument("--ahead", type=_positive, default=1, help="layers ahead (default: %(default)s)")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write one HTML page, PNGs and JSON")
    parser.add_argument("--curve", type=_positive, nargs="+", metavar="N", help="learning curve at these token counts")
    parser.add_argument("--model", metavar="MODEL", help="also measure what speculative execution costs this model")
    parser.add_argument("--data", nargs="+", metavar="D", help="text for --model; " + DATA_HELP)
    parser.add_argument(
        "--quality-tokens", type=_positive, default=8192, help="tokens for --model (default: %(default)s)"
    )
    _add_model_options(parser)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--prompt", required=True, metavar="P", help="text to continue")
    parser.add_argument("--predictor", metavar="NAME|CKPT", help="without one, experts are loaded on demand")
    parser.add_argument(
        "--mode", default="exact", choices=("exact", "speculate", "hybrid"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--slots", type=_positive, metavar="S", help="experts that fit on the device (default: a quarter)"
    )
    parser.add_argument("--memory", metavar="BYTES", help="device memory for experts instead of --slots, such as 2GB")
    parser.add_argument(
        "--policies",
        nargs="+",
        metavar="KIND=P",
        help="eviction, prefetch, miss, routing, pre_eviction or scope, such as eviction=lfu; or a preset's name",
    )
    parser.add_argument(
        "--next-token", metavar="CKPT", help="next_token checkpoint, for the eviction policy `forecast`"
    )
    parser.add_argument(
        "--store-folder", metavar="DIR", help="keep the experts packed in this folder, for models larger than memory"
    )
    parser.add_argument("--bandwidth", type=_bandwidth, metavar="BYTES/S", help=BANDWIDTH_HELP)
    parser.add_argument("--new-tokens", type=_positive, default=64, metavar="N", help="(default: %(default)s)")
    _add_model_options(parser)


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    """What `bench` and `advise` both need to run something offloaded."""
    parser.add_argument(
        "target", metavar="MODEL|SHAPE", help=MODEL_HELP + "; or a shape with random weights: " + SHAPES
    )
    parser.add_argument("--layers", type=_positive, metavar="N", help="cut a shape to N MoE layers")
    parser.add_argument("--slots", type=_positive, metavar="S", help="experts that fit on the device")
    parser.add_argument("--memory", metavar="BYTES", help="device memory for experts instead of --slots, such as 2GB")
    parser.add_argument("--bandwidth", type=_bandwidth, metavar="BYTES/S", help=BANDWIDTH_HELP)
    parser.add_argument(
        "--copy-over-compute",
        type=_positive_number,
        metavar="R",
        help="emulate a link on which K copies take R layers' time (default: 5)",
    )
    parser.add_argument(
        "--latency", type=_not_negative, default=0.0, metavar="S", help="of the emulated link, per copy"
    )
    parser.add_argument(
        "--link",
        default="auto",
        metavar="NAME",
        help="instant, emulated, cuda or kernel (default: emulated, or cuda on a GPU)",
    )
    parser.add_argument("--predictor", metavar="NAME|CKPT", help="for a model's own routing (default: next_norm)")
    process = parser.add_argument_group(
        "routing", "random weights route at random: a process routes a shape instead, and a model where it is asked for"
    )
    process.add_argument("--persistence", type=float, metavar="P", help="chance that an expert stays (default: 0.3)")
    process.add_argument("--skew", type=float, metavar="Z", help="Zipf exponent of experts' popularity (default: 0.8)")
    process.add_argument("--accuracy", type=float, metavar="A", help="chance of a right forecast (default: 0.9)")
    process.add_argument("--replay", type=Path, metavar="TRACES", help="route as recorded in a traces folder")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    _add_model_options(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_target_options(parser)
    parser.add_argument("--mode", nargs="+", default=list(BENCH_MODES), choices=BENCH_MODES, help="(default: all)")
    parser.add_argument("--cache", default="both", choices=("both", "with", "without"), help="(default: %(default)s)")
    parser.add_argument("--ahead", type=_positive, default=1, metavar="N", help="layers ahead (default: %(default)s)")
    parser.add_argument(
        "--prompt-tokens", type=_positive, nargs="+", default=[1024], metavar="N", help="(default: 1024)"
    )
    parser.add_argument("--new-tokens", type=_positive, default=32, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--repetitions", type=_positive, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--no-advice", action="store_true", help="do not check what `advise` would have expected")
    parser.add_argument(
        "--peer", action="store_true", help="the first prompt under accelerate's own CPU offload as well"
    )
    parser.add_argument(
        "--minutes", type=_positive_number, default=math.inf, metavar="M", help="begin no further prompt after so long"
    )
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="Chrome trace of the runs, and a PNG beside it")


def _add_advise(parser: argparse.ArgumentParser) -> None:
    _add_target_options(parser)
    parser.set_defaults(ahead=1)
    parser.add_argument("--prompt-tokens", type=_positive, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--new-tokens", type=_positive, default=32, metavar="N", help="(default: %(default)s)")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, metavar="TRACES", help="traces folder")
    parser.add_argument(
        "--sweep", action="store_true", help="every eviction policy at 1, 5, 10, 25 and 45%%, with Belady's bounds"
    )
    _add_policy_options(parser)
    parser.add_argument(
        "--predictor",
        nargs="+",
        metavar="NAME|CKPT",
        help="names are fitted on the train split; their forecasts prefetch",
    )
    parser.add_argument("--ahead", type=_positive, default=1, metavar="N", help="layers ahead (default: %(default)s)")
    parser.add_argument(
        "--next-token", metavar="CKPT", help="next_token checkpoint, for the eviction policy `forecast`"
    )
    parser.add_argument("--slots", type=_positive, nargs="+", metavar="S", help="experts that fit on the device")
    parser.add_argument(
        "--capacity", type=_positive_number, nargs="+", metavar="C", help="the same as shares of all (default: 0.25)"
    )
    parser.add_argument(
        "--bandwidth",
        type=_bandwidth,
        nargs="+",
        metavar="BYTES/S",
        help="of the link: a number, or pcie3, pcie4, pcie5",
    )
    parser.add_argument("--latency", type=_not_negative, default=0.0, metavar="S", help="of the link, per copy")
    parser.add_argument(
        "--write-back",
        type=_not_negative,
        default=0.0,
        metavar="F",
        help="share of a copy that an eviction takes on the link, for hosts that keep no weights (default: 0)",
    )
    parser.add_argument(
        "--layer-time",
        type=_positive_number,
        nargs="+",
        metavar="S",
        help="compute of all layers, or of each, in seconds",
    )
    parser.add_argument(
        "--split", default="test", choices=("train", "validation", "test", "all"), help="documents to run"
    )
    parser.add_argument(
        "--tokens", type=_positive, default=10_000, metavar="N", help="of the split (default: %(default)s)"
    )
    parser.add_argument(
        "--prefill", type=_positive, default=64, metavar="N", help="of each document (default: %(default)s)"
    )
    parser.add_argument("--batch", type=_positive, default=1, metavar="B", help="documents decoded together")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="measure what lossy policies cost this model (default: the bundled one, if the traces are its)",
    )
    parser.add_argument("--no-quality", action="store_true", help="do not measure what lossy policies cost")
    parser.add_argument("--data", nargs="+", metavar="D", help="text for --model; " + DATA_HELP)
    parser.add_argument(
        "--quality-tokens", type=_positive, default=512, help="tokens for --model (default: %(default)s)"
    )
    parser.add_argument(
        "--processes", type=_positive, metavar="N", help="simulations at a time (default: one per core)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the results, a table and PNGs there")
    _add_model_options(parser)


def _add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Which experts are kept, loaded and dropped; several of a kind are all combined."""
    policies = parser.add_argument_group(
        "policies", "NAME, or NAME:OPTION=VALUE,...; several of a kind are all combined"
    )
    for flag, default, text in (
        ("--policy", None, "which expert gives up its slot (default: lru)"),
        ("--prefetch", None, "which of a forecast's experts are asked for (default: top_k with --predictor)"),
        ("--miss", ["fetch"], "what becomes of missing experts (default: fetch)"),
        ("--routing", ["standard"], "which experts a layer executes (default: standard)"),
        ("--pre-eviction", ["none"], "slots given up before the routing is known (default: none)"),
        ("--scope", ["global"], "global, or layer: each has an equal share of the slots (default: global)"),
        ("--preset", None, "published systems' policies, by name"),
    ):
        policies.add_argument(flag, nargs="+", default=default, metavar="P", help=text)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL|TRACES|CKPT", help="what to look at")


if __name__ == "__main__":
    raise SystemExit(main())
