"""Decoding loop that drafts and verifies; it replaces the loop of transformers' `generate`.

A cycle drafts n tokens after the settled ones, rolls the cache back, and runs the exact model over the drafted tokens
in one pass, which loads each expert once for all of them. The tokens that the exact model would have chosen are
accepted, and the pass yields one more token.

B sequences, V vocabulary size, n drafted tokens, N = n + 1 verified positions. Columns are those of
:class:`.sequences.Sequences`.

Source: MoE-SpeQ; Leviathan et al. (2023) for verification.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, StopStringCriteria

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.drafts.cache import SharedCache
from expertcast.runtime.drafts.costs import Choice, Cycle
from expertcast.runtime.drafts.governor import DraftCount, Governor
from expertcast.runtime.drafts.kinds import PassDraft
from expertcast.runtime.drafts.prefetch import Schedule
from expertcast.runtime.drafts.sequences import Feed, Sequences
from expertcast.runtime.engine.engine import Engine

# Verification of drafted tokens: the accepted ones and the next token.
#
# B rows, n drafted tokens, N = n + 1, V vocabulary size. Position i of the exact logits belongs to drafted token i, and
# position n to the token after all drafted ones. The first tokens of a row may be settled already; they are always
# accepted.


def pick(scores_BV: Tensor, *, sample: bool) -> Tensor:
    """Return the next token of each row [B] from processed logits [B, V]: sampled, or the likeliest."""
    if not sample:
        return scores_BV.argmax(dim=-1)
    return torch.multinomial(scores_BV.softmax(dim=-1), num_samples=1).squeeze(1)


def accept_greedy(logits_BNV: Tensor, drafted_Bn: Tensor, start_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens up to the first that differs from the model's likeliest token.

    Args:
        logits_BNV: processed exact logits [B, n + 1, V].
        drafted_Bn: drafted ids [B, n].
        start_B: number of leading tokens that are settled, 0 to n; None: 0.

    Returns:
        ids [B, n + 1]: in each row the accepted tokens, the next token, then -1; and the number of accepted tokens [B],
        including settled ones.

    Example:
        >>> import torch
        >>> from expertcast.runtime.drafts.decoding import accept_greedy
        >>> logits_BNV = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])  # the likeliest tokens are 1, 0, 1
        >>> accept_greedy(logits_BNV, torch.tensor([[1, 1]]))
        (tensor([[ 1,  0, -1]]), tensor([1]))
    """
    likeliest_BN = logits_BNV.argmax(dim=-1)
    accepted_B = _standing(drafted_Bn == likeliest_BN[:, :-1], start_B)
    return _joined(drafted_Bn, accepted_B, likeliest_BN.gather(1, accepted_B[:, None])), accepted_B


