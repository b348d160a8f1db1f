"""`expertcast store`: pack a model's experts into a folder, for models larger than memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import torch

from expertcast.commands.options import CheckpointOptions, Model, Option
from expertcast.commands.output import Outcome
from expertcast.data.machine import torch_dtype
from expertcast.data.models import load_config
from expertcast.data.packed_experts import weight_bits
from expertcast.data.source import ModelSource
from expertcast.predictors import ExpertcastError

if TYPE_CHECKING:
    from expertcast.runtime.config import EXPERTS, OffloadConfig


@dataclass(frozen=True, kw_only=True)
class Options(CheckpointOptions):
    """Options of `expertcast store`."""

    model: Model
    store_folder: Annotated[str | None, Option(metavar="DIR")] = None
    """Folder for the packed experts, one per model; a complete file of the same model is reused."""
    in_place: bool = False
    """In place of --store-folder, check that the experts can be read from the checkpoint's own files, without a second
    copy; other commands read them with --in-place. Also done if the disk has no room for the copy."""
    codec: Annotated[str | None, Option(metavar="CODEC")] = None
    """Compression of the experts: raw, bitsplit; other commands use the folder's codec (default: bitsplit for bf16 and
    fp16, else raw)."""
    experts: Annotated[str, Option(choices=EXPERTS)] = "expanded"
    """Form of the experts: expanded (the model's dtype), packed (blocks of a quantised checkpoint, by ggml), int8 or
    int4 (rounded), auto (packed if ggml has the checkpoint's form)."""

    def __post_init__(self) -> None:
        self.configuration()

    def configuration(self) -> OffloadConfig:
        """Return a configuration with the fewest slots, since nothing runs.

        Raises:
            ExpertcastError: an unknown codec, or one that does not store such experts.
        """
        from expertcast.runtime.config import EXPANDED, OffloadConfig

        if self.store_folder is None and not self.in_place:
            raise ExpertcastError("give --store-folder for the packed experts, or --in-place")
        dtype = torch_dtype(self.dtype)
        packed = "bitsplit" if self.experts == EXPANDED and dtype != torch.float32 else "raw"
        return OffloadConfig(
            store="disk", store_folder=self.store_folder, codec=self.codec or (None if self.in_place else packed),
            in_place=self.in_place, experts=self.experts, cache=False,
        )  # fmt: skip


def run(options: Options) -> Outcome:
    """Load the model offloaded, which packs it layer by layer, and report the size of the file."""
    from expertcast.runtime.loading import load_offloaded

    config, given = options.configuration(), options.passed_on(options.model)
    if options.codec is None and options.dtype == "auto":
        found = load_config(ModelSource.of(options.model, given))
        if torch.float32 in (found.dtype, found.get_text_config().dtype):
            config = replace(config, codec=None if options.in_place else "raw")
    with load_offloaded(options.model, config, device="cpu", dtype=options.dtype, **given) as offloaded:
        store = offloaded.store
        place = getattr(store, "in_place", None)
        codec = config.codec if place is None else None
        where = f"in {options.store_folder}, codec {codec}" if place is None else str(place)
        stored, bits = store.stored_nbytes, weight_bits(offloaded.view)
        result = {
            "store_folder": options.store_folder, "in_place": place is not None, "codec": codec,
            "experts_form": options.experts, "weight_bits": bits, "layers": store.layers,
            "experts": store.experts, "nbytes": store.nbytes, "stored_nbytes": stored, "ratio": stored / store.nbytes,
        }  # fmt: skip
    text = (
        f"{store.layers * store.experts} experts of {store.layout.block_bytes:,} bytes {where}, "
        f"{bits:.3g} bits a weight: {stored:,} bytes, "
        f"{stored / store.nbytes:.3f} of {store.nbytes:,}"
    )
    return result, text
