"""Models, and timed generations over them.

D hidden size, F inner width of an expert, E routed experts per layer, K experts per token, L MoE layers, T tokens of a
prompt, N new tokens behind the first one, n drafted tokens.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from transformers.generation import BaseStreamer

from benchmarks.draft_sides import AUTO, EMULATED, INT4, NONE, REFERENCE, WIDENED, Setting, Side
from expertcast.data.batch import RouterCall
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime import load_offloaded
from expertcast.runtime.benchmarking.bench import step_times
from expertcast.runtime.benchmarking.runs import decode_greedily
from expertcast.runtime.drafts.costs import Cycle
from expertcast.runtime.drafts.drafting import Drafting
from expertcast.runtime.drafts.governor import Governor
from expertcast.runtime.drafts.kinds import Draft
from expertcast.runtime.drafts.prefetch import Schedule
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.recording.recorder import Recorder

_NAME = "reference"
_MATRICES = 3
"""Of an expert: two to its inner width, one back."""


def widened(folder: Path, expert_bytes: int) -> Path:
    """Write the bundled model with wider experts, unless it is there.

    What is added to an expert's inner width is zero: the same function, more to copy and to multiply. Products are
    summed in other blocks, so that bits may differ.

    Args:
        folder: its files go into a folder there.
        expert_bytes: of one expert, at most; rounded down to a multiple of 128 of the inner width.
    """
    path = folder / f"widened-{expert_bytes}"
    if (path / "made").is_file():
        return path
    model = load_model(_NAME, dtype="bf16")
    config = model.config
    width = expert_bytes // (_MATRICES * config.hidden_size * 2) // 128 * 128
    if width < config.moe_intermediate_size:
        raise ExpertcastError(f"experts of {expert_bytes} bytes are narrower than the model's: give more")
    with torch.no_grad():
        for block in model.model.layers:
            experts = block.mlp.experts
            up, down = experts._parameters.pop("gate_up_proj"), experts._parameters.pop("down_proj")
            count, twice, hidden = up.shape
            wide_up = up.new_zeros(count, 2, width, hidden)
            wide_up[:, :, : twice // 2] = up.view(count, 2, twice // 2, hidden)  # gates, then what they gate
            wide_down = down.new_zeros(count, hidden, width)
            wide_down[..., : down.shape[-1]] = down
            experts.gate_up_proj = torch.nn.Parameter(wide_up.flatten(1, 2), requires_grad=False)
            experts.down_proj = torch.nn.Parameter(wide_down, requires_grad=False)
    config.moe_intermediate_size = width
    model.save_pretrained(path)
    (path / "made").write_text("")
    return path


def prompts(tokens: int, count: int) -> list[Tensor]:
    """The first tokens [1, T] of so many bundled texts, one of each domain before a second one of any.

    Raises:
        ExpertcastError: too few texts are so long.
    """
    tokenizer = load_tokenizer(_NAME)
    by_domain: dict[str, list[Tensor]] = {}
    for document in load_documents(_NAME, max_chars=400_000):
        ids = tokenizer(document.text[: 12 * tokens])["input_ids"][:tokens]
        if len(ids) == tokens:
            by_domain.setdefault(document.domain, []).append(torch.tensor([ids]))
    found = [texts[place] for place in range(count) for texts in by_domain.values() if place < len(texts)]
    if len(found) < count:
        raise ExpertcastError(f"{len(found)} bundled texts have {tokens} tokens, {count} are needed: give fewer")
    return found[:count]


def layer_seconds(path: Path | str, options: dict[str, object], prompt: Tensor, tokens: int) -> float:
    """Seconds that one layer computes in a decode step when its experts are there; last norm and head left out."""
    recorder = Recorder(prompt.device)
    offloaded = load_offloaded(path, cache=False, link="instant", observers=[recorder], **options)  # type: ignore[arg-type]
    with offloaded:
        decode_greedily(offloaded.model, prompt[:, :64], tokens, offloaded=offloaded, recorder=recorder)
        layers = offloaded.store.layers
        return statistics.median(sum(step.compute_L[:layers]) / layers for step in step_times(recorder, layers))


def opened(path: Path | str, options: dict[str, object]) -> OffloadedModel:
    """Offloaded, without an end of text: all generate as many tokens."""
    offloaded = load_offloaded(path, **options)  # type: ignore[arg-type]
    assert offloaded.model.generation_config is not None
    offloaded.model.generation_config.eos_token_id = None
    return offloaded


@dataclass(frozen=True, slots=True)
class Prepared:
    """One model."""

    path: Path | str
    options: dict[str, object]
    """Of its offload: where the experts lie."""
    kept: Json
    """In the result: `layer_s`, `shape`, `expert_bytes`, `ids` said after each text; `int4_bytes` once known."""
    new_tokens: int

    def slots(self, capacity: float, *, same_memory: bool) -> int:
        """Experts that fit; without a cache, three layers' worth of a token. The bytes of int4 copies come on top."""
        shape = self.kept["shape"]
        total = shape["L"] * shape["E"]
        slots = int(capacity * total) or 3 * shape["K"]
        more = self.kept["int4_bytes"] // self.kept["expert_bytes"] if same_memory else 0
        return int(min(total, slots + more))

    def link_options(self, setting: Setting) -> dict[str, object]:
        """Of the offload, with the link."""
        options = {**self.options, "link": setting.link}
        if setting.link == EMULATED:
            assert setting.ratio is not None
            copied = self.kept["shape"]["K"] * self.kept["expert_bytes"]
            options["bandwidth"] = copied / (self.kept["layer_s"] * setting.ratio)
        return options


