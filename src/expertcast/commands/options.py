"""Command line options from the fields of dataclasses: flag, type, default and help are the field's own.

Command modules import the runtime inside their functions. Names of it in the annotations of their options are found in
`RUNTIME` when the options are made.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.checkpoints.bundled import resolve_model
from expertcast.commands.numbers import bandwidth, not_negative_whole, positive
from expertcast.data.machine import torch_device
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.plan import TextOptions
from expertcast.data.processes import join_ranks, wait_for_all
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.options import field_docs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from expertcast.runtime.config import EXPERTS, MODES, OffloadConfig
    from expertcast.runtime.offloading import OffloadedModel
    from expertcast.runtime.policies import Policies
    from expertcast.runtime.policies.settings import FORECASTS

C = TypeVar("C", bound="DataclassInstance")

RUNTIME = {
    "BenchSettings": "benchmarking.bench",
    "EXPERTS": "config",
    "FORECASTS": "policies.settings",
    "MODES": "config",
    "OffloadConfig": "config",
    "RoutingOptions": "benchmarking.routing",
    "Texts": "simulation.trace",
}
"""Names that annotations of options may use without an import, by module of the runtime."""


class _Runtime(dict[str, object]):
    """Imports a name of `RUNTIME` when an annotation asks for it; it goes before a module's own name."""

    def __missing__(self, name: str) -> object:
        return getattr(importlib.import_module(f"expertcast.runtime.{RUNTIME[name]}"), name)


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a field's name, type, default and docstring leave open of its option: `Annotated[int, Option(...)]`."""

    flag: str | None = None
    """Its flag, where that is not the field's name."""
    positional: bool = False
    """Whether it is given by its place, without a flag."""
    metavar: str | None = None
    """What stands for the value in the help."""
    choices: Sequence[str] | None = None
    """The only values."""
    read: Callable[[str], object] | None = None
    """Makes a value of one word, where the type does not."""
    help: str | None = None
    """What the option takes, behind what the field's docstring says."""


class Fields(dict[str, Option]):
    """What has to be said of the options of a nested dataclass; its other fields get none. Empty: all of them do."""


class Given(dict[str, object], Generic[C]):
    """The fields of a dataclass that were given on the command line: `Annotated[Given[Config], Fields(...)]`."""


class _Field(NamedTuple):
    """A field of a dataclass, with its type taken apart."""

    name: str
    default: object
    kind: type
    """Of a single value."""
    around: set[object]
    """What stands around that: tuple, Given, a union."""
    option: Option | Fields
    """Fields, when it is a dataclass that is nested in another."""


def add_options(parser: argparse._ActionsContainer, cls: type[C]) -> None:
    """Give a parser an option per field; those of nested dataclasses are a group of their own in the help.

    Args:
        parser: of a command.
        cls: the dataclass. Fields without a default must be given; a bool is a switch.
    """
    docs = field_docs(cls)
    for field in _fields(cls):
        if isinstance(field.option, Option):
            _add(parser, field, field.option, docs[field.name])
            continue
        group, inner_docs = parser.add_argument_group(field.name, docs[field.name]), field_docs(field.kind)
        for inner in _fields(field.kind, field.option):
            assert isinstance(inner.option, Option)
            _add(group, inner, inner.option, inner_docs[inner.name], given=Given in field.around)


def read_options(cls: type[C], args: argparse.Namespace) -> C:
    """The dataclass from what was parsed; nested ones are made too.

    Args:
        cls: the dataclass whose options a parser was given.
        args: what it found.

    Raises:
        ExpertcastError: values that the dataclass refuses.
    """
    values: dict[str, object] = {}
    for field in _fields(cls):
        if isinstance(field.option, Option):
            values[field.name] = _value(field, args)
            continue
        inner = {each.name: _value(each, args) for each in _fields(field.kind, field.option)}
        if Given in field.around:
            values[field.name] = Given({name: value for name, value in inner.items() if value is not None})
        else:
            values[field.name] = field.kind(**inner)
    return cls(**values)


