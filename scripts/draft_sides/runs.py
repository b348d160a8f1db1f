"""Runs of sides in one setting.

T tokens of a prompt, N new tokens behind the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from draft_sides.exact_sets import drafting, resident_views
from draft_sides.models import opened, other_bytes
from draft_sides.sides import ASSISTANT, AUTO, INT4, NONE, Side
from draft_sides.watching import Clock, Kept, Watch
from expertcast.data.models import load_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.messages import Json
from expertcast.runtime.drafts.costs import Choice, Cycle
from expertcast.runtime.drafts.drafting import Drafting, DraftOptions
from expertcast.runtime.drafts.kinds import Draft
from expertcast.runtime.drafts.quantised import QuantisedExperts
from expertcast.runtime.engine.front import EXPERTS_NAME
from expertcast.runtime.offloading import OffloadedModel

_FEW_ROWS = 32
"""A verification has no more rows, a prompt has."""


@dataclass(slots=True)
class Assistant:
    """The bundled model's int4 version as a model of its own."""

    model: PreTrainedModel
    nbytes: int
    """Of its experts, and of its copy of everything else; its cache comes on top."""

    def bytes_at(self, tokens: int) -> int:
        """With a cache of so many tokens."""
        config = self.model.config
        width = config.num_key_value_heads * config.head_dim
        return int(self.nbytes + 2 * config.num_hidden_layers * width * tokens * self.model.dtype.itemsize)


@contextmanager
def assistant(path: Path | str) -> Iterator[Assistant]:
    """Load it; it drafts inside."""
    model = load_model(str(path), dtype="bf16")
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    view = find_moe_layers(model)
    quantised = QuantisedExperts.of(view, resident_views(view), "int4")
    with drafting(model, view, quantised):
        yield Assistant(model, quantised.nbytes + other_bytes(model))


@contextmanager
def one_by_one() -> Iterator[None]:
    """Verifications ask for and compute each token's experts on their own (ablation of row C14)."""
    together = ALL_EXPERTS_FUNCTIONS[EXPERTS_NAME]

    def rows(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not 1 < len(hidden_states) <= _FEW_ROWS:
            return together(experts, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        parts = zip(*(torch.split(each, 1) for each in (hidden_states, top_k_index, top_k_weights)), strict=True)
        return torch.cat([together(experts, *part) for part in parts])

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, rows)
    try:
        yield
    finally:
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, together)


@dataclass(slots=True)
class Learnt:
    """What is known of one side in one setting."""

    governor: Kept | None = None
    warmed: bool = False
    report: Json = field(default_factory=dict)
    memory_bytes: int = 0
    cycles: list[Cycle] = field(default_factory=list)
    """Of all runs that counted."""
    choices: list[Choice] = field(default_factory=list)
    """Of these, where the governor chose."""


