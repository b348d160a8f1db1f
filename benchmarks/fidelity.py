"""Distance of packed experts from the same weights expanded, and of those from bf16, on the bundled model.

    python -m benchmarks fidelity --page benchmarks/packed.md

--recall also fits predictors on the expanded model, and scores them on traces of packed ones.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from tests.runtime.gguf_files import write
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.results import ResultFile, markdown, result_parser, write_section
from expertcast import load_offloaded
from expertcast.checkpoints.checkpoint import load_predictor, save_predictor
from expertcast.data import packed_experts
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.data.packed_experts import iterate_plain, pack_module
from expertcast.data.text import bundled_ids, load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.predictors.linear import LinearConfig
from expertcast.predictors.messages import Json
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit

_PAIRS = (("packed", "packed", "expanded"), ("rounded", "expanded", "bf16"), ("kernel", "eager", "expanded"))
"""Comparison, side, reference side."""
FORMS = ("int4", "int8", "Q4_0", "Q8_0", "MXFP4")
"""Two that round the experts, and types of GGUF files; blocks of 256, as in Q4_K, do not divide the model's rows."""
WINDOW = 256
"""Tokens of a text that are read at once."""


@torch.no_grad()
def fidelity(name: str, tokens: int, form: str) -> Json:
    """Three comparisons over a model's bundled text.

    Args:
        name: of the model.
        tokens: to read, in windows.
        form: `int4` or `int8`, its experts rounded; else the type of all matrices of a GGUF file.

    Returns:
        `packed` (against expanded), `rounded` (expanded against bf16) and `kernel` (expanded, grouped against eager),
        each with `kl` (nats per token), `agreement` and both perplexities.
    """
    model = load_model(name)
    text = bundled_ids(load_tokenizer(name), tokens)
    windows = torch.tensor(text[: tokens // WINDOW * WINDOW]).view(-1, WINDOW)
    sums: dict[str, dict[str, float]] = {}
    packed_experts.MANY_ROWS = WINDOW  # all products by ggml, none of expanded weights
    with ExitStack() as stack:
        packed, expanded = (
            _rounded(model, int(form[3:])) if "int" in form else stack.enter_context(_of_gguf(model, form))
        )
        sides = {"bf16": (model, "grouped_mm"), "packed": (packed, None), "expanded": (expanded, "grouped_mm"),
                 "eager": (expanded, "eager")}  # fmt: skip
        for window in windows:
            logits = {side: _logits(*given, window) for side, given in sides.items()}
            for what, side, truth in _PAIRS:
                _add(sums.setdefault(what, {}), logits[side], logits[truth], window)
    return {what: _means(each) for what, each in sums.items()} | {"tokens": windows.numel(), "form": form}


@contextmanager
def _of_gguf(model: PreTrainedModel, kind: str = "Q4_0") -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """The packed model, offloaded with all of its experts, and the expanded one, of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write(path, model, kind)
        with load_offloaded(path, device="cpu", dtype="bf16", slots=_experts(model), experts="packed") as offloaded:
            yield offloaded.model, load_model(path).bfloat16()


def _experts(model: PreTrainedModel) -> int:
    return sum(layer.num_experts for layer in find_moe_layers(model))


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
    """Log-probabilities float32 [T, V]; without an implementation by the model's own."""
    with nullcontext() if implementation is None else experts_implementation(model, implementation):
        found: Tensor = model(input_ids=window_T[None]).logits[0].float().log_softmax(-1)
    return found


def _add(sums: dict[str, float], side_TV: Tensor, truth_TV: Tensor, window_T: Tensor) -> None:
    followed = window_T[1:, None]
    values = {
        "kl": (truth_TV.exp() * (truth_TV - side_TV)).sum(),
        "agreement": (side_TV.argmax(-1) == truth_TV.argmax(-1)).sum(),
        "tokens": torch.tensor(len(window_T)),
        "perplexity": -side_TV[:-1].gather(1, followed).sum(),
        "perplexity_against": -truth_TV[:-1].gather(1, followed).sum(),
        "followed": torch.tensor(len(followed)),
    }
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value)


def _means(sums: dict[str, float]) -> Json:
    found: Json = {name: sums[name] / sums["tokens"] for name in ("kl", "agreement")}
    for name in ("perplexity", "perplexity_against"):
        found[name] = math.exp(sums[name] / sums["followed"])
    return found


# Predictors of the expanded model on packed experts

_FITTED = {"linear": LinearConfig(), "estimator": EstimatorConfig(steps=150)}


def recall(name: str, tokens: int) -> dict[str, dict[str, float]]:
    """Fit predictors on traces of a bf16 model, and score them on the test split of traces of each form.

    Args:
        name: of the model.
        tokens: to collect per form, of the same documents.

    Returns:
        Recall@K one layer ahead, mean over layers, by form and predictor.
    """
    model, tokenizer = load_model(name), load_tokenizer(name)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def traces(form: str, side: PreTrainedModel) -> TraceDataset:
            out = Path(folder) / form
            return collect(side, tokenizer, load_documents(name), out, tokens=tokens, early_rank=None)

        sides = {"bf16": traces("bf16", model)}
        for fitted, config in _FITTED.items():
            made = fit(fitted, sides["bf16"], config=config).predictor
            save_predictor(made, Path(folder) / fitted, view=sides["bf16"].view)
        sides["Q4_0, packed"] = traces("Q4_0", stack.enter_context(_of_gguf(model))[0])
        for form in ("int8", "int4"):
            offloaded = load_offloaded(name, device="cpu", slots=_experts(model), experts=form)
            sides[form] = traces(form, stack.enter_context(offloaded).model)
        for form, each in sides.items():
            known = {fitted: load_predictor(Path(folder) / fitted, each.view) for fitted in _FITTED}
            scores = evaluate(known, each.batches("test", batch_size=512), each.view).as_dict()["recall_at_k"]
            found[form] = {fitted: scores[fitted]["mean"] for fitted in _FITTED}
    return found


_WORDS = {"packed": "packed against the same weights expanded", "rounded": "rounded and expanded against bf16",
          "kernel": "expanded, eager against grouped kernels"}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare every form, and write the page."""
    parser = result_parser("fidelity", __doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="(default: %(default)s)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="(default: all)")
    parser.add_argument("--recall", action="store_true", help="recall of predictors, too")
    parser.add_argument("--page", type=Path, help="Markdown page whose section to write")
    args = parser.parse_args(arguments)
    file = ResultFile(args, {"tokens": args.tokens})
    known = [run["form"] for run in file.values["runs"]]
    for form in args.forms:
        if form not in known:
            file.values["runs"].append(fidelity("reference", args.tokens, form))
            file.write()
    rows = [
        [run["form"], words, f"{run[name]['kl']:.5f}", f"{run[name]['agreement']:.4f}",
         f"{run[name]['perplexity']:.3f}", f"{run[name]['perplexity_against']:.3f}"]
        for run in file.values["runs"] for name, words in _WORDS.items()
    ]  # fmt: skip
    text = markdown(["form", "comparison", "KL, nats", "same token", "perplexity", "of the other"], rows)
    if args.recall:
        file.values["recall"] = recall("reference", 20_000)
        file.write()
        scores = file.values["recall"].items()
        text += "\n\nRecall@4, one layer ahead, of predictors of the expanded model:\n\n"
        text += markdown(["traces of", *_FITTED], [[form, *(f"{own[f]:.4f}" for f in _FITTED)] for form, own in scores])
    print(text)
    if args.page is not None:
        write_section(args.page, f"Fidelity, the bundled model, {args.tokens} tokens", text)
    return 0
