"""Assistants with a tokenizer of their own, against transformers' own `generate`."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import candidate_generator

from expertcast.data.models import load_tokenizer
from expertcast.runtime.drafts.proposals import Assistant
from tests.families.models import tiny_model
from tests.runtime.drafts.cycles import decoded, prepared, recorded

TEXT = (
    "The experts of a layer are many, and a token asks for few of them: the few are read, the many stay where they are."
)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3_moe", torch.float32)


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
