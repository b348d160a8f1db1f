"""Proposers against transformers' own `generate`: the same candidates for the same text, cycle by cycle."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast, SuppressTokensLogitsProcessor
from transformers.generation import candidate_generator

from expertcast.data.models import load_tokenizer
from expertcast.predictors import ExpertcastError
from expertcast.runtime.drafts.proposals import Assistant, PromptLookup
from tests.families.models import tiny_model
from tests.families.table import tiny_family
from tests.runtime.conftest import refused
from tests.runtime.drafts.loops import decoded, prepared, recorded
from tests.runtime.drafts.loops import repeating as prompt


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3_moe", torch.float32)


@pytest.fixture(scope="module")
def assistant(model: PreTrainedModel) -> PreTrainedModel:
    """The model with noise on its head: it is right now and then."""
    made = tiny_model("qwen3_moe", torch.float32)
    noise = torch.randn(made.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
    made.lm_head.weight.data.add_(0.03 * noise)
    return made


def test_prompt_lookup_is_transformers_own(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    kind = candidate_generator.PromptLookupCandidateGenerator
    expected, output = recorded(monkeypatch, kind, model, prompt(), prompt_lookup_num_tokens=3)
    assert any(ids for _, ids in expected)
    whole = [cycle for cycle in expected if len(cycle[0]) + 3 < len(output)]  # the last drafts are cut to the length
    proposer = PromptLookup()
    for text, ids in whole:
        drafted, logits = proposer.propose(torch.tensor([text]), 3)
        assert (drafted[0].tolist(), logits) == (ids, None)


def test_prompt_lookup_by_hand() -> None:
    """... 5 6 7 8 ... 5 6: 7 8 and what follows; the end of a text and forbidden tokens cut it."""
    text = torch.tensor([[5, 6, 7, 8, 9, 3, 5, 6]])
    for most, expected in ((1, [7]), (3, [7, 8, 9]), (9, [7, 8, 9, 3, 5, 6])):
        assert PromptLookup().propose(text, most)[0].tolist() == [expected]
    assert PromptLookup(eos_token_id=torch.tensor([9])).propose(text, 4)[0].tolist() == [[7, 8]]
    assert PromptLookup().propose(torch.tensor([[5, 6, 7]]), 4)[0].shape == (1, 0)
    no_eight = LogitsProcessorList([SuppressTokensLogitsProcessor([8])])
    assert PromptLookup(processors=no_eight, vocabulary=10).propose(text, 4)[0].tolist() == [[7]]


def test_assistant_is_transformers_own(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, assistant: PreTrainedModel
) -> None:
    """A constant number of tokens, without the threshold that ends a draft early."""
    monkeypatch.setattr(assistant.generation_config, "num_assistant_tokens", 3)
    monkeypatch.setattr(assistant.generation_config, "num_assistant_tokens_schedule", "constant")
    monkeypatch.setattr(assistant.generation_config, "assistant_confidence_threshold", 0.0)
    kind = candidate_generator.AssistedCandidateGenerator
    expected, output = recorded(monkeypatch, kind, model, prompt(), assistant_model=assistant)
    proposer = Assistant(model, assistant, prepared(model, do_sample=False, eos_token_id=None))
    cycles, text = decoded(model, proposer, prompt(), [3] * len(expected))
    whole = [cycle for cycle in expected if len(cycle[1]) == 3]
    assert len(whole) > 5
    assert cycles[: len(whole)] == whole
    assert text[0].tolist()[: len(output)] == output
    accepted = [len(after) - len(before) - 1 for (before, _), (after, _) in pairwise(cycles)]
    assert len(set(accepted)) > 1


def test_length_changes_every_cycle(model: PreTrainedModel, assistant: PreTrainedModel) -> None:
    """Each draft is the assistant's own greedy continuation of the text, also behind cycles without a draft."""
    proposer = Assistant(model, assistant, prepared(model, do_sample=False, eos_token_id=None))
    lengths = [2, 5, 0, 0, 3, 1, 0, 4, 4, 0, 0, 0, 0, 2, 6]
    cycles, _ = decoded(model, proposer, prompt(), lengths)
    for (text, ids), most in zip(cycles, [length for length in lengths if length], strict=True):
        own = assistant.generate(torch.tensor([text]), max_new_tokens=most, do_sample=False, eos_token_id=None)
        assert own[0, len(text) :].tolist() == ids