class Models:
    """Prepares models when they are first asked for.

    Args:
        args: of the command line.
        kept: by name, what the result has of them.
    """

    def __init__(self, args: argparse.Namespace, kept: Json) -> None:
        self._args, self._kept = args, kept
        count = max(args.prompts, args.other_prompts)
        found = prompts(args.prompt, count + args.warm)
        self.prompts, self.warm = found[:count], found[count:]
        """Texts that are continued, and those that governors learn on."""

    def get(self, name: str) -> Prepared:
        """The model of this name."""
        args, kept = self._args, self._kept.setdefault(name, {})
        path: Path | str = REFERENCE if name == REFERENCE else widened(args.keep, args.expert_bytes)
        tokens = args.new_tokens if name == REFERENCE else args.wide_tokens
        options: dict[str, object] = {"device": "cpu", "dtype": "bf16"}
        if name == WIDENED:
            options |= {"store": "disk", "store_folder": Path(path) / "store"}
        if "layer_s" not in kept:
            kept["layer_s"] = layer_seconds(path, options, self.warm[0], 8 if args.small else 48)
        if len(kept.get("ids", ())) < len(self.prompts):
            with opened(path, {**options, "link": "instant"}) as offloaded:
                shape, layout = offloaded.view.shape, offloaded.store.layout
                kept |= {"shape": shape.as_dict(), "expert_bytes": layout.block_bytes}
                kwargs = {"max_new_tokens": tokens + 1, "do_sample": False, "draft": NONE}
                outputs = [offloaded.generate(ids, **kwargs) for ids in self.prompts]
            kept["ids"] = [output[0, args.prompt :].tolist() for output in outputs]
        return Prepared(path, options, kept, tokens)


class Clock(BaseStreamer):  # type: ignore[misc]
    """Seconds from the first new token to the end.

    Args:
        first: called when that token is there.
    """

    def __init__(self, first: Callable[[], None]) -> None:
        self._first, self._puts, self._start = first, 0, 0.0
        self.seconds = 0.0

    def put(self, value: Tensor) -> None:
        """The prompt, then every new token."""
        del value
        self._puts += 1
        if self._puts == 2:
            self._first()
            self._start = perf_counter()

    def end(self) -> None:
        """There are no more."""
        self.seconds = perf_counter() - self._start


