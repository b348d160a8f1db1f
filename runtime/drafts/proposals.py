"""State of the sequences during generation, and proposers: prompt lookup, assistant models, multi-token prediction.

A draft may be accepted further in one row than in another, so rows have different lengths. All rows share the columns
of the cache; tokens that a row has beyond them are fed again until the other rows catch up. A column is the position of
a token in its row, including padding on the left.

B sequences, S tokens of a sequence, m drafted tokens, V vocabulary size, L heads, T tokens with new hidden states,
D hidden size.
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
from transformers.cache_utils import MtpCache
from transformers.generation import AssistedCandidateGenerator, CandidateGenerator, PromptLookupCandidateGenerator
from transformers.modeling_layers import MtpModel

from expertcast.predictors.messages import ExpertcastError


class Sequences:
    """Token ids of a batch and the number of settled tokens of each row.

    Args:
        prompt_BS: ids of the prompts [B, S].
        most: maximum number of columns, more than S.
        pad: id that fills a row after its end.
    """

    def __init__(self, prompt_BS: Tensor, most: int, pad: int) -> None:
        batch, self.prompt = prompt_BS.shape
        self.ids_BS = prompt_BS.new_full((batch, most), pad)
        """Ids of all columns; columns that are not settled may hold a draft."""
        self.ids_BS[:, : self.prompt] = prompt_BS
        self.most = most
        self.known = [self.prompt] * batch
        """Number of settled columns of each row."""
        self.ended = [False] * batch
        self._pad = pad

    @property
    def open(self) -> list[int]:
        """Rows that have not ended."""
        return [row for row, ended in enumerate(self.ended) if not ended]

    @property
    def common(self) -> int:
        """Number of columns that are settled in all open rows."""
        return min(self.known[row] for row in self.open)

    @property
    def longest(self) -> int:
        """Number of settled columns of the longest row."""
        return max(self.known)

    def draft(self, column: int, token_B: Tensor) -> None:
        """Write drafted tokens [B] into a column of the rows where it is not settled."""
        for row in self.open:
            if self.known[row] <= column:
                self.ids_BS[row, column] = token_B[row]

    def settle(self, token_BN: Tensor, count_B: list[int], stops: StoppingCriteriaList) -> list[int]:
        """Append tokens to every open row, up to its end.

        Args:
            token_BN: next tokens of each row.
            count_B: number of valid tokens of each row.
            stops: stopping criteria, checked after every token as in decoding one by one.

        Returns:
            Number of tokens appended to each row.
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
        """Return the number of settled columns of each row from a column on; `most` for a row that has ended."""
        return [self.most if ended else known - column for known, ended in zip(self.known, self.ended, strict=True)]

    def result(self) -> Tensor:
        """Return the settled ids [B, longest]."""
        return self.ids_BS[:, : self.longest].clone()


def continued(values: Tensor, columns: int, how: str) -> Tensor:
    """Extend an input of the prompt [..., S] to a number of columns.

    Args:
        values: mask, positions or token types of the prompt.
        columns: number of columns of the result.
        how: new values: `like` the last one, one `more` than the previous one, or `zero`.
    """
    missing = columns - values.shape[-1]
    if missing <= 0:
        return values[..., :columns]
    last, further = values[..., -1:], torch.arange(1, missing + 1, dtype=values.dtype, device=values.device)
    added = {"like": last + 0 * further, "more": last + further, "zero": 0 * (last + further)}[how]
    return torch.cat([values, added], dim=-1)


_CONTINUED = {
    "attention_mask": "like", "position_ids": "more", "token_type_ids": "like", "mm_token_type_ids": "zero"
}  # fmt: skip
"""Inputs with one column per token, and how :func:`continued` extends them."""


