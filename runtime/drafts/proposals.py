"""Texts of a batch while they are generated, and drafts by transformers' own proposers: prompt lookup, assistant models
and multi-token prediction.

Rows get ahead of each other, for a draft is accepted further in one than in another. Columns are those of the cache,
which all rows share: what a row knows beyond them is fed again as given text until the others have caught up. A column
is a token's place in its row, padding on the left included.

B sequences, S tokens of text, m drafted ones, V the vocabulary, L heads, T tokens whose hidden states are new, D the
hidden size.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import AssistedCandidateGenerator, CandidateGenerator, PromptLookupCandidateGenerator

from expertcast.compat import MtpCache, MtpModel
from expertcast.predictors.messages import ExpertcastError


class Texts:
    """Rows of ids and how far each is known.

    Args:
        prompt_BS: [B, S] ids.
        most: columns at the end, more than S.
        pad: what follows a row that has ended.
    """

    def __init__(self, prompt_BS: Tensor, most: int, pad: int) -> None:
        batch, self.prompt = prompt_BS.shape
        self.ids_BS = prompt_BS.new_full((batch, most), pad)
        """All columns; what is not known of a row may be a draft."""
        self.ids_BS[:, : self.prompt] = prompt_BS
        self.most = most
        self.known = [self.prompt] * batch
        """Columns of each row that are settled."""
        self.ended = [False] * batch
        self._pad = pad

    @property
    def open(self) -> list[int]:
        """Rows that go on."""
        return [row for row, ended in enumerate(self.ended) if not ended]

    @property
    def common(self) -> int:
        """Columns that are known of every row that goes on."""
        return min(self.known[row] for row in self.open)

    @property
    def longest(self) -> int:
        """Columns of the longest row."""
        return max(self.known)

    def draft(self, column: int, token_B: Tensor) -> None:
        """Put drafted tokens [B] into a column, in rows that do not know it."""
        for row in self.open:
            if self.known[row] <= column:
                self.ids_BS[row, column] = token_B[row]

    def take(self, token_BN: Tensor, count_B: list[int], stops: StoppingCriteriaList) -> list[int]:
        """Settle each row's next tokens, as far as its text goes on.

        Args:
            token_BN: each row's next tokens.
            count_B: how many of them there are.
            stops: checked after every token, as in decoding one by one.

        Returns:
            How many tokens each row got.
        """
        before = list(self.known)
        for row in self.open:
            count = min(count_B[row], self.most - self.known[row])
            start = self.known[row]
            self.ids_BS[row, start : start + count] = token_BN[row, :count]
            self.ids_BS[row, start + count :] = self._pad
            self.known[row] = start + count
        for column in range(min(before), max(self.known)):
            rows = [row for row in self.open if before[row] <= column < self.known[row]]
            if not rows:
                continue
            done = stops(self.ids_BS[:, : column + 1], None)
            for row in rows:
                if done[row] or column + 1 == self.most:
                    self.ended[row], self.known[row] = True, column + 1
                    self.ids_BS[row, column + 1 :] = self._pad
        return [now - then for now, then in zip(self.known, before, strict=True)]

    def start_B(self, column: int) -> list[int]:
        """Per row, how many columns from that one on are known; of a row that has ended, all there are."""
        return [self.most if ended else known - column for known, ended in zip(self.known, self.ended, strict=True)]

    def result(self) -> Tensor:
        """[B, longest] ids."""
        return self.ids_BS[:, : self.longest].clone()


def continued(values: Tensor, columns: int, how: str) -> Tensor:
    """A prompt's mask, positions or token types [..., S] for so many columns: further ones are `like` the last, one
    `more` than the one before, or `zero`."""
    missing = columns - values.shape[-1]
    if missing <= 0:
        return values[..., :columns]
    last, further = values[..., -1:], torch.arange(1, missing + 1, dtype=values.dtype, device=values.device)
    added = {"like": last + 0 * further, "more": last + further, "zero": 0 * (last + further)}[how]
    return torch.cat([values, added], dim=-1)


_CONTINUED = {
    "attention_mask": "like", "position_ids": "more", "token_type_ids": "like", "mm_token_type_ids": "zero"
}  # fmt: skip
"""Inputs with a column for each token, and what stands in further columns."""


class Feed:
    """Feeds columns to a model; what they leave in its cache is for others to roll back.

    Args:
        model: which generates.
        texts: its rows.
        kwargs: transformers' own for the model's forwards, those of the prompt.
    """

    def __init__(self, model: PreTrainedModel, texts: Texts, kwargs: Mapping[str, Any]) -> None:
        self._model, self._texts = model, texts
        self._kwargs = dict(kwargs)
        for name, how in _CONTINUED.items():
            if self._kwargs.get(name) is not None:
                self._kwargs[name] = continued(self._kwargs[name], texts.most, how)
        self._keeps = "logits_to_keep" in self._kwargs
        self.hidden_BTD: Tensor | None = None
        """Last hidden states of what was fed last, where `output_hidden_states` is among the arguments."""

    def run(self, start: int, end: int, keep: int) -> Tensor:
        """Feed columns start..end-1 behind those in the cache.

        Returns:
            float32 logits [B, keep, V] of the last `keep` of them.
        """
        kwargs = dict(self._kwargs)
        for name in _CONTINUED:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., :end]
        inputs = self._model.prepare_inputs_for_generation(
            self._texts.ids_BS[:, :end], next_sequence_length=end - start, is_first_iteration=False, **kwargs
        )
        if self._keeps:
            inputs["logits_to_keep"] = keep
        output = self._model(**inputs, return_dict=True)
        if self._kwargs.get("output_hidden_states"):
            self.hidden_BTD = output.hidden_states[-1]
        logits: Tensor = output.logits[:, -keep:]
        return logits.float()


_NO_LIMIT = 2**31


class Proposer(ABC):
    """Proposes how one row's text may go on."""

    @abstractmethod
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
        """The model's last hidden states [1, T, D] of tokens that stand, each token once and in order. Most proposers
        read the text alone."""
        del hidden_1TD


