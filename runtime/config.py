"""How a model is offloaded: every option once, checked before anything is loaded, and kept in a file."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
import re
import reprlib
import types
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import JsonValue

from expertcast.checkpoints.checkpoint import PredictorCheckpoint, is_name, recover
from expertcast.checkpoints.hub import HubName
from expertcast.data.trace_writer import write_where_told
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors import names as predictor_names
from expertcast.predictors.artefacts import read_json
from expertcast.predictors.messages import Json, size_text
from expertcast.predictors.options import field_docs
from expertcast.predictors.view import MoEView, overfetched
from expertcast.runtime.drafts.names import NONE, QUANTISED, check_draft
from expertcast.runtime.links.base import InstantLink, Link, check_rate
from expertcast.runtime.policies import LRU, PRESETS, Fetch, Policies, Standard, TopK
from expertcast.runtime.policies.settings import AUTO, FORECASTS, NEVER
from expertcast.runtime.pools.states import State
from expertcast.runtime.storage.codecs import check_codec
from expertcast.runtime.storage.expert_file import packed_codec
from expertcast.runtime.storage.reader import can_read_directly
from expertcast.runtime.storage.store import ExpertStore

if TYPE_CHECKING:
    import torch

    from expertcast.predictors.view import ModelShape
    from expertcast.runtime.storage.layout import ExpertsForm

# Values of options: types, plain forms for JSON, sizes

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_JSON_TYPES: dict[object, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    types.NoneType: "leave it out",
    Policies: "Policies(...), in a file an object with a text for each kind of policy",
}
"""What JSON may hold for a field of such a type; for others (links, stores, predictors) it holds nothing."""
_ALIKE = {int: numbers.Integral, float: numbers.Real}
"""Types of numbers that are taken as well, such as numpy's."""


def check_types(config: object) -> None:
    """Refuse a configuration in which a field holds a value of another type.

    Raises:
        ExpertcastError: the line names the first such field, its value, and what may be given.
    """
    cls: type = type(config)
    for name, hint in typing.get_type_hints(cls).items():
        value = getattr(config, name)
        if not any(_is_of(kind, value) for kind in _members(hint)):
            meaning = re.split("[:;(]", field_docs(cls)[name])[0].strip().rstrip(".")
            raise ExpertcastError(f"{name}={reprlib.repr(value)}: give {_allowed(hint)} ({name} is: {meaning})")


def _is_of(kind: object, value: object) -> bool:
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(typing.get_args(kind)[0], element) for element in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, _ALIKE.get(kind, kind))  # type: ignore[arg-type, call-overload]


def to_plain(name: str, value: object, hint: object) -> object:
    """A field's value as JSON has it; the field's name and type are for the error.

    Raises:
        ExpertcastError: JSON cannot hold it: an object that was made already, or a number without end.
    """
    if isinstance(value, Policies):
        return value.as_dict()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    what = value if isinstance(value, float) else f"a {type(value).__name__}"
    raise ExpertcastError(f"{name} is {what}, which no file can hold: give {_allowed(hint)}")


def from_plain(name: str, value: object, hint: object) -> object:
    """A value from JSON as a field of this type has it, if it is one; :func:`check_types` refuses others.

    Raises:
        ExpertcastError: a text with NUL, or policies that are none.
    """
    if isinstance(value, str) and "\0" in value:
        raise ExpertcastError(f"{name}={value!r}: give a text without NUL, which no path can have")
    if isinstance(value, list):
        return tuple(value)
    return _policies(value) if isinstance(value, dict) and Policies in _members(hint) else value


def size_bytes(memory: str | int) -> int:
    """Bytes of a size: a number of them, or a text such as `2GB` or `512MiB`.

    Raises:
        ExpertcastError: another text.
    """
    if not isinstance(memory, str):
        return int(memory)
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMG]?I?)B?\s*", memory.upper())
    try:
        if match is None:
            raise ValueError
        return int(float(match[1]) * _UNITS[match[2]])
    except (ValueError, KeyError, OverflowError):
        raise ExpertcastError(f"memory={memory!r} is no size: write bytes, or text such as '2GB' or '512MiB'") from None