class Feed:
    """Runs the model over columns of the sequences; the caller rolls the cache back.

    Args:
        model: the generating model.
        sequences: sequences of the batch.
        kwargs: arguments of the model's forward pass over the prompt, as transformers prepares them.
    """

    def __init__(self, model: PreTrainedModel, sequences: Sequences, kwargs: Mapping[str, Any]) -> None:
        self._model, self._sequences = model, sequences
        self._kwargs = dict(kwargs)
        for name, how in _CONTINUED.items():
            if self._kwargs.get(name) is not None:
                self._kwargs[name] = continued(self._kwargs[name], sequences.most, how)
        self._keeps = "logits_to_keep" in self._kwargs
        self.hidden_BTD: Tensor | None = None
        """Last hidden states of the latest run [B, T, D], if `output_hidden_states` is among the arguments."""

    def run(self, start: int, end: int, keep: int) -> Tensor:
        """Run the model over columns `start` to `end` - 1, after those in the cache.

        Returns:
            Logits of the last `keep` columns [B, keep, V], float32.
        """
        kwargs = dict(self._kwargs)
        for name in _CONTINUED:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., :end]
        inputs = self._model.prepare_inputs_for_generation(
            self._sequences.ids_BS[:, :end], next_sequence_length=end - start, is_first_iteration=False, **kwargs
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
    """Base class of proposers, which continue one row."""

    @abstractmethod
    def propose(self, ids_1S: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        """Propose the next tokens of the row.

        Args:
            ids_1S: settled ids of the row without padding [1, S]; a later call continues an earlier one.
            most: maximum number of tokens, 1 or more.

        Returns:
            ids [1, m] with m from 0 to `most`, and the processed logits that they were sampled from [1, m, V]; None for
            deterministic proposals.
        """

    def see_hidden(self, hidden_1TD: Tensor) -> None:
        """Read the model's last hidden states [1, T, D] of settled tokens, each token once and in order."""
        del hidden_1TD


class PromptLookup(Proposer):
    """Proposes the tokens that followed an earlier occurrence of the last tokens.

    Args:
        longest: maximum number of last tokens to search for; shorter ends are searched for next.
        eos_token_id: ids that end a sequence; a proposal stops before them.
        processors: logits processors; a proposal stops before tokens that they set to -inf.
        vocabulary: vocabulary size, V; needed with `processors`.

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

    def propose(self, ids_1S: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        """Propose tokens; none if the last token of the row does not occur earlier."""
        self._generator.num_output_tokens = most
        ids_1N, _ = self._generator.get_candidates(ids_1S)
        return ids_1N[:, ids_1S.shape[1] :], None


class Assistant(Proposer):
    """Proposes tokens by a smaller model with its own cache.

    Unlike in `generate`, the confidence of the assistant does not shorten a proposal, since the governor chooses the
    length. If the vocabularies differ, ids are translated through text, and the proposal is the assistant's likeliest
    tokens even if the model samples. (The translation of transformers 5.23 for sampling, `AssistantToTargetTranslator`,
    returns logits of other tokens than the drafted ones and changes the assistant's head.)

    Args:
        model: model that verifies.
        assistant: model that drafts.
        config: configuration as `generate` prepares it.
        processors: logits processors of the caller; `generate` adds the processors of `config`.
        tokenizer: tokenizer of the model, needed if the vocabularies differ.
        assistant_tokenizer: tokenizer of the assistant, needed if the vocabularies differ.

    Raises:
        ExpertcastError: the vocabularies differ in size and a tokenizer is missing; they are equal and there is an
            `assistant_tokenizer`; or the assistant has recurrent states.
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
            raise _cannot_roll_back(assistant)
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

    def propose(self, ids_1S: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        """Propose tokens; fewer than `most` if the proposal ends the sequence or is translated.

        Raises:
            ExpertcastError: the assistant has recurrent states.
        """
        self._roll_back_to(ids_1S)
        if self._generator is None:
            self._generator = self._new_generator(ids_1S)
        self._generator.num_assistant_tokens = most
        ids_1N, logits_1mV = self._generator.get_candidates(ids_1S)
        if not self._generator.assistant_kwargs["past_key_values"].is_croppable:
            raise _cannot_roll_back(self._assistant)
        self._last_1N = ids_1N.to(ids_1S.device)
        length = ids_1S.shape[1]
        drafted_1m = self._last_1N[:, length : length + most]
        if logits_1mV is not None:
            logits_1mV = logits_1mV[:, : drafted_1m.shape[1]].to(ids_1S.device)
        return drafted_1m, logits_1mV if self._config.do_sample else None

    def _roll_back_to(self, ids_1S: Tensor) -> None:
        """Remove tokens from the assistant's cache that differ from the row, or start with a new cache.

        transformers does this itself if the row is a prefix of the last candidates plus one token; its translation
        relies on this.
        """
        if self._generator is None:
            return
        shared = min(self._last_1N.shape[1], ids_1S.shape[1])
        differs = (self._last_1N[0, :shared] != ids_1S[0, :shared]).nonzero()
        same = int(differs[0]) if len(differs) else shared
        if same >= ids_1S.shape[1] - 1:
            return
        cache = self._generator.assistant_kwargs.get("past_key_values")
        if self._translates:
            self._generator = None
        elif cache is not None and cache.get_seq_length() > same:
            cache.crop(same - cache.get_seq_length())

    def _new_generator(self, ids_1S: Tensor) -> AssistedCandidateGenerator:
        generator: CandidateGenerator = self._model._get_candidate_generator(
            generation_config=self._config,
            input_ids=ids_1S,
            inputs_tensor=ids_1S,
            logits_processor=self._processors,
            model_kwargs={"attention_mask": torch.ones_like(ids_1S)},
            assistant_model=self._assistant,
            target_tokenizer=self._tokenizers[0],
            assistant_tokenizer=self._tokenizers[1],
        )
        if not isinstance(generator, AssistedCandidateGenerator):
            raise ExpertcastError(
                f"a {type(self._assistant).__name__} needs states of the model, which drafts do not provide: pass a "
                "causal language model as assistant"
            )
        for config in (generator.generation_config, generator.assistant_generation_config):
            config.assistant_confidence_threshold = 0.0
        return generator


def _cannot_roll_back(assistant: PreTrainedModel) -> ExpertcastError:
    return ExpertcastError(
        f"a {type(assistant).__name__} cannot be rolled back: pass an assistant without recurrent states"
    )


# MtpHeads for later tokens


class MtpHeads:
    """Multi-token prediction heads of a model, read from its checkpoint; all rows share them.

    A head is a decoder layer. It reads the previous head, or the model's last hidden states for the first head, and the
    next token, and predicts the token after that. `transformers.modeling_layers.MtpModel` loads the heads and shares
    embedding and output head with the model. Experts of the heads are not offloaded.

    Args:
        model: model loaded from a checkpoint (`config._name_or_path`), offloaded or not.

    Raises:
        ExpertcastError: the checkpoint has no such heads, or transformers cannot read them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if not getattr(model.config.get_text_config(), "num_mtp_layers", None):
            raise ExpertcastError(
                f"a {type(model).__name__} has no heads for later tokens (num_mtp_layers): choose another draft"
            )
        device = model.device
        try:
            self.model = MtpModel.from_pretrained(model, device_map={"": device}).eval()
        except (OSError, RuntimeError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ExpertcastError(f"the heads for later tokens cannot be read: {first}; choose another draft") from None
        self.model.config._experts_implementation = "grouped_mm"  # the model's own serves offloaded experts only
        self.length: int = self.model.num_mtp_layers
        self.device: torch.device = device
        self._shared = {each.data_ptr() for each in model.parameters()}

    @property
    def nbytes(self) -> int:
        """Bytes of the heads' weights, without those shared with the model."""
        return sum(each.nbytes for each in self.model.parameters() if each.data_ptr() not in self._shared)


class MtpProposer(Proposer):
    """Proposes up to L tokens by multi-token prediction heads.

    After verification, the cache entries of the later heads are computed again with the settled tokens.

    Args:
        heads: heads of the model.
        do_sample: sample each token instead of choosing the likeliest.
        processors: logits processors, including those for sampling.
    """

    def __init__(self, heads: MtpHeads, do_sample: bool = False, processors: LogitsProcessorList | None = None) -> None:
        self._heads = heads
        self._do_sample = do_sample
        self._processors = processors
        self._cache = MtpCache(config=heads.model.config)
        self._cache.activate_past_recording()
        self._held = 0
        self._hidden_1TD: Tensor | None = None

    def propose(self, ids_1S: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        """Propose tokens.

        Raises:
            RuntimeError: the hidden states so far are not those of all tokens but the last one.
        """
        new = 0 if self._hidden_1TD is None else self._hidden_1TD.shape[1]
        if self._hidden_1TD is None or self._held + new != ids_1S.shape[1] - 1:
            raise RuntimeError(f"hidden states of {self._held + new} tokens for a sequence of {ids_1S.shape[1]}")
        length, device = ids_1S.shape[1], self._heads.device
        ids_1L, logits_1LV, _ = self._heads.model(
            input_ids=ids_1S[:, length - new :].to(device),
            last_hidden_states=self._hidden_1TD,
            attention_mask=None,
            position_ids=torch.arange(length - new, length, device=device)[None],
            mtp_cache=self._cache,
            do_sample=self._do_sample,
            logits_processor=self._processors,
            full_input_ids=ids_1S.to(device),
        )
        again = min(self._heads.length - 1, self._held + new)
        self._cache.crop(-again)
        self._held += new - again
        self._hidden_1TD = self._hidden_1TD[:, new - again :]
        ids_1m, logits_1mV = ids_1L[:, :most].to(ids_1S.device), logits_1LV[:, :most].to(ids_1S.device)
        return ids_1m, logits_1mV if self._do_sample else None

    def see_hidden(self, hidden_1TD: Tensor) -> None:
        hidden_1TD = hidden_1TD.to(self._heads.device)
        before = self._hidden_1TD
        self._hidden_1TD = hidden_1TD if before is None else torch.cat([before, hidden_1TD], dim=1)


class RowProposers:
    """Proposers of all rows of a batch.

    Args:
        proposers: one proposer per row.
        sequences: sequences of the batch.
        first_B: first column of each row after its padding.
    """

    def __init__(self, proposers: list[Proposer], sequences: Sequences, first_B: list[int]) -> None:
        self._proposers, self._sequences, self._first_B = proposers, sequences, first_B
        self._seen_B = list(first_B)
        """Number of columns whose hidden states each proposer has received."""

    def see_hidden(self, begin: int, hidden_BTD: Tensor) -> None:
        """Pass the hidden states of newly settled tokens to the proposers.

        Args:
            begin: first column of the hidden states.
            hidden_BTD: last hidden states of the model [B, T, D].
        """
        for row, proposer in enumerate(self._proposers):
            start, end = self._seen_B[row], min(self._sequences.known[row] - 1, begin + hidden_BTD.shape[1])
            if start < end:
                proposer.see_hidden(hidden_BTD[row : row + 1, start - begin : end - begin])
                self._seen_B[row] = end

    def propose(self, most: int) -> tuple[int, Tensor | None]:
        """Write proposals after the columns that are settled in all rows.

        Args:
            most: maximum number of columns.

        Returns:
            Number of columns of the longest proposal, and the processed logits that proposals were sampled from
            [B, m, V]; None for deterministic proposals.
        """
        sequences, settled = self._sequences, self._sequences.common
        found: dict[int, tuple[Tensor, Tensor | None]] = {}
        for row in sequences.open:
            known = min(sequences.known[row], settled + most)
            further = settled + most - known
            if further:
                ids_1S = sequences.ids_BS[row : row + 1, self._first_B[row] : known]
                found[row] = self._proposers[row].propose(ids_1S, further)
                ids_1m = found[row][0]
                sequences.ids_BS[row, known : known + ids_1m.shape[1]] = ids_1m[0]
        ends = [min(sequences.known[row], settled + most) + ids.shape[1] for row, (ids, _) in found.items()]
        count = max([settled, *ends]) - settled
        drawn = {row: logits for row, (_, logits) in found.items() if logits is not None}
        if not drawn or not count:
            return count, None
        vocabulary = next(iter(drawn.values())).shape[-1]
        # settled and deterministic tokens have probability 1
        logits_BmV = torch.full(
            (len(sequences.known), count, vocabulary), float("-inf"), device=sequences.ids_BS.device
        )
        logits_BmV.scatter_(2, sequences.ids_BS[:, settled : settled + count, None], 0.0)
        for row, logits_1mV in drawn.items():
            start = sequences.known[row] - settled
            logits_BmV[row, start : start + logits_1mV.shape[1]] = logits_1mV[0].float()
        return count, logits_BmV