def test_another_text_is_another_draft(model: PreTrainedModel, assistant: PreTrainedModel) -> None:
    """A draft continues the settled sequence, however early it differs from the earlier proposal."""
    proposer = Assistant(model, assistant, prepared(model, do_sample=False, eos_token_id=None))
    proposer.propose(prompt(), 3)
    for seed in (4, 5):
        drafted, _ = proposer.propose(prompt(12, seed), 3)
        own = assistant.generate(prompt(12, seed), max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert torch.equal(own[:, 18:], drafted)


def test_sampled_drafts_come_with_what_they_were_drawn_from(model: PreTrainedModel, assistant: PreTrainedModel) -> None:
    """Top 5 of the assistant's logits at a temperature of 0.7, for each drafted token."""
    config = prepared(model, do_sample=True, top_k=5, temperature=0.7, eos_token_id=None)
    proposer = Assistant(model, assistant, config)
    text = prompt()
    for most in (3, 2):
        drafted, logits = proposer.propose(text, most)
        assert logits is not None
        assert logits.shape == (1, most, 4096)
        whole = torch.cat([text, drafted], dim=1)
        own = assistant(input_ids=whole).logits[:, text.shape[1] - 1 : -1] / 0.7
        least = own.topk(5).values[..., -1:]
        torch.testing.assert_close(logits, own.masked_fill(own < least, -torch.inf), rtol=1e-4, atol=1e-4)
        assert bool(logits.gather(2, drafted[..., None]).isfinite().all())
        text = whole[:, :-1]


def test_another_vocabulary_needs_tokenizers(model: PreTrainedModel) -> None:
    other = tiny_model("qwen3_moe", torch.float32)
    other.resize_token_embeddings(512)
    config = prepared(model, do_sample=False)
    with refused("vocabulary has 512 tokens, the model's 4096: pass tokenizer and"):
        Assistant(model, other, config)
    tokenizer = load_tokenizer("reference")
    with pytest.raises(ExpertcastError, match="share a vocabulary: leave out assistant_tokenizer"):
        Assistant(model, model, config, None, tokenizer, tokenizer)


def test_assistants_that_cannot_be_rolled_back_are_refused(model: PreTrainedModel) -> None:
    config = prepared(model, do_sample=False)
    with pytest.raises(ExpertcastError, match="Qwen3NextForCausalLM cannot be rolled back: pass an assistant"):
        Assistant(model, tiny_family("qwen3_next"), config)
    with pytest.raises(ExpertcastError, match="MiniMaxForCausalLM cannot be rolled back: pass an assistant"):
        Assistant(model, tiny_family("minimax"), config).propose(prompt(), 2)


def test_prompt_lookup_needs_a_length() -> None:
    with pytest.raises(ExpertcastError, match="max_matching_ngram_size is 0"):
        PromptLookup(longest=0)


# Assistants with a tokenizer of their own

TEXT = (
    "The experts of a layer are many, and a token asks for few of them: the few are read, the many stay where they are."
)


@pytest.fixture(scope="module")
def stranger(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """An assistant with a tokenizer of 300 tokens of its own."""
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    made.train_from_iterator([TEXT], BpeTrainer(vocab_size=300, initial_alphabet=ByteLevel.alphabet()))
    other = tiny_model("qwen3_moe", torch.float32)
    other.resize_token_embeddings(300)
    other.config.vocab_size = 300
    return other, PreTrainedTokenizerFast(tokenizer_object=made)


def test_another_tokenizer_is_transformers_own(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, stranger: tuple[PreTrainedModel, PreTrainedTokenizerFast]
) -> None:
    other, other_tokenizer = stranger
    tokenizer = load_tokenizer("reference")
    text = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    monkeypatch.setattr(other.generation_config, "num_assistant_tokens", 6)
    monkeypatch.setattr(other.generation_config, "num_assistant_tokens_schedule", "constant")
    monkeypatch.setattr(other.generation_config, "assistant_confidence_threshold", 0.0)
    kind = candidate_generator.AssistedCandidateGeneratorDifferentTokenizers
    expected, output = recorded(
        monkeypatch, kind, model, text, assistant_model=other, tokenizer=tokenizer, assistant_tokenizer=other_tokenizer
    )
    config = prepared(model, do_sample=False, eos_token_id=None)
    proposer = Assistant(model, other, config, None, tokenizer, other_tokenizer)
    cycles, whole = decoded(model, proposer, text, [6] * len(expected))
    assert sum(len(ids) > 1 for _, ids in expected) > 5
    for (own_text, own), (their_text, theirs) in list(zip(cycles, expected, strict=True))[:-8]:
        assert (own_text, own) == (their_text, theirs[:6])
    assert whole[0].tolist()[: len(output)] == output


def test_another_tokenizer_drafts_the_likeliest_where_the_model_samples(
    model: PreTrainedModel, stranger: tuple[PreTrainedModel, PreTrainedTokenizerFast]
) -> None:
    """The same draft each time, and as in greedy decoding; also behind text that no draft said."""
    tokenizer = load_tokenizer("reference")
    text = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    for sampled in (text, torch.cat([text, text[:, :4]], dim=1)):
        drafts = []
        for do_sample in (True, True, False):
            config = prepared(model, do_sample=do_sample, eos_token_id=None)
            proposer = Assistant(model, stranger[0], config, None, tokenizer, stranger[1])
            proposer.propose(text[:, :-1], 2)
            drafted, logits = proposer.propose(sampled, 4)
            assert logits is None
            drafts.append(drafted.tolist())
        assert drafts[0] == drafts[1] == drafts[2] != [[]]
