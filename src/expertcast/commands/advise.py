"""`expertcast advise`: choose the experts' form, prefetching, and storage on a disk, by short measurements."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.bench_target import Target, TargetOptions, say_if_busy
from expertcast.commands.numbers import BANDWIDTHS
from expertcast.commands.options import Count, Form, Option, StoredOptions
from expertcast.commands.output import Outcome, new_file, say
from expertcast.commands.routing_file import (
    CAPACITY,
    described,
    heading,
    memories,
    open_routing,
    replayed_rows,
    routing_policies,
)
from expertcast.data.models import load_tokenizer
from expertcast.data.packed_experts import packed_matrices, weight_bits
from expertcast.data.routing_file import is_routing_file
from expertcast.data.source import ModelSource
from expertcast.data.text import bundled_ids
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json

if TYPE_CHECKING:
    from expertcast.runtime.advising.forms import FormOption
    from expertcast.runtime.advising.survey import Survey
    from expertcast.runtime.benchmarking.routing import RoutingProcess
    from expertcast.runtime.config import OffloadConfig
    from expertcast.runtime.offloading import OffloadedModel

_DRAFT = Option(
    metavar="NAME:K=V,...",
    help="options: acceptance (share of accepted tokens), foreseen (share of experts), cost (in steps without copies)",
)
_THIS_MACHINE = (
    "measured on link 'instant' of this machine, where experts in memory need no forecasts; --bandwidth emulates the "
    "link of other hardware"
)


@dataclass(frozen=True, kw_only=True)
class Options(TargetOptions):
    """Options of `expertcast advise`.

    Raises:
        ExpertcastError: as :class:`TargetOptions`; too few tokens; or --save with synthetic routing.
    """

    prompt_tokens: Count = 64
    """Length of the prompt in tokens."""
    new_tokens: Count = 32
    """Tokens to decode per run."""
    draft: Annotated[tuple[str, ...], _DRAFT] = ()
    """Also advise on drafts with these properties, and their length, by replaying the routing of the run on demand."""
    store_folder: Annotated[str | None, Option(metavar="DIR")] = None
    """Advise on experts in this folder instead: compressed or not, and with how much memory."""
    save: Annotated[Path | None, Option(metavar="FILE", read=new_file)] = None
    """Write the advised configuration, for `expertcast generate --config`."""
    capacity: Annotated[float | None, Option(metavar="SHARE")] = None
    """For a routing file, the share of all experts that fits, instead of --slots or --memory (default: 0.25)."""
    experts_per_layer: Count | None = None
    """For a routing file, experts per layer (default: largest id + 1)."""
    expert_bytes: Annotated[str | None, Option(metavar="BYTES")] = None
    """For a routing file without a column expert_bytes, the size of an expert."""

    def __post_init__(self) -> None:
        if is_routing_file(self.target):
            return
        from expertcast.runtime.benchmarking.bench import BenchSettings

        super().__post_init__()
        BenchSettings(new_tokens=self.new_tokens)
        if self.draft:
            self._check_drafts()
        if self.store_folder is not None:
            self._check_disk()
        elif self.save is not None and self.routing is not None:
            raise ExpertcastError("--save needs a model with its own routing, here routing is synthetic")

    @property
    def form(self) -> Form:
        """A routing file, or a model or shape with its experts in memory or in a store."""
        of_file = {"capacity", "experts_per_layer", "expert_bytes"}
        if is_routing_file(self.target):
            return Form("a routing file", of_file | {"target", "slots", "memory", "bandwidth", "latency", "save"})
        unread = of_file if self.store_folder is None else {
            *of_file, "link", "latency", "predictor", "copy_over_compute", "draft",
        }  # fmt: skip
        name, reads = super().form
        return Form(name if self.store_folder is None else "--store-folder", frozenset(reads) - unread)

    def forms(self) -> tuple[str, ...]:
        """Forms of the experts to try: that of --experts, else those that the checkpoint can have."""
        from expertcast.runtime.advising.forms import compared_forms
        from expertcast.runtime.storage.expert_file import packed_codec

        stored = self.store_folder is not None and packed_codec(Path(self.store_folder)) is not None
        if self.experts is not None or self.random or stored or self.device_name != "cpu":
            return (self.experts_form,)
        with suppress(ExpertcastError):  # loading raises a better one
            return compared_forms(ModelSource.of(self.target, self.passed_on(self.target)))
        return (self.experts_form,)

    @property
    def emulated(self) -> bool:
        """Whether the link is emulated: only with a speed or by name, otherwise advice is for this machine."""
        config, ratio = self.offload, self.copy_over_compute
        given = config.bandwidth is not None or config.latency or ratio is not None or config.link == "emulated"
        return super().emulated and bool(given)

    def _check_disk(self) -> None:
        if self.device_name != "cpu":
            raise ExpertcastError("--store-folder needs a model on the CPU: give --device cpu, or leave it out")

    def _check_drafts(self) -> None:
        from expertcast.runtime.advising.drafts import FEWEST, DraftTraits

        for draft in self.draft:
            DraftTraits.parse(draft)
        if self.new_tokens < FEWEST:
            raise ExpertcastError(f"--new-tokens {self.new_tokens} is too few for --draft: give {FEWEST} or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Measurements and advice with the experts in one form."""

    option: FormOption
    result: Json
    text: str
    config: OffloadConfig
    """The advised configuration."""
    link: Json
    """Name and speed of the link, for the other forms."""