class PromptLookup(Proposer):
    """What followed the last tokens where the text had them before.

    Args:
        longest: tokens of the text's end that are looked for first, then fewer.
        eos_token_id: ids that end the text [E], and a draft before them.
        processors: forbid tokens by -inf.
        vocabulary: V; needed with `processors`.

    Raises:
        ExpertcastError: `longest` is not positive.
    """

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
        self._generator.num_output_tokens = most
        ids_1N, _ = self._generator.get_candidates(text_1S)
        return ids_1N[:, text_1S.shape[1] :], None


class Assistant(Proposer):
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


def _cannot_go_back(assistant: PreTrainedModel) -> ExpertcastError:
    return ExpertcastError(
        f"a {type(assistant).__name__} cannot take tokens back: pass an assistant without recurrent states"
    )


# Heads for later tokens


class Heads:
    """A model's heads for later tokens (multi-token prediction), read from its checkpoint: one object for all texts.

    A head is a decoder layer that reads the head before it, the first one the model's last hidden states, and the token
    that came next; it says the token after that. transformers loads them and shares embedding and output head with the
    model (`modeling_layers.MtpModel`).

    A head of a Mixture-of-Experts model has experts of its own, and all of them stay in memory.

    Args:
        model: loaded from a checkpoint (`config._name_or_path`), offloaded or not.

    Raises:
        ExpertcastError: the checkpoint has no such heads, or none that transformers can read.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if not getattr(model.config.get_text_config(), "num_mtp_layers", None):
            raise ExpertcastError(
                f"a {type(model).__name__} has no heads for later tokens (num_mtp_layers): choose another draft"
            )
        device = model.get_input_embeddings().weight.device
        try:
            self.model = MtpModel.from_pretrained(model, device_map={"": device}).eval()
        except (OSError, RuntimeError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ExpertcastError(f"the heads for later tokens cannot be read: {first}; choose another draft") from None
        self.model.config._experts_implementation = "grouped_mm"  # the model's own may know offloaded experts alone
        self.length: int = self.model.num_mtp_layers
        self.device: torch.device = device
        self._shared = {each.data_ptr() for each in model.parameters()}

    @property
    def nbytes(self) -> int:
        """Bytes of the heads' own weights; what they share with the model is not counted twice."""
        return sum(each.nbytes for each in self.model.parameters() if each.data_ptr() not in self._shared)


