"""`expertcast generate`: generate with experts offloaded and forecast."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from expertcast.commands.options import add_options, bandwidth, positive
from expertcast.commands.output import Outcome, table
from expertcast.commands.shared import BANDWIDTH_HELP, MODEL_HELP, ModelOptions, device_of
from expertcast.data.models import load_tokenizer
from expertcast.predictors import ExpertcastError
from expertcast.runtime.loading import load_offloaded
from expertcast.runtime.policies import Policies


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--prompt", required=True, metavar="P", help="text to continue")
    parser.add_argument("--predictor", metavar="NAME|CKPT", help="without one, experts are loaded on demand")
    parser.add_argument(
        "--mode", default="exact", choices=("exact", "speculate", "hybrid"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--slots", type=positive, metavar="S", help="experts that fit on the device (default: a quarter)"
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
    parser.add_argument("--bandwidth", type=bandwidth, metavar="BYTES/S", help=BANDWIDTH_HELP)
    parser.add_argument("--new-tokens", type=positive, default=64, metavar="N", help="(default: %(default)s)")
    add_options(parser, ModelOptions)


def run(args: argparse.Namespace) -> Outcome:
    """`expertcast generate`."""
    tokenizer = load_tokenizer(args.model)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(device_of(args.device))
    if not inputs["input_ids"].shape[1]:
        raise ExpertcastError("--prompt holds no token: give some text")
    with load_offloaded(
        args.model,
        device=device_of(args.device),
        dtype=args.dtype,
        store="memory" if args.store_folder is None else "disk",
        store_folder=args.store_folder,
        predictor=args.predictor,
        policies=_policies(args.policies),
        next_token=args.next_token,
        mode=args.mode,
        slots=args.slots,
        memory=args.memory,
        bandwidth=args.bandwidth,
    ) as offloaded:
        output = offloaded.generate(**inputs, max_new_tokens=args.new_tokens, do_sample=False)
        stats = offloaded.stats.as_dict()
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    totals = {key: value for key, value in stats.items() if isinstance(value, (int, float))}
    return {"text": text, "tokens": output[0].tolist(), "stats": stats}, f"{text}\n\n{table(totals)}"


def _policies(words: Sequence[str] | None) -> Policies | str | None:
    """`kind=policy` for each kind that is not the default, or a preset's name.

    Raises:
        ExpertcastError: an unknown kind or policy.
    """
    if not words:
        return None
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    kinds = list(Policies().as_dict())
    given = dict(word.partition("=")[::2] for word in words)
    for kind in given:
        if kind not in kinds:
            raise ExpertcastError(f"--policies {kind}: give a preset alone, or KIND=POLICY of {', '.join(kinds)}")
    return Policies(**given)
