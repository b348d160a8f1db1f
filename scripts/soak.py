"""Run random deployments in exact mode, and compare every result with that of the resident model.

    python scripts/soak.py --requests 1000000 --seed 0 --json soak.json

A case is a model (three families, two of them also as quantised checkpoints, and the bundled one; bf16 or fp32),
options of an offload, and a few computations: forward passes, forward passes over a cache, and generations, greedy or
sampled, in batches with left padding, with drafts or without. The resident model computes them first. The offloaded
model's logits must have the same bits, and drafted sequences the same tokens. Outcomes of a case:

    right       equal to the resident model
    wrong       other bits or tokens, or a model that was not restored
    crashed     an exception, or a signal
    hung        no end within `--seconds`

Refused options are counted by their error message and drawn again. Every token of a drafted sequence must be the
resident model's most probable one, computed in forward passes of the same shapes as the verifications, over a separate
cache. In fp32 the sequence also equals the plain one. In bf16, shapes round differently, so it may differ from the
plain one at a tie (the plain step's two largest logits are equal) or a near tie; both are counted. The run ends after
enough expert requests. A case depends only on the seed and its number: `--only N` runs case N of a seed again. The exit
status is 1 if any case was not right.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads do not help tiny operations
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    GptOssConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from expertcast import load_offloaded, offload
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.checkpoints.provenance import provenance
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

REFERENCE, FP8, MXFP4 = "reference", "qwen3_moe-fp8", "gpt_oss-mxfp4"
_COMMON: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": None,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **_COMMON, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "gpt_oss": GptOssConfig(
        **_COMMON, num_local_experts=8, num_experts_per_tok=2, intermediate_size=64, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "deepseek_v3": DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        n_shared_experts=1, first_k_dense_replace=1, moe_intermediate_size=16, intermediate_size=48,
    ),
}  # fmt: skip
_MODELS = {"qwen3_moe": 4, "deepseek_v3": 4, "gpt_oss": 4, FP8: 1, MXFP4: 1, REFERENCE: 3}
"""Relative frequency of each model."""
_OPTIONS = {
    "top_k": ["overfetch=1.5", "overfetch=3.0"], "percentile": ["over=token", "over=mass", "percentile=50.0"],
    "next_use": ["horizon=2"], "marking": ["seed=7"],
    "fld": ["distance=absolute"], "least_stale": ["order=layer"], "importance": ["alpha=0.0", "alpha=1.0"],
    "gap": ["literal=true", "tau=0.2,r_max=4"], "substitute": ["tolerance=1.0"], "drop": ["fetched=1"],
    "cache_aware": ["strength=1.0"], "bitsplit": ["shards=1", "shards=3"],
}  # fmt: skip
"""Options of policies, drafts and codecs, drawn beside the defaults."""
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
TOTALS = ("requests", "cases", "right", "wrong", "crashed", "hung", "drafted texts", "ties", "near ties")


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
        folder: folder of the models' files.
        own: this process's folder for traces, predictors and stores.
    """

    def __init__(self, folder: Path, own: Path) -> None:
        self._folder, self.own = folder, own
        self.models: dict[tuple[str, str], PreTrainedModel] = {}
        self._traces: dict[tuple[str, str], TraceDataset] = {}
        self.ids = bundled_ids(load_tokenizer(REFERENCE), 20_000)

    def path(self, model: str) -> str:
        return REFERENCE if model == REFERENCE else str(self._folder / model)

    def model(self, name: str, dtype: str) -> PreTrainedModel:
        """Return the resident model."""
        if (name, dtype) not in self.models:
            self.models[name, dtype] = without_end(load_model(self.path(name), dtype=dtype))
        return self.models[name, dtype]

    def checkpoint(self, name: str, dtype: str, predictor: str) -> str:
        """Return the folder of a predictor trained for the model."""
        folder = self.own / f"{name}-{dtype}" / predictor
        if not folder.exists():
            if (name, dtype) not in self._traces:
                self._traces[name, dtype] = collect(
                    self.model(name, dtype), load_tokenizer(REFERENCE), load_documents(REFERENCE),
                    self.own / f"{name}-{dtype}-traces", tokens=_TRACE_TOKENS, window=32, batch_size=8,
                )  # fmt: skip
            cls = predictor_class(predictor)
            config = cls.config_class(ahead=(1, 2), **_PREDICTORS.get(predictor, {}))
            traces = self._traces[name, dtype]
            fitted = fit(predictor, traces, config=config, options=FitOptions(progress=False))
            save_predictor(fitted.predictor, folder, view=traces.view)
        return str(folder)


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a random fp32 model."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "bias" in name:
            tensor.data.normal_(std=0.1)
    return without_end(model)


