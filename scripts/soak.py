"""Run random deployments in exact mode, and compare every result with that of the resident model.

    python scripts/soak.py --requests 1000000 --seed 0 --json soak.json

A case is a model (of a family of the tests, or the bundled one; bf16 or fp32), options of an offload, and a few
computations: forward passes, forward passes over a cache, and generations, greedy or sampled, in batches with left
padding, with drafts or without (in fp32: in bf16 a verification of several tokens rounds differently at ties). The
resident model computes them first. The offloaded model's logits must have the same bits (in fp32 in chunks: be
close), and drafted sequences the same tokens. Outcomes of a case:

    right       equal to the resident model
    wrong       other bits or tokens, or a model that was not restored
    crashed     an exception, or a signal
    hung        no end within `--seconds`

Refused options are counted by their error message and drawn again. The run ends after enough expert requests. A case
depends only on the seed and its number: `--only N` runs case N of a seed again. The exit status is 1 if any case was
not right.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
import fault_trials  # before torch: it sets the environment
import torch
from fault_trials import HUNG, RIGHT, Row, conclude, parser_of
from tests.families.models import CONFIGS, tiny_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from expertcast import load_offloaded, offload
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import bundled_ids, load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, names, predictor_class
from expertcast.runtime.config import LINKS
from expertcast.runtime.drafts.names import AUTO, NONE, draft_names
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.policies import EVICTION, MISS, PRE_EVICTION, PREFETCH, PRESETS, ROUTING, Policies
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.training.fit import fit
from expertcast.training.scoring import FitOptions

REFERENCE = "reference"
MODELS = (*CONFIGS, REFERENCE)
_OPTIONS = {
    "top_k": ["overfetch=1.5", "overfetch=3.0"], "percentile": ["percentile=50.0"],
    "next_use": ["horizon=2"], "importance": ["alpha=0.0", "alpha=1.0"],
    "gap": ["tau=0.2,r_max=4"], "substitute": ["tolerance=1.0"], "drop": ["fetched=1"],
    "cache_aware": ["strength=1.0"],
}  # fmt: skip
"""Options of policies and drafts, drawn beside the defaults."""
_ESTIMATOR = {"width": 16, "steps": 8, "step_tokens": 64}
_PREDICTORS = {
    "estimator": _ESTIMATOR,
    "hybrid": {"candidates": ["linear", "estimator"], "member_configs": {"estimator": _ESTIMATOR}},
}  # fmt: skip
_TRACE_TOKENS = 1500
DRAFTS = [name for name in draft_names() if name != NONE]
FREE = ("router_input", "next_norm")
"""Predictors that need no training."""
LOSSY = Policies(prefetch="none", miss="drop")
WRONG, CRASHED = "wrong", "crashed"
_IDS = "ids.json"


@dataclass(kw_only=True)
class Text:
    """One computation of a case."""

    kind: str
    """forward, cached (forward passes over one cache) or generate."""
    start: int
    """Position of the prompts in the bundled text."""
    lengths: tuple[int, ...]
    """Lengths of the prompts, one per row."""
    new: int = 0
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling options; empty for greedy decoding."""
    ends: bool = False
    """Whether a token generated half-way is an end token."""
    draft: str = NONE
    draft_length: int | None = None


@dataclass(kw_only=True)
class Case:
    """A model, the options of its offload, and its computations."""

    model: str
    dtype: str
    kernel: str
    loaded: bool
    """Whether the model is loaded from files instead of being offloaded in memory."""
    options: dict[str, Any]
    texts: list[Text]


class Refused(Exception):  # noqa: N818
    """A combination of options that expertcast refuses."""


