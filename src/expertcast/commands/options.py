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
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.checkpoints.bundled import resolve_model
from expertcast.commands.numbers import bandwidth, not_negative_whole, positive, seed
from expertcast.data.machine import free_memory, torch_device
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.plan import TextOptions
from expertcast.data.processes import join_ranks, wait_for_all
from expertcast.data.source import ModelSource
from expertcast.predictors.base import Predictor, register
from expertcast.predictors.messages import ExpertcastError, TooLargeError, first_line
from expertcast.predictors.options import field_docs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from expertcast.runtime.config import EXPERTS, MISSES, MODES, OffloadConfig
    from expertcast.runtime.offloading import OffloadedModel
    from expertcast.runtime.policies import Policies
    from expertcast.runtime.policies.settings import FORECASTS

C = TypeVar("C", bound="DataclassInstance")

RUNTIME = {
    "BenchSettings": "benchmarking.bench",
    "EXPERTS": "config",
    "FORECASTS": "policies.settings",
    "MISSES": "config",
    "MODES": "config",
    "OffloadConfig": "config",
    "SequenceSelection": "simulation.trace",
}
"""Names that annotations of options may use without an import, by module of the runtime."""


class _Runtime(dict[str, object]):
    """Lazily import runtime names used in annotations, before the module's own names."""

    def __missing__(self, name: str) -> object:
        return getattr(importlib.import_module(f"expertcast.runtime.{RUNTIME[name]}"), name)


@dataclass(frozen=True, kw_only=True)
class Option:
    """Details of a field's option, beyond its name, type, default and docstring: `Annotated[int, Option(...)]`."""

    flag: str | None = None
    """The flag; None: the field's name."""
    positional: bool = False
    """A positional argument, without a flag."""
    metavar: str | None = None
    """Placeholder of the value in the help."""
    choices: Sequence[str] | None = None
    """Values that are allowed; None: all."""
    read: Callable[[str], object] | None = None
    """Parses one word; None: the type does."""
    help: str | None = None
    """Text that follows the field's docstring in the help."""


class Fields(dict[str, Option]):
    """Options of a nested dataclass by field; fields that are not named get none. Empty: every field gets one."""


class Given(dict[str, object], Generic[C]):
    """Fields of a dataclass that the command line sets: `Annotated[Given[Config], Fields(...)]`."""


class Form(NamedTuple):
    """A way to run a command. Options of a command with several have a property `form`; the others read all options."""

    name: str
    """Completes "--option does not apply to"."""
    reads: Collection[str]
    """Names of the options that it reads; others are refused."""


class _Field(NamedTuple):
    """A field of a dataclass, with its type taken apart."""

    name: str
    default: object
    kind: type
    """Type of a single value."""
    around: set[object]
    """Generic types around it: tuple, Given, a union."""
    option: Option | Fields
    """Fields for a nested dataclass."""

    @property
    def flag(self) -> str:
        own = self.option.flag if isinstance(self.option, Option) else None
        return own or "--" + self.name.replace("_", "-")


def add_options(parser: argparse._ActionsContainer, cls: type[C]) -> None:
    """Add an option to a parser for each field of a dataclass; a nested dataclass is a group in the help.

    Args:
        parser: the parser of a command.
        cls: the dataclass. A field without a default is a required option; a bool is a switch.
    """
    docs = field_docs(cls)
    for field in _fields(cls):
        if isinstance(field.option, Option):
            _add(parser, field, field.option, docs[field.name])
            continue
        group, inner_docs = parser.add_argument_group(field.name, docs[field.name]), field_docs(field.kind)
        for inner in _fields(field.kind, field.option):
            assert isinstance(inner.option, Option)
            _add(group, inner, inner.option, inner_docs[inner.name], nested=True)


