"""`expertcast advise`: choose prefetching, and storage on a disk, by short measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.bench_target import DEFAULT_PREDICTOR, Target, TargetOptions, say_if_busy
from expertcast.commands.options import Count, Form, Option, StoredOptions, read_by
from expertcast.commands.output import Outcome, new_file, runs_table, say
from expertcast.data.models import form_of, load_config, load_tokenizer
from expertcast.data.routing_file import read_routing
from expertcast.data.text import bundled_ids
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json

if TYPE_CHECKING:
    from expertcast.predictors import MoEView
    from expertcast.runtime.benchmarking.bench import Bench, Run
    from expertcast.runtime.config import OffloadConfig
    from expertcast.runtime.offloading import OffloadedModel

ON_DEMAND = "on demand"
_THIS_MACHINE = (
    "measured on link 'instant' of this machine, where experts in memory need no forecasts; --bandwidth emulates the "
    "link of other hardware"
)


@dataclass(frozen=True, kw_only=True)
class Options(TargetOptions):
    """Options of `expertcast advise`.

    Raises:
        ExpertcastError: as :class:`TargetOptions`; or too few tokens.
    """

    prompt_tokens: Count = 64
    """Length of the prompt in tokens."""
    new_tokens: Count = 32
    """Tokens to decode per run."""
    store_folder: Annotated[str | None, Option(metavar="DIR")] = None
    """Advise on experts in this folder instead: compressed or not, and with which pools."""
    replay: Annotated[Path | None, Option(metavar="ROUTING")] = None
    """With --store-folder, use the routing recorded in a file of any engine instead of that of a short run."""
    save: Annotated[Path | None, Option(metavar="FILE", read=new_file)] = None
    """Write the advised configuration, for `expertcast generate --config`."""

    def __post_init__(self) -> None:
        from expertcast.runtime.benchmarking.bench import BenchSettings

        super().__post_init__()
        BenchSettings(new_tokens=self.new_tokens)
        if self.save is not None:
            replace(self.offload, predictor=self.predictor).as_dict()  # refused before the runs
        if self.store_folder is not None and self.device_name != "cpu":
            raise ExpertcastError("--store-folder needs a model on the CPU: give --device cpu, or leave it out")

    @property
    def form(self) -> Form:
        """A model with its experts in memory or in a store."""
        if self.store_folder is None:
            return Form("advise without --store-folder", read_by(Options, but={"replay"}))
        unread = {"link", "latency", "predictor", "copy_over_compute"}
        return Form("--store-folder", read_by(Options, but=unread))

    @cached_property
    def experts_form(self) -> str:
        """`experts`, else `auto` for a quantised checkpoint on the CPU, unless the store compresses."""
        from expertcast.runtime.storage.expert_file import packed_codec

        stored = self.store_folder is not None and packed_codec(Path(self.store_folder)) is not None
        if self.experts is None and not stored and self.device_name == "cpu":
            with suppress(ExpertcastError):  # loading raises a better one
                source = self.source_of(self.target)
                if form_of(load_config(source), source) is not None:
                    return StoredOptions.experts
        return super().experts_form

    @property
    def emulated(self) -> bool:
        """Whether the link is emulated: only with a speed or by name, otherwise advice is for this machine."""
        config, ratio = self.offload, self.copy_over_compute
        given = config.bandwidth is not None or config.latency or ratio is not None or config.link == "emulated"
        return super().emulated and bool(given)


def run(options: Options) -> Outcome:
    """Run the model briefly, on demand and with forecasts, and choose."""
    say_if_busy()
    result, text, config = _advise_memory(options) if options.store_folder is None else _advise_disk(options)
    if options.save is not None:
        config.save(options.save)
        text += f"\nwrote {options.save}"
    return result, text


WORTH = 0.02
"""Fraction of the time per token that prefetching must save, beyond two standard errors, to be advised."""


def _advise_memory(options: Options) -> tuple[Json, str, OffloadConfig]:
    """Run the model with its experts in memory; return the result, its text and the advised configuration."""
    from expertcast.runtime.benchmarking.bench import BenchSettings, measure
    from expertcast.runtime.forecasters import resolve_predictor
    from expertcast.runtime.policies.settings import ALWAYS

    target = Target.load(options)
    prompt_ids = target.prompt(options.prompt_tokens)
    link, name = target.link(prompt_ids, options.new_tokens), options.predictor or DEFAULT_PREDICTOR
    runs = {ON_DEMAND: target.config(link)}
    predictor, _ = resolve_predictor(name, target.view)
    assert predictor is not None
    for ahead in predictor.ahead:
        if link["link"] != "instant" and ahead < len(target.view):
            config = replace(runs[ON_DEMAND], predictor=predictor, ahead=ahead, forecasts=ALWAYS)
            runs[f"{name}, {ahead} ahead"] = config
    settings = BenchSettings(new_tokens=options.new_tokens, repetitions=2)
    measured = measure(target.model, prompt_ids, runs, settings, resident=None, say=say)
    facts, text = advice_from(measured, target.view)
    chosen, advised = runs[facts["advice"]], options.experts_form
    result = {**target.heading(), **link, **facts, "predictor": None, "ahead": None}
    config = replace(target.config(link), slots=facts["slots"], memory=None, store="memory", experts=advised)
    if chosen.predictor is not None:
        config = replace(config, predictor=name, ahead=chosen.ahead)
        result |= {"predictor": name, "ahead": chosen.ahead}
    text = f"{options.target}\n{text}"
    if link["link"] == "instant":  # the link of a CPU, also without its name
        config = replace(config, link=options.offload.link)
        text += "\n" + _THIS_MACHINE
    return result, text, config


def advice_from(measured: Bench, view: MoEView) -> tuple[Json, str]:
    """Choose the fastest run; the first one, on demand, unless another certainly saves `WORTH` of its time.

    Returns:
        The name of the run as `advice`, with measured values; and all of it as text.
    """
    on_demand, *others = measured.runs.values()
    saved_s = {name: _surely_saved_s(on_demand, run) for name, run in measured.runs.items()}
    experts, slots = len(view) * view.shape.experts, on_demand.slots
    best = max(saved_s, key=saved_s.__getitem__)
    if slots >= experts or saved_s[best] <= WORTH * on_demand.tpot_s:
        best = ON_DEMAND
    report, tpot_s = measured.reports[ON_DEMAND], on_demand.tpot_s
    waiting = report["copy_s"] / report["tpot_mean_s"]
    hideable = min(waiting, report["hideable_s"] / tpot_s)
    if slots >= experts:
        reason = f"all {experts} experts fit the slots: each is copied once, so prefetching gains nothing"
    elif not others:
        reason = "this link copies in the model's own thread: compute cannot hide its copies"
    else:
        reason = (
            f"on demand, waiting for copies is {waiting:.0%} of the time per token "
            f"(hit rate {report['hit_rate']:.0%}): prefetching can hide at most {hideable:.0%}"
        )
    advised = "load on demand" if best == ON_DEMAND else f"prefetch with {best}"
    facts = {
        "advice": best, "tpot_s": measured.runs[best].tpot_s, "on_demand_s": tpot_s, "most_to_hide": hideable,
        "slots": slots, "experts": experts, "link_rate": measured.link_rate, "runs": measured.reports,
    }  # fmt: skip
    text = (
        f"advice: {advised}; expect {1e3 * facts['tpot_s']:.3g} ms per token\n\n- {reason}\n"
        f"- prefetching is advised if it saves {WORTH:.0%} of the time per token, beyond two standard errors\n\n"
        f"{runs_table(measured.reports)}\n\n"
        f"link {measured.link_rate or 0:.3g} bytes/s; {slots} of {experts} experts in slots"
    )
    return facts, text


def _surely_saved_s(on_demand: Run, run: Run) -> float:
    """Return the seconds that a run saves per token: median over the same steps, less two standard errors."""
    from expertcast.runtime.benchmarking.bench import standard_error

    pairs = zip(on_demand.steps_s, run.steps_s, strict=True)
    saved_s = [slower - faster for slower, faster in pairs]
    return statistics.median(saved_s) - 2 * standard_error(saved_s)


# --store-folder: codec and pools for experts on a disk


def _advise_disk(options: Options) -> tuple[Json, str, OffloadConfig]:
    """Run the model briefly from the store, or with its experts in memory, and choose codec and pools.

    Raises:
        ExpertcastError: no such model, routing of another one, or a folder that cannot be written.
    """
    from expertcast.runtime.benchmarking.advise_disk import advise_disk, survey_disk
    from expertcast.runtime.storage.expert_file import packed_codec

    assert options.store_folder is not None
    folder, form = Path(options.store_folder), options.experts_form
    codec, routing = packed_codec(folder), None if options.replay is None else read_routing(options.replay)
    say("a short run on demand; reading and decoding some experts")
    offloaded, prompt_ids = _run_for_disk(options, folder, codec)
    found = survey_disk(
        offloaded, prompt_ids, folder, new_tokens=options.new_tokens, bandwidth=options.offload.bandwidth,
        routing=routing,
    )  # fmt: skip
    advice = advise_disk(found)
    text = f"{options.target}, experts in {folder}\n{advice.text()}"
    if options.save is not None and advice.chosen.codec != codec:
        own = "" if form == StoredOptions.experts else f" --experts {form}"
        text += f"\npack with: expertcast store {options.target} --store-folder {folder} --codec "
        text += advice.chosen.codec + own
    heading = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **provenance(), "target": options.target}
    result = {**heading, "packed": codec, **advice.as_dict()}
    return result, text, replace(advice.chosen.config(options.offload, folder), experts=form)


def _run_for_disk(options: Options, folder: Path, codec: str | None) -> tuple[Callable[..., OffloadedModel], Tensor]:
    """Return a function that offloads the model, and the prompt [1, T].

    The function loads from the store if there is one, and otherwise offloads the loaded model.
    """
    from expertcast.runtime.config import size_bytes, slots_for
    from expertcast.runtime.loading import load_offloaded
    from expertcast.runtime.offloading import offload
    from expertcast.runtime.storage.expert_file import FILE_NAME, read_header

    name, config, tokens = options.target, replace(options.offload, experts=options.experts_form), options.prompt_tokens
    if codec is not None:
        given = options.passed_on(name)
        if config.memory is not None:
            slots = size_bytes(config.memory) // read_header(folder / FILE_NAME).block_bytes
            config = replace(config, slots=slots, memory=None)
        config = replace(config, store="disk", store_folder=str(folder), codec=codec)
        ids_1T = torch.tensor([bundled_ids(load_tokenizer(name, **given), tokens, frozenset())])
        return partial(load_offloaded, name, config, device="cpu", dtype=options.dtype, **given), ids_1T
    target = Target.load(options)
    config = replace(config, experts="expanded", store=target.store, link="instant", bandwidth=None)
    if config.memory is not None:
        config = replace(config, slots=slots_for(config, target.store), memory=None)
    return partial(offload, target.model, config), target.prompt(tokens)