def accept_sampled(
    logits_BNV: Tensor,
    drafted_Bn: Tensor,
    draft_logits_BnV: Tensor | None,
    start_B: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens by rejection sampling, so that the result follows the exact distribution p.

    A token drafted from q is accepted with probability min(1, p / q). The first rejected one is replaced by a sample of
    the normalised max(p - q, 0). If all are accepted, the next token is a sample of p.

    Source: Leviathan et al. (2023, arXiv 2211.17192); Chen et al. (2023, arXiv 2302.01318).

    Args:
        logits_BNV: processed exact logits [B, n + 1, V]: temperature applied, -inf for excluded tokens.
        drafted_Bn: drafted ids [B, n], sampled from q.
        draft_logits_BnV: processed logits of q [B, n, V]; None: no token is drafted.
        start_B: number of leading tokens that are settled, 0 to n; None: 0.
        generator: random generator on the device of the logits.

    Returns:
        The same as :func:`accept_greedy`.
    """
    rows, drafted = drafted_Bn.shape
    device = logits_BNV.device
    chance_Bn = torch.rand(rows, drafted, device=device, generator=generator)
    if draft_logits_BnV is not None:
        chance_Bn = chance_Bn * _probability(draft_logits_BnV, drafted_Bn)
    accepted_B = _standing(chance_Bn < _probability(logits_BNV[:, :-1], drafted_Bn), start_B)
    row_B = torch.arange(rows, device=device)
    p_BV = logits_BNV[row_B, accepted_B].float().softmax(dim=-1)
    left_BV = p_BV
    rejected_B = accepted_B < drafted
    if draft_logits_BnV is not None and drafted:
        at_B = accepted_B.clamp(max=drafted - 1)
        left_BV = (left_BV - draft_logits_BnV[row_B, at_B].float().softmax(dim=-1)).clamp(min=0.0)
    # the difference is 0 where p and q are equal up to rounding: sample from p there
    use_B = rejected_B & (left_BV.sum(dim=-1) > 0)
    next_B1 = torch.multinomial(torch.where(use_B[:, None], left_BV, p_BV), 1, generator=generator)
    return _joined(drafted_Bn, accepted_B, next_B1), accepted_B


def _probability(logits_BnV: Tensor, ids_Bn: Tensor) -> Tensor:
    """Return the probability of each id [B, n], float32."""
    logits_BnV = logits_BnV.float()
    return (logits_BnV.gather(2, ids_Bn[..., None])[..., 0] - logits_BnV.logsumexp(dim=-1)).exp()


def _standing(right_Bn: Tensor, start_B: Tensor | None) -> Tensor:
    """Return the number of positions before the first wrong one [B]; positions before `start_B` count as right."""
    if start_B is not None:
        right_Bn = right_Bn | (torch.arange(right_Bn.shape[1], device=right_Bn.device) < start_B[:, None])
    return right_Bn.long().cumprod(dim=1).sum(dim=1)


def _joined(drafted_Bn: Tensor, accepted_B: Tensor, next_B1: Tensor) -> Tensor:
    """Return accepted tokens, the next token, then -1 [B, n + 1]."""
    place_N = torch.arange(drafted_Bn.shape[1] + 1, device=drafted_Bn.device)
    ids_BN = torch.cat([drafted_Bn, next_B1], dim=1).masked_fill(place_N > accepted_B[:, None], -1)
    return ids_BN.scatter(1, accepted_B[:, None], next_B1)


# Arguments of `generate`


def check_generate_arguments(
    config: GenerationConfig, kwargs: Mapping[str, Any], input_ids: Tensor, streamer: BaseStreamer | None
) -> None:
    """Check that the arguments of `generate` can be combined with drafts.

    Raises:
        ExpertcastError: an argument excludes drafts.
    """
    refused = {
        "num_beams": config.num_beams > 1,
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "guidance_scale": config.guidance_scale not in (None, 1.0),
        "use_cache=False": not config.use_cache,
        "a streamer for several sequences": streamer is not None and len(input_ids) > 1,
        "inputs_embeds": kwargs.get("inputs_embeds") is not None,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        "assistant_early_exit": config.assistant_early_exit is not None,
    }
    for argument, is_set in refused.items():
        if is_set:
            raise ExpertcastError(f"a draft does not go with {argument}: leave one of them out")


def extract_stop_strings(kwargs: dict[str, Any]) -> None:
    """Replace stop strings by a stopping criterion, in place.

    `generate` does not pass the tokenizer on to a custom decoding loop, so it cannot do this itself.

    Raises:
        ExpertcastError: there are stop strings and no tokenizer.
    """
    config = kwargs.get("generation_config")
    strings = kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None)
    tokenizer = kwargs.pop("tokenizer", None)
    if strings is None:
        return
    if tokenizer is None:
        raise ExpertcastError("stop_strings need a tokenizer: pass tokenizer=... as well")
    if config is not None:
        kwargs["generation_config"] = config = copy.copy(config)
        config.stop_strings = None
    criteria = kwargs.get("stopping_criteria") or []
    kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, strings)])


# Scores and logits


class Outputs:
    """Scores and logits of the settled tokens, if the configuration requests them.

    Args:
        config: configuration of `generate`.
        batch: number of sequences, B.
    """

    def __init__(self, config: GenerationConfig, batch: int) -> None:
        self._config = config
        self._scores: list[list[Tensor]] = [[] for _ in range(batch)]
        self._logits: list[list[Tensor]] = [[] for _ in range(batch)]

    def keep(self, row: int, logits_V: Tensor, scores_V: Tensor) -> None:
        """Store the logits and processed logits of a settled token."""
        if self._config.return_dict_in_generate:
            if self._config.output_logits:
                self._logits[row].append(logits_V)
            if self._config.output_scores:
                self._scores[row].append(scores_V)

    def result(self, ids_BS: Tensor, cache: Cache) -> Tensor | GenerateDecoderOnlyOutput:
        """Return the ids, or the output object that the configuration requests."""
        config = self._config
        if not config.return_dict_in_generate:
            return ids_BS
        return GenerateDecoderOnlyOutput(
            sequences=ids_BS,
            scores=_steps(self._scores) if config.output_scores else None,
            logits=_steps(self._logits) if config.output_logits else None,
            past_key_values=cache,
        )


def _steps(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Return one tensor [B, V] per step; rows that ended earlier are 0."""
    most = max(map(len, rows), default=0)
    return tuple(
        torch.stack([row[step] if step < len(row) else torch.zeros_like(rows[0][0]) for row in rows])
        for step in range(most)
    )


class DraftedDecoding:
    """Generation of one batch with drafts.

    Args:
        engine: engine of the exact model.
        schedule: loads the experts that drafts are routed to.
        drafts: drafts by name; exactly one if there is a `length`.
        governor: chooses the draft and its length, and learns from every cycle.
        counts: counts by draft, which every cycle changes.
        length: number of tokens drafted per cycle; None: the governor chooses.
        optional: decode without drafts, instead of raising, if the model cannot be verified.
        streamer: receives every settled token.
    """

    def __init__(
        self, engine: Engine, schedule: Schedule, drafts: Mapping[str, PassDraft], governor: Governor,
        counts: dict[str, DraftCount], *,
        length: int | None, optional: bool, streamer: BaseStreamer | None,
    ) -> None:  # fmt: skip
        self._engine, self._schedule, self._drafts = engine, schedule, drafts
        self._governor, self._counts, self._length, self._optional = governor, counts, length, optional
        self._streamer = streamer
        self._residency = engine.flow.residency
        self.verifiable = False
        """Whether a check has shown that a pass over several tokens equals single steps."""

    @torch.no_grad()
    def generate(
        self, model: PreTrainedModel, input_ids: Tensor, logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:  # fmt: skip
        """Generate; `generate` of transformers calls this as `custom_generate`.

        Raises:
            ExpertcastError: an argument excludes drafts, or the model cannot be verified and drafts are not optional.
        """
        check_generate_arguments(generation_config, model_kwargs, input_ids, self._streamer)
        self._model, self._config = model, generation_config
        self._process, self._stops = logits_processor, stopping_criteria
        output = model._prefill(input_ids, generation_config, model_kwargs)
        pad = generation_config._pad_token_tensor
        self._sequences = sequences = Sequences(input_ids, generation_config.max_length, 0 if pad is None else int(pad))
        self._cache = SharedCache(output.past_key_values)
        model_kwargs["past_key_values"] = output.past_key_values
        self._feed = Feed(model, sequences, model_kwargs)
        self._outputs = Outputs(generation_config, len(sequences.known))
        try:
            with model._optimize_model_for_decode():
                self._check_verifiable()
                self._settle(output.logits[:, -1:].float(), 0)
                del output
                while sequences.open:
                    self._cycle()
        finally:
            self._schedule.stop()
            self._cache.roll_back(min(self._cache.length, self._columns()))
        if self._streamer is not None:
            self._streamer.end()
        return self._outputs.result(sequences.result(), self._cache.cache)

    def _columns(self) -> int:
        """Return the number of columns that belong in the cache; the last settled token of a row is not fed yet."""
        sequences = self._sequences
        return max(sequences.prompt, (sequences.common if sequences.open else sequences.longest) - 1)

    def _check_verifiable(self) -> None:
        """Check the model once, unless the generation is too short for a draft."""
        start = self._cache.length
        if not self.verifiable and self._sequences.most - self._sequences.prompt > 2:
            try:
                self._cache.check_verifiable(self._model, lambda: self._feed.run(start, self._sequences.prompt + 2, 1))
            except ExpertcastError:
                if not self._optional:
                    raise
                self._drafts = {}
            else:
                self.verifiable = True

    def _choose(self, most: int) -> Choice:
        """Return the choice for the next cycle, with at most `most` drafted tokens."""
        if self._length is None:
            return self._governor.choose(list(self._drafts), most)
        (name,) = self._drafts
        length = min(self._length, most)
        return Choice(draft=name if length else None, length=length, longest=length, trial=True)

    def _cycle(self) -> None:
        sequences, cache, schedule = self._sequences, self._cache, self._schedule
        start = perf_counter()
        settled = sequences.common
        choice = self._choose(max(0, sequences.most - settled - 1))
        begin, cycle, logits = cache.length, Cycle(draft=choice.draft), None
        cache.mark()
        schedule.begin()
        if choice.draft is not None:
            logits = self._write(self._drafts[choice.draft], choice, cycle)
            begin = cache.roll_back(begin)
            cache.mark()
        cycle.growth = tuple(schedule.buffer.growth[: cycle.drafted])
        verified = perf_counter()
        waited_s, before_verifying = self._residency.stats.waited_s, self._requests()
        if cycle.drafted:
            schedule.verify()
        logits_BNV = self._feed.run(begin, settled + cycle.drafted, cycle.drafted + 1)
        cycle.known = tuple(min(cycle.drafted, first) for first in sequences.start_B(settled))
        before = list(sequences.known)
        cycle.accepted = tuple(self._settle(logits_BNV, cycle.drafted, logits))
        schedule.end()
        cache.roll_back(min(cache.length, self._columns()))
        end = perf_counter()
        cycle.verify_s, cycle.seconds = end - verified, end - start
        cycle.waited_s = self._residency.stats.waited_s - waited_s
        cycle.needed, cycle.covered, misses = (
            after - then for after, then in zip(self._requests(), before_verifying, strict=True)
        )
        cycle.waited_bytes, cycle.matches = misses * self._residency.pool.layout.block_bytes, schedule.matches
        rows = [row for row, length in enumerate(before) if length < sequences.most]
        cycle.emitted = sum(sequences.known[row] - before[row] for row in rows) / max(1, len(rows))
        self._governor.observe(cycle)
        if cycle.draft is not None:
            self._counts.setdefault(cycle.draft, DraftCount()).observe(cycle)

    def _requests(self) -> list[int]:
        """Return the requests, hits and misses of all layers so far."""
        layers = self._residency.stats.layers
        return [sum(getattr(each, name) for each in layers) for name in ("requests", "hits", "misses")]

    def _write(self, draft: PassDraft, choice: Choice, cycle: Cycle) -> Tensor | None:
        """Draft with passes of the model, one token per pass.

        Returns:
            Processed logits [B, n, V] if tokens are sampled.
        """
        sequences, schedule, logits = self._sequences, self._schedule, []
        settled, fed = sequences.common, self._cache.length
        with draft.passes():
            while cycle.drafted < choice.longest:
                start, column = perf_counter(), settled + cycle.drafted
                schedule.draft(cycle.drafted)
                logits_BV = self._feed.run(fed, column, 1)[:, 0]
                fed = column
                scores_BV = self._process(sequences.ids_BS[:, :column], logits_BV)
                token_B = pick(scores_BV, sample=self._config.do_sample)
                sequences.draft(column, token_B)
                schedule.drafted()
                logits.append(scores_BV)
                cycle.drafted += 1
                cycle.passes_s += (perf_counter() - start,)
                if self._all_end(column) or not self._governor.should_continue(choice, schedule.buffer):
                    break
            self._residency.keep_full_only()  # inside `passes`, so that an interruption here also ends the draft
        return torch.stack(logits, dim=1) if self._config.do_sample else None

    def _settle(self, logits_BNV: Tensor, count: int, draft_logits_BnV: Tensor | None = None) -> list[int]:
        """Accept drafted tokens by the logits of the exact model, and add the next token.

        Args:
            logits_BNV: exact logits of the drafted columns and of the one after them.
            count: number of drafted columns.
            draft_logits_BnV: logits that the drafted tokens were sampled from.

        Returns:
            Number of accepted columns of each row, including columns that were settled before.
        """
        sequences = self._sequences
        settled = sequences.common
        scores_BNV = logits_BNV.clone() if len(self._process) else logits_BNV
        if len(self._process):
            for place in range(logits_BNV.shape[1]):
                ids_BS = sequences.ids_BS[:, : settled + place]
                scores_BNV[:, place] = self._process(ids_BS, logits_BNV[:, place])
        drafted_BN = sequences.ids_BS[:, settled : settled + count]
        starts = sequences.start_B(settled)
        start_B = torch.tensor(starts, device=drafted_BN.device).clamp(max=count)
        if self._config.do_sample:
            token_BN, accepted_B = accept_sampled(scores_BNV, drafted_BN, draft_logits_BnV, start_B)
        else:
            token_BN, accepted_B = accept_greedy(scores_BNV, drafted_BN, start_B)
        accepted, before = accepted_B.tolist(), list(sequences.known)
        rows, counts = torch.zeros_like(token_BN), []
        for row, (first, kept) in enumerate(zip(starts, accepted, strict=True)):
            new = max(0, kept + 1 - first)
            rows[row, :new] = token_BN[row, first : first + new]
            counts.append(new)
        for row, new in enumerate(sequences.settle(rows, counts, self._stops)):
            for column in range(before[row], before[row] + new):
                self._outputs.keep(row, logits_BNV[row, column - settled], scores_BNV[row, column - settled])
                if self._streamer is not None:
                    self._streamer.put(sequences.ids_BS[row, column : column + 1].cpu())
        return accepted

    def _all_end(self, column: int) -> bool:
        """Return whether every open row has an end token in this column."""
        ends = self._config._eos_token_tensor
        if ends is None:
            return False
        return bool(torch.isin(self._sequences.ids_BS[self._sequences.open, column], ends).all())
