"""MtpHeads for later tokens, read from tiny checkpoints, against transformers' own `generate(use_mtp=True)`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper
from transformers.generation.candidate_generator import MTPCandidateGenerator

import expertcast
from expertcast.predictors import ExpertcastError
from expertcast.runtime.drafts.cache import SharedCache
from expertcast.runtime.drafts.decoding import accept_greedy
from expertcast.runtime.drafts.proposals import MtpHeads, MtpProposer
from tests.families.models import tiny_model
from tests.families.table import tiny_config
from tests.runtime.conftest import refused
from tests.runtime.drafts.loops import recorded

CASES = [("glm4_moe", 1), ("deepseek_v3", 1), ("deepseek_v3", 3)]
PROMPT = torch.randint(10, 4096, (1, 9), generator=torch.Generator().manual_seed(3))


def checkpoint(family: str, heads: int, folder: Path, reads: str = "token") -> Path:
    """Write the checkpoint of a tiny model with its heads after its layers, as in published checkpoints.

    Heads that read the last token are right sometimes. Heads that read the past depend on every token of it.
    """
    config = tiny_config(family)
    config.num_mtp_layers = heads
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.data.mul_(0.03 if reads == "token" else 1.0)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    last, hidden = config.num_hidden_layers - 1, config.hidden_size
    for head in range(heads):
        name = f"model.layers.{last + 1 + head}."
        weights |= {
            key.replace(f"model.layers.{last}.", name): value.clone()
            for key, value in weights.items()
            if key.startswith(f"model.layers.{last}.")
        }
        weights |= {
            name + "eh_proj.weight": torch.eye(hidden, 2 * hidden).roll(0 if reads == "token" else hidden, dims=1)
            + 0.02 * torch.randn(hidden, 2 * hidden),
            **{name + each: torch.ones(hidden) for each in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")},
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loaded(folder: Path) -> PreTrainedModel:
    """Load the model; the heads come after fewer layers than the tensors that its class ignores by default."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return with_heads(model)


def with_heads(model: PreTrainedModel) -> PreTrainedModel:
    """Published models say where their heads lie: at layers 46, 61 or 92."""
    model._keys_to_ignore_on_load_unexpected = {r"model\.layers\.[3-9]\..*"}
    return model


def decoded(
    model: PreTrainedModel, draft: MtpProposer, lengths: list[int]
) -> tuple[list[tuple[list[int], list[int]]], Tensor]:
    """Text and draft of each cycle, and the text: greedy, with a shared cache; a length of 0 drafts nothing."""
    output = model(input_ids=PROMPT, use_cache=True, output_hidden_states=-1)
    cache = SharedCache(output.past_key_values)
    text = torch.cat([PROMPT, output.logits[:, -1:].argmax(dim=-1)], dim=1)
    draft.see_hidden(output.hidden_states[-1])
    cycles = []
    for most in lengths:
        drafted = text[:, :0]
        if most:
            drafted, logits = draft.propose(text, most)
            assert logits is None
            cycles.append((text[0].tolist(), drafted[0].tolist()))
        start = cache.mark()
        fed = torch.cat([text[:, -1:], drafted], dim=1)
        output = model(input_ids=fed, past_key_values=cache.cache, use_cache=True, output_hidden_states=-1)
        ids, accepted = accept_greedy(output.logits, drafted)
        stands = int(accepted[0]) + 1
        cache.roll_back(start + stands)
        draft.see_hidden(output.hidden_states[-1][:, :stands])
        text = torch.cat([text, ids[:, :stands]], dim=1)
    return cycles, text


def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, reads: str) -> PreTrainedModel:
    family, heads = request.param
    return loaded(checkpoint(family, heads, tmp_path_factory.mktemp(family), reads))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return made(request, tmp_path_factory, "token")


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return made(request, tmp_path_factory, "past")