def without_end(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the model's end token, so that generations end by length."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def make_models(folder: Path) -> None:
    """Write the families' models, and two quantised ones, to a folder."""
    tokenizer = load_tokenizer(REFERENCE)
    for name in (*CONFIGS, FP8, MXFP4):
        random_model(CONFIGS[name.partition("-")[0]]).bfloat16().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    block = (16, 16)
    _quantise(folder / FP8, _fp8, quant_method="fp8", weight_block_size=block, activation_scheme="dynamic")
    _quantise(folder / MXFP4, _mxfp4, quant_method="mxfp4", modules_to_not_convert=["lm_head"])


def _quantise(folder: Path, convert: Any, **settings: Any) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(weights)
    for name in list(tensors):
        convert(tensors, name)
    save_file(tensors, weights, metadata={"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": settings}))


def _fp8(tensors: dict[str, Tensor], name: str) -> None:
    """Quantise a weight to fp8 with a scale per block of 16 x 16."""
    if ".mlp.experts." not in name and "_proj" not in name:
        return
    weight_RC = tensors[name].float()
    tiles = weight_RC.view(weight_RC.shape[0] // 16, 16, -1, 16)
    scales = tiles.abs().amax((1, 3)) / 448
    tensors[name] = (tiles / scales[:, None, :, None]).view_as(weight_RC).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = scales


def _mxfp4(tensors: dict[str, Tensor], name: str) -> None:
    if name.endswith(("gate_up_proj", "down_proj")):
        experts, inner, outer = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 126, (experts, outer, inner // 32), dtype=torch.uint8)


def draw(choose: Random, world: World) -> Case:
    """Draw a case; expertcast refuses some of them."""
    model = choose.choices(list(_MODELS), list(_MODELS.values()))[0]
    dtype = "bf16" if model in (FP8, MXFP4) else choose.choice(("bf16", "bf16", "fp32"))
    kernel = choose.choice(("grouped_mm", "grouped_mm", "batched_mm"))
    view = find_moe_layers(world.model(model, dtype))
    shape, block = view.shape, BlockLayout.of(view).block_bytes
    options = _forecasts(choose) | _transport(choose, model, dtype)
    pools = options.pop("pools", {})
    if pools and choose.random() < 0.9:
        options |= {"policies": {"prefetch": _named(choose, choose.choice(PREFETCH.names()))}, "cache": True}
        options.pop("overfetch", None)
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
    drafts = choose.random() < 0.35
    if drafts and choose.random() < 0.3:
        options["draft"] = _named(choose, choose.choice(DRAFTS))
    texts = [_text(choose, drafts, options) for _ in range(choose.randint(1, 6))]
    loaded = model in (FP8, MXFP4) or choose.random() < 0.3
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
    elif choose.random() < 0.3:
        options["overfetch"] = choose.choice((1.5, 2.0))
    if choose.random() < 0.7:
        predictor = options["predictor"] = choose.choice(names())
        if choose.random() < 0.3 and predictor not in FREE:
            options["ahead"] = 2
        if choose.random() < 0.3:
            options["forecasts"] = "always"
    if choose.random() < 0.2:
        options["cache"] = False
    return options


def _transport(choose: Random, model: str, dtype: str) -> dict[str, Any]:
    """Draw options of store and link. Pool sizes are in experts."""
    options: dict[str, Any] = {}
    if choose.random() < 0.4:
        codec = "raw" if choose.random() < 0.3 else "bitsplit"
        codec = codec if dtype == "bf16" or choose.random() < 0.1 else "raw"
        options["store"] = "disk"
        if codec != "raw":
            options["codec"] = _named(choose, codec)
            if choose.random() < 0.5:
                states = choose.sample(("C", "S", "E"), choose.randint(1, 3))
                options["pools"] = {state: choose.randint(1, 12) for state in states}
        if choose.random() < 0.5:
            options["store_folder"] = f"store-{options.get('codec', 'raw').replace(':', '-')}"
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
        fields["store_folder"] = world.own / f"{case.model}-{case.dtype}-{case.loaded}-{fields['store_folder']}"
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


@dataclass(kw_only=True)
class Forward:
    """One forward pass over a cache."""

    begin: int
    """Tokens in the cache before it."""
    ids_BT: Tensor
    kept: int
    """Last positions with logits; 0: all."""


@contextmanager
def recorded(model: PreTrainedModel) -> Iterator[list[Forward]]:
    """Record the model's forward passes over a cache."""
    found: list[Forward] = []

    def note(_model: object, _args: object, given: dict[str, Any]) -> None:
        if (past := given.get("past_key_values")) is not None:
            ids_BT, kept = given["input_ids"].clone(), given.get("logits_to_keep", 0)
            found.append(Forward(begin=past.get_seq_length(), ids_BT=ids_BT, kept=kept))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


def draft_error(
    model: PreTrainedModel, text: Text, forwards: list[Forward], drafted_BS: Tensor, end: int | None
) -> str:
    """Check a drafted sequence with the resident model; return the first error in a line, or an empty string.

    The resident model repeats the offload's verifications in forward passes of the same shapes over a separate cache.
    Each new token must be the most probable one.

    Args:
        model: the resident model.
        text: the computation.
        forwards: forward passes of the offload, drafts included. A pass is not a verification if a later one starts
            at or before its beginning.
        drafted_BS: the drafted sequences.
        end: an end token.
    """
    longest, past = max(text.lengths), DynamicCache(config=model.config)
    mask_BS = torch.ones(len(drafted_BS), longest + text.new, dtype=torch.long)
    for row, length in enumerate(text.lengths):
        mask_BS[row, : longest - length] = 0
    place_BS = (mask_BS.cumsum(1) - 1).clamp(min=0)
    for layer in past.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    known = [longest] * len(drafted_BS)
    for number, forward in enumerate(forwards):
        begin, stop = forward.begin, forward.begin + forward.ids_BT.shape[1]
        if any(later.begin <= begin for later in forwards[number + 1 :]):
            continue
        if held := past.get_seq_length():
            past.crop(begin - held)
        logits_BTV = model(
            input_ids=forward.ids_BT, attention_mask=mask_BS[:, :stop], position_ids=place_BS[:, begin:stop],
            past_key_values=past, use_cache=True, logits_to_keep=forward.kept,
        ).logits  # fmt: skip
        first = stop - logits_BTV.shape[1]
        for row, tokens_S in enumerate(drafted_BS):
            fed_S = torch.cat([drafted_BS[row, :begin], forward.ids_BT[row]])
            if not torch.equal(fed_S[: known[row]], tokens_S[: min(stop, known[row])]):
                return f"row {row} was fed other tokens than came out"
            while known[row] <= min(stop, drafted_BS.shape[1] - 1):
                column = known[row]
                if end is not None and column > longest and end in tokens_S[longest:column]:
                    break
                if column <= first:
                    return f"row {row} has a new token {column - longest} that no forward says"
                logits_V = logits_BTV[row, column - 1 - first]
                if logits_V[tokens_S[column]] < logits_V.max():
                    return f"row {row} has a new token {column - longest} that is not the likeliest of its forward"
                known[row] += 1
                if column < stop and fed_S[column] != tokens_S[column]:
                    break
    for row, (column, tokens_S) in enumerate(zip(known, drafted_BS, strict=True)):
        if column < len(tokens_S) and (end is None or end not in tokens_S[longest:column]):
            return f"row {row} has a new token {column - longest} that no forward says"
    return ""


def count_ties(plain: tuple[Tensor, list[Tensor]], drafted_BS: Tensor, dtype: str) -> tuple[Counter[str], str]:
    """Count the ties and near ties at which drafted sequences differ from plain ones; describe a forbidden difference
    in a line.

    Args:
        plain: tokens [B, S] and logits [B, V] of every new token, of the resident model.
        drafted_BS: the drafted sequences.
        dtype: dtype of the model.
    """
    ties: Counter[str] = Counter()
    plain_BS, logits = plain
    shared, prompt = min(plain_BS.shape[1], drafted_BS.shape[1]), plain_BS.shape[1] - len(logits)
    for row in range(len(plain_BS)):
        differs = (plain_BS[row, :shared] != drafted_BS[row, :shared]).nonzero()
        if not len(differs):
            continue
        first = int(differs[0]) - prompt
        chosen, other = (int(tokens[row, prompt + first]) for tokens in (plain_BS, drafted_BS))
        lead = float(logits[first][row, chosen].float() - logits[first][row, other].float())
        if dtype != "bf16":
            return ties, f"row {row} parts at new token {first}, where the plain model's token leads by {lead}"
        ties["near ties" if lead else "ties"] += 1
    same = plain_BS.shape == drafted_BS.shape or ties.total()
    return ties, "" if same else f"{drafted_BS.shape[1]} columns, {plain_BS.shape[1]} without a draft"


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
    drafted: list[tuple[Tensor, list[Forward]] | None] = []
    with opened as offloaded:
        for number, (text, right, end) in enumerate(zip(case.texts, plain, ends, strict=True)):
            with recorded(offloaded.model) as forwards:
                line, tokens_BS = compare(offloaded, text, right, world, end)
            if line:
                return f"text {number}: {line}"
            drafted.append(None if tokens_BS is None else (tokens_BS, forwards))
        total = offloaded.stats.total
        counts["requests"] += total.requests
        counts["steps in chunks"] += total.chunks > total.steps
    if total.hits + total.misses != total.requests:
        return f"{total.hits} hits and {total.misses} misses of {total.requests} requests"
    again = plain[0] if case.loaded else compute(resident, case.texts[0], world, ends[0])
    if not all(map(torch.equal, again[1], plain[0][1])):
        return "the model was not put back as it was"
    for number, (text, right, end, found) in enumerate(zip(case.texts, plain, ends, drafted, strict=True)):
        if found is not None:
            ties, line = count_ties(right, found[0], case.dtype)
            counts.update({"drafted texts": 1, **ties})
            if line := line or draft_error(resident, text, found[1], found[0], end):
                return f"text {number}: {line}"
    return ""


def compare(
    offloaded: Any, text: Text, right: tuple[Tensor, list[Tensor]], world: World, end: int | None
) -> tuple[str, Tensor | None]:
    """Describe an error of a computation in a line; also return the tokens if they were drafted."""
    if text.draft == NONE:
        tokens, logits = compute(offloaded, text, world, end, **({"draft": NONE} if text.kind == "generate" else {}))
        if not torch.equal(tokens, right[0]) or len(logits) != len(right[1]):
            return "other tokens", None
        return ("" if all(map(torch.equal, logits, right[1])) else "other logits"), None
    objects = {"policies": LOSSY, "config": None}
    draft = objects.get(text.draft, text.draft)
    try:
        return "", compute(offloaded, text, world, end, draft=draft, draft_length=text.draft_length)[0]
    except ExpertcastError as error:
        raise Refused(str(error)) from error


def run_case(seed: int, number: int, world: World, report: Callable[[Case], None]) -> tuple[str, str, Counter[str]]:
    """Run the first case of this number that is not refused; return outcome, description and counts."""
    counts: Counter[str] = Counter()
    for attempt in itertools.count():
        case = draw(Random(f"{seed}:{number}:{attempt}"), world)
        report(case)
        own = Counter[str]()
        try:
            line = run(case, world, own)
        except Refused as error:
            counts["refused: " + re.sub(r"\d[\d.e+-]*", "N", str(error).replace(str(world.own), ""))] += 1
            continue
        except Exception as error:
            traceback.print_exc()
            at, lines = traceback.extract_tb(error.__traceback__)[-1], [*str(error).splitlines(), ""]
            world.models.pop((case.model, case.dtype), None)  # the model may still be offloaded
            return "crashed", f"{type(error).__name__}: {lines[0]} ({Path(at.filename).name}:{at.lineno})", counts
        return ("wrong" if line else "right"), line, counts + own
    raise AssertionError


def work(connection: Connection, folder: Path, own: Path, args: argparse.Namespace, first: int) -> None:
    """Run cases one after another until the process is ended."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    own.mkdir()
    with torch.no_grad():
        world = World(folder, own)
        for number in itertools.count(first):
            faulthandler.dump_traceback_later(args.seconds, exit=True)
            connection.send(run_case(args.seed, number, world, lambda case: connection.send(str(case))))


def results(folder: Path, args: argparse.Namespace) -> Iterator[tuple[int, str, str, str, Counter[str]]]:
    """Yield number, text, outcome, description and counts of every finished case.

    Cases run in forks. The parent process runs no tensor operation: the threads that those start would be missing in a
    fork. A process that ended during a case is replaced.
    """
    context, started = multiprocessing.get_context("fork"), itertools.count()
    maker = context.Process(target=make_models, args=(folder,))
    maker.start()
    maker.join()
    number = args.only or 0
    while True:
        here, there = context.Pipe(duplex=False)
        own = folder / f"process-{next(started)}"
        process = context.Process(target=work, args=(there, folder, own, args, number), daemon=True)
        process.start()
        there.close()
        case, begun = "", time.monotonic()
        try:
            while True:
                found = here.recv()
                if isinstance(found, str):
                    case = found
                    continue
                yield number, case, *found
                number, case, begun = number + 1, "", time.monotonic()
        except EOFError:
            process.join()
            hung = time.monotonic() - begun >= args.seconds
            yield number, case, "hung" if hung else "crashed", f"exit status {process.exitcode}", Counter()
            number += 1
        finally:
            process.terminate()
            process.join()


def main(argv: list[str] | None = None) -> int:
    """Run the cases; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="expert requests (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of a case (default: %(default)s)")
    parser.add_argument("--only", type=int, metavar="N", help="case N alone")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there as well")
    args = parser.parse_args(argv)
    begun, counts, failures = time.monotonic(), Counter[str](), []
    with tempfile.TemporaryDirectory() as temporary, closing(results(Path(temporary), args)) as cases:
        for number, case, outcome, line, own in cases:
            counts.update({**own, "cases": 1, outcome: 1})
            again = f"--seed {args.seed} --only {number}"
            print(f"{again}: {case}: {outcome}, {own['requests']} requests {line}", flush=True)
            if outcome != "right":
                failures.append({"run again": again, "case": case, "outcome": outcome, "line": line})
            last = args.only is not None or counts["requests"] >= args.requests
            if last or counts["cases"] % 20 == 0:
                totals = ", ".join(f"{counts[name]} {name}" for name in TOTALS)
                print(f"[{time.monotonic() - begun:.0f} s] {totals}", flush=True)
            if last:
                break
    if args.json:
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "seed": args.seed, **provenance()}
        totals = {name: counts.pop(name, 0) for name in TOTALS}
        values = {**about, "seconds": time.monotonic() - begun, **totals, "failures": failures, "counts": dict(counts)}
        args.json.write_text(json.dumps(values, indent=2) + "\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