class World:
    """Models with their traces, predictors and stores, created at their first use.

    Args:
        folder: folder of the models' files, and for traces, predictors and stores.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[tuple[str, str], PreTrainedModel] = {}
        self.ids: list[int] = json.loads((folder / _IDS).read_text())

    def path(self, model: str) -> str:
        return REFERENCE if model == REFERENCE else str(self.folder / model)

    def model(self, name: str, dtype: str) -> PreTrainedModel:
        """Return the resident model."""
        if (name, dtype) not in self.models:
            self.models[name, dtype] = without_end(load_model(self.path(name), dtype=dtype))
        return self.models[name, dtype]

    def checkpoint(self, name: str, dtype: str, predictor: str) -> str:
        """Return the folder of a predictor trained for the model."""
        folder = self.folder / f"{name}-{dtype}" / predictor
        if not folder.exists():
            made = self.folder / f"{name}-{dtype}-traces"
            traces = TraceDataset.open(made) if made.exists() else collect(
                self.model(name, dtype), load_tokenizer(REFERENCE), load_documents(REFERENCE), made,
                tokens=_TRACE_TOKENS, window=32, batch_size=8,
            )  # fmt: skip
            config = predictor_class(predictor).config_class(ahead=(1, 2), **_PREDICTORS.get(predictor, {}))
            fitted = fit(predictor, traces, config=config, options=FitOptions(progress=False))
            save_predictor(fitted.predictor, folder, view=traces.view)
        return str(folder)


def without_end(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the model's end token, so that generations end by length."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def make_models(folder: Path) -> None:
    """Write the families' models, and the bundled text's tokens, to a folder."""
    (folder / _IDS).write_text(json.dumps(bundled_ids(load_tokenizer(REFERENCE), 20_000)))
    for name in CONFIGS:
        tiny_model(name).save_pretrained(folder / name)
        load_tokenizer(REFERENCE).save_pretrained(folder / name)


def draw(choose: Random, world: World) -> Case:
    """Draw a case; expertcast refuses some of them."""
    model = choose.choice(MODELS)
    dtype = choose.choice(("bf16", "fp32"))
    kernel = choose.choice(("grouped_mm", "grouped_mm", "batched_mm"))
    view = find_moe_layers(world.model(model, dtype))
    shape, block = view.shape, BlockLayout.of(view).block_bytes
    options = _forecasts(choose) | _transport(choose, dtype)
    pools = options.pop("pools", {})
    if pools and choose.random() < 0.9:
        options |= {"policies": {"prefetch": _named(choose, choose.choice(PREFETCH.names()))}, "cache": True}
    most = shape.layers * shape.experts
    slots = min(most, int(shape.top_k * (most / shape.top_k) ** choose.random()) + choose.randrange(2))
    chosen = options.get("policies", {})
    scope = PRESETS[chosen].policies.scope if isinstance(chosen, str) else chosen.get("scope")
    if scope == "layer" and choose.random() < 0.9:
        slots = max(slots, shape.layers * shape.top_k)
    if pools or choose.random() < 0.1:
        options["memory"] = block * (slots + sum(pools.values())) + choose.randrange(block)
    elif choose.random() < 0.95:
        options["slots"] = slots
    if pools:
        options["pools"] = ",".join(f"{state}={count * block}" for state, count in pools.items())
    drafts = dtype == "fp32" and choose.random() < 0.6
    if drafts and choose.random() < 0.3:
        options["draft"] = _named(choose, choose.choice(DRAFTS))
    texts = [_text(choose, drafts, options) for _ in range(choose.randint(1, 6))]
    loaded = choose.random() < 0.3
    return Case(model=model, dtype=dtype, kernel=kernel, loaded=loaded, options=options, texts=texts)


def _named(choose: Random, name: str) -> str:
    return f"{name}:{choose.choice(_OPTIONS[name])}" if name in _OPTIONS and choose.random() < 0.4 else name


def _forecasts(choose: Random) -> dict[str, Any]:
    """Draw options of forecasts and policies."""
    options: dict[str, Any] = {}
    if choose.random() < 0.15:
        lossless = [name for name, preset in PRESETS.items() if not preset.policies.lossy]
        options["policies"] = choose.choice(lossless)
    elif choose.random() < 0.7:
        eviction = [cls.name for cls in EVICTION.classes() if not cls.offline]
        options["policies"] = {
            "eviction": _named(choose, choose.choice(eviction)),
            "prefetch": _named(choose, choose.choice(PREFETCH.names())),
            "pre_eviction": _named(choose, choose.choices(PRE_EVICTION.names(), (3, 1))[0]),
            "miss": choose.choice([cls.name for cls in MISS.classes() if not cls.lossy]),
            "routing": choose.choice([cls.name for cls in ROUTING.classes() if not cls.lossy]),
            "scope": choose.choice(("global", "global", "layer")),
        }
    if choose.random() < 0.7:
        predictor = options["predictor"] = choose.choice(names())
        if choose.random() < 0.3 and predictor not in FREE:
            options["ahead"] = 2
        if choose.random() < 0.3:
            options["forecasts"] = "always"
    if choose.random() < 0.2:
        options["cache"] = False
    return options


def _transport(choose: Random, dtype: str) -> dict[str, Any]:
    """Draw options of store and link. Pool sizes are in experts."""
    options: dict[str, Any] = {}
    if choose.random() < 0.4:
        codec = "raw" if choose.random() < 0.3 else "bitsplit"
        codec = codec if dtype == "bf16" or choose.random() < 0.1 else "raw"
        options["store"] = "disk"
        if codec != "raw":
            options["codec"] = codec
            if choose.random() < 0.5:
                states = choose.sample(("C", "S", "E"), choose.randint(1, 3))
                options["pools"] = {state: choose.randint(1, 12) for state in states}
        if choose.random() < 0.5:
            options["store_folder"] = f"store-{options.get('codec', 'raw')}"
    links = ("auto", "disk", "paced") if "store" in options else ("auto", "instant", "emulated", "timed", "jitter")
    link = choose.choice(links) if choose.random() < 0.95 else choose.choice(LINKS)
    if link == "timed":
        options |= {"bandwidth": choose.choice((3e8, 1e9, 4e9)), "latency": choose.choice((0.0, 1e-5))}
    elif link == "paced":
        options["bandwidth"] = choose.choice((3e8, 4e9))
    elif link == "jitter":
        options["link"] = {"bandwidth": 1e9, "latency": 1e-5, "jitter": 1e-4, "seed": choose.randrange(1000)}
    elif link != "auto":
        options["link"] = link
    return options


def _text(choose: Random, drafts: bool, options: dict[str, Any]) -> Text:
    kind = "generate" if drafts else choose.choice(("forward", "cached", "generate", "generate", "generate"))
    rows, longest = choose.randint(1, 4), choose.choice((4, 12, 40))
    lengths = tuple(choose.randint(1, longest) for _ in range(rows))
    if choose.random() < 0.3:
        lengths = (max(lengths),) * rows
    text = Text(kind=kind, start=choose.randrange(19_000), lengths=lengths)
    if kind == "generate":
        text.new, text.ends = choose.randint(1, 24), choose.random() < 0.2
        if drafts and choose.random() < 0.8:
            of_offload = "draft" in options and choose.random() < 0.5
            text.draft = "config" if of_offload else _named(choose, choose.choice((*DRAFTS, "policies")))
            text.draft_length = None if text.draft == AUTO else choose.choice((None, 1, 2, 3, 5))
        if choose.random() < 0.3:  # drafts sample other tokens of the same distribution, so only top_k=1 is comparable
            text.sampling = {"top_k": 1} if text.draft != NONE else choose.choice(
                ({"temperature": 0.7}, {"top_p": 0.9, "temperature": 1.3}, {"top_k": 20})
            )  # fmt: skip
    return text


def open_offload(case: Case, world: World) -> Any:
    """Offload the case's model.

    Raises:
        ExpertcastError: the options do not fit together.
    """
    fields = dict(case.options)
    if fields.get("predictor") not in (None, *FREE):
        fields["predictor"] = world.checkpoint(case.model, case.dtype, fields["predictor"])
    if isinstance(fields.get("policies"), dict):
        fields["policies"] = Policies(**fields["policies"])
    if isinstance(fields.get("link"), dict):
        fields["link"] = EmulatedLink(**fields["link"])
    if "store_folder" in fields:
        fields["store_folder"] = world.folder / f"{case.model}-{case.dtype}-{case.loaded}-{fields['store_folder']}"
    if not case.loaded:
        return offload(world.model(case.model, case.dtype), **fields)
    # The resident model's experts are expanded; packed ones are compared with packed ones in the tests.
    options = {"dtype": case.dtype, "device": "cpu", "experts_implementation": case.kernel, "experts": "expanded"}
    offloaded = load_offloaded(world.path(case.model), **options, **fields)
    without_end(offloaded.model)
    return offloaded


def compute(model: Any, text: Text, world: World, end: int | None = None, **draft: Any) -> tuple[Tensor, list[Tensor]]:
    """Return tokens [B, S] and the logits of every forward pass.

    Args:
        model: resident or offloaded.
        text: the computation.
        world: provides the prompts.
        end: an end token.
        draft: arguments of an offload's `generate`.
    """
    longest = max(text.lengths)
    ids_BS, mask_BS = torch.zeros(2, len(text.lengths), longest, dtype=torch.long)
    for row, length in enumerate(text.lengths):
        first = text.start + row * 100
        ids_BS[row, longest - length :] = torch.tensor(world.ids[first : first + length])
        mask_BS[row, longest - length :] = 1
    torch.manual_seed(text.start)
    if text.kind == "generate":
        output = model.generate(
            input_ids=ids_BS, attention_mask=mask_BS, max_new_tokens=text.new, do_sample=bool(text.sampling),
            eos_token_id=end, return_dict_in_generate=True, output_logits=True, **text.sampling, **draft,
        )  # fmt: skip
        return output.sequences, list(output.logits)
    cuts = range(max(1, longest // 2), longest)[-5:] if text.kind == "cached" else ()
    past, logits = None, []
    for begin, stop in itertools.pairwise([0, *cuts, longest]):
        output = model(
            input_ids=ids_BS[:, begin:stop], attention_mask=mask_BS[:, :stop], past_key_values=past,
            use_cache=text.kind == "cached",
        )  # fmt: skip
        past, logits = output.past_key_values, [*logits, output.logits]
    return ids_BS, logits


def run(case: Case, world: World, counts: Counter[str]) -> str:
    """Run a case resident and offloaded; describe an error in a line.

    Raises:
        Refused: expertcast refuses the options.
    """
    resident = world.model(case.model, case.dtype)
    resident.set_experts_implementation(case.kernel)
    plain, ends = [], []
    for text in case.texts:
        found = compute(resident, text, world)
        ends.append(int(found[0][0, -(text.new // 2) - 1]) if text.ends else None)
        plain.append(compute(resident, text, world, ends[-1]) if text.ends else found)
    try:
        opened = open_offload(case, world)
    except ExpertcastError as error:
        raise Refused(str(error)) from error
    with opened as offloaded:
        for number, (text, right, end) in enumerate(zip(case.texts, plain, ends, strict=True)):
            if line := compare(offloaded, text, right, world, end):
                return f"text {number}: {line}"
        total = offloaded.stats.total
        counts["requests"] += total.requests
        counts["drafted texts"] += sum(text.draft != NONE for text in case.texts)
    if total.hits + total.misses != total.requests:
        return f"{total.hits} hits and {total.misses} misses of {total.requests} requests"
    again = plain[0] if case.loaded else compute(resident, case.texts[0], world, ends[0])
    return "" if all(map(torch.equal, again[1], plain[0][1])) else "the model was not put back as it was"


def compare(offloaded: Any, text: Text, right: tuple[Tensor, list[Tensor]], world: World, end: int | None) -> str:
    """Describe an error of a computation in a line."""
    options = {"draft": NONE} if text.kind == "generate" else {}
    if text.draft != NONE:
        objects = {"policies": LOSSY, "config": None}
        options = {"draft": objects.get(text.draft, text.draft), "draft_length": text.draft_length}
    try:
        tokens, logits = compute(offloaded, text, world, end, **options)
    except ExpertcastError as error:
        raise (error if text.draft == NONE else Refused(str(error))) from error
    if not torch.equal(tokens, right[0]):
        return "other tokens"
    total, exact = offloaded.stats.total, torch.equal
    if total.chunks > total.steps and offloaded.model.dtype == torch.float32:  # sums of fewer rows round differently
        exact = partial(torch.allclose, rtol=1e-3, atol=1e-4)
    return "" if text.draft != NONE or all(map(exact, logits, right[1])) else "other logits"


def run_case(folder: Path, seed: int, number: int) -> None:
    """Run the first case of this number that is not refused; write its text, what is wrong, and counts."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    world = World(folder)
    counts: Counter[str] = Counter()
    for attempt in itertools.count():
        case = draw(Random(f"{seed}:{number}:{attempt}"), world)
        (folder / "case").write_text(str(case))
        own = Counter[str]()
        try:
            with torch.no_grad():
                line = run(case, world, own)
        except Refused as error:
            counts["refused: " + re.sub(r"\d[\d.e+-]*", "N", str(error).replace(str(folder), ""))] += 1
            continue
        (folder / "result.json").write_text(json.dumps([line, counts + own]))
        return


