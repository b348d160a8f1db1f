"""Distance of packed experts from the same weights expanded, and of those from bf16, on the bundled model.

python -m benchmarks fidelity --page benchmarks/packed.md
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from tests.runtime.gguf_files import write
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.results import ResultFile, markdown, result_parser
from expertcast import load_offloaded
from expertcast.data import packed_experts
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.data.packed_experts import iterate_plain, pack_module
from expertcast.data.text import bundled_ids
from expertcast.predictors.messages import Json

_PAIRS = (
    ("packed", "packed", "expanded"),
    ("steps", "steps", "expanded"),
    ("rounded", "expanded", "bf16"),
    ("kernel", "eager", "expanded"),
)
"""Comparison, side, reference side."""
FORMS = ("int4", "int8", "Q4_0", "Q8_0", "MXFP4")
"""Two that round the experts, and types of GGUF files; blocks of 256, as in Q4_K, do not divide the model's rows."""
WINDOW = 256
"""Tokens of a text that are read at once."""


@torch.no_grad()
def fidelity(name: str, tokens: int, form: str) -> Json:
    """Four comparisons over a model's bundled text.

    Args:
        name: of the model.
        tokens: to read, in windows.
        form: `int4` or `int8`, its experts rounded; else the type of all matrices of a GGUF file.

    Returns:
        `packed` (against expanded), `steps` (the same, packed token by token), `rounded` (expanded against bf16) and
        `kernel` (expanded, grouped against eager), each with `kl` (nats per token) and `agreement`.
    """
    model = load_model(name)
    text = bundled_ids(load_tokenizer(name), tokens)
    windows = torch.tensor(text[: tokens // WINDOW * WINDOW]).view(-1, WINDOW)
    sums: Counter[tuple[str, str]] = Counter()
    packed_experts.MANY_ROWS = WINDOW  # all products by ggml, none of expanded weights
    with ExitStack() as stack:
        packed, expanded = (
            _rounded(model, int(form[3:])) if "int" in form else stack.enter_context(_of_gguf(model, form))
        )
        sides = {"bf16": (model, "grouped_mm"), "packed": (packed, None), "steps": (packed, "steps"),
                 "expanded": (expanded, "grouped_mm"), "eager": (expanded, "eager")}  # fmt: skip
        for window in windows:
            logits = {side: _logits(*given, window) for side, given in sides.items()}
            for what, side, truth in _PAIRS:
                own_TV, other_TV = logits[side], logits[truth]
                sums[what, "kl"] += float((other_TV.exp() * (other_TV - own_TV)).sum()) / windows.numel()
                same = int((own_TV.argmax(-1) == other_TV.argmax(-1)).sum())
                sums[what, "agreement"] += same / windows.numel()
    found = {what: {name: sums[what, name] for name in ("kl", "agreement")} for what, _, _ in _PAIRS}
    return {**found, "tokens": windows.numel(), "form": form}


@contextmanager
def _of_gguf(model: PreTrainedModel, kind: str = "Q4_0") -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """The packed model, offloaded with all of its experts, and the expanded one, of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write(path, model, kind)
        with load_offloaded(path, device="cpu", dtype="bf16", experts="packed") as offloaded:
            yield offloaded.model, load_model(path).bfloat16()


def _rounded(model: PreTrainedModel, bits: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    packed = copy.deepcopy(model)
    for layer in find_moe_layers(packed):
        pack_module(layer.experts, layer.num_experts, bits)
    packed.set_experts_implementation("grouped_mm")
    return packed, _expanded(model, packed)


def _expanded(model: PreTrainedModel, packed: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model with the weights that the packed one stands for."""
    made = copy.deepcopy(model)
    for layer, source in zip(find_moe_layers(made), find_moe_layers(packed), strict=True):
        for expert, weights in enumerate(iterate_plain(source.experts, source.num_experts)):
            for name, weight in weights.items():
                getattr(layer.experts, name)[expert].copy_(weight)
    return made


def _logits(model: PreTrainedModel, implementation: str | None, window_T: Tensor) -> Tensor:
    """Log-probabilities float32 [T, V], without an implementation by the model's own, token by token with `steps`."""
    if implementation == "steps":
        past = DynamicCache(config=model.config)
        steps = [model(input_ids=token[None, None], past_key_values=past).logits[0] for token in window_T]
        return torch.cat(steps).float().log_softmax(-1)
    with nullcontext() if implementation is None else experts_implementation(model, implementation):
        found: Tensor = model(input_ids=window_T[None]).logits[0].float().log_softmax(-1)
    return found


_WORDS = {"packed": "packed against the same weights expanded", "steps": "the same, packed token by token",
          "rounded": "rounded and expanded against bf16",
          "kernel": "expanded, eager against grouped kernels"}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare every form, and write the page."""
    parser = result_parser("fidelity", __doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="(default: %(default)s)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="(default: all)")
    args = parser.parse_args(arguments)
    file = ResultFile(args, {"tokens": args.tokens})
    known = [run["form"] for run in file.values["runs"]]
    for form in args.forms:
        if form not in known:
            file.values["runs"].append(fidelity("reference", args.tokens, form))
            file.write()
    rows = [
        [run["form"], words, f"{run[name]['kl']:.5f}", f"{run[name]['agreement']:.4f}"]
        for run in file.values["runs"] for name, words in _WORDS.items()
    ]  # fmt: skip
    text = markdown(["form", "comparison", "KL, nats", "same token"], rows)
    file.publish(f"Fidelity, the bundled model, {args.tokens} tokens", text)
    return 0