def pool_bytes(text: str) -> dict[State, int]:
    """Bytes of each pool of a text such as `C=2GB,S=500MB`; none for an empty one.

    Raises:
        ExpertcastError: another text, or a state twice.
    """
    found: dict[State, int] = {}
    for entry in filter(None, text.split(",")):
        name, _, size = entry.partition("=")
        state = next((state for state in (State.C, State.S, State.E) if state.name == name.strip()), None)
        if state is None or state in found:
            raise ExpertcastError(
                f"pools={text!r}: give sizes by state, each once, of C (compressed), S (signs and mantissas) and E "
                "(exponents), such as 'C=2GB,E=300MB'; full experts have the slots"
            )
        try:
            found[state] = size_bytes(size)
        except ExpertcastError:
            raise ExpertcastError(f"pools={text!r}: {size!r} is no size: write it as '2GB' or '512MiB'") from None
    return found


def _members(hint: object) -> tuple[object, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _allowed(hint: object) -> str:
    """What JSON may hold for a field of this type, in words."""
    words = []
    for kind in _members(hint):
        if typing.get_origin(kind) is tuple:
            words.append(f"a list, each of it {_allowed(typing.get_args(kind)[0])}")
        elif kind in _JSON_TYPES:
            words.append(_JSON_TYPES[kind])
    return " or ".join(words)


def _policies(given: Mapping[str, object]) -> Policies:
    kinds = list(Policies().as_dict())
    for kind, text in given.items():
        if kind not in kinds or not isinstance(text, str):
            raise ExpertcastError(f"policies {kind}={text!r}: give texts by kind, of {', '.join(kinds)}")
    return Policies(**given)  # type: ignore[arg-type]


def named_checkpoint(given: str | Path) -> PredictorCheckpoint | None:
    """The checkpoint that a `predictor` or `next_token` names: a folder, or a repository of the hub, which is
    downloaded; None for a registered predictor's name.

    Raises:
        ExpertcastError: it names none of these, a predictor and a folder, or a checkpoint that is not right.
    """
    recover(Path(given))
    if is_name(given):
        return None
    if not os.path.exists(given) and HubName.of(given) is None:  # no error for a text that can be no path
        raise ExpertcastError(
            f"predictor {str(given)!r} is neither a folder nor one of {', '.join(predictor_names())}, nor user/repo "
            "of the hub: give a checkpoint's folder"
        )
    return PredictorCheckpoint.open(given)


MODES = ("exact", "speculate", "hybrid")
STORES = ("memory", "disk")
MOST_REFIT_MS = 1000.0
EXPANDED, PACKED = "expanded", "packed"
EXPERTS_BITS = {"int8": 8, "int4": 4}
EXPERTS = (EXPANDED, PACKED, *EXPERTS_BITS, "auto")
LINKS = ("auto", "instant", "emulated", "disk", "cuda", "kernel")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The options of :func:`expertcast.offload`, which takes them together as this or one by one as keywords.

    :meth:`save` and :meth:`load` keep them in a JSON file: a deployment is that file and the model.

    Raises:
        ExpertcastError: a value of another type than its field's, an unknown mode, link, store, preset or policy, a
            memory that is no size, or options that rule each other out.

    Example:
        >>> import expertcast
        >>> config = expertcast.OffloadConfig(predictor="next_norm", slots=192)
        >>> config.save("offload.json")
        >>> expertcast.OffloadConfig.load("offload.json") == config
        True
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
    made on the device); auto reads a store on disk directly, and takes cuda on CUDA otherwise."""
    policies: Policies | str | None = None
    """Which experts are kept, loaded and dropped, or a preset's name (default: lru, the forecast's own, every miss)."""
    next_token: str | Path | Predictor | None = None
    """Checkpoint of a next_token predictor, here or on the hub: experts that a token surely needs come when it begins,
    and the eviction policy `forecast` goes by it."""
    overfetch: float = 1.0
    """Experts prefetched per token as a multiple of K; policies that are given say it themselves."""
    likely: float = 0.2
    """The least probability by next_token at which an expert is loaded when a token begins (above 0, 1: none)."""
    forecasts: str = AUTO
    """auto: by the way to forecast whose decode steps are fastest, as learned while the model runs, where they save
    more than they cost, or none; always: all, by the predictor itself; never. Executed forecasts are always made."""
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
    (see :mod:`expertcast.runtime.drafts.kinds`); with `memory`, what int4 or int8 take is taken from it."""
    drift: bool = True
    """Follow the forecasts' recall, and warn once when it falls below the checkpoint's."""
    refit: float = 0.0
    """Milliseconds per token for refitting forecasts to the text while it runs; 0 leaves them as they were trained."""
    store: str | ExpertStore = "memory"
    """Where the experts lie: memory (page-locked for CUDA, as far as there is room), or disk (a file)."""
    store_folder: str | Path | None = None
    """With disk, the folder of the file, one per model (default: the file has no name, and goes with the process)."""
    experts: str = EXPANDED
    """How experts are held and multiplied: expanded (in the model's dtype); packed (a quantised checkpoint's codes and
    scales, in 4 or 8 bits); int4 or int8 (rounded here); auto (packed where the checkpoint is quantised)."""
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
        _check_choice("experts", self.experts, EXPERTS)
        check_types(self)
        if self.slots is not None and self.memory is not None:
            raise ExpertcastError("give slots or memory, not both")
        if self.memory is not None:
            size_bytes(self.memory)
        check_rate(self.bandwidth, self.latency)
        if isinstance(self.link, Link) and (self.bandwidth is not None or self.latency):
            raise ExpertcastError(
                "bandwidth and latency are those of the link that is given: leave them out, or name the link"
            )
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
        if self.experts != EXPANDED:
            self._check_packed()
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

    def _check_packed(self) -> None:
        if self.codec not in (None, "raw"):
            raise ExpertcastError(
                f"experts={self.experts!r} lie in few bits, which codec {self.codec!r} does not store: leave it out"
            )
        if self.draft in QUANTISED and self.experts in EXPERTS_BITS:
            raise ExpertcastError(
                f"draft {self.draft!r} is no cheaper than experts={self.experts!r}: give another draft"
            )

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