def read_options(cls: type[C], args: argparse.Namespace) -> C:
    """Build the dataclass, and those nested in it, from parsed options.

    Args:
        cls: the dataclass of :func:`add_options`.
        args: the parsed options.

    Raises:
        ExpertcastError: values that the dataclass refuses, or options that the form of the command does not read.
    """
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
    values: dict[str, object] = {}
    for field in _fields(cls):
        if isinstance(field.option, Option):
            values |= {field.name: given[field.name]} if field.name in given else {}
            continue
        inner = {each.name: given[each.name] for each in _fields(field.kind, field.option) if each.name in given}
        values[field.name] = Given(inner) if Given in field.around else field.kind(**inner)
    made = cls(**values)
    form = getattr(made, "form", None)
    if form is not None:
        unread = [flag for name, flag in _flags(cls).items() if name in given and name not in form.reads]
        if unread:
            raise ExpertcastError(f"{', '.join(unread)}: not read by {form.name}; leave it out")
    return made


def read_by(*sources: type[DataclassInstance] | str, but: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of options for :attr:`Form.reads`: those of dataclasses and single names."""
    found = {name for each in sources for name in ([each] if isinstance(each, str) else _flags(each))}
    return frozenset(found - set(but))


def _flags(cls: type[DataclassInstance]) -> dict[str, str]:
    """Return the flags of a dataclass by the names of its fields and of those nested in it."""
    found: dict[str, str] = {}
    for field in _fields(cls):
        inner = [field] if isinstance(field.option, Option) else _fields(field.kind, field.option)
        found |= {each.name: each.flag for each in inner}
    return found


def _fields(cls: type[DataclassInstance], only: Mapping[str, Option] | None = None) -> Iterator[_Field]:
    """Yield the fields that get an option (`only` these of a nested dataclass), a class's own before inherited ones."""
    fields = {field.name: field for field in dataclasses.fields(cls) if not only or field.name in only}
    hints = typing.get_type_hints(cls, localns=_Runtime(), include_extras=True)
    for base in cls.__mro__:
        for name in inspect.get_annotations(base):
            if name in fields:
                kind, around, notes = _taken_apart(hints[name])
                option = next((note for note in notes if isinstance(note, (Option, Fields))), Option())
                yield _Field(name, fields.pop(name).default, kind, around, only[name] if only else option)


def _taken_apart(hint: object) -> tuple[type, set[object], list[object]]:
    """Return the innermost type, the generic types around it, and their annotations."""
    around, notes = set[object](), list[object]()
    while origin := typing.get_origin(hint):
        hint, *others = typing.get_args(hint)
        if origin is Annotated:
            notes += others
        else:
            around.add(origin)
    return typing.cast(type, hint), around, notes


def _add(parser: argparse._ActionsContainer, field: _Field, option: Option, doc: str, *, nested: bool = False) -> None:
    """Add an option with that docstring, whose value is in the namespace only if it is given."""
    required = field.default is dataclasses.MISSING
    default = None if required else field.default
    text = _help("; ".join(filter(None, (doc.rstrip("."), option.help))), default)
    if option.positional:
        parser.add_argument(field.name, type=option.read or field.kind, metavar=option.metavar, help=text)
        return
    if field.kind is bool:
        parser.add_argument(field.flag, dest=field.name, action="store_true", default=argparse.SUPPRESS, help=text)
        return
    parser.add_argument(
        field.flag,
        dest=field.name,
        type=option.read or field.kind,
        nargs="+" if tuple in field.around else None,
        required=required and not nested,
        default=argparse.SUPPRESS,
        metavar=option.metavar,
        choices=option.choices,
        help=text,
    )


def _help(doc: str, default: object) -> str:
    """Return a docstring as help: without a capital letter, and with the default unless the docstring names it."""
    text = lowered(doc)
    if default is not None and default is not False and default not in ((), "") and "default:" not in text:
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text = f"{text} (default: {shown})".strip()
    return text.replace("%", "%%")


def lowered(sentence: str) -> str:
    """Return a sentence without its capital letter, unless its first word is a name such as AdamW, CPU or K."""
    first = sentence.partition(" ")[0].rstrip(",")
    named = first[1:] != first[1:].lower() or (len(first) == 1 and first != "A")
    return sentence if named else sentence[:1].lower() + sentence[1:]


def _own_class(module: str, name: str, what: str) -> object:
    """Import a class of the user's own, from the Python path or the current folder, also by processes started later.

    Raises:
        ExpertcastError: no such module or class, or an error in it.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        with chdir(here):  # the module may change the folder
            return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a user's own code does
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ExpertcastError(f"cannot import {what} {module}:{name} ({why})") from error


def own_code(text: str) -> str:
    """Parse a predictor or checkpoint, and import code of the user's own that it names.

    Args:
        text: `MODULE:CLASS` is registered and stands for its name, `MODULE:CLASS@CKPT` is registered and stands for the
            checkpoint. A checkpoint by itself never imports the module that it names. Other texts stay as they are.

    Raises:
        ArgumentTypeError: no such module or class, an error in it, or a name that is taken.
    """
    named = re.fullmatch(r"([\w.]+):(\w+)(?:@(.+))?", text)
    if named is None:
        return text
    module, name, rest = named.groups()
    try:
        found = _own_class(module, name, "predictor")
        if not (isinstance(found, type) and issubclass(found, Predictor)):
            raise ExpertcastError(f"{module}:{name} is no subclass of expertcast.Predictor")
        own = register(found).name
    except ExpertcastError as error:  # argparse hides the message of a ValueError
        raise argparse.ArgumentTypeError(str(error)) from error
    return own_code(rest) if rest else own


PREDICTOR = Option(
    metavar="NAME|CKPT", read=own_code,
    help="your own: MODULE:CLASS, imported from the current folder, or MODULE:CLASS@CKPT",
)  # fmt: skip
BANDWIDTH = Option(metavar="BYTES/S", read=bandwidth, help="a number, or pcie3, pcie4, pcie5 (12, 25, 50 GB/s)")
COUNT = Option(metavar="N", read=positive)
SEED = Option(metavar="N", read=seed)
EARLY = Option(
    metavar="R|auto|none",
    read=lambda text: {"auto": "auto", "none": None}[text] if text in ("auto", "none") else not_negative_whole(text),
)
MODEL_HELP = "folder or hub id of a transformers model, a GGUF file, or `reference` (the bundled model)"
DATA_HELP = (
    "hub data set id, .parquet or .jsonl files with a column `text`, .txt files (split at blank lines into documents "
    "of about 4000 characters), or `reference` (bundled text)"
)

Count = Annotated[int, COUNT]
"""1 or more of something."""
Model = Annotated[str, Option(positional=True, metavar="MODEL", help=MODEL_HELP)]
Data = Annotated[tuple[str, ...], Option(metavar="D", help=DATA_HELP)]
TextColumn = Annotated[str, Option(metavar="NAME")]
Text = Annotated[TextOptions, Fields(window=COUNT, batch_size=COUNT, early_rank=EARLY)]


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options of reading a model's checkpoint."""

    dtype: Annotated[str, Option(choices=("auto", "bf16", "fp16", "fp32"))] = "auto"
    """Dtype of the weights in memory."""
    revision: Annotated[str | None, Option(metavar="REV")] = None
    """Branch, tag or commit of a model on the hub (default: main)."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository."""
    attn_implementation: Annotated[str | None, Option(metavar="NAME")] = None
    """Attention implementation of transformers, such as sdpa, eager or flash_attention_2 (default: its choice)."""

    def source_of(self, name: str) -> ModelSource:
        """Return the model `name`, with the keyword arguments of :meth:`passed_on`."""
        return ModelSource.of(name, self.passed_on(name))

    def passed_on(self, name: str) -> dict[str, Any]:
        """Return the keyword arguments of `from_pretrained` for the model `name`.

        Raises:
            ExpertcastError: --revision for a local folder.
        """
        if self.revision is not None and Path(resolve_model(name)).exists():
            raise ExpertcastError(f"--revision {self.revision} applies only to hub models; {name} is a local folder")
        given = {"revision": self.revision, "attn_implementation": self.attn_implementation}
        known = {key: value for key, value in given.items() if value is not None}
        return {**known, "trust_remote_code": self.trust_remote_code}  # without it transformers would ask at a terminal


@dataclass(frozen=True, kw_only=True)
class ModelOptions(CheckpointOptions):
    """Options of loading a model."""

    device: str = "auto"
    """Device: cpu, cuda, cuda:1 ... (default: cuda if there is one)."""

    @property
    def device_name(self) -> str:
        """`device`, with `auto` resolved.

        Raises:
            ExpertcastError: there is no such device.
        """
        return str(torch_device(None if self.device == "auto" else self.device))

    def load(self, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return a model on its device, and its tokenizer.

        Raises:
            ExpertcastError: no such model, tokenizer or device.
        """
        tokenizer = self.tokenizer(name)
        join_ranks()  # each rank's current device is then its own
        return load_model(name, dtype=self.dtype, device=self.device_name, **self.passed_on(name)), tokenizer

    def tokenizer(self, name: str) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the model `name`."""
        return load_tokenizer(name, **self.passed_on(name))

    def offloaded(self, name: str, config: OffloadConfig, at_once: int | None = None) -> OffloadedModel:
        """Load the model `name` offloaded; `at_once` as for :func:`expertcast.load_offloaded`.

        Raises:
            ExpertcastError: as :func:`expertcast.load_offloaded`.
        """
        from expertcast.runtime.loading import load_offloaded

        os.environ.setdefault(*_FEW_KERNELS)
        shown = partial(print, file=sys.stderr, flush=True)
        given = self.passed_on(name) | {"at_once": at_once}
        return load_offloaded(name, config, device=self.device_name, dtype=self.dtype, on_plan=shown, **given)


_FEW_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
"""oneDNN caches one kernel per number of tokens of an expert, 1,024 by default: 1.5 GB beside a model that does not fit
memory. It reads the variable when it builds the first kernel."""


@dataclass(frozen=True, kw_only=True)
class StoredOptions(ModelOptions):
    """Options of loading a model whose experts may be in a store folder."""

    store_folder: Annotated[str | None, Option(metavar="DIR")] = None
    """Run the model offloaded from a folder of packed experts, for models larger than memory."""
    in_place: bool = False
    """Run the model offloaded from the checkpoint's own files, without packed experts."""
    experts: Annotated[str, Option(choices=EXPERTS)] = "auto"
    """Form of the experts: auto (packed if ggml has the checkpoint's form), expanded (the model's dtype), packed
    (blocks of a quantised checkpoint, by ggml), int8 or int4 (rounded). All but auto run the model offloaded."""

    def opener(self, name: str) -> Callable[[OffloadConfig], OffloadedModel] | None:
        """Return a function from a configuration to the offloaded model `name`; None without --store-folder, --in-place
        and --experts."""
        from expertcast.runtime.config import OffloadConfig

        changed: dict[str, object] = {"experts": self.experts}
        if self.store_folder is not None or self.in_place:
            changed |= {
                "store": "disk", "store_folder": self.store_folder, "in_place": self.in_place, "codec": None,
            }  # fmt: skip
        elif self.experts == StoredOptions.experts:
            return None
        return lambda config: self.offloaded(name, OffloadConfig.of(config, changed))


@dataclass(frozen=True, kw_only=True)
class OffloadedOptions(StoredOptions):
    """Options of loading a model that may run offloaded."""

    slots: Annotated[int | None, COUNT] = None
    """Run the model offloaded with this many experts on the device (default: as many as fit --memory)."""
    memory: Annotated[str | None, Option(metavar="BYTES")] = None
    """Run the model offloaded in this much memory of the device, such as 8GB (default: what is free)."""
    codec: Annotated[str | None, Option(metavar="CODEC")] = None
    """Compression of the experts in --store-folder (default: that of the folder, else raw)."""

    def load(self, name: str, part: float = 1.0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return a model on its device, offloaded if it is too large or an option requires it, and its tokenizer.

        Args:
            name: the model.
            part: of the free memory, that of an offloaded model without --memory and --slots.

        Raises:
            ExpertcastError: no such model, tokenizer or device, or options that contradict each other.
        """
        other_form = self.experts != StoredOptions.experts
        if not (self.store_folder or self.in_place or self.slots or self.memory or self.codec or other_form):
            with suppress(TooLargeError):
                return super().load(name)
        from expertcast.runtime.config import OffloadConfig

        memory: int | str | None = self.memory
        free = free_memory(torch_device(self.device_name)) if part < 1 and memory is None and not self.slots else None
        if free is not None:
            memory = int(part * free)
        config = OffloadConfig(
            slots=self.slots, memory=memory, store="disk" if self.store_folder or self.in_place else "memory",
            store_folder=self.store_folder, in_place=self.in_place, codec=self.codec, experts=self.experts,
        )  # fmt: skip
        share, tokenizer = join_ranks(), self.tokenizer(name)
        first = self.offloaded(name, config) if share.rank == 0 else None  # packs the experts for all processes
        wait_for_all(share)
        offloaded = self.offloaded(name, config) if first is None else first
        return offloaded.model, tokenizer


POLICIES_HELP = (
    "KIND is eviction, prefetch, miss, routing, pre_eviction or scope, such as eviction=lfu, or eviction=MODULE:CLASS "
    "for your own; or the name of a preset"
)


def own_policy(text: str) -> str:
    """Import and register the policy of `MODULE:CLASS` or `MODULE:CLASS:option=value,...`, and return its text by name.

    Modules of the current folder are found too, also by processes started later. Other text stays as it is.

    Raises:
        ExpertcastError: no such module or class, an error in it, or a name that is taken.
    """
    named = re.fullmatch(r"([\w.]+):([A-Za-z_]\w*)(:.*)?", text)
    if named is None:
        return text
    from expertcast.runtime.policies.settings import KINDS

    module, name, rest = named.groups("")
    if any(module in registry.names() for registry in KINDS.values()):
        return text
    found = _own_class(module, name, "policy")
    for registry in KINDS.values():
        if isinstance(found, type) and issubclass(found, registry.base):
            return f"{registry.register(found).name}{rest}"
    raise ExpertcastError(f"{module}:{name} is no policy: give a subclass of EvictionPolicy, PrefetchPolicy or others")


def policies_of(words: Sequence[str]) -> Policies | str:
    """Parse `kind=policy` words, or the name of a preset.

    Raises:
        ExpertcastError: an unknown kind or policy.
    """
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    from expertcast.runtime.policies.settings import parse_policies

    pairs = (word.partition("=")[::2] for word in words)
    return parse_policies(f"{kind}={own_policy(policy)}" for kind, policy in pairs)


@dataclass(frozen=True, kw_only=True)
class DeploymentOptions(ModelOptions):
    """Options of offloading a model."""

    config: Annotated[Path | None, Option(metavar="FILE")] = None
    """Configuration file of `expertcast advise --save` or OffloadConfig.save; other options replace its values."""
    policies: Annotated[tuple[str, ...], Option(metavar="KIND=P", help=POLICIES_HELP)] = ()
    """Cache policies."""
    offload: Annotated[
        Given[OffloadConfig],
        Fields(
            predictor=PREDICTOR,
            mode=Option(choices=MODES),
            slots=COUNT,
            memory=Option(metavar="BYTES"),
            context=COUNT,
            store_folder=Option(metavar="DIR", help="implies a store on disk, for models larger than memory"),
            in_place=Option(),
            codec=Option(metavar="CODEC"),
            pools=Option(metavar="C=BYTES,...", help="`expertcast advise` proposes values"),
            experts=Option(choices=EXPERTS),
            forecasts=Option(choices=FORECASTS),
            misses=Option(choices=MISSES),
            draft=Option(metavar="DRAFT"),
            bandwidth=BANDWIDTH,
        ),
    ]
    """Offloading; defaults apply without --config."""

    def configuration(self) -> OffloadConfig:
        """Return the configuration of --config, or the default one, with the values of the other options.

        Raises:
            ExpertcastError: a bad file, or options that contradict it; the message names the file.
        """
        from expertcast.runtime.config import OffloadConfig, named_checkpoint

        config = OffloadConfig() if self.config is None else OffloadConfig.load(self.config)
        try:
            made = OffloadConfig.of(config, self._changed())
            if isinstance(made.predictor, (str, Path)):
                named_checkpoint(made.predictor)
        except ExpertcastError as error:
            if self.config is None:
                raise
            raise ExpertcastError(f"{self.config} with the other options: {error}") from error
        return made

    def _changed(self) -> Mapping[str, object]:
        changed: dict[str, object] = dict(self.offload)
        if "store_folder" in changed or changed.get("in_place"):
            changed["store"] = "disk"
        if self.policies:
            changed["policies"] = policies_of(self.policies)
        if ("slots" in changed) != ("memory" in changed):  # both set one thing: the option replaces the file's
            changed = {"slots": None, "memory": None, **changed}
        return changed