def run(options: Options) -> Outcome:
    """Run the model briefly with the experts in each form, on demand and with forecasts, and choose."""
    if is_routing_file(options.target):
        return _advise_routing(options)
    from expertcast.runtime.advising.forms import FormOption, advise_forms

    say_if_busy()
    trials, refused = list[Trial](), dict[str, ExpertcastError]()
    forms = options.forms()
    for form in forms:
        if len(forms) > 1:
            say(f"experts {form}")
        try:
            trials.append(_try(options, form, trials[0] if trials else None))
        except ExpertcastError as error:
            refused[form] = error
        gc.collect()  # one form is in memory at a time
    if not trials:
        raise next(iter(refused.values()))
    found = [trial.option for trial in trials] + [FormOption(form=name, note=str(why)) for name, why in refused.items()]
    advice = advise_forms(found)
    chosen = next(trial for trial in trials if trial.option is advice.chosen)
    text = chosen.text if len(forms) == 1 else f"{advice.text()}\n\nwith experts={advice.chosen.form}: {chosen.text}"
    if options.save is not None:
        chosen.config.save(options.save)
        text += f"\nwrote {options.save}"
    return {**chosen.result, "forms": advice.as_dict()}, text


def _try(options: Options, form: str, first: Trial | None) -> Trial:
    """Measure the experts in one form, over the link and in the memory of the first form."""
    offload = options.offload
    if first is not None and offload.memory is None:
        assert first.option.slots is not None
        assert first.option.expert_bytes is not None
        offload = replace(offload, slots=None, memory=first.option.slots * first.option.expert_bytes)
    own = replace(options, experts=form, offload=offload)
    return _advise_memory(own, first) if options.store_folder is None else _advise_disk(own)


def _advise_memory(options: Options, first: Trial | None) -> Trial:
    """Run the model with its experts in memory."""
    from expertcast.runtime.advising.advise import advice_from
    from expertcast.runtime.advising.forms import FormOption
    from expertcast.runtime.advising.survey import survey

    target = Target.load(options)
    prompt_ids = target.prompt(options.prompt_tokens)
    process = target.routing_process(options.prompt_tokens, options.new_tokens)
    with process if process is not None else nullcontext():
        link = target.link(prompt_ids, options.new_tokens) if first is None else first.link
        config = target.config(link)
        say("short runs, on demand and with forecasts")
        predictors = [target.forecaster(process)]
        found = survey(target.model, prompt_ids, config, predictors=predictors, new_tokens=options.new_tokens)
    advice = advice_from(found)
    result = {**target.heading(process), **link, **advice.as_dict()}
    text = f"{options.target}, routing: {result['routing']}\n{advice.text()}"
    if link["link"] == "instant":
        text += "\n" + _THIS_MACHINE
    if options.draft:
        result["drafts"], drafts = _advise_drafts(options, found, packed=bool(packed_matrices(target.view[0].experts)))
        text += f"\n\n{drafts}"
    chosen = replace(advice.chosen.config(config), slots=found.case.slots, memory=None, store="memory")
    if link["link"] == "instant":  # the link of a CPU, also without its name
        chosen = replace(chosen, link=options.offload.link)
    option = replace(
        FormOption.of(options.experts_form, target.view, None), slots=found.case.slots, tpot_s=advice.chosen.tpot_s,
        hit_rate=advice.chosen.hit_rate,
    )  # fmt: skip
    return Trial(
        option=option, result=result, text=text, config=replace(chosen, experts=options.experts_form), link=link
    )


