"""The decoding loop that drafts and verifies, in place of transformers' own (rows C4, C9, C11, C14).

A cycle drafts n tokens behind those that are settled, rolls the cache back, and feeds them to the exact model in one
pass, which reads every expert once for all of them. What the exact model would have chosen stays, with one token more.

B sequences, V vocabulary, n drafted tokens. Columns are those of :class:`.proposals.Texts`.
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
from expertcast.runtime.drafts.acceptance import accept_greedy, accept_sampled, pick
from expertcast.runtime.drafts.cache import SharedCache
from expertcast.runtime.drafts.costs import Choice, Cycle
from expertcast.runtime.drafts.governor import Governor, Tally
from expertcast.runtime.drafts.kinds import Draft, PassDraft, ProposalDraft
from expertcast.runtime.drafts.prefetch import Schedule
from expertcast.runtime.drafts.proposals import Feed, RowProposers, Texts
from expertcast.runtime.engine.engine import HostEngine

# Arguments of `generate`


def check_asked(
    config: GenerationConfig, kwargs: Mapping[str, Any], input_ids: Tensor, streamer: BaseStreamer | None
) -> None:
    """Refuse arguments that no draft can be combined with.

    Raises:
        ExpertcastError: the first such argument.
    """
    refused = {
        "num_beams": config.num_beams > 1,
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "guidance_scale": config.guidance_scale not in (None, 1.0),
        "use_cache=False": not config.use_cache,
        "a streamer for several texts": streamer is not None and len(input_ids) > 1,
        "inputs_embeds": kwargs.get("inputs_embeds") is not None,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        "assistant_early_exit": config.assistant_early_exit is not None,
    }
    for what, given in refused.items():
        if given:
            raise ExpertcastError(f"a draft does not go with {what}: leave one of them out")


def own_stop_strings(kwargs: dict[str, Any]) -> None:
    """Make stop strings a stopping criterion here: `generate` has no tokenizer left where a loop is given to it."""
    config = kwargs.get("generation_config")
    strings = kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None)
    tokenizer = kwargs.pop("tokenizer", None)
    if strings is None:
        return
    if tokenizer is None:
        raise ExpertcastError("stop_strings need the tokenizer: give tokenizer=... beside them")
    if config is not None:
        kwargs["generation_config"] = config = copy.copy(config)
        config.stop_strings = None
    given = kwargs.get("stopping_criteria") or []
    kwargs["stopping_criteria"] = StoppingCriteriaList([*given, StopStringCriteria(tokenizer, strings)])


# Scores and logits


class Outputs:
    """Keeps scores and logits where they were asked for.

    Args:
        config: which asks.
        batch: B
    """

    def __init__(self, config: GenerationConfig, batch: int) -> None:
        self._config = config
        self._scores: list[list[Tensor]] = [[] for _ in range(batch)]
        self._logits: list[list[Tensor]] = [[] for _ in range(batch)]

    def keep(self, row: int, logits_V: Tensor, scores_V: Tensor) -> None:
        """A token of a row was settled, by these logits and what processors made of them."""
        if self._config.return_dict_in_generate:
            if self._config.output_logits:
                self._logits[row].append(logits_V)
            if self._config.output_scores:
                self._scores[row].append(scores_V)

    def result(self, ids_BS: Tensor, cache: Cache) -> Tensor | GenerateDecoderOnlyOutput:
        """The ids alone, or with what was asked for."""
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
    """By step, [B, V]; rows that ended before have zeros."""
    most = max(map(len, rows), default=0)
    return tuple(
        torch.stack([row[step] if step < len(row) else torch.zeros_like(rows[0][0]) for row in rows])
        for step in range(most)
    )


class DraftedDecoding:
    """Generates one batch.

    Args:
        engine: runs the exact model; drafts stand in for it.
        schedule: is told what drafts are routed to.
        drafts: by name; one of them where a length is given.
        governor: chooses the draft and its length, and learns from every cycle.
        tally: counts every cycle.
        length: tokens drafted in every cycle; None: the governor chooses.
        optional: decode plainly a model that cannot be drafted for, in place of refusing it.
        streamer: gets every token that is settled.
    """

    def __init__(
        self, engine: HostEngine, schedule: Schedule, drafts: Mapping[str, Draft], governor: Governor, tally: Tally, *,
        length: int | None, optional: bool, streamer: BaseStreamer | None,
    ) -> None:  # fmt: skip
        self._engine, self._schedule, self._drafts = engine, schedule, drafts
        self._governor, self._tally, self._length, self._optional = governor, tally, length, optional
        self._streamer = streamer
        self._residency = engine.flow.residency
        self.fit = False
        """Whether it is known that a pass over several tokens says what steps say."""

    @torch.no_grad()
    def generate(
        self, model: PreTrainedModel, input_ids: Tensor, logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:  # fmt: skip
        """What transformers' `generate` calls as `custom_generate`."""
        check_asked(generation_config, model_kwargs, input_ids, self._streamer)
        self._model, self._config = model, generation_config
        self._process, self._stops = logits_processor, stopping_criteria
        needy = [draft for draft in self._drafts.values() if isinstance(draft, ProposalDraft) and draft.needs_hidden]
        if needy:
            model_kwargs["output_hidden_states"] = -1  # the last ones alone
        output = model._prefill(input_ids, generation_config, model_kwargs)
        pad = generation_config._pad_token_tensor
        self._texts = texts = Texts(input_ids, generation_config.max_length, 0 if pad is None else int(pad))
        self._cache = SharedCache(output.past_key_values)
        model_kwargs["past_key_values"] = output.past_key_values
        mask_BS = model_kwargs.get("attention_mask")
        self._first_B = [0] * len(input_ids) if mask_BS is None else mask_BS.long().argmax(dim=1).tolist()
        self._proposers: dict[str, RowProposers] = {}
        for draft in needy:
            self._make(draft)
        self._feed = Feed(model, texts, model_kwargs)
        self._outputs = Outputs(generation_config, len(texts.known))
        try:
            with model._optimize_model_for_decode():
                self._refuse_unfit()
                self._settle(output.logits[:, -1:].float(), 0)
                if needy:
                    self._show(input_ids.shape[1] - output.hidden_states[-1].shape[1], output.hidden_states[-1])
                del output
                while texts.open:
                    self._cycle()
        finally:
            self._schedule.stop()
            self._cache.roll_back(min(self._cache.length, self._columns()))
        if self._streamer is not None:
            self._streamer.end()
        return self._outputs.result(texts.result(), self._cache.cache)

    def _columns(self) -> int:
        """Columns that belong into the cache: a row's last new token has not been fed."""
        texts = self._texts
        return max(texts.prompt, (texts.common if texts.open else texts.longest) - 1)

    def _refuse_unfit(self) -> None:
        """Two passes, if any, once for a model: not where there is no room for a draft."""
        start = self._cache.length
        if not self.fit and self._texts.most - self._texts.prompt > 2:
            try:
                self._cache.refuse_unfit(self._model, lambda: self._feed.run(start, self._texts.prompt + 2, 1))
            except ExpertcastError:
                if not self._optional:
                    raise
                self._drafts = {}
            else:
                self.fit = True

    def _choose(self, most: int) -> Choice:
        """The next cycle, with `most` drafted tokens at most."""
        if self._length is None:
            return self._governor.choose(list(self._drafts), most)
        (name,) = self._drafts
        length = min(self._length, most)
        return Choice(draft=name if length else None, length=length, longest=length, trial=True)

    def _cycle(self) -> None:
        texts, cache, schedule = self._texts, self._cache, self._schedule
        start = perf_counter()
        settled = texts.common
        choice = self._choose(max(0, texts.most - settled - 1))
        begin, cycle, logits = cache.length, Cycle(draft=choice.draft), None
        cache.mark()
        schedule.begin()
        draft = None if choice.draft is None else self._drafts[choice.draft]
        if isinstance(draft, PassDraft):
            logits = self._write(draft, choice, cycle)
            begin = cache.roll_back(begin)
            cache.mark()
        elif isinstance(draft, ProposalDraft):
            logits = self._propose(draft, choice, cycle)
        cycle.growth = tuple(schedule.buffer.growth[: cycle.drafted])
        verified = perf_counter()
        waited_s = self._residency.stats.waited_s
        if cycle.drafted:
            schedule.verify()
        logits_BNV = self._feed.run(begin, settled + cycle.drafted, cycle.drafted + 1)
        cycle.known = tuple(min(cycle.drafted, first) for first in texts.start_B(settled))
        before = list(texts.known)
        cycle.accepted = tuple(self._settle(logits_BNV, cycle.drafted, logits))
        self._show(begin, self._feed.hidden_BTD)
        schedule.end()
        cache.roll_back(min(cache.length, self._columns()))
        end = perf_counter()
        cycle.verify_s, cycle.seconds = end - verified, end - start
        cycle.waited_s = self._residency.stats.waited_s - waited_s
        rows = [row for row, length in enumerate(before) if length < texts.most]
        cycle.emitted = sum(texts.known[row] - before[row] for row in rows) / max(1, len(rows))
        self._governor.observe(cycle)
        self._tally.observe(cycle)

    def _write(self, draft: PassDraft, choice: Choice, cycle: Cycle) -> Tensor | None:
        """Passes of the model, one after another, each over the token that the one before drafted; their processed
        logits [B, n, V], where tokens are drawn."""
        texts, schedule, logits = self._texts, self._schedule, []
        settled, fed = texts.common, self._cache.length
        with draft.passes():
            while cycle.drafted < choice.longest:
                start, column = perf_counter(), settled + cycle.drafted
                schedule.draft(cycle.drafted)
                logits_BV = self._feed.run(fed, column, 1)[:, 0]
                fed = column
                scores_BV = self._process(texts.ids_BS[:, :column], logits_BV)
                token_B = pick(scores_BV, sample=self._config.do_sample)
                texts.draft(column, token_B)
                schedule.drafted()
                logits.append(scores_BV)
                cycle.drafted += 1
                cycle.passes_s += (perf_counter() - start,)
                if self._all_end(column) or not self._governor.goes_on(choice, schedule.buffer):
                    break
            self._residency.keep_full_only()  # inside: what is interrupted here is cleared like a draft cut short
        return torch.stack(logits, dim=1) if self._config.do_sample else None

    def _propose(self, draft: ProposalDraft, choice: Choice, cycle: Cycle) -> Tensor | None:
        """All tokens at once, each row's own; rows that have fewer go on with what they have. The processed logits
        [B, n, V] that they were drawn from, if they were."""
        start = perf_counter()
        rows = self._proposers.get(draft.name) or self._make(draft)
        cycle.drafted, logits_BnV = rows.propose(choice.longest)
        cycle.ended = cycle.drafted < choice.longest
        cycle.passes_s = (perf_counter() - start,)
        return logits_BnV

    def _make(self, draft: ProposalDraft) -> RowProposers:
        # processors may know each row's padding; what they forbid is not accepted in any case
        process = self._process if len(self._texts.known) == 1 else LogitsProcessorList()
        made = [draft.make(self._config, process) for _ in self._texts.known]
        rows = self._proposers[draft.name] = RowProposers(made, self._texts, self._first_B)
        return rows

    def _show(self, begin: int, hidden_BTD: Tensor | None) -> None:
        """Hidden states from column `begin` on, to the proposers that read them."""
        if hidden_BTD is not None:
            for rows in self._proposers.values():
                rows.saw(begin, hidden_BTD)

    def _settle(self, logits_BNV: Tensor, count: int, draft_logits_BnV: Tensor | None = None) -> list[int]:
        """Take what the exact model's logits say of `count` drafted columns, and one token more.

        Returns:
            Drafted tokens that stay, by row; what was settled before counts.
        """
        texts = self._texts
        settled = texts.common
        scores_BNV = logits_BNV.clone() if len(self._process) else logits_BNV
        if len(self._process):
            for place in range(logits_BNV.shape[1]):
                ids_BS = texts.ids_BS[:, : settled + place]
                scores_BNV[:, place] = self._process(ids_BS, logits_BNV[:, place])
        drafted_BN = texts.ids_BS[:, settled : settled + count]
        starts = texts.start_B(settled)
        start_B = torch.tensor(starts, device=drafted_BN.device).clamp(max=count)
        if self._config.do_sample:
            token_BN, accepted_B = accept_sampled(scores_BNV, drafted_BN, draft_logits_BnV, start_B)
        else:
            token_BN, accepted_B = accept_greedy(scores_BNV, drafted_BN, start_B)
        accepted, before = accepted_B.tolist(), list(texts.known)
        rows, counts = torch.zeros_like(token_BN), []
        for row, (first, kept) in enumerate(zip(starts, accepted, strict=True)):
            new = max(0, kept + 1 - first)
            rows[row, :new] = token_BN[row, first : first + new]
            counts.append(new)
        for row, new in enumerate(texts.take(rows, counts, self._stops)):
            for column in range(before[row], before[row] + new):
                self._outputs.keep(row, logits_BNV[row, column - settled], scores_BNV[row, column - settled])
                if self._streamer is not None:
                    self._streamer.put(texts.ids_BS[row, column : column + 1].cpu())
        return accepted

    def _all_end(self, column: int) -> bool:
        """Whether every row that goes on has drafted its end."""
        ends = self._config._eos_token_tensor
        if ends is None:
            return False
        return bool(torch.isin(self._texts.ids_BS[self._texts.open, column], ends).all())
