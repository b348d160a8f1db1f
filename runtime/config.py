"""Options of offloading: their types, checks and file, and the link, store and slots that they name."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, InstanceOf, JsonValue
from pydantic_core import PydanticSerializationError, to_jsonable_python

from expertcast.checkpoints.checkpoint import PredictorCheckpoint, is_name, recover
from expertcast.checkpoints.hub import HubName
from expertcast.data.packed_experts import pack_module, packed_matrices
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.artefacts import read_json, write_user_file
from expertcast.predictors.base import PREDICTORS
from expertcast.predictors.messages import Json, Progress, TooLargeError, format_bytes
from expertcast.predictors.options import field_docs, validate
from expertcast.runtime.drafts.names import NONE, QUANTISED, check_draft, keeps_copies
from expertcast.runtime.links.base import InstantLink, Link, check_rate
from expertcast.runtime.policies import Choice, Policies
from expertcast.runtime.policies.base import check_slots
from expertcast.runtime.policies.settings import AUTO, FORECASTS, parse_policies, preset
from expertcast.runtime.pools.states import State
from expertcast.runtime.storage.store import ExpertStore

if TYPE_CHECKING:
    import torch

    from expertcast.predictors.view import MoEView
    from expertcast.runtime.policies.base import Policy
    from expertcast.runtime.storage.layout import ExpertsForm

# Values of options: types, plain forms for JSON, sizes

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def size_bytes(memory: str | int, name: str = "memory=") -> int:
    """Return the bytes of a size: a number, or text such as `2GB` or `512MiB`.

    Args:
        memory: the size.
        name: what errors have before it.

    Raises:
        ExpertcastError: other text.
    """
    if not isinstance(memory, str):
        return int(memory)
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?I?)B?\s*", memory.upper())
    try:
        if match is None:
            raise ValueError
        return int(float(match[1]) * _UNITS[match[2]])
    except (ValueError, KeyError, OverflowError):
        raise ExpertcastError(f"{name}{memory!r} is no size: give bytes, or text such as '2GB' or '512MiB'") from None


def pool_bytes(text: str) -> dict[State, int]:
    """Return the bytes of each pool of text such as `C=2GB,S=500MB`; empty for empty text.

    Raises:
        ExpertcastError: other text, or a state twice.
    """
    found: dict[State, int] = {}
    for entry in filter(None, text.split(",")):
        name, _, size = entry.partition("=")
        state = next((state for state in (State.C, State.S, State.E) if state.name == name.strip()), None)
        if state is None or state in found:
            raise ExpertcastError(
                f"pools={text!r}: give one size for each state, of C (compressed), S (signs and mantissas) and E "
                "(exponents), such as 'C=2GB,E=300MB'"
            )
        found[state] = size_bytes(size, f"pools={text!r}: ")
    return found


def named_checkpoint(given: str | Path) -> PredictorCheckpoint | None:
    """Return the checkpoint that `predictor` names: a folder, or a repository of the hub, which is downloaded;
    None for the name of a registered predictor.

    Raises:
        ExpertcastError: an unknown name, the name of both a predictor and a folder, or a damaged checkpoint.
    """
    recover(Path(given))
    if is_name(given):
        return None
    if not os.path.exists(given) and HubName.of(given) is None:  # no error for text that cannot be a path
        raise ExpertcastError(
            f"unknown predictor {str(given)!r}: give a checkpoint's folder, user/repo of the hub, or one of "
            f"{', '.join(PREDICTORS.names())}"
        )
    return PredictorCheckpoint.open(given)


MODES = ("exact", "speculate", "hybrid")
STORES = ("memory", "disk")
_ON_DISK = ("disk", "checkpoint")
"""Names of stores whose experts are in files."""
COPY, HOST = "copy", "host"
MISSES = (COPY, HOST, AUTO)
EXPANDED, PACKED, BY_FORM = "expanded", "packed", "auto"
EXPERTS_BITS = {"int8": 8, "int4": 4}
EXPERTS = (BY_FORM, EXPANDED, PACKED, *EXPERTS_BITS)
LINKS = ("auto", "instant", "emulated", "disk", "cuda")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Options of :func:`expertcast.offload`, which also takes them one by one as keywords.

    :meth:`save` and :meth:`load` use a JSON file: a deployment is that file and the model.

    Raises:
        ExpertcastError: a value of the wrong type, an unknown mode, link, store, preset or policy, a malformed size, or
            options that contradict each other.

    Example:
        >>> import expertcast
        >>> config = expertcast.OffloadConfig(predictor="next_norm", slots=192)
        >>> config.save("offload.json")
        >>> expertcast.OffloadConfig.load("offload.json") == config
        True
    """

    predictor: str | Path | Predictor | None = None
    """Checkpoint folder, user/repo or user/repo@revision of the hub, or the name of a predictor that needs no training
    (default: none, experts are loaded on demand)."""
    mode: str = "exact"
    """exact: forecasts only prefetch; speculate: layers execute them; hybrid: some layers do."""
    slots: int | None = None
    """Number of slots, places for one expert each (default: as many as fit `memory`; in `bench`, `advise` and for a
    loaded model a quarter of all experts, on the CPU at most what is free)."""
    memory: str | int | None = None
    """Memory of the whole process on the device that computes: bytes, or text such as 8GB. Experts get what all else
    leaves (default: free memory, less a reserve)."""
    context: Annotated[int, Field(ge=1)] = 4096
    """Longest sequence in tokens, for which memory is reserved (default: 4096; in `generate` what it needs)."""
    cache: bool = True
    """Keep experts until their slot is needed; false frees a slot as soon as its layer has run, and takes slots for a
    token's experts at three layers by default."""
    bandwidth: float | None = None
    """Bytes per second of the link: emulated on the CPU, a limit for a disk."""
    latency: float = 0.0
    """Seconds of latency per copy, emulated in the same way."""
    link: str | Link = "auto"
    """auto, instant, emulated, disk (direct reads without the page cache), or cuda. auto is disk for a store on disk,
    else cuda on CUDA."""
    policies: InstanceOf[Policies] | str | None = None
    """Cache policies, text such as `eviction=lfu scope=layer`, or the name of a preset (default: lrfu, prefetch of the
    forecast experts, every miss loaded)."""
    forecasts: str = AUTO
    """auto: in each step the fastest of the predictor's methods, executed or not, or none; always; never: only executed
    forecasts."""
    misses: str = COPY
    """Missing experts of decode steps: copy them, compute them on the host from the store, or auto."""
    ahead: Annotated[int, Field(ge=1)] = 1
    """Distance in layers between a forecast and its target."""
    layers: tuple[int, ...] | None = None
    """With hybrid, layers that execute their forecast (default: those with recall@k of at least min_recall)."""
    min_recall: Annotated[float, Field(ge=0, le=1)] = 0.9
    """With hybrid, least recall@k, by the checkpoint, of a layer that executes its forecast."""
    speculate_prefill: bool = False
    """Forecast and execute in prefill steps too; otherwise prefill is exact."""
    draft: str = NONE
    """Draft that the exact model verifies: none, auto, int4, int8, resident, a lossy policy and others. `memory`
    includes the experts of int4 and int8."""
    store: str | ExpertStore = "memory"
    """Storage of the experts: memory (page-locked for CUDA, within a budget; `load_offloaded` reads them from the
    checkpoint's own files if they do not fit, or on the CPU get slots for all of them), or disk (a file)."""
    store_folder: str | Path | None = None
    """With a store on disk, the folder of its file, one per model (default: a temporary file)."""
    in_place: bool = False
    """With a store on disk, read the experts from the checkpoint's own files, not from a copy (default if the disk has
    no room for one); forms other than the file's are converted after each read."""
    experts: str = BY_FORM
    """Form of the experts: auto (on the CPU packed if ggml has the checkpoint's form, else expanded); expanded (the
    model's dtype); packed (the blocks of a quantised checkpoint, by ggml); int4 or int8 (rounded)."""
    codec: str | None = None
    """With a store on disk, compression of the experts: raw, or bitsplit (bf16 without loss, two thirds of the bytes;
    default: that of store_folder, else raw)."""
    pools: str = ""
    """With a codec, memory for compressed experts by state: C (whole), S (without exponents), E (exponents only), such
    as C=2GB,E=300MB. `memory` includes these pools."""

    def __post_init__(self) -> None:
        if isinstance(self.layers, Iterable):
            object.__setattr__(self, "layers", tuple(self.layers))
        if isinstance(self.policies, str) and "=" in self.policies:
            object.__setattr__(self, "policies", parse_policies(self.policies.split()))
        _check_choice("mode", self.mode, MODES)
        _check_choice("store", self.store, STORES)
        _check_choice("link", self.link, LINKS)
        _check_choice("forecasts", self.forecasts, FORECASTS)
        _check_choice("experts", self.experts, EXPERTS)
        _check_choice("misses", self.misses, MISSES)
        validate(self)
        if self.slots is not None and self.memory is not None:
            raise ExpertcastError("give slots or memory, not both")
        if self.memory is not None:
            size_bytes(self.memory)
        check_rate(self.bandwidth, self.latency)
        if isinstance(self.link, Link) and (self.bandwidth is not None or self.latency):
            raise ExpertcastError(
                "bandwidth and latency do not apply to a link object: leave them out, or give the name of a link"
            )
        if self.store_folder is not None and self.store != "disk":
            raise ExpertcastError("store_folder needs store='disk': give that too, or leave store_folder out")
        if self.store_folder == "":
            raise ExpertcastError("store_folder='': give a folder, '.' for the current one")
        if self.in_place and (self.store != "disk" or self.store_folder is not None):
            raise ExpertcastError("in_place reads the checkpoint's own files: give store='disk' without store_folder")
        if self.codec not in (None, "raw"):
            from expertcast.runtime.storage.codecs import CODECS

            CODECS.get(self.codec)
            if self.in_place:
                raise ExpertcastError(f"in_place keeps experts as they are: leave codec={self.codec!r} out")
            if self.store != "disk":
                raise ExpertcastError(
                    f"codec={self.codec!r} needs store='disk' (--store-folder): give that too, or leave the codec out"
                )
        if self.experts not in (EXPANDED, BY_FORM):
            self._check_packed()
        if pool_bytes(self.pools):
            self._check_pools()
        check_draft(self.draft, packed=self.experts not in (EXPANDED, BY_FORM))
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
            raise ExpertcastError(f"pools={self.pools!r} need compressed experts: give a codec, such as 'bitsplit'")
        policies = self.resolved_policies()
        if str(policies.eviction) != Policies.eviction or policies.scope != "global" or policies.miss.cls.lossy:
            raise ExpertcastError("pools have their own eviction: leave eviction, scope and lossy misses out")
        if not self.cache:
            raise ExpertcastError("pools need cache=True: leave one of the two out")

    def _check_packed(self) -> None:
        if self.codec not in (None, "raw"):
            raise ExpertcastError(f"codec {self.codec!r} does not store experts={self.experts!r}: leave the codec out")
        miss = self.resolved_policies().miss
        if keeps_copies(miss):
            raise ExpertcastError(
                f"miss {miss.name!r} keeps copies in fewer bits, no smaller than experts={self.experts!r}: choose "
                "another policy"
            )

    @classmethod
    def of(cls, config: Self | None, fields: Mapping[str, object]) -> Self:
        """Return a configuration with some fields changed; None: the default one.

        Raises:
            ExpertcastError: an unknown field, or as the class.
        """
        if not isinstance(config, cls | None):
            raise ExpertcastError(f"config is a {type(config).__name__}: give an OffloadConfig, or its fields by name")
        for name in fields:
            _check_choice("option", name, tuple(field.name for field in dataclasses.fields(cls)))
        return dataclasses.replace(config or cls(), **fields)  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Return the configuration from the result of :meth:`as_dict`; missing fields have their default.

        Raises:
            ExpertcastError: an unknown field, a value of the wrong type, or as the class.
        """
        policies = values.get("policies")
        if isinstance(policies, dict):
            values = {**values, "policies": parse_policies(f"{kind}={text}" for kind, text in policies.items())}
        return cls.of(None, values)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of :meth:`save`. Relative folders in it are relative to the current folder.

        Raises:
            ExpertcastError: no such file, no JSON object in it, or as :meth:`from_dict`; the message names the file.
        """
        values = read_json(
            Path(path), dict[str, JsonValue], "give a file of OffloadConfig.save or `expertcast advise --save`"
        )
        try:
            return cls.from_dict(values)
        except ExpertcastError as error:
            raise ExpertcastError(f"{path}: {error}") from error

    def as_dict(self) -> Json:
        """Return every field as a plain value, policies as text by kind.

        Raises:
            ExpertcastError: a field is an object, such as a link or a predictor, or names a class of the user's own,
                which another process does not know.
        """
        named: dict[str, type[Policy | Predictor]] = {}
        if isinstance(self.policies, Policies):
            named = {f"{kind} policy": own.cls for kind, own in vars(self.policies).items() if isinstance(own, Choice)}
        if isinstance(self.predictor, str) and is_name(self.predictor):
            named["predictor"] = PREDICTORS.get(self.predictor)
        for kind, cls in named.items():
            if not cls.__module__.startswith("expertcast."):
                raise ExpertcastError(
                    f"{kind} {cls.name!r} is a class of your own, which a file cannot hold: save without it, and give "
                    "it beside the file, as MODULE:CLASS on the command line"
                )
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.policies, Policies):
            values["policies"] = self.policies.as_dict()
        for name, value in values.items():
            try:
                values[name] = to_jsonable_python(value)
            except PydanticSerializationError:
                raise ExpertcastError(
                    f"{name} is a {type(value).__name__}, which a file cannot hold: give text or numbers"
                ) from None
        return values

    def save(self, path: str | Path) -> None:
        """Write a JSON file for :meth:`load`, atomically.

        Raises:
            ExpertcastError: as :meth:`as_dict`; or the folder is missing or cannot be written.
        """
        write_user_file(Path(path), (json.dumps(self.as_dict(), indent=2) + "\n").encode())

    @property
    def on_demand(self) -> bool:
        """Whether every expert is loaded on demand, without forecasts by the options or a preset."""
        return self.resolved_predictor() is None

    def resolved_codec(self) -> str:
        """Return `codec`, else the codec of the store folder, else raw.

        Raises:
            ExpertcastError: the file in the folder is damaged, or not of expertcast.
        """
        if self.codec is None and self.store_folder is not None:
            from expertcast.runtime.storage.expert_file import packed_codec

            return packed_codec(Path(self.store_folder)) or "raw"
        return self.codec or "raw"

    def resolved_experts(self) -> str:
        """Return `experts`; expanded for `auto` beside a codec, and beside copies of experts in fewer bits."""
        copies = self.draft in QUANTISED or keeps_copies(self.resolved_policies().miss)
        expanded = self.experts == BY_FORM and (copies or self.resolved_codec() != "raw")
        return EXPANDED if expanded else self.experts

    def resolved_policies(self) -> Policies:
        """Return the policies, those of a preset, or the default ones.

        Raises:
            ExpertcastError: unknown preset, or an eviction that needs the future routing.
        """
        if self.policies is None:
            return Policies()
        if isinstance(self.policies, Policies):
            if self.policies.eviction.cls.offline:
                raise ExpertcastError(
                    f"eviction {self.policies.eviction.name!r} needs the future routing: use it with "
                    "`expertcast simulate`"
                )
            return self.policies
        return preset(self.policies).policies

    def resolved_predictor(self) -> str | Path | Predictor | None:
        """Return `predictor`, else the predictor of the preset."""
        if self.predictor is None and isinstance(self.policies, str):
            return preset(self.policies).predictor
        return self.predictor