class Kept(Governor):
    """A governor that keeps its cycles."""

    def __init__(self, layers: int, copy_s: float) -> None:
        super().__init__(layers, copy_s)
        self.cycles: list[Cycle] = []

    def observe(self, cycle: Cycle) -> None:
        super().observe(cycle)
        self.cycles.append(cycle)

    def forget(self) -> None:
        """Drop the cycles; what was learnt stays."""
        self.cycles = []


class Watch:
    """Compares, for one text, a draft's routing with the exact pass's of the same column (rows C2 and C17)."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing is known."""
        self._drafted: dict[int, list[list[int]]] = {}
        """By layer, the experts of each position [n][K]."""
        self._layer = -1
        self.hard = self.soft = self.mismatch = 0
        """Token-layer pairs: the same experts in the same order, in another one, others."""
        self.needed = self.held = 0
        """Experts that layers needed in verifications, and those of them that had a slot when the layer was reached."""

    def follow(self, schedule: Schedule, held: Container[int]) -> None:
        """Watch all routing that a schedule is told of; `held` are the experts that have a slot."""
        routed, reached = schedule.routed, schedule.reached

        def watched(call: RouterCall) -> None:
            if schedule.position is not None or schedule.verifies:
                self.routed(schedule.position, call)
            routed(call)

        def watched_layer(layer: int, keys: Sequence[int]) -> None:
            if schedule.verifies:
                self.reached(layer, keys, held)
            reached(layer, keys)

        schedule.routed, schedule.reached = watched, watched_layer  # type: ignore[method-assign]

    def routed(self, position: int | None, call: RouterCall) -> None:
        """A router has run, in the pass that drafts the token at this position, or (None) in the verification."""
        if position is not None:
            known = self._drafted.setdefault(call.layer, [])
            if not position:
                known.clear()
            known.append(call.ids_TK[-1].tolist())
            return
        drafted = self._drafted.pop(call.layer, [])
        exact = call.ids_TK[len(call.ids_TK) - len(drafted) - 1 :].tolist()
        for own, right in zip(drafted, exact, strict=False):  # the last drafted token was never fed to the draft
            if own == right:
                self.hard += 1
            elif set(own) == set(right):
                self.soft += 1
            else:
                self.mismatch += 1

    def reached(self, layer: int, keys: Sequence[int], held: Container[int]) -> None:
        """The verification is about to request these experts of a layer; a layer that is asked for again in the same
        pass, as one that goes token by token is, counts once."""
        if layer != self._layer:
            self.needed += len(keys)
            self.held += sum(key in held for key in keys)
        self._layer = layer

    def as_dict(self) -> Json:
        """Counts."""
        return {
            "sets": [self.hard, self.soft, self.mismatch],
            "needed": [self.held, self.needed],
        }


_FEW_ROWS = 32
"""A verification has no more rows, a prompt has."""


@dataclass(slots=True)
class Learnt:
    """What is known of one side in one setting."""

    governor: Kept | None = None
    warmed: bool = False
    report: Json = field(default_factory=dict)
    memory_bytes: int = 0


class Runner:
    """Runs sides of one offload.

    Args:
        path: of the model.
        options: of its offload.
    """

    def __init__(self, path: Path | str, options: dict[str, object]) -> None:
        self._path, self._options = path, options
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
            (by position), `sets` and `needed` as :meth:`Watch.as_dict` has them.
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
        ids = self._generate(side, prompt_1T, new_tokens + 1, clock)
        moved, hits, requests = (now - then for now, then in zip(counts(), before, strict=True))
        self._made |= made.drafts
        learnt.memory_bytes = sum(made.memory.values())
        if side.governed:
            learnt.report = governor.report()
        found: Json = {"tpot_s": clock.seconds / new_tokens, "ids": ids, "bytes": moved / new_tokens,
                       "lookups": [hits, requests]}  # fmt: skip
        if side.draft != NONE:
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
            ids_1S = self._drafting.generate(side.draft, (prompt_1T,), kwargs, length=side.length)
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