def trials(args: argparse.Namespace, folder: Path, counts: Counter[str]) -> Iterator[Row]:
    """Run cases, each in a fork, until there are enough requests; add up their counts.

    The parent process runs no tensor operation: the threads that those start would be missing in a fork.
    """
    fault_trials.call(lambda: make_models(folder), folder)
    for number in itertools.count() if args.only is None else [args.only]:
        (folder / "result.json").unlink(missing_ok=True)
        work = partial(run_case, folder, args.seed, number)
        ended = fault_trials.run(fault_trials.refusing(work), folder, fault_trials.Limits(seconds=args.seconds))
        again, case = f"--seed {args.seed} --only {number}", (folder / "case").read_text()
        row = partial(Row, again=again, group=case.split("'")[1], what=case)
        if ended.status:
            yield row(outcome=HUNG if ended.hung else CRASHED, line=ended.err[-1500:])
            continue
        line, own = json.loads((folder / "result.json").read_text())
        counts.update(own)
        yield row(outcome=WRONG if line else RIGHT, line=line or f"{own['requests']} requests")
        if counts["requests"] >= args.requests:
            return


def main(argv: list[str] | None = None) -> int:
    """Run the cases; return the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000, help="expert requests (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of a case (default: %(default)s)")
    parser.add_argument("--only", type=int, metavar="N", help="case N alone")
    args = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        cases = trials(args, Path(temporary), counts)
        return conclude(cases, (RIGHT, WRONG, CRASHED, HUNG), args.json, every=True, counts=counts)


if __name__ == "__main__":
    sys.exit(main())
