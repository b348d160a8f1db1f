"""How a model is offloaded: every option once, checked before anything is loaded, and kept in a file."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import JsonValue

from expertcast.data.writer import write_where_told
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.artefacts import read_json
from expertcast.predictors.fields import field_docs
from expertcast.predictors.plain import Json
from expertcast.runtime.drafts.names import NONE, check_draft
from expertcast.runtime.links.base import Link, check_rate
from expertcast.runtime.option_values import check_types, from_plain, pool_bytes, size_bytes, to_plain
from expertcast.runtime.policies import PRESETS, Policies
from expertcast.runtime.storage.codecs import check_codec
from expertcast.runtime.storage.coded_file import packed_codec
from expertcast.runtime.storage.store import ExpertStore

MODES = ("exact", "speculate", "hybrid")
STORES = ("memory", "disk")
FORECASTS = ("always", "worth")
MOST_REFIT_MS = 1000.0
LINKS = ("auto", "instant", "emulated", "disk", "cuda", "kernel")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The options of :func:`expertcast.offload`, which takes them together as this or one by one as keywords.

    :meth:`save` and :meth:`load` keep them in a JSON file: a deployment is that file and the model.

    Raises:
        ExpertcastError: a value of another type than its field's, an unknown mode, link, store, preset or policy, a
            memory that is no size, or options that rule each other out.
    """

    predictor: str | Path | Predictor | None = None
    """A checkpoint's folder, user/repo or user/repo@revision of the hub, or the name of a predictor that needs no
    training; none loads experts on demand."""
    mode: str = "exact"
    """exact: forecasts only bring experts in early; speculate: they are executed; hybrid: at some layers."""
    slots: int | None = None
    """Experts that fit on the device (default: a quarter of all, without a cache three layers' worth of a token)."""
    memory: str | int | None = None
    """Device memory for experts instead of slots: bytes, or a text such as 2GB; with a codec on the CPU, what threads
    decode in is taken from it."""
    cache: bool = True
    """Keep experts until their slot is needed; false gives slots back as soon as a layer has run."""
    bandwidth: float | None = None
    """Bytes per second of the link: emulated on the CPU, a disk's at most; on CUDA copies are padded to that."""
    latency: float = 0.0
    """Seconds that each copy takes whatever its size, emulated likewise."""
    link: str | Link = "auto"
    """auto, instant, emulated, disk (read directly, past the system's page cache), cuda, or kernel (copies decided and
    made on the device); auto reads a store on disk directly, and measures the last two on CUDA otherwise."""
    policies: Policies | str | None = None
    """Which experts are kept, loaded and dropped, or a preset's name (default: lru, the forecast's own, every miss)."""
    next_token: str | Path | Predictor | None = None
    """Checkpoint of a next_token predictor, here or on the hub: experts that a token surely needs come when it begins,
    and the eviction policy `forecast` goes by it."""
    overfetch: float = 1.0
    """Experts prefetched per token as a multiple of K; policies that are given say it themselves."""
    likely: float = 0.2
    """The least probability by next_token at which an expert is loaded when a token begins (above 0, 1: none)."""
    forecasts: str = "always"
    """always, or worth: with a cache, only those that are expected to save more waiting than they take; executed ones
    are always made."""
    ahead: int = 1
    """Layers between a forecast and its target."""
    reach: int | None = None
    """Layers ahead that experts are asked for while the link is idle, nearest first (default: ahead)."""
    layers: tuple[int, ...] | None = None
    """With hybrid, the layers that execute their forecast (default: where recall@k is at least min_recall)."""
    min_recall: float = 0.9
    """With hybrid, the checkpoint's own recall@k from which a layer executes its forecast."""
    true_weights: bool = False
    """Executed forecasts get the true router's weights over the forecast's ids."""
    router_free: bool = False
    """Layers that execute their forecast leave their router out: its logits are never known there."""
    speculate_prefill: bool = False
    """Forecast and execute in prefill steps too; they are exact otherwise."""
    draft: str = NONE
    """What `generate` drafts with unless it is told otherwise: none, auto, int4, int8, resident, a lossy policy, ...
    (see :mod:`expertcast.runtime.drafts.drafts`); with `memory`, what int4 or int8 take is taken from it."""
    drift: bool = True
    """Follow the forecasts' recall, and warn once when it falls below the checkpoint's."""
    refit: float = 0.0
    """Milliseconds per token for refitting forecasts to the text while it runs; 0 leaves them as they were trained."""
    store: str | ExpertStore = "memory"
    """Where the experts lie: memory (page-locked for CUDA, as far as there is room), or disk (a file)."""
    store_folder: str | Path | None = None
    """With disk, the folder of the file, one per model (default: the file has no name, and goes with the process)."""
    codec: str | None = None
    """With disk, how experts are stored: raw, bitsplit (bf16 without loss, two thirds of the bytes), or mxfp4 and fp8
    (as a checkpoint in that form ships them); by default as they lie in store_folder, else raw."""
    pools: str = ""
    """With a codec, memory in which experts are kept compressed beside the slots, by state: C (whole), S (without
    exponents), E (exponents alone), such as C=2GB,E=300MB. `memory` is for slots and pools together."""

    def __post_init__(self) -> None:
        if isinstance(self.layers, Iterable):
            object.__setattr__(self, "layers", tuple(self.layers))
        _check_choice("mode", self.mode, MODES)
        _check_choice("store", self.store, STORES)
        _check_choice("link", self.link, LINKS)
        _check_choice("forecasts", self.forecasts, FORECASTS)
        check_types(self)
        if self.slots is not None and self.memory is not None:
            raise ExpertcastError("give slots or memory, not both")
        if self.memory is not None:
            size_bytes(self.memory)
        check_rate(self.bandwidth, self.latency)
        if self.ahead < 1:
            raise ExpertcastError(f"ahead={self.ahead}: give a number of layers, 1 or more")
        if not 0 <= self.min_recall <= 1:
            raise ExpertcastError(f"min_recall={self.min_recall}: give a share of 0 to 1, such as 0.9")
        if not 0 < self.likely <= 1:
            raise ExpertcastError(f"likely={self.likely}: give a probability above 0 and up to 1, such as 0.2")
        if not 0 <= self.refit <= MOST_REFIT_MS:
            raise ExpertcastError(f"refit={self.refit}: give milliseconds per token, 0 to {MOST_REFIT_MS:g}")
        if self.store_folder is not None and self.store != "disk":
            raise ExpertcastError("store_folder belongs to store='disk': leave it out")
        if self.store_folder == "":
            raise ExpertcastError("store_folder='': give a folder, '.' for the current one")
        if self.codec not in (None, "raw"):
            check_codec(self.codec)
            if self.store != "disk":
                raise ExpertcastError(
                    f"codec={self.codec!r} needs store='disk' (--store-folder): give that too, or leave the codec out"
                )
        if self.reach is not None and self.reach < self.ahead:
            raise ExpertcastError(f"reach={self.reach} is nearer than ahead={self.ahead}: give a larger one, or none")
        if self.router_free and (self.mode == "exact" or self.true_weights):
            with_what = "mode 'exact'" if self.mode == "exact" else "true_weights"
            raise ExpertcastError(f"router_free leaves routers out, which {with_what} needs: choose one of them")
        if pool_bytes(self.pools):
            self._check_pools()
        check_draft(self.draft)
        if self.draft != NONE and (self.mode != "exact" or self.resolved_policies().lossy):
            raise ExpertcastError(
                f"draft={self.draft!r} is verified by the exact model: leave mode and lossy policies out"
            )
        self.resolved_policies()

    def __repr__(self) -> str:
        """The fields that are not at their default."""
        fields = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        changed = (f"{name}={value!r}" for name, (value, default) in fields.items() if value != default)
        return f"OffloadConfig({', '.join(changed)})"

    def _check_pools(self) -> None:
        if self.resolved_codec() == "raw" and not isinstance(self.store, ExpertStore):
            raise ExpertcastError(f"pools={self.pools!r} keep compressed experts: give a codec, such as 'bitsplit'")
        policies = self.resolved_policies()
        if policies.eviction.name != "lru" or policies.scope != "global" or policies.miss.cls.lossy:
            raise ExpertcastError("pools decide what stays in a slot: leave eviction, scope and lossy misses out")
        if not self.cache:
            raise ExpertcastError("pools keep experts, and cache=False keeps none: leave one of them out")

    @classmethod
    def of(cls, config: Self | None, fields: Mapping[str, object]) -> Self:
        """A configuration with some fields changed; none is the default one.

        Raises:
            ExpertcastError: a field that does not exist, or as the class.
        """
        if not isinstance(config, cls | None):
            raise ExpertcastError(f"config is a {type(config).__name__}: give an OffloadConfig, or its fields by name")
        _check_names(fields, [field.name for field in dataclasses.fields(cls)])
        return dataclasses.replace(config or cls(), **fields)  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """The configuration that :meth:`as_dict` described; what is not in it has its default.

        Raises:
            ExpertcastError: a field that does not exist, a value that is not of its field's type, or as the class.
        """
        hints = typing.get_type_hints(cls)
        _check_names(values, list(hints))
        return cls.of(None, {name: from_plain(name, value, hints[name]) for name, value in values.items()})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote. Folders in it are as they were given: relative to the current one, or absolute.

        Raises:
            ExpertcastError: no such file, no JSON object in it, or as :meth:`from_dict`; the line names the file.
        """
        values = read_json(
            Path(path), dict[str, JsonValue], "OffloadConfig.save and `expertcast advise --save` write one"
        )
        try:
            return cls.from_dict(values)
        except ExpertcastError as error:
            raise ExpertcastError(f"{path}: {error}") from error

    def as_dict(self) -> Json:
        """Every field as a plain value, policies as texts by kind.

        Raises:
            ExpertcastError: a field holds an object, such as a link or a predictor that was made already.
        """
        hints = typing.get_type_hints(type(self))
        return {name: to_plain(name, getattr(self, name), hint) for name, hint in hints.items()}

    def save(self, path: str | Path) -> None:
        """Write a JSON file for :meth:`load`; one that is there is replaced as a whole.

        Raises:
            ExpertcastError: as :meth:`as_dict`; or the folder is missing or cannot be written.
        """
        write_where_told(Path(path), (json.dumps(self.as_dict(), indent=2) + "\n").encode())

    @property
    def on_demand(self) -> bool:
        """Whether every expert is loaded when its layer asks for it: neither this nor a preset forecasts."""
        return self.next_token is None and self.resolved_predictor() is None

    def resolved_codec(self) -> str:
        """What is given, else how experts lie in the folder, else raw.

        Raises:
            ExpertcastError: what lies there is damaged, or not ours.
        """
        if self.codec is None and self.store_folder is not None:
            return packed_codec(Path(self.store_folder)) or "raw"
        return self.codec or "raw"

    def resolved_policies(self) -> Policies:
        """The policies that a preset's name, or nothing, stands for.

        Raises:
            ExpertcastError: unknown preset, or `overfetch` beside policies that say what is prefetched.
        """
        if self.policies is None:
            return Policies(prefetch=f"top_k:overfetch={self.overfetch}")
        if self.overfetch != 1.0:
            raise ExpertcastError(
                "overfetch belongs to the policies here: give Policies(prefetch='top_k:overfetch=1.5')"
            )
        if isinstance(self.policies, Policies):
            if self.policies.eviction.cls.offline:
                raise ExpertcastError(
                    f"eviction {self.policies.eviction.name!r} needs to know the future: run it with "
                    "`expertcast simulate`"
                )
            return self.policies
        if self.policies not in PRESETS:
            raise ExpertcastError(
                f"unknown preset {self.policies!r}: choose from {', '.join(PRESETS)}, or give Policies(...)"
            )
        return PRESETS[self.policies].policies

    def resolved_predictor(self) -> str | Path | Predictor | None:
        """What is given, else what the preset forecasts with."""
        if self.predictor is None and isinstance(self.policies, str):
            return PRESETS[self.policies].predictor
        return self.predictor


OffloadConfig.__doc__ = f"{OffloadConfig.__doc__}\n    Fields:\n" + "".join(
    f"        {name}: {doc}\n" for name, doc in field_docs(OffloadConfig).items()
)  # so that help() shows them


def _check_names(given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ExpertcastError(f"unknown option {name!r}: choose from {', '.join(known)}")


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, Link | ExpertStore) and value not in known:
        raise ExpertcastError(f"unknown {name} {value!r}: choose from {', '.join(known)}")