def _fields(cls: type[DataclassInstance], only: Mapping[str, Option] | None = None) -> Iterator[_Field]:
    """The fields that get an option (of a nested dataclass, `only` these), a class's own before what it inherits."""
    fields = {field.name: field for field in dataclasses.fields(cls) if not only or field.name in only}
    hints = typing.get_type_hints(cls, localns=_Runtime(), include_extras=True)
    for base in cls.__mro__:
        for name in inspect.get_annotations(base):
            if name in fields:
                kind, around, notes = _taken_apart(hints[name])
                option = next((note for note in notes if isinstance(note, (Option, Fields))), Option())
                yield _Field(name, fields.pop(name).default, kind, around, only[name] if only else option)


def _taken_apart(hint: object) -> tuple[type, set[object], list[object]]:
    """The type that stands inside of others, those others, and what they are annotated with."""
    around, notes = set[object](), list[object]()
    while origin := typing.get_origin(hint):
        hint, *others = typing.get_args(hint)
        if origin is Annotated:
            notes += others
        else:
            around.add(origin)
    return typing.cast(type, hint), around, notes


def _value(field: _Field, args: argparse.Namespace) -> object:
    value = getattr(args, field.name)
    return tuple(value) if isinstance(value, list) else value


def _add(parser: argparse._ActionsContainer, field: _Field, option: Option, doc: str, *, given: bool = False) -> None:
    """An option for a field of that docstring; with `given` its default is None, whatever the field's is."""
    required = field.default is dataclasses.MISSING
    default = None if required else field.default
    text = _help("; ".join(filter(None, (doc.rstrip("."), option.help))), default)
    if option.positional:
        parser.add_argument(field.name, type=option.read or field.kind, metavar=option.metavar, help=text)
        return
    flag = option.flag or "--" + field.name.replace("_", "-")
    if field.kind is bool:
        parser.add_argument(flag, dest=field.name, action="store_true", help=text)
        return
    parser.add_argument(
        flag,
        dest=field.name,
        type=option.read or field.kind,
        nargs="+" if tuple in field.around else None,
        required=required and not given,
        default=None if given else default,
        metavar=option.metavar,
        choices=option.choices,
        help=text,
    )


def _help(doc: str, default: object) -> str:
    """A docstring as the help of an option: no sentence, and with the default unless it says that itself."""
    text = lowered(doc)
    if default is not None and default is not False and default != () and "default:" not in text:
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text = f"{text} (default: {shown})".strip()
    return text.replace("%", "%%")


def lowered(sentence: str) -> str:
    """A sentence without its capital letter, unless its first word is a name such as AdamW, CPU or K."""
    first = sentence.partition(" ")[0].rstrip(",")
    named = first[1:] != first[1:].lower() or (len(first) == 1 and first != "A")
    return sentence if named else sentence[:1].lower() + sentence[1:]


BANDWIDTH = Option(metavar="BYTES/S", read=bandwidth, help="a number, or pcie3, pcie4, pcie5 (12, 25, 50 GB/s)")
COUNT = Option(metavar="N", read=positive)
EARLY = Option(metavar="R|none", read=lambda text: None if text == "none" else not_negative_whole(text))
MODEL_HELP = "local folder or hub id of a transformers model, or `reference` (the bundled model)"
DATA_HELP = (
    "hub data set id, or local .parquet/.jsonl files with a column `text`, or .txt files (each cut into documents of "
    "about 4000 characters, at blank lines), or `reference` (bundled text)"
)