class HeadsDraft(Proposer):
    """What the heads say of one row's text: up to L tokens.

    What a later head holds of a draft's tokens is computed again with those that stand.

    Args:
        heads: the model's.
        do_sample: draw each token; else the likeliest.
        processors: of the logits, all that sampling asks for among them.
    """

    def __init__(self, heads: Heads, do_sample: bool = False, processors: LogitsProcessorList | None = None) -> None:
        self._heads = heads
        self._do_sample = do_sample
        self._processors = processors
        self._cache = MtpCache(config=heads.model.config)
        self._cache.activate_past_recording()
        self._held = 0
        self._hidden_1TD: Tensor | None = None

    def propose(self, text_1S: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        """As :meth:`Proposer.propose`.

        Raises:
            RuntimeError: the hidden states seen are not those of the text without its last token.
        """
        new = 0 if self._hidden_1TD is None else self._hidden_1TD.shape[1]
        if self._hidden_1TD is None or self._held + new != text_1S.shape[1] - 1:
            raise RuntimeError(f"hidden states of {self._held + new} tokens for a text of {text_1S.shape[1]}")
        length, device = text_1S.shape[1], self._heads.device
        ids_1L, logits_1LV, _ = self._heads.model(
            input_ids=text_1S[:, length - new :].to(device),
            last_hidden_states=self._hidden_1TD,
            attention_mask=None,
            position_ids=torch.arange(length - new, length, device=device)[None],
            mtp_cache=self._cache,
            do_sample=self._do_sample,
            logits_processor=self._processors,
            full_input_ids=text_1S.to(device),
        )
        again = min(self._heads.length - 1, self._held + new)
        self._cache.crop(-again)
        self._held += new - again
        self._hidden_1TD = self._hidden_1TD[:, new - again :]
        ids_1m, logits_1mV = ids_1L[:, :most].to(text_1S.device), logits_1LV[:, :most].to(text_1S.device)
        return ids_1m, logits_1mV if self._do_sample else None

    def saw(self, hidden_1TD: Tensor) -> None:
        """The model's last hidden states of tokens that stand, each once: `hidden_states[-1]` of its output."""
        hidden_1TD = hidden_1TD.to(self._heads.device)
        before = self._hidden_1TD
        self._hidden_1TD = hidden_1TD if before is None else torch.cat([before, hidden_1TD], dim=1)


class RowProposers:
    """What one draft proposes for all rows.

    Args:
        proposers: one for each row.
        texts: the rows.
        first_B: each row's first column that is no padding.
    """

    def __init__(self, proposers: list[Proposer], texts: Texts, first_B: list[int]) -> None:
        self._proposers, self._texts, self._first_B = proposers, texts, first_B
        self._seen_B = list(first_B)
        """Columns of which each row's proposer has seen the hidden states."""

    def saw(self, begin: int, hidden_BTD: Tensor) -> None:
        """Show each proposer what it has not seen of its row's tokens that stand.

        Args:
            begin: the first column that was fed.
            hidden_BTD: the model's last hidden states [B, T, D] from there on.
        """
        for row, proposer in enumerate(self._proposers):
            start, end = self._seen_B[row], min(self._texts.known[row] - 1, begin + hidden_BTD.shape[1])
            if start < end:
                proposer.saw(hidden_BTD[row : row + 1, start - begin : end - begin])
                self._seen_B[row] = end

    def propose(self, most: int) -> tuple[int, Tensor | None]:
        """Put proposals behind the columns that are settled in all rows.

        Returns:
            Columns of the longest proposal, and the processed logits [B, m, V] that they were drawn from, if they were.
        """
        texts, settled = self._texts, self._texts.common
        found: dict[int, tuple[Tensor, Tensor | None]] = {}
        for row in texts.open:
            known = min(texts.known[row], settled + most)
            further = settled + most - known
            if further:
                text_1S = texts.ids_BS[row : row + 1, self._first_B[row] : known]
                found[row] = self._proposers[row].propose(text_1S, further)
                ids_1m = found[row][0]
                texts.ids_BS[row, known : known + ids_1m.shape[1]] = ids_1m[0]
        ends = [min(texts.known[row], settled + most) + ids.shape[1] for row, (ids, _) in found.items()]
        count = max([settled, *ends]) - settled
        drawn = {row: logits for row, (_, logits) in found.items() if logits is not None}
        if not drawn or not count:
            return count, None
        vocabulary = next(iter(drawn.values())).shape[-1]
        # what was not drawn from anything could have been nothing else
        logits_BmV = torch.full((len(texts.known), count, vocabulary), float("-inf"), device=texts.ids_BS.device)
        logits_BmV.scatter_(2, texts.ids_BS[:, settled : settled + count, None], 0.0)
        for row, logits_1mV in drawn.items():
            start = texts.known[row] - settled
            logits_BmV[row, start : start + logits_1mV.shape[1]] = logits_1mV[0].float()
        return count, logits_BmV