# Remarks on options, one line each, for the user who offloads a model


def remarks(config: OffloadConfig) -> list[str]:
    """What a user should know of options that were taken as they are: which change the output, which have no effect."""
    policies = config.resolved_policies()
    found = list(_lossy(config, policies))
    for condition, names in _idle(config, policies):
        given = list(dict.fromkeys(names))
        if given:
            found.append(f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect {condition}")
    return found


def _lossy(config: OffloadConfig, policies: Policies) -> Iterator[str]:
    """Mode 'exact' says that forecasts change nothing; policies may."""
    if config.mode == "exact" and policies.lossy:
        miss, routing = policies.miss, policies.routing
        found = {f"miss {miss.name!r}": miss.cls.lossy, f"routing {routing.name!r}": routing.cls.lossy}
        named = " and ".join(name for name, lossy in found.items() if lossy)
        where = f" of preset {config.policies!r}" if isinstance(config.policies, str) else ""
        yield f"{named}{where} may change the output, in mode 'exact' too: only lossless policies leave every bit"


def _idle(config: OffloadConfig, policies: Policies) -> Iterator[tuple[str, Iterable[str]]]:
    """When, and which options that are not at their defaults have no effect then."""
    fields = [field.name for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]

    def changed(*names: str) -> list[str]:
        return [name for name in fields if name in names]

    if config.mode == "exact":
        yield "in mode 'exact'", changed("layers", "min_recall", "true_weights", "speculate_prefill")
    elif config.mode == "speculate" or config.layers is not None:
        yield "unless mode 'hybrid' chooses its layers by it", changed("min_recall")
    if config.resolved_predictor() is None:
        of_policies = {"prefetch": policies.prefetch, "pre_eviction": policies.pre_eviction}
        usual = (Policies.prefetch, "none")
        named = [f"{kind} {str(own)!r}" for kind, own in of_policies.items() if str(own) not in usual]
        named = named if config.policies is not None else []  # without, it is `overfetch` that says it
        overfetch = changed("overfetch") if config.cache else []  # else the default number of slots goes by it
        yield "without a predictor", [*changed("ahead", "reach", "forecasts"), *overfetch, *named]
    if config.next_token is None:
        reads = [f"looking ahead by eviction {str(policies.eviction)!r}"] if policies.eviction.cls.reads_tokens else []
        yield "without next_token", [*changed("likely"), *reads]


# What options stand for on one device


def slots_for(config: OffloadConfig, shape: ModelShape, block_bytes: int, drafts: int = 0, decoding: int = 0) -> int:
    """Slots to make, at most one per expert: what `slots`, `memory`, or else `cache` and `overfetch` stand for.

    Args:
        config: the options.
        shape: of the model.
        block_bytes: bytes of one expert; read where `memory` is given.
        drafts, decoding: bytes that drafts, and threads that decode, take of `memory`.

    Raises:
        ExpertcastError: too few for one token.
    """
    slots, everything = config.slots, shape.layers * shape.experts
    if config.memory is not None:
        pools = sum(pool_bytes(config.pools).values())
        slots = (size_bytes(config.memory) - drafts - decoding - pools) // block_bytes
        if slots < shape.top_k:
            beside = f" beside pools={config.pools!r}" if config.pools else ""
            beside += f" beside {drafts} bytes for draft={config.draft!r}" if drafts else ""
            beside += f" beside {decoding} bytes to decode in" if decoding else ""
            raise ExpertcastError(
                f"memory={config.memory!r} holds {max(0, slots)} experts of {block_bytes} bytes{beside}, one token "
                f"needs {shape.top_k}: give {shape.top_k * block_bytes} bytes or more{beside}"
            )
    elif slots is None:
        # the running layer's, a forecast's, and those of a wrong forecast whose copies are under way
        least = shape.top_k + 2 * overfetched(config.overfetch, shape.top_k, shape.experts)
        slots = max(least, everything // 4) if config.cache else least
    if slots < shape.top_k:
        raise ExpertcastError(
            f"slots={slots} is fewer than the {shape.top_k} experts one token needs: give slots={shape.top_k} or more"
        )
    return min(slots, everything)


def make_link(config: OffloadConfig, device: str) -> Link:
    """The link that `link`, `bandwidth` and `latency` stand for on a type of device; its module is imported here.

    Raises:
        ExpertcastError: a link that the device or the other options rule out.
    """
    link, bandwidth, latency = config.link, config.bandwidth, config.latency
    only_on_host = _only_on_host(config)
    if only_on_host and (link == "kernel" or (isinstance(link, Link) and link.decides_on_device)):
        raise ExpertcastError(
            f"the kernel link decides on the device, without {only_on_host}: take link='cuda', or leave that out"
        )
    if config.pools and (device != "cpu" or link not in ("auto", "disk")):
        raise ExpertcastError(f"pools are kept by link 'disk' on the CPU, not by {link!r} on {device}: leave pools out")
    if isinstance(link, Link):
        return link
    if link == "auto":
        link = _auto_link(config, device)
    if link == "emulated":
        if device != "cpu":
            raise ExpertcastError(f"the emulated link is for models on the CPU, this one is on {device}: use 'cuda'")
        from expertcast.runtime.links.emulated import EmulatedLink

        return EmulatedLink(float("inf") if bandwidth is None else bandwidth, latency)
    if link == "disk" and not latency:
        return _disk_link(config, device)
    if link == "cuda" and device != "cuda":
        raise ExpertcastError(f"link 'cuda' needs a model on CUDA, this one is on {device}: use 'emulated'")
    timed = bandwidth is not None or bool(latency)
    if timed and link != "cuda":
        raise ExpertcastError(
            "bandwidth and latency belong to the links emulated and cuda, bandwidth also to disk: "
            f"{link!r} takes none of them"
        )
    if link == "cuda":
        from expertcast.runtime.links.cuda import CudaLink, PacedCudaLink

        return PacedCudaLink(bandwidth, latency) if timed else CudaLink()
    if link == "kernel":
        from expertcast.runtime.experimental.kernel_link import KernelLink

        return KernelLink()
    return InstantLink()


def _auto_link(config: OffloadConfig, device: str) -> str:
    made = config.store if isinstance(config.store, ExpertStore) else None
    coded = config.resolved_codec() != "raw" or (made is not None and not made.addressable)
    timed = (config.bandwidth is not None or config.latency) and not coded
    on_disk = (config.store == "disk" or (made is not None and made.name == "disk")) and can_read_directly()
    if on_disk and not timed:
        return "disk"
    if device == "cuda":
        return "cuda"
    return "emulated" if timed else "instant"


def _disk_link(config: OffloadConfig, device: str) -> Link:
    if device == "cuda":
        from expertcast.runtime.links.disk_cuda import CudaDiskLink

        return CudaDiskLink(bandwidth=config.bandwidth)
    from expertcast.runtime.links.disk import DiskLink

    return DiskLink(bandwidth=config.bandwidth, pools=pool_bytes(config.pools), passing=1 if config.on_demand else 2)


def _only_on_host(config: OffloadConfig) -> str | None:
    """What the kernel link, which decides on the device, would leave out of these options; None: nothing."""
    policies = config.resolved_policies()
    chosen = (policies.eviction.cls, policies.prefetch.cls, policies.miss.cls, policies.routing.cls)
    plain = policies.scope == "global" and policies.pre_eviction.name == "none"
    if not plain or chosen != (LRU, TopK, Fetch, Standard):
        return "policies other than lru over all slots, top_k prefetches and every miss fetched"
    used = {
        "next_token": config.next_token is not None,
        "refit": config.refit > 0,
        "reach": config.reach not in (None, config.ahead),
        "forecasts='never'": config.forecasts == NEVER,
    }
    return next((name for name, given in used.items() if given), None)


def make_store(
    config: OffloadConfig, view: MoEView | ExpertsForm, device: torch.device, fingerprint: str | None = None
) -> ExpertStore:
    """The store that `store` and `store_folder` stand for.

    Args:
        config: the options.
        view: the model's MoE layers, or the form of its experts.
        device: where the model computes.
        fingerprint: of the checkpoint that the experts come from; see `DiskStore`.

    Raises:
        ExpertcastError: the folder holds another file of the store's name.
    """
    if isinstance(config.store, ExpertStore):
        return config.store
    if config.store != "disk":
        return ExpertStore(view, device=device, pinned=device.type == "cuda")
    from expertcast.runtime.storage.disk_store import DiskStore

    folder, codec = config.store_folder, config.resolved_codec()
    store = DiskStore(view, folder, codec=codec, device=device, fingerprint=fingerprint)
    expanded = config.codec is None and codec == "raw" and config.experts == EXPANDED
    if expanded and folder is not None and not store.holds(0):
        size = size_text(store.nbytes)
        warnings.warn(
            f"{size} of experts are written to {str(folder)!r} by codec 'raw': a codec such as 'bitsplit' (--codec) "
            "writes less",
            stacklevel=3,
        )
    return store