Count = Annotated[int, COUNT]
"""1 or more of something."""
Model = Annotated[str, Option(positional=True, metavar="MODEL", help=MODEL_HELP)]
Data = Annotated[tuple[str, ...], Option(metavar="D", help=DATA_HELP)]
TextColumn = Annotated[str, Option(metavar="NAME")]
Text = Annotated[TextOptions, Fields(window=COUNT, batch_size=COUNT, early_rank=EARLY)]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is loaded."""

    dtype: Annotated[str, Option(choices=("auto", "bf16", "fp16", "fp32"))] = "auto"
    """Dtype to load in."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ... (default: cuda when there is one)."""
    revision: Annotated[str | None, Option(metavar="REV")] = None
    """Branch, tag or commit of a model on the hub (default: main)."""
    trust_remote_code: bool = False
    """Run the code that a model brings along."""
    attn_implementation: Annotated[str | None, Option(metavar="NAME")] = None
    """Attention as transformers names it, such as sdpa, eager or flash_attention_2 (default: its own choice)."""

    @property
    def device_name(self) -> str:
        """`device`, with `auto` resolved.

        Raises:
            ExpertcastError: there is no such device.
        """
        return str(torch_device(None if self.device == "auto" else self.device))

    def load(self, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A model on its device, and its tokenizer.

        Raises:
            ExpertcastError: no such model, tokenizer or device.
        """
        given = self.passed_on(name)
        return load_model(name, dtype=self.dtype, device=self.device_name, **given), load_tokenizer(name, **given)

    def passed_on(self, name: str) -> dict[str, Any]:
        """What `from_pretrained` is told beside the model's `name`.

        Raises:
            ExpertcastError: a revision of what is no repository.
        """
        if self.revision is not None and Path(resolve_model(name)).exists():
            raise ExpertcastError(f"--revision {self.revision} is of a hub id, and {name} is here: leave it out")
        given = {"revision": self.revision, "attn_implementation": self.attn_implementation}
        asked = {key: value for key, value in given.items() if value is not None}
        return {**asked, "trust_remote_code": self.trust_remote_code}  # without it transformers would ask at a terminal


_FEW_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
"""oneDNN keeps a kernel for each number of tokens that an expert got, 1,024 of them by default: 1.5 GB beside a model
that memory is too small for. It reads the variable when it makes the first one."""


@dataclass(frozen=True, kw_only=True)
class StoredOptions(ModelOptions):
    """How a model is loaded whose experts may lie in a folder."""

    store_folder: Annotated[str | None, Option(metavar="DIR")] = None
    """Run the model offloaded, its experts packed in this folder: for models larger than memory."""
    experts: Annotated[str, Option(choices=EXPERTS)] = "expanded"
    """Run the model offloaded, its experts expanded (in the model's dtype), packed (as a quantised checkpoint ships
    them), rounded to int8 or int4, or auto (packed where the checkpoint is quantised)."""

    def opener(self, name: str) -> Callable[[OffloadConfig], OffloadedModel] | None:
        """Function that opens the model `name` offloaded by a configuration, from the folder or with its experts in
        another form; None without these."""
        from expertcast.runtime.config import OffloadConfig
        from expertcast.runtime.loading import load_offloaded

        changed: dict[str, object] = {"experts": self.experts}
        if self.store_folder is not None:
            changed |= {"store": "disk", "store_folder": self.store_folder, "codec": None}
        elif self.experts == StoredOptions.experts:
            return None

        given = self.passed_on(name)

        def opened(config: OffloadConfig) -> OffloadedModel:
            stored = OffloadConfig.of(config, changed)
            return load_offloaded(name, stored, device=self.device_name, dtype=self.dtype, **given)

        return opened


@dataclass(frozen=True, kw_only=True)
class OffloadedOptions(StoredOptions):
    """How a model is loaded that may run offloaded."""

    slots: Annotated[int | None, COUNT] = None
    """Run the model offloaded, with so many experts on the device (default with --store-folder: a quarter of all)."""
    memory: Annotated[str | None, Option(metavar="BYTES")] = None
    """The same in bytes, such as 2GB; activations take about as much beside it."""
    codec: Annotated[str | None, Option(metavar="CODEC")] = None
    """How experts are packed in --store-folder (default: as they are there, else raw)."""

    def load(self, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A model on its device, offloaded if any option says so, and its tokenizer.

        Raises:
            ExpertcastError: no such model, tokenizer or device, or options that rule each other out.
        """
        other_form = self.experts != StoredOptions.experts
        if not (self.store_folder or self.slots or self.memory or self.codec or other_form):
            return super().load(name)
        from expertcast.runtime.config import OffloadConfig
        from expertcast.runtime.loading import load_offloaded

        os.environ.setdefault(*_FEW_KERNELS)
        config = OffloadConfig(
            slots=self.slots, memory=self.memory, store="memory" if self.store_folder is None else "disk",
            store_folder=self.store_folder, codec=self.codec, experts=self.experts,
        )  # fmt: skip

        given = self.passed_on(name)

        def loaded() -> PreTrainedModel:
            return load_offloaded(name, config, device=self.device_name, dtype=self.dtype, **given).model

        share, tokenizer = join_ranks(), load_tokenizer(name, **given)
        model = loaded() if share.rank == 0 else None  # the first process packs, the others find what it packed
        wait_for_all(share)
        return loaded() if model is None else model, tokenizer


POLICIES_HELP = "eviction, prefetch, miss, routing, pre_eviction or scope, such as eviction=lfu; or a preset's name"


def policies_of(words: Sequence[str]) -> Policies | str:
    """`kind=policy` for each kind that is not the default, or a preset's name.

    Raises:
        ExpertcastError: an unknown kind or policy.
    """
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    from expertcast.runtime.policies import Policies

    kinds = list(Policies().as_dict())
    given = dict(word.partition("=")[::2] for word in words)
    for kind in given:
        if kind not in kinds:
            raise ExpertcastError(f"--policies {kind}: give a preset alone, or KIND=POLICY of {', '.join(kinds)}")
    return Policies(**given)


@dataclass(frozen=True, kw_only=True)
class DeploymentOptions(ModelOptions):
    """How a model is offloaded by a command."""

    config: Annotated[Path | None, Option(metavar="FILE")] = None
    """How to offload, as `expertcast advise --save` or OffloadConfig.save wrote it; other options win over it."""
    policies: Annotated[tuple[str, ...], Option(metavar="KIND=P", help=POLICIES_HELP)] = ()
    """How experts are evicted, prefetched and missed."""
    store_folder: Annotated[str | None, Option(metavar="DIR")] = None
    """Keep the experts packed in this folder, for models larger than memory."""
    codec: Annotated[str | None, Option(metavar="CODEC")] = None
    """How experts are packed in --store-folder (default: as they are there, else raw)."""
    pools: Annotated[str | None, Option(metavar="C=BYTES,...")] = None
    """With a codec, memory for experts that are kept compressed beside the slots; see `expertcast advise`."""
    offload: Annotated[
        Given[OffloadConfig],
        Fields(
            predictor=Option(metavar="NAME|CKPT"),
            mode=Option(choices=MODES),
            slots=COUNT,
            memory=Option(metavar="BYTES"),
            experts=Option(choices=EXPERTS),
            next_token=Option(metavar="CKPT"),
            forecasts=Option(choices=FORECASTS),
            draft=Option(metavar="DRAFT"),
            bandwidth=BANDWIDTH,
        ),
    ]
    """How the experts are offloaded; defaults are those without --config."""

    def configuration(self) -> OffloadConfig:
        """The file's configuration, or the default one, with what was given in place of what it says.

        Raises:
            ExpertcastError: a bad file, or options that the file's others rule out; the line names the file.
        """
        from expertcast.runtime.config import OffloadConfig, named_checkpoint

        config = OffloadConfig() if self.config is None else OffloadConfig.load(self.config)
        try:
            made = OffloadConfig.of(config, self._changed())
            for given in (made.predictor, made.next_token):
                if isinstance(given, (str, Path)):
                    named_checkpoint(given)
        except ExpertcastError as error:
            if self.config is None:
                raise
            raise ExpertcastError(f"{self.config} with what is given beside it: {error}") from error
        return made

    def _changed(self) -> Mapping[str, object]:
        own: dict[str, object] = {"store_folder": self.store_folder, "codec": self.codec, "pools": self.pools}
        if self.store_folder is not None:
            own["store"] = "disk"
        if self.policies:
            own["policies"] = policies_of(self.policies)
        changed = self.offload | {name: value for name, value in own.items() if value is not None}
        if ("slots" in changed) != ("memory" in changed):  # two ways to say the same: the file's goes
            changed = {"slots": None, "memory": None, **changed}
        return changed
