"""Generation with drafts for one offloaded model; drafts are created at their first use. B sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from expertcast.data.packed_experts import packed_matrices
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.drafts import names
from expertcast.runtime.drafts.decoding import DraftedDecoding, extract_stop_strings
from expertcast.runtime.drafts.governor import DraftCount, Governor
from expertcast.runtime.drafts.kinds import PassDraft, PolicyStage, QuantisedExperts, QuantisedStage
from expertcast.runtime.drafts.prefetch import Schedule
from expertcast.runtime.engine.engine import Engine
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.store import ExpertStore


class Drafter:
    """Drafts of an offloaded model and their governors.

    Args:
        model: the offloaded model.
        engine: engine of the offload.
        store: store of the experts.
    """

    def __init__(self, model: PreTrainedModel, engine: Engine, store: ExpertStore) -> None:
        self._model, self._engine, self._store = model, engine, store
        self._residency = engine.residency
        self.schedule = Schedule(self._residency, engine.view.shape)
        self.drafts: dict[str, PassDraft] = {}
        """Created drafts, by name."""
        self.governors: dict[int, Governor] = {}
        """Governors by number of sequences; benchmarks replace them between runs."""
        self.counts: dict[str, DraftCount] = {}
        """Counts by draft since the offload began."""
        self._verifiable = False

    @property
    def memory(self) -> dict[str, int]:
        """Device memory of each draft in addition to the slots, in bytes."""
        return {name: draft.nbytes for name, draft in list(self.drafts.items())}

    def generate(
        self,
        draft: str | Policies,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        length: int | None = None,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Call `generate` of transformers with drafts.

        Args:
            draft: name of a draft, or lossy policies.
            args: positional arguments of `generate`.
            kwargs: keyword arguments of `generate`.
            length: number of tokens drafted per cycle; None: the governor chooses, possibly 0.

        Returns:
            The result of `generate`.

        Raises:
            ExpertcastError: the draft is unknown or this model cannot have it, or an argument excludes drafts.
        """
        kwargs = dict(kwargs)
        is_auto = isinstance(draft, str) and draft.partition(":")[0] == names.AUTO
        limits = names.auto_options(str(draft)) if is_auto else names.AutoOptions()
        if is_auto and length is not None:
            raise ExpertcastError("draft='auto' chooses the length itself: leave the length out, or name a draft")
        if isinstance(draft, Policies):
            candidates = [self._lossy(draft)]
        else:
            candidates = [self._named(name) for name in (self._auto() if is_auto else [draft])]
        self.drafts |= {each.name: each for each in candidates}
        extract_stop_strings(kwargs)

        def decode(model: PreTrainedModel, input_ids: Tensor, **rest: Any) -> Tensor | GenerateDecoderOnlyOutput:
            decoding = DraftedDecoding(
                self._engine,
                self.schedule,
                {each.name: each for each in candidates},
                self._governor(limits, len(input_ids)),
                self.counts,
                length=length,
                optional=is_auto,
                streamer=kwargs.get("streamer"),
            )
            decoding.verifiable = self._verifiable
            self._engine.ahead = self.schedule
            try:
                return decoding.generate(model, input_ids, **rest)
            finally:
                self._engine.ahead, self._verifiable = None, decoding.verifiable

        return self._model.generate(*args, **kwargs, custom_generate=decode)

    def report(self) -> Json:
        """Return the entry `drafts` of the run's report, or an empty dict before the first drafted generation.

        It has the device memory of all drafts in bytes, :meth:`.governor.Governor.report` by number of sequences, and
        :meth:`.governor.DraftCount.as_dict` by draft since the offload began.
        """
        if not self.governors:
            return {}
        reports = {str(batch): governor.report() for batch, governor in self.governors.items()}
        counts = {name: count.as_dict() for name, count in self.counts.items()}
        return {"drafts": {"memory_bytes": sum(self.memory.values()), "by_sequences": reports, "by_draft": counts}}

    def close(self) -> None:
        """Free the memory of all drafts."""
        self.drafts.clear()

    def _governor(self, limits: names.AutoOptions, batch: int) -> Governor:
        """Return the governor for a number of sequences, with the limits of this generation."""
        copy_s = self._residency.link.copy_s
        governor = self.governors.setdefault(batch, Governor(len(self._engine.view), copy_s))
        governor.copy_s = copy_s
        governor.limit(limits.longest, limits.limit_s)
        return governor

    def _auto(self) -> list[str]:
        """Return the names that the governor chooses from. Drafts that need memory are included only if they exist."""
        existing = [name for name, draft in self.drafts.items() if draft.nbytes]
        speculates = [names.SPECULATE] if self._engine.speculator.predictor is not None else []
        return [*existing, "resident", *speculates]

    def _named(self, name: str) -> PassDraft:
        """Return the draft of a name, with options; create it at the first call.

        Raises:
            ExpertcastError: the name is unknown, or this model or offload cannot have the draft.
        """
        if name in self.drafts:
            return self.drafts[name]
        speculator = self._engine.speculator
        names.check_draft(name, packed=bool(packed_matrices(speculator.view[0].experts)))
        if name in names.QUANTISED:
            experts = QuantisedExperts(speculator.view, self._store.views, name, self._store.device)
            stage = QuantisedStage(experts, self.schedule, self._residency.link)
            return PassDraft(name, self._engine, stage, nbytes=experts.nbytes)
        if name == names.SPECULATE:
            if speculator.predictor is None:
                raise ExpertcastError("draft='speculate' needs forecasts: offload the model with a predictor")
            return PassDraft(name, self._engine, forecasts=True)
        return self._by_policies(name, names.policies_of(name))

    def _by_policies(self, name: str, policies: Policies) -> PassDraft:
        stage = PolicyStage(self._engine, policies, self.schedule)
        self._store.add_copies(stage.precisions)
        return PassDraft(name, self._engine, stage)

    def _lossy(self, policies: Policies) -> PassDraft:
        if not policies.lossy:
            raise ExpertcastError("lossless policies do not make a draft cheaper: give lossy ones as draft")
        name = "policies " + ", ".join(f"{kind}={policy}" for kind, policy in policies.as_dict().items())
        return self.drafts.get(name) or self._by_policies(name, policies)
