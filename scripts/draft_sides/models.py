"""The models that are measured, as folders: the bundled one, and the same function with experts of real size.

D hidden size, F inner width of an expert, E routed experts per layer, T tokens, L MoE layers.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draft_sides.exact_sets import compare_draft, resident_views
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError
from expertcast.runtime import load_offloaded
from expertcast.runtime.benchmarking.bench import step_times
from expertcast.runtime.benchmarking.runs import decode_greedily
from expertcast.runtime.drafts.quantised import BITS, Calibration, QuantisedExperts
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.recording.recorder import Recorder

_NAME = "reference"
_MATRICES = 3
"""Of an expert: two to its inner width, one back."""


def widened(folder: Path, expert_bytes: int) -> Path:
    """Write the bundled model with wider experts, unless it is there.

    What is added to an expert's inner width is zero: the same function, more to copy and to multiply. Products are
    summed in other blocks, so that bits may differ.

    Args:
        folder: its files go into a folder there.
        expert_bytes: of one expert, at most; rounded down to a multiple of 128 of the inner width.
    """
    path = folder / f"widened-{expert_bytes}"
    if (path / "made").is_file():
        return path
    model = load_model(_NAME, dtype="bf16")
    config = model.config
    width = expert_bytes // (_MATRICES * config.hidden_size * 2) // 128 * 128
    if width < config.moe_intermediate_size:
        raise ExpertcastError(f"experts of {expert_bytes} bytes are narrower than the model's: give more")
    with torch.no_grad():
        for block in model.model.layers:
            experts = block.mlp.experts
            up, down = experts._parameters.pop("gate_up_proj"), experts._parameters.pop("down_proj")
            count, twice, hidden = up.shape
            wide_up = up.new_zeros(count, 2, width, hidden)
            wide_up[:, :, : twice // 2] = up.view(count, 2, twice // 2, hidden)  # gates, then what they gate
            wide_down = down.new_zeros(count, hidden, width)
            wide_down[..., : down.shape[-1]] = down
            experts.gate_up_proj = torch.nn.Parameter(wide_up.flatten(1, 2), requires_grad=False)
            experts.down_proj = torch.nn.Parameter(wide_down, requires_grad=False)
    config.moe_intermediate_size = width
    model.save_pretrained(path)
    (path / "made").write_text("")
    return path


def prompts(tokens: int, count: int) -> list[Tensor]:
    """The first tokens [1, T] of so many bundled texts, one of each domain before a second one of any.

    Raises:
        ExpertcastError: too few texts are so long.
    """
    tokenizer = load_tokenizer(_NAME)
    by_domain: dict[str, list[Tensor]] = {}
    for document in load_documents(_NAME, max_chars=400_000):
        ids = tokenizer(document.text[: 12 * tokens])["input_ids"][:tokens]
        if len(ids) == tokens:
            by_domain.setdefault(document.domain, []).append(torch.tensor([ids]))
    found = [texts[place] for place in range(count) for texts in by_domain.values() if place < len(texts)]
    if len(found) < count:
        raise ExpertcastError(f"{len(found)} bundled texts have {tokens} tokens, {count} are needed: give fewer")
    return found[:count]


def same_inputs(windows: int, tokens: int = 128) -> dict[str, dict[str, float]]:
    """How quantised copies route where they read the same text as the model (rows C1 and C2): by precision
    :meth:`.exact_sets.ExactSets.as_dict`, and `next_token`, the share of tokens after which
    both find the same one likeliest. Calibration reads other texts.

    Args:
        windows: texts that are compared.
        tokens: of each.
    """
    model = load_model(_NAME, dtype="bf16")
    view = find_moe_layers(model)
    texts_SW = torch.cat(prompts(tokens, 2 * windows))
    calibration = Calibration.of(model, view, texts_SW[windows:])
    found = {}
    for precision in BITS:
        quantised = QuantisedExperts.of(view, resident_views(view), precision, calibration=calibration)
        sets, likeliest = compare_draft(model, view, quantised, texts_SW[:windows])
        found[precision] = {**sets.as_dict(), "next_token": likeliest}
    return found


def layer_seconds(path: Path | str, options: dict[str, object], prompt: Tensor, tokens: int) -> float:
    """Seconds that one layer computes in a decode step when its experts are there; last norm and head left out."""
    recorder = Recorder(prompt.device)
    offloaded = load_offloaded(path, cache=False, link="instant", observers=[recorder], **options)  # type: ignore[arg-type]
    with offloaded:
        decode_greedily(offloaded.model, prompt[:, :64], tokens, offloaded=offloaded, recorder=recorder)
        layers = offloaded.store.layers
        return statistics.median(sum(step.compute_L[:layers]) / layers for step in step_times(recorder, layers))


def opened(path: Path | str, options: dict[str, object]) -> OffloadedModel:
    """Offloaded, without an end of text: all generate as many tokens."""
    offloaded = load_offloaded(path, **options)  # type: ignore[arg-type]
    assert offloaded.model.generation_config is not None
    offloaded.model.generation_config.eos_token_id = None
    return offloaded


def other_bytes(model: PreTrainedModel) -> int:
    """Bytes of all that is no routed expert, in the model's dtype; what is tied counts once."""
    return sum(each.nbytes for name, each in model.named_parameters() if ".experts." not in name)
