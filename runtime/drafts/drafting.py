"""Drafts for one offloaded model: made when they are first asked for, and governed by what its own runs took.

B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation import GenerateDecoderOnlyOutput

from expertcast.data.models import load_tokenizer
from expertcast.data.text import bundled_ids
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.drafts import names
from expertcast.runtime.drafts.decoding import DraftedDecoding, own_stop_strings
from expertcast.runtime.drafts.governor import Governor, Tally
from expertcast.runtime.drafts.kinds import Draft, EarlyExit, ForecastDraft, PassDraft, ProposalDraft, StageDraft
from expertcast.runtime.drafts.prefetch import Schedule
from expertcast.runtime.drafts.proposals import Assistant, Heads, HeadsDraft, PromptLookup
from expertcast.runtime.drafts.quantised import CALIBRATED, Calibration, PolicyStage, QuantisedExperts, QuantisedStage
from expertcast.runtime.engine.engine import EngineParts, HostEngine
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.store import ExpertStore

_WINDOWS, _WINDOW = 16, 512
"""Tokens of text for calibration, and how many are read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """How a generation drafts."""

    draft: str | Policies | PreTrainedModel | None
    """A name, lossy policies, or an assistant model."""
    length: int | None = None
    """Tokens drafted in every cycle; None: the governor decides, 0 included."""
    assistant_tokenizer: PreTrainedTokenizerBase | None = None
    """Of an assistant with other tokens than the model, given beside `tokenizer`."""
    prefetch: bool = True
    """Load ahead what drafts were routed to."""