def test_drafts_are_transformers_own(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    cycles, output = recorded(monkeypatch, MTPCandidateGenerator, model, PROMPT, use_mtp=True)
    expected = [cycle for cycle in cycles if cycle[1]]  # the first pass has nothing to draft from
    heads = MtpHeads(model)
    cycles, text = decoded(model, MtpProposer(heads), [heads.length] * len(expected))
    assert cycles == expected
    grown = {len(after) - len(before) for (before, _), (after, _) in pairwise(cycles)}
    assert len(grown) > 1, "drafts are sometimes right"
    assert text[0, : len(output)].tolist() == output


def test_a_draft_is_that_of_a_text_read_at_once(deep: PreTrainedModel) -> None:
    """Whatever was drafted before, and however many tokens came without a draft."""
    heads = MtpHeads(deep)
    text = torch.randint(10, 4096, (1, 40), generator=torch.Generator().manual_seed(5))
    hidden = deep(input_ids=text, output_hidden_states=-1).hidden_states[-1]

    def said(draft: MtpProposer, length: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(length)
        ids, logits = draft.propose(text[:, :length], heads.length)
        assert logits is not None
        return ids, logits

    draft, seen = MtpProposer(heads, do_sample=True), 0
    for length in (2, 3, 9, 10, 11, 13, 14, 19, 20, 24, 25, 26, 40):
        for end in range(seen + 1, length):
            draft.see_hidden(hidden[:, end - 1 : end])
        seen = length - 1
        fresh = MtpProposer(heads, do_sample=True)
        fresh.see_hidden(hidden[:, :seen])
        for one, other in zip(said(draft, length), said(fresh, length), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_sampled_drafts_come_with_what_they_were_drawn_from(model: PreTrainedModel) -> None:
    """At a temperature of 0.5 the first head's logits are twice what they are."""
    heads = MtpHeads(model)
    hidden = model(input_ids=PROMPT[:, :-1], output_hidden_states=-1).hidden_states[-1]
    plain, cold = (MtpProposer(heads, True, LogitsProcessorList(each)) for each in ([], [TemperatureLogitsWarper(0.5)]))
    said = []
    for draft in (plain, cold):
        draft.see_hidden(hidden)
        ids, logits = draft.propose(PROMPT, heads.length)
        assert logits is not None
        assert (ids.shape, logits.shape) == ((1, heads.length), (1, heads.length, 4096))
        said.append(logits[:, 0])
    torch.testing.assert_close(said[0] * 2, said[1])


def test_heads_of_an_offloaded_model(tmp_path: Path) -> None:
    """Heads of an offloaded model keep their experts in memory and propose the same tokens as the resident model's."""
    folder = checkpoint("glm4_moe", 1, tmp_path)
    model = loaded(folder)
    expected, whole = decoded(model, MtpProposer(MtpHeads(model)), [1] * 6)
    with expertcast.load_offloaded(str(folder), slots=5, dtype="fp32") as offloaded:
        draft = MtpProposer(MtpHeads(with_heads(offloaded.model)))
        cycles, text = decoded(offloaded.model, draft, [1] * 6)
    assert cycles == expected
    assert torch.equal(text, whole)


def test_hidden_states_must_be_those_of_the_text(model: PreTrainedModel) -> None:
    draft = MtpProposer(MtpHeads(model))
    with pytest.raises(RuntimeError, match="hidden states of 0 tokens for a sequence of 9"):
        draft.propose(PROMPT, 1)
    draft.see_hidden(torch.zeros(1, 9, 32))
    with pytest.raises(RuntimeError, match="hidden states of 9 tokens for a sequence of 9"):
        draft.propose(PROMPT, 1)


def test_models_without_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExpertcastError, match="a Qwen3MoeForCausalLM has no heads for later tokens"):
        MtpHeads(tiny_model("qwen3_moe"))
    AutoModelForCausalLM.from_config(tiny_config("glm4_moe")).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    with refused(r"heads for later tokens cannot be read: .+missing"):
        MtpHeads(model)


@pytest.mark.parametrize(("family", "heads"), [("glm4_moe", 1), ("deepseek_v3", 3)])
def test_heads_draft_and_the_text_stays(family: str, heads: int, tmp_path: Path) -> None:
    """Fixed and governed lengths, one sequence and two with padding; each hidden state is passed once."""
    model = loaded(checkpoint(family, heads, tmp_path))
    both = torch.cat([PROMPT, PROMPT.flip(1)])
    mask = torch.ones_like(both)
    mask[1, :3] = 0
    with expertcast.offload(model, slots=12) as offloaded:
        for ids, kwargs in ((PROMPT, {}), (both, {"attention_mask": mask})):
            given = {"max_new_tokens": 16, "do_sample": False, **kwargs}
            plain = offloaded.generate(ids, **given)
            for length in (1, 3, None):
                assert torch.equal(offloaded.generate(ids, draft="mtp", draft_length=length, **given), plain)
        found = offloaded.stats.as_dict()["drafts"]
        assert found["by_sequences"]["1"]["drafts"]["mtp"]["cycles"] > 3
        assert found["memory_bytes"] > 0


def test_a_model_without_heads_says_so() -> None:
    with (
        expertcast.offload(tiny_model("mixtral"), slots=12) as offloaded,
        pytest.raises(ExpertcastError, match="has no heads"),
    ):
        offloaded.generate(PROMPT, max_new_tokens=4, draft="mtp")
