"""Drafts for one offloaded model: made when they are first asked for, and governed by what its own runs took.

B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from expertcast.data.packed_experts import packed_matrices
from expertcast.data.text import bundled_ids
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.drafts import names
from expertcast.runtime.drafts.decoding import DraftedDecoding, own_stop_strings
from expertcast.runtime.drafts.governor import Governor, Tally
from expertcast.runtime.drafts.kinds import Draft, PassDraft, ProposalDraft, early_exit, forecast_draft
from expertcast.runtime.drafts.prefetch import Schedule
from expertcast.runtime.drafts.proposals import Assistant, Heads, HeadsDraft, PromptLookup
from expertcast.runtime.drafts.quantised import CALIBRATED, Calibration, PolicyStage, QuantisedExperts, QuantisedStage
from expertcast.runtime.engine.engine import EngineParts, HostEngine
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.store import ExpertStore

_WINDOWS, _WINDOW = 16, 512
"""Tokens of text for calibration, and how many are read at once."""


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
        self,
        draft: str | Policies | PreTrainedModel,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        length: int | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """transformers' `generate` with drafts.

        Args:
            draft: a name, lossy policies, or an assistant model.
            args, kwargs: of `generate`.
            length: tokens drafted in every cycle; None: the governor decides, 0 included.
            assistant_tokenizer: of an assistant with other tokens than the model, given beside `tokenizer`.

        Raises:
            ExpertcastError: no such draft, or something that a draft does not go with.
        """
        kwargs = dict(kwargs)
        is_auto = isinstance(draft, str) and draft.partition(":")[0] == names.AUTO
        limits = names.auto_options(str(draft)) if is_auto else names.AutoOptions()
        if is_auto and length is not None:
            raise ExpertcastError("draft='auto' chooses the length too: leave the length out, or name a draft")
        if isinstance(draft, PreTrainedModel):
            candidates = [self._assistant(draft, assistant_tokenizer, kwargs)]
        elif isinstance(draft, Policies):
            candidates = [self._lossy(draft)]
        else:
            tokenizer = kwargs.get("tokenizer")
            candidates = [self._named(name, tokenizer) for name in (self._auto() if is_auto else [draft])]
        self.drafts |= {each.name: each for each in candidates}
        own_stop_strings(kwargs)

        def decode(model: PreTrainedModel, input_ids: Tensor, **rest: Any) -> Tensor | GenerateDecoderOnlyOutput:
            decoding = DraftedDecoding(
                self._engine,
                self.schedule,
                {each.name: each for each in candidates},
                self._governor(limits, len(input_ids)),
                self.tally,
                length=length,
                optional=is_auto,
                streamer=kwargs.get("streamer"),
            )
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

    def _governor(self, limits: names.AutoOptions, batch: int) -> Governor:
        """What was learnt for so many sequences, with the limits of this generation."""
        copy_s = self._residency.link.copy_s
        governor = self.governors.setdefault(batch, Governor(len(self._parts.speculator.view), copy_s))
        governor.copy_s = copy_s
        governor.limit(limits.longest, limits.limit_s)
        return governor

    def _auto(self) -> list[str]:
        """Names of the drafts that the governor chooses from: what takes memory only where it was made already."""
        made = [name for name, draft in self.drafts.items() if isinstance(draft, PassDraft) and draft.nbytes]
        speculates = [names.SPECULATE] if self._parts.speculator.predictor is not None else []
        return [*made, "resident", *speculates, names.PROMPT_LOOKUP]

    def _named(self, name: str, tokenizer: PreTrainedTokenizerBase | None) -> Draft:
        """The draft of this name, made when it is first asked for.

        Args:
            name: of it.
            tokenizer: makes the text of a calibration into tokens; None: the one beside the model.

        Raises:
            ExpertcastError: unknown name, or this model or offload cannot have it.
        """
        if name in self.drafts:
            return self.drafts[name]
        speculator = self._parts.speculator
        names.check_draft(name, packed=bool(packed_matrices(speculator.view[0].experts)))
        base = name.partition(":")[0]
        if name in names.QUANTISED:
            calibration = self._calibration(tokenizer) if name == CALIBRATED else None
            experts = QuantisedExperts.of(
                speculator.view, self._store.views, name, calibration=calibration, device=self._store.device
            )
            stage = QuantisedStage(experts, self.schedule, self._residency.link)
            return PassDraft(name, self._engine, stage, nbytes=experts.nbytes)
        if base == names.SPECULATE:
            if speculator.predictor is None:
                raise ExpertcastError("draft='speculate' executes forecasts: offload the model with a predictor")
            return forecast_draft(name, self._engine, speculator)
        if base == names.EARLY_EXIT:
            count = names.early_exit_options(name).layers
            return early_exit(name, self._engine, self._model, speculator.view[0].experts, count)
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
        return PassDraft(name, self._engine, stage)

    def _lossy(self, policies: Policies) -> Draft:
        if not policies.lossy:
            raise ExpertcastError("these policies lose nothing, so that nothing is gained: give lossy ones as draft")
        name = "policies " + ", ".join(f"{kind}={policy}" for kind, policy in policies.as_dict().items())
        return self.drafts.get(name) or self._by_policies(name, policies)

    def _assistant(
        self,
        assistant: PreTrainedModel,
        assistant_tokenizer: PreTrainedTokenizerBase | None,
        kwargs: Mapping[str, Any],
    ) -> Draft:
        tokenizer, own = kwargs.get("tokenizer"), kwargs.get("logits_processor")

        def make(config: GenerationConfig, _processors: LogitsProcessorList) -> Assistant:  # it makes others of config
            return Assistant(self._model, assistant, config, own, tokenizer, assistant_tokenizer)

        return ProposalDraft("assistant", make)

    def _heads(self, name: str) -> Draft:
        heads = Heads(self._model)

        def make(config: GenerationConfig, processors: LogitsProcessorList) -> HeadsDraft:
            return HeadsDraft(heads, bool(config.do_sample), processors)

        return ProposalDraft(name, make, needs_hidden=True, nbytes=heads.nbytes)

    def _lookup(self, config: GenerationConfig, processors: LogitsProcessorList) -> PromptLookup:
        vocabulary = self._model.config.get_text_config().vocab_size
        return PromptLookup(config.max_matching_ngram_size or 2, config._eos_token_tensor, processors, vocabulary)