def _advise_drafts(options: Options, found: Survey, *, packed: bool) -> tuple[list[Json], str]:
    """Advise on drafts by the routing of the run on demand; on drafts in few bits only for experts that are not."""
    from expertcast.runtime.advising.drafts import LONGEST, DraftTraits, advise_drafts
    from expertcast.runtime.drafts.names import QUANTISED

    longest = min(LONGEST, found.trace.steps - 2)
    traits = [DraftTraits.parse(text) for text in options.draft]
    idle = [draft.name for draft in traits if packed and draft.name in QUANTISED]
    advice = [
        advise_drafts(found.trace, found.case, draft, longest=longest) for draft in traits if draft.name not in idle
    ]
    lines = ["drafts, as replayed from this routing", *(f"- {draft.text()}" for draft in advice)]
    lines += [f"- {name}: no cheaper than experts in 4 or 8 bits" for name in idle]
    return [draft.as_dict() for draft in advice], "\n".join(lines)


# --store-folder: codec and memory for experts on a disk

TOKENS = 1000
"""Tokens of --replay."""


def _advise_disk(options: Options) -> Trial:
    """Run the model briefly from the store, or with its experts in memory, and choose codec and memory.

    Raises:
        ExpertcastError: no such model, traces of another model, or a folder that cannot be written.
    """
    from expertcast.runtime.advising.disk import OWN, advise_disk, survey_disk
    from expertcast.runtime.advising.forms import FormOption
    from expertcast.runtime.config import size_bytes
    from expertcast.runtime.simulation.trace import SequenceSelection, load_trace
    from expertcast.runtime.storage.expert_file import packed_codec

    assert options.store_folder is not None
    folder, form = Path(options.store_folder), options.experts_form
    routing, replayed, memory = OWN, None, options.offload.memory
    if options.replay is not None:
        routing, replayed = (
            str(options.replay),
            load_trace(TraceDataset.open(options.replay), SequenceSelection(tokens=TOKENS)),
        )
    codec = packed_codec(folder)
    say("a short run on demand; reading and decoding some experts")
    offloaded, prompt_ids, process, bits = _run_for_disk(options, folder, codec)
    with process if process is not None else nullcontext():
        found = survey_disk(
            offloaded, prompt_ids, folder, new_tokens=options.new_tokens, bandwidth=options.offload.bandwidth,
            budget=None if memory is None else size_bytes(memory),
            routing=routing if process is None else process.tables.source, replayed=replayed,
        )  # fmt: skip
    advice = advise_disk(found)
    text = f"{options.target}, experts in {folder}\n{advice.text()}"
    if options.save is not None and advice.chosen.store == "disk" and advice.chosen.codec != codec:
        own = "" if form == StoredOptions.experts else f" --experts {form}"
        text += f"\npack with: expertcast store {options.target} --store-folder {folder} --codec "
        text += advice.chosen.codec + own
    option = FormOption(
        form=form, weight_bits=bits, expert_bytes=found.block_bytes, slots=advice.chosen.slots,
        all_experts_bytes=found.experts * found.block_bytes, tpot_s=advice.chosen.tpot_s,
        hit_rate=advice.chosen.hit_rate,
    )  # fmt: skip
    heading = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **provenance(), "target": options.target}
    result = {**heading, "packed": codec, **advice.as_dict()}
    config = replace(advice.chosen.config(options.offload, folder), experts=form)
    return Trial(option=option, result=result, text=text, config=config, link={})


def _run_for_disk(
    options: Options, folder: Path, codec: str | None
) -> tuple[Callable[..., OffloadedModel], Tensor, RoutingProcess | None, float | None]:
    """Return a function that offloads the model, the prompt [1, T], the routing process, if any, and bits per weight.

    The function loads from the store if there is one, and otherwise offloads the loaded model or shape.
    """
    from expertcast.runtime.config import size_bytes, slots_for
    from expertcast.runtime.loading import load_offloaded
    from expertcast.runtime.offloading import offload
    from expertcast.runtime.storage.expert_file import FILE_NAME, read_header

    name, config, tokens = options.target, replace(options.offload, experts=options.experts_form), options.prompt_tokens
    if codec is not None and not options.random:
        given = options.passed_on(name)
        if config.memory is not None:
            slots = size_bytes(config.memory) // read_header(folder / FILE_NAME).block_bytes
            config = replace(config, slots=slots, memory=None)
        config = replace(config, store="disk", store_folder=str(folder), codec=codec)
        ids_1T = torch.tensor([bundled_ids(load_tokenizer(name, **given), tokens, frozenset())])
        return partial(load_offloaded, name, config, device="cpu", dtype=options.dtype, **given), ids_1T, None, None
    target = Target.load(options)
    process = target.routing_process(tokens, options.new_tokens) if options.replay is None else None
    config = replace(config, experts="expanded", store=target.store, link="instant", bandwidth=None)
    if config.memory is not None:
        config = replace(config, slots=slots_for(config, target.store), memory=None)
    return partial(offload, target.model, config), target.prompt(tokens), process, weight_bits(target.view)