class Runner:
    """Runs sides of one offload.

    Args:
        path: of the model.
        options: of its offload.
        helper: for sides whose draft is an assistant.
    """

    def __init__(self, path: Path | str, options: dict[str, object], helper: Assistant | None) -> None:
        self._path, self._options, self._helper = path, options, helper
        self._made: dict[str, Draft] = {}
        self._watch = Watch()

    def __enter__(self) -> Runner:
        self.offloaded: OffloadedModel = opened(self._path, self._options)
        assert self.offloaded.drafting is not None
        self._drafting: Drafting = self.offloaded.drafting
        self._watch.follow(self._drafting.schedule, self.offloaded.residency.pool.slots)
        return self

    def __exit__(self, *_: object) -> None:
        self.offloaded.close()
        self._made.clear()

    def learn(self, side: Side, learnt: Learnt, texts: Sequence[Tensor], new_tokens: int) -> None:
        """Before the first run that counts: a governor gets to know its drafts, on all texts where it has several."""
        if not learnt.warmed and side.governed:
            for prompt_1T in texts if side.draft == AUTO else texts[:1]:
                self.run(side, learnt, prompt_1T, new_tokens)
            learnt.cycles, learnt.choices = [], []
        learnt.warmed = True

    def int4_bytes(self) -> int:
        """Of the int4 copies of all experts."""
        self._make(Side(draft=AUTO))
        return self._made[INT4].nbytes

    @property
    def layer_copy_s(self) -> float:
        """Seconds in which K experts are copied."""
        return self.offloaded.store.top_k * self.offloaded.link.copy_s

    def run(self, side: Side, learnt: Learnt, prompt_1T: Tensor, new_tokens: int) -> Json:
        """One generation.

        Returns:
            `tpot_s`, `ids` of the new tokens, `bytes` that were asked of the link per token, `lookups` (hits and
            requests of all layers), and of drafts `cycles`, `plain` of them, `emitted`, `drafted`, `kept` and `judged`
            (by position), `sets` and `needed` as :meth:`.watching.Watch.as_dict` has them.
        """
        offloaded, made, before = self.offloaded, self._drafting, [0, 0, 0]
        governor = learnt.governor
        if governor is None:
            governor = learnt.governor = Kept(offloaded.store.layers, offloaded.link.copy_s)
        made.governors = {1: governor}
        self._make(side)

        def counts() -> list[int]:
            total = offloaded.stats.total
            return [total.bytes_moved, total.hits, total.requests]

        def first() -> None:
            before[:] = counts()
            self._watch.reset()
            governor.forget()

        clock = Clock(first)
        with ExitStack() as stack:
            if side.ablation == "reordering":
                stack.enter_context(one_by_one())
            ids = self._generate(side, prompt_1T, new_tokens + 1, clock)
        moved, hits, requests = (now - then for now, then in zip(counts(), before, strict=True))
        self._made |= made.drafts
        learnt.memory_bytes = sum(made.memory.values())
        if side.draft == ASSISTANT:
            assert self._helper is not None
            learnt.memory_bytes = self._helper.bytes_at(prompt_1T.shape[1] + new_tokens)
        if side.governed:
            learnt.report = governor.report()
        found: Json = {"tpot_s": clock.seconds / new_tokens, "ids": ids, "bytes": moved / new_tokens,
                       "lookups": [hits, requests]}  # fmt: skip
        if side.draft != NONE:
            learnt.cycles += governor.cycles
            learnt.choices += governor.choices
            found |= {**_counted(governor), **self._watch.as_dict()}
        return found

    def _make(self, side: Side) -> None:
        """The drafts that it may use, and no others: `auto` takes whatever is there."""
        made = self._drafting
        made.drafts = dict(self._made)
        for name in side.beside:
            if name not in self._made:
                self._generate(Side(draft=name, length=1), torch.tensor([[1, 2]]), 3, None)
        self._made |= made.drafts
        made.drafts = {name: draft for name, draft in self._made.items() if name in (side.draft, *side.beside)}

    def _generate(self, side: Side, prompt_1T: Tensor, new_tokens: int, clock: Clock | None) -> list[int]:
        kwargs = {"max_new_tokens": new_tokens, "do_sample": False, "streamer": clock}
        if side.draft == NONE:
            ids_1S = self.offloaded.generate(prompt_1T, **kwargs, draft=NONE)
        else:
            draft = self._helper.model if side.draft == ASSISTANT and self._helper is not None else side.draft
            options = DraftOptions(draft=draft, length=side.length, prefetch=side.ablation != "prefetch")
            ids_1S = self._drafting.generate(options, (prompt_1T,), kwargs)
        new: list[int] = ids_1S[0, prompt_1T.shape[1] :].tolist()
        return new


def _counted(governor: Kept) -> Json:
    """Cycles in sums."""
    cycles = governor.cycles
    longest = max((cycle.drafted for cycle in cycles), default=0)
    reached = [[cycle.accepted[0] for cycle in cycles if cycle.drafted > place] for place in range(longest)]
    return {
        "cycles": len(cycles),
        "plain": sum(cycle.draft is None for cycle in cycles),
        "emitted": sum(cycle.emitted for cycle in cycles),
        "drafted": sum(cycle.drafted for cycle in cycles),
        "kept": [sum(kept > place for kept in own) for place, own in enumerate(reached)],
        "judged": [sum(kept >= place for kept in own) for place, own in enumerate(reached)],
    }
