"""Drafts that transformers knows: prompt lookup and assistant models, one proposer for each row of a batch.

transformers' own candidate generators (`generation/candidate_generator.py`) make the candidates; how many is asked anew
in every cycle. S tokens of text, m drafted ones, V the vocabulary.
"""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from expertcast.predictors.errors import ExpertcastError

_NO_LIMIT = 2**31


class Proposer(Protocol):
    """Says how one row's text may go on."""

    needs_hidden: bool
    """Whether :meth:`saw` is to be called."""

    def propose(self, text_1S: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        """Tokens that may follow.

        Args:
            text_1S: the row's ids [1, S] without padding, all that stands; in a later call it has grown.
            most: tokens asked for, 1 or more.

        Returns:
            ids [1, m], m from 0 to `most`, and the processed logits [1, m, V] that they were drawn from; None: nothing
            else could have been said.
        """

    def saw(self, hidden_1TD: Tensor) -> None:
        """The model's last hidden states [1, T, D] of tokens that stand, each token once and in order."""


class PromptLookup:
    """What followed the last tokens where the text had them before.

    Args:
        longest: tokens of the text's end that are looked for first, then fewer.
        eos_token_id: ids that end the text [E], and a draft before them.
        processors: forbid tokens by -inf.
        vocabulary: V; needed with `processors`.

    Raises:
        ExpertcastError: `longest` is not positive.
    """

    needs_hidden = False

    def __init__(
        self,
        longest: int = 2,
        eos_token_id: Tensor | None = None,
        processors: LogitsProcessorList | None = None,
        vocabulary: int | None = None,
    ) -> None:
        if longest < 1:
            raise ExpertcastError(f"max_matching_ngram_size is {longest}: it must be 1 or more")
        self._generator = PromptLookupCandidateGenerator(
            eos_token_id=eos_token_id,
            max_matching_ngram_size=longest,
            max_length=_NO_LIMIT,
            logits_processor=processors or None,
            vocab_size=vocabulary,
        )

    def propose(self, text_1S: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        """As :meth:`Proposer.propose`; nothing where the text's last token is new."""
        refuse_batch(text_1S)
        self._generator.num_output_tokens = most
        ids_1N, _ = self._generator.get_candidates(text_1S)
        return ids_1N[:, text_1S.shape[1] :], None

    def saw(self, hidden_1TD: Tensor) -> None:
        """Nothing: the text says all."""


class Assistant:
    """A smaller model writes the draft, token by token, with a cache of its own.

    How sure it is does not shorten a draft, as it does in `generate`: whoever asks knows how many tokens pay. With
    another tokenizer than the model's it drafts through the text, its likeliest tokens even where the model samples:
    transformers' own way of sampling there (`AssistantToTargetTranslator`, 5.23) gives logits of other tokens than the
    drafted ones, and changes the assistant's head.

    Args:
        model: the one that verifies.
        assistant: it is run by its own `generate`.
        config: prepared, as `generate` makes it: whether and how to sample, and what ends a text.
        processors: of the logits, the caller's own; those that `config` asks for are made of it.
        tokenizer: the model's; needed, like the next, where the vocabularies differ.
        assistant_tokenizer: the assistant's.

    Raises:
        ExpertcastError: the vocabularies differ in size and tokenizers are missing, or they do not and tokenizers are
            given; or the assistant has no cache of keys and values.
    """

    needs_hidden = False

    def __init__(
        self,
        model: PreTrainedModel,
        assistant: PreTrainedModel,
        config: GenerationConfig,
        processors: LogitsProcessorList | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        sizes = [each.config.get_text_config().vocab_size for each in (model, assistant)]
        self._translates = sizes[0] != sizes[1]
        if self._translates and (tokenizer is None or assistant_tokenizer is None):
            raise ExpertcastError(
                f"the assistant's vocabulary has {sizes[1]} tokens, the model's {sizes[0]}: pass tokenizer and "
                "assistant_tokenizer, or an assistant of the model's own vocabulary"
            )
        if not self._translates and assistant_tokenizer is not None:
            raise ExpertcastError("model and assistant share a vocabulary: leave out assistant_tokenizer")
        if assistant._is_stateful:
            raise _cannot_go_back(assistant)
        self._model, self._assistant = model, assistant
        self._processors = processors if processors is not None else LogitsProcessorList()
        self._tokenizers = (tokenizer, assistant_tokenizer) if self._translates else (None, None)
        self._config = copy.deepcopy(config)
        self._config.max_length = _NO_LIMIT
        self._config.prompt_lookup_num_tokens = self._config.assistant_early_exit = None
        self._config.use_mtp = False
        self._config.do_sample = bool(config.do_sample) and not self._translates
        self._config.min_length = self._config.min_length or 0
        self._generator: AssistedCandidateGenerator | None = None
        self._last_1N = torch.empty(1, 0, dtype=torch.long)

    def propose(self, text_1S: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        """As :meth:`Proposer.propose`; fewer than `most` where the draft ends the text or is translated.

        Raises:
            ExpertcastError: the assistant keeps recurrent states, as its cache shows.
        """
        refuse_batch(text_1S)
        self._go_back_to(text_1S)
        if self._generator is None:
            self._generator = self._made(text_1S)
        self._generator.num_assistant_tokens = most
        ids_1N, logits_1mV = self._generator.get_candidates(text_1S)
        if not self._generator.assistant_kwargs["past_key_values"].is_croppable:
            raise _cannot_go_back(self._assistant)
        self._last_1N = ids_1N.to(text_1S.device)
        length = text_1S.shape[1]
        drafted_1m = self._last_1N[:, length : length + most]
        if logits_1mV is not None:
            logits_1mV = logits_1mV[:, : drafted_1m.shape[1]].to(text_1S.device)
        return drafted_1m, logits_1mV if self._config.do_sample else None

    def saw(self, hidden_1TD: Tensor) -> None:
        """Nothing: the assistant reads the text."""

    def _go_back_to(self, text_1S: Tensor) -> None:
        """Take out of the assistant's cache what the text does not begin with, or begin anew.

        transformers takes it out where the text is a beginning of the last candidates and one more token, and counts
        on that where it translates.
        """
        if self._generator is None:
            return
        shared = min(self._last_1N.shape[1], text_1S.shape[1])
        differs = (self._last_1N[0, :shared] != text_1S[0, :shared]).nonzero()
        same = int(differs[0]) if len(differs) else shared
        if same >= text_1S.shape[1] - 1:
            return
        cache = self._generator.assistant_kwargs.get("past_key_values")
        if self._translates:
            self._generator = None
        elif cache is not None and cache.get_seq_length() > same:
            cache.crop(same - cache.get_seq_length())

    def _made(self, text_1S: Tensor) -> AssistedCandidateGenerator:
        generator: CandidateGenerator = self._model._get_candidate_generator(
            generation_config=self._config,
            input_ids=text_1S,
            inputs_tensor=text_1S,
            logits_processor=self._processors,
            model_kwargs={"attention_mask": torch.ones_like(text_1S)},
            assistant_model=self._assistant,
            target_tokenizer=self._tokenizers[0],
            assistant_tokenizer=self._tokenizers[1],
        )
        if not isinstance(generator, AssistedCandidateGenerator):
            raise ExpertcastError(
                f"a {type(self._assistant).__name__} reads the model's own states, which a draft here does not have: "
                "pass a causal language model as assistant"
            )
        for config in (generator.generation_config, generator.assistant_generation_config):
            config.assistant_confidence_threshold = 0.0
        return generator


def refuse_batch(text_BS: Tensor) -> None:
    """Refuse more than one text.

    Raises:
        ExpertcastError: a batch of any other number.
    """
    if text_BS.shape[0] != 1:
        raise ExpertcastError(f"a proposer drafts for one text, not for {text_BS.shape[0]}: make one for each row")


def _cannot_go_back(assistant: PreTrainedModel) -> ExpertcastError:
    return ExpertcastError(
        f"a {type(assistant).__name__} cannot take tokens back: pass an assistant without recurrent states"
    )