# A routing file in place of a model

_WORTH = 0.02
"""Share of the time per token that a policy must save over the simplest one to be advised."""
_SIMPLE = ("lrfu", "global")
_ADVISED = ("policy", "scope", "memory_bytes", "hits", "bytes_per_step", "copy_s", "policy_s")


def _advise_routing(options: Options) -> Outcome:
    """Replay every policy that needs no forecast, over all slots and with equal shares per layer.

    Raises:
        ExpertcastError: more than one size, a damaged file, or too little memory.
    """
    from expertcast.runtime.config import OffloadConfig
    from expertcast.runtime.policies import Policies
    from expertcast.runtime.simulation.sweep import BELADY

    config, capacity = options.offload, options.capacity
    if sum(given is not None for given in (config.memory, config.slots, capacity)) > 1:
        raise ExpertcastError("--capacity, --slots and --memory exclude each other: give one of them")
    routing, total = open_routing(options.target, options.experts_per_layer, options.expert_bytes)
    memory = [] if config.memory is None else [str(config.memory)]
    slots = [] if config.slots is None else [config.slots]
    shares = [] if memory or slots else [CAPACITY if capacity is None else capacity]
    (size,) = memories(routing, total, memory, shares, slots)
    link = BANDWIDTHS["pcie4"] if config.bandwidth is None else config.bandwidth
    names = routing_policies()
    cases = [(name, "global") for name in names]
    if size // routing.layers >= routing.top_k * int(routing.sized(total // (routing.layers * routing.experts)).max()):
        cases += [(name, "layer") for name in names]
    rows = replayed_rows(routing, total, [*cases, (BELADY, "global")], [size], bandwidth=link, latency=config.latency)
    *found, bound = rows
    chosen = _chosen(found)
    found.sort(key=_token_s)
    result: Json = {
        **heading(routing, total),
        "advised": {key: chosen[key] for key in _ADVISED},
        "reasons": _reasons(chosen, found, bound),
        "results": [*found, bound],
    }
    policies = Policies(eviction=chosen["policy"], scope=chosen["scope"])
    text = f"{described(result)}\n\n" + "\n".join(f"- {reason}" for reason in result["reasons"])
    text += f"\n\nadvised: eviction={chosen['policy']}, scope={chosen['scope']}"
    if options.save is not None:
        OffloadConfig(policies=policies, memory=str(size)).save(options.save)
        text += f"\nwrote {options.save}"
    return result, text


def _chosen(rows: list[Json]) -> Json:
    """Return the row with the least time, or lrfu over all slots if its time is within a margin."""
    best, simple = min(rows, key=_token_s), _simplest(rows)
    return simple if _token_s(best) >= (1 - _WORTH) * _token_s(simple) else best


def _token_s(row: Json) -> float:
    """Return the seconds per token of copies and of the policy's own computing."""
    seconds: float = row["copy_s"] + row["policy_s"]
    return seconds


def _simplest(rows: list[Json]) -> Json:
    return next(row for row in rows if (row["policy"], row["scope"]) == _SIMPLE)


def _reasons(chosen: Json, rows: list[Json], bound: Json) -> list[str]:
    simple = _simplest(rows)
    reasons = [
        f"{chosen['policy']} ({chosen['scope']}) hits {chosen['hits']:.1%} and leaves "
        f"{chosen['bytes_per_step'] / 1e6:.1f} MB per token, "
        f"{1e3 * chosen['copy_s']:.2f} ms on a link of {chosen['bandwidth'] / 1e9:.3g} GB/s; the policy takes "
        f"{1e3 * chosen['policy_s']:.2g} ms",
        f"belady, which knows the future, hits {bound['hits']:.1%}: {1e3 * bound['copy_s']:.2f} ms per token",
    ]
    if chosen is not simple:
        saved = 1 - _token_s(chosen) / _token_s(simple)
        reasons.insert(1, f"{simple['policy']} hits {simple['hits']:.1%}: {saved:.0%} of its time is saved")
    fewest = min(rows, key=lambda row: row["copy_s"])
    if _token_s(fewest) > _token_s(chosen) and fewest["copy_s"] < (1 - _WORTH) * chosen["copy_s"]:
        reasons.append(
            f"{fewest['policy']} ({fewest['scope']}) copies less, {1e3 * fewest['copy_s']:.2f} ms, but computes "
            f"{1e3 * fewest['policy_s']:.2g} ms per token"
        )
    return [*reasons, "the figures leave prompts out; forecasts by hidden states need the model"]