OffloadConfig.__doc__ = f"{OffloadConfig.__doc__}\n    Fields:\n" + "".join(
    f"        {name}: {doc}\n" for name, doc in field_docs(OffloadConfig).items()
)  # so that help() shows them


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, Link | ExpertStore) and value not in known:
        raise ExpertcastError(f"unknown {name} {value!r}: choose from {', '.join(known)}")


# Warnings about options that change the output or have no effect, one line each


def remarks(config: OffloadConfig) -> list[str]:
    """Return a line for options that change the output, and one for each group of options without effect."""
    policies = config.resolved_policies()
    found = list(_lossy(config, policies))
    for condition, names in _idle(config, policies):
        given = list(dict.fromkeys(names))
        if given:
            found.append(f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect {condition}")
    return found


def _lossy(config: OffloadConfig, policies: Policies) -> Iterator[str]:
    """Yield a line if policies change the output in mode 'exact'."""
    if config.mode == "exact" and policies.lossy:
        miss, routing = policies.miss, policies.routing
        found = {f"miss {miss.name!r}": miss.cls.lossy, f"routing {routing.name!r}": routing.cls.lossy}
        named = " and ".join(name for name, lossy in found.items() if lossy)
        where = f" of preset {config.policies!r}" if isinstance(config.policies, str) else ""
        yield f"{named}{where} may change the output, also in mode 'exact': only lossless policies keep every bit"


def _idle(config: OffloadConfig, policies: Policies) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield conditions, each with the changed options that have no effect under it."""
    fields = [field.name for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]

    def changed(*names: str) -> list[str]:
        return [name for name in fields if name in names]

    if config.mode == "exact":
        yield "in mode 'exact'", changed("layers", "min_recall", "speculate_prefill")
    elif config.mode == "speculate" or config.layers is not None:
        yield "unless mode 'hybrid' chooses its layers by it", changed("min_recall")
    if config.resolved_predictor() is None:
        of_policies = {"prefetch": policies.prefetch, "pre_eviction": policies.pre_eviction}
        usual = (Policies.prefetch, "none")
        named = [f"{kind} {str(own)!r}" for kind, own in of_policies.items() if str(own) not in usual]
        yield "without a predictor", [*changed("ahead", "forecasts"), *named]


# Link, store and slots of one device


def pack_experts(view: MoEView, form: str, device: str = "cpu") -> None:
    """Round a model's experts in place, for good.

    Args:
        view: its MoE layers.
        form: `experts` of :class:`OffloadConfig`; `expanded` and `auto` change nothing.
        device: type of the device where the model computes.

    Raises:
        ExpertcastError: the experts are packed already, or `form` is `packed` and they are not.
    """
    packed, bits = bool(packed_matrices(view[0].experts)), EXPERTS_BITS.get(form)
    if form == PACKED and not packed:
        raise ExpertcastError(
            "the experts here are expanded: give experts='int4' or 'int8'; only load_offloaded takes blocks from a "
            "checkpoint"
        )
    if bits is None:
        return
    if packed:
        raise ExpertcastError(f"the model's experts are packed already: leave experts={form!r} out")
    for layer in Progress(f"rounding experts to {form}", unit="layer", steps=view):
        pack_module(layer.experts, layer.num_experts, bits, device)


def draft_bytes(config: OffloadConfig, view: MoEView) -> int:
    """Return the bytes that the configured draft needs on the device."""
    from expertcast.runtime.drafts.kinds import expected_bytes

    return expected_bytes(view, config.draft) if config.draft in QUANTISED else 0


def memory_beside(config: OffloadConfig, store: ExpertStore, beside: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes beside the slots, each with its name: `beside`, decoding and pools."""
    own = {"decoding": 0, f"pools={config.pools!r}": sum(pool_bytes(config.pools).values())}
    if store.codec is not None and store.device.type == "cpu":
        from expertcast.runtime.storage.coded_reader import decoding_bytes

        own["decoding"] = decoding_bytes(store.codec)
    return {name: nbytes for name, nbytes in {**beside, **own}.items() if nbytes}


def listed(parts: Mapping[str, int]) -> str:
    """Return named numbers of bytes in words."""
    return ", ".join(f"{format_bytes(nbytes)} for {name}" for name, nbytes in parts.items() if nbytes)


def slots_for(
    config: OffloadConfig, store: ExpertStore, beside: Mapping[str, int] = MappingProxyType({}), room: int | None = None
) -> int:
    """Return the number of slots by `slots`, `memory`, `room`, or else `cache`; at most one per expert.

    Args:
        config: the options.
        store: holds the experts; threads that decode for it on the CPU work in a part of the memory.
        beside: bytes of the memory for other uses, each with its name.
        room: memory without `slots` and `memory`; None: a quarter of the experts.

    Raises:
        TooLargeError: too few slots for one token; names the smallest number of bytes that would do.
    """
    slots, top_k, everything = config.slots, store.top_k, store.layers * store.experts
    budget = room if config.memory is None else size_bytes(config.memory)
    least = 3 * top_k  # the running layer's, a forecast's, and those of a wrong forecast whose copies are under way
    if slots is None and budget is not None:
        block_bytes, parts = store.layout.block_bytes, memory_beside(config, store, beside)
        slots = store.slots_in(budget - sum(parts.values()))
        if slots < top_k:
            given = f"memory={config.memory!r} holds"
            if config.memory is None:
                given = f"{format_bytes(budget)} of free memory hold"
            words, enough = f" beside {listed(parts)}" if parts else "", sum(parts.values()) + top_k * block_bytes
            raise TooLargeError(
                f"{given} {slots} experts of {format_bytes(block_bytes)}{words}; one token "
                f"needs {top_k}: give {enough} bytes or more, such as {format_bytes(1.01 * enough).replace(' ', '')}"
            )
        if config.memory is None and not config.cache:
            slots = min(slots, least)
    elif slots is None:
        slots = max(least, everything // 4) if config.cache else least
    check_slots(slots, top_k)
    return min(slots, everything)


def make_link(config: OffloadConfig, device: str) -> Link:
    """Return the link that `link`, `bandwidth` and `latency` name, on a type of device.

    Raises:
        ExpertcastError: the device or another option excludes the link.
    """
    link, bandwidth, latency = config.link, config.bandwidth, config.latency
    if config.pools and (device != "cpu" or link not in ("auto", "disk")):
        raise ExpertcastError(f"pools need link 'disk' on the CPU, not {link!r} on {device}: leave pools out")
    if isinstance(link, Link):
        return link
    if link == "auto":
        link = _auto_link(config, device)
    if link == "emulated":
        if device != "cpu":
            raise ExpertcastError(f"link 'emulated' needs a model on the CPU, this one is on {device}: use 'cuda'")
        from expertcast.runtime.links.emulated import EmulatedLink

        return EmulatedLink(float("inf") if bandwidth is None else bandwidth, latency)
    if link == "disk" and not latency:
        if device == "cuda":
            from expertcast.runtime.links.disk_cuda import CudaDiskLink

            return CudaDiskLink(bandwidth=bandwidth)
        from expertcast.runtime.links.disk import DiskLink

        return DiskLink(bandwidth=bandwidth, pools=pool_bytes(config.pools), passing=1 if config.on_demand else 2)
    if link == "cuda" and device != "cuda":
        raise ExpertcastError(f"link 'cuda' needs a model on CUDA, this one is on {device}: use 'emulated'")
    if bandwidth is not None or latency:
        raise ExpertcastError(
            f"link {link!r} has no bandwidth or latency: leave them out, or use 'emulated' on the CPU ('disk' has "
            "bandwidth)"
        )
    if link == "cuda":
        from expertcast.runtime.links.cuda import CudaLink

        return CudaLink()
    return InstantLink()


def _auto_link(config: OffloadConfig, device: str) -> str:
    made = config.store if isinstance(config.store, ExpertStore) else None
    timed = (config.bandwidth is not None or config.latency) and (made is None or made.addressable) and device == "cpu"
    if config.store == "disk" or (made is not None and made.name in _ON_DISK):
        return "disk"
    if device == "cuda":
        return "cuda"
    return "emulated" if timed else "instant"


def make_store(
    config: OffloadConfig, form: ExpertsForm, device: torch.device, fingerprint: str | None = None
) -> ExpertStore:
    """Return the store that `store` and `store_folder` name, not filled yet.

    Args:
        config: the options.
        form: number and layout of the experts.
        device: where the model computes.
        fingerprint: of the checkpoint that the experts come from; see `DiskStore`.

    Raises:
        ExpertcastError: the folder holds another file of the store's name, or the model has no files to read in place.
    """
    if config.in_place and fingerprint is None:
        raise ExpertcastError("in_place reads a checkpoint's files: give its folder to load_offloaded")
    if isinstance(config.store, ExpertStore):
        return config.store
    if config.store != "disk":
        return ExpertStore(form, device=device, pinned=device.type == "cuda")
    from expertcast.runtime.storage.disk_store import DiskStore

    folder, codec = config.store_folder, config.resolved_codec()
    store = DiskStore(form, folder, codec=codec, device=device, fingerprint=fingerprint)
    unnamed = config.codec is None and codec == "raw"
    halves = all(field.dtype.itemsize == 2 for field in form.layout.fields)  # as bitsplit needs
    if unnamed and halves and folder is not None and not store.holds(0):
        size = format_bytes(store.nbytes)
        warnings.warn(
            f"codec 'raw' writes {size} of experts to {str(folder)!r}: another codec (--codec bitsplit) writes less",
            stacklevel=3,
        )
    return store