class Drafting:
    """What drafts for a model, and what was learnt of it.

    Args:
        model: which is offloaded.
        engine: of its offload.
        parts: what the engine drives.
        store: of its experts.
    """

    def __init__(self, model: PreTrainedModel, engine: HostEngine, parts: EngineParts, store: ExpertStore) -> None:
        self._model, self._engine, self._parts, self._store = model, engine, parts, store
        self._residency = engine.flow.residency
        self.schedule = Schedule(self._residency, parts.speculator.view.shape)
        self.drafts: dict[str, Draft] = {}
        """Those that were made, by name."""
        self.governors: dict[int, Governor] = {}
        """What was learnt, by number of sequences; a benchmark puts in what each of its runs has learnt."""
        self.tally = Tally()
        """What became of the tokens they wrote."""
        self._fit = False

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the device's memory that drafts hold beside the slots, by name."""
        return {name: draft.nbytes for name, draft in list(self.drafts.items())}

    def generate(
        self, options: DraftOptions, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """transformers' `generate` with drafts, its arguments as they are.

        Raises:
            ExpertcastError: no such draft, or something that a draft does not go with.
        """
        kwargs = dict(kwargs)
        candidates = self._candidates(options, kwargs)
        own_stop_strings(kwargs)
        streamer = kwargs.get("streamer")

        def decode(model: PreTrainedModel, input_ids: Tensor, **rest: Any) -> Tensor | GenerateDecoderOnlyOutput:
            self.schedule.prefetch = options.prefetch
            drafts = {name: self.drafts[name] for name in candidates}
            decoding = DraftedDecoding(
                self._engine, self.schedule, drafts, self._governor(options, len(input_ids)), self.tally,
                length=options.length, optional=_is_auto(options.draft), streamer=streamer,
            )  # fmt: skip
            decoding.fit = self._fit
            self._engine.ahead = self.schedule
            try:
                return decoding.generate(model, input_ids, **rest)
            finally:
                self._engine.ahead, self._fit = None, decoding.fit

        return self._model.generate(*args, **kwargs, custom_generate=decode)

    def report(self) -> Json:
        """`drafts`: by number of sequences what the governor says (:meth:`.governor.Governor.report`), with the bytes
        of device memory that drafts hold; nothing where nothing was drafted."""
        if not self.governors:
            return {}
        reports = {str(batch): governor.report() for batch, governor in self.governors.items()}
        return {"drafts": {"memory_bytes": sum(self.memory.values()), "by_sequences": reports}}

    def reset(self) -> None:
        """Forget what was learnt."""
        self.governors.clear()

    def close(self) -> None:
        """Free what drafts hold."""
        self.drafts.clear()

    def _governor(self, options: DraftOptions, batch: int) -> Governor:
        """What was learnt for so many sequences, with the limits of this generation."""
        link, draft = self._residency.link, options.draft
        governor = self.governors.get(batch)
        if governor is None:
            governor = self.governors[batch] = Governor(len(self._parts.speculator.view), link.copy_s)
        governor.copy_s = link.copy_s
        limits = names.auto_options(draft) if _is_auto(draft) else names.AutoOptions()
        governor.limit(limits.longest, limits.limit_s)
        return governor

    def _candidates(self, options: DraftOptions, kwargs: dict[str, Any]) -> list[str]:
        """Names of the drafts that may be used, all of them made."""
        given = options.draft
        if isinstance(given, PreTrainedModel):
            return [self._add("assistant", lambda: self._assistant(given, options, kwargs), anew=True)]
        if isinstance(given, Policies):
            if not given.lossy:
                raise ExpertcastError(
                    "these policies lose nothing, so that nothing is gained: give lossy ones as draft"
                )
            text = "policies " + ", ".join(f"{kind}={policy}" for kind, policy in given.as_dict().items())
            return [self._add(text, lambda: self._by_policies(text, given))]
        assert given is not None
        names.check_draft(given)
        if not _is_auto(given):
            return [self._add(given, lambda: self._named(given, kwargs.get("tokenizer")))]
        if options.length is not None:
            raise ExpertcastError("draft='auto' chooses the length too: leave the length out, or name a draft")
        made = [name for name, draft in self.drafts.items() if isinstance(draft, StageDraft) and draft.nbytes]
        speculates = [names.SPECULATE] if self._parts.speculator.predictor is not None else []
        found = [*made, "resident", *speculates, names.PROMPT_LOOKUP]
        return [self._add(name, lambda name=name: self._named(name)) for name in found]  # type: ignore[misc]

    def _add(self, name: str, make: Callable[[], Draft], *, anew: bool = False) -> str:
        if anew or name not in self.drafts:
            self.drafts[name] = make()
        return name

    def _named(self, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Draft:
        """The draft of this name.

        Args:
            name: of it.
            tokenizer: makes the text of a calibration into tokens; None: the one beside the model.

        Raises:
            ExpertcastError: this model or offload cannot have it.
        """
        base = name.partition(":")[0]
        speculator = self._parts.speculator
        if name in names.QUANTISED:
            calibration = self._calibration(tokenizer) if name == CALIBRATED else None
            experts = QuantisedExperts.of(
                speculator.view, self._store.views, name, calibration=calibration, device=self._store.device
            )
            stage = QuantisedStage(experts, self.schedule, self._residency.link)
            return StageDraft(name, self._engine, stage, experts.nbytes)
        if base == names.SPECULATE:
            if speculator.predictor is None:
                raise ExpertcastError("draft='speculate' executes forecasts: offload the model with a predictor")
            return ForecastDraft(name, self._engine, speculator)
        if base == names.EARLY_EXIT:
            count = names.early_exit_options(name).layers
            return EarlyExit(name, self._engine, self._model, speculator.view[0].experts, count)
        if base == names.PROMPT_LOOKUP:
            return ProposalDraft(name, self._lookup)
        if base == names.MTP:
            return self._heads(name)
        return self._by_policies(name, names.policies_of(name))

    def _calibration(self, tokenizer: PreTrainedTokenizerBase | None) -> Calibration:
        """On the bundled text.

        Raises:
            ExpertcastError: no tokenizer is given, and none lies beside the model.
        """
        ids = bundled_ids(tokenizer or load_tokenizer(self._model.name_or_path), _WINDOWS * _WINDOW)
        ids_SW = torch.tensor(ids, device=self._store.device).view(_WINDOWS, _WINDOW)
        return Calibration.of(self._model, self._parts.speculator.view, ids_SW)

    def _by_policies(self, name: str, policies: Policies) -> PassDraft:
        parts = self._parts
        stage = PolicyStage(parts, policies, self._residency, self.schedule)
        self._store.add_copies(stage.precisions)
        return StageDraft(name, self._engine, stage)

    def _assistant(self, assistant: PreTrainedModel, options: DraftOptions, kwargs: Mapping[str, Any]) -> Draft:
        tokenizer, own = kwargs.get("tokenizer"), kwargs.get("logits_processor")

        def make(config: GenerationConfig, _processors: LogitsProcessorList) -> Assistant:  # it makes others of config
            return Assistant(self._model, assistant, config, own, tokenizer, options.assistant_tokenizer)

        return ProposalDraft("assistant", make)

    def _heads(self, name: str) -> Draft:
        heads = Heads(self._model)

        def make(config: GenerationConfig, processors: LogitsProcessorList) -> HeadsDraft:
            return HeadsDraft(heads, bool(config.do_sample), processors)

        return ProposalDraft(name, make, needs_hidden=True, nbytes=heads.nbytes)

    def _lookup(self, config: GenerationConfig, processors: LogitsProcessorList) -> PromptLookup:
        vocabulary = self._model.config.get_text_config().vocab_size
        return PromptLookup(config.max_matching_ngram_size or 2, config._eos_token_tensor, processors, vocabulary)


def _is_auto(draft: object) -> TypeGuard[str]:
    return isinstance(draft, str) and draft.partition(":")[0] == names.AUTO
