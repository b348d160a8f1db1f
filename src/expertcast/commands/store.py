"""`expertcast store`: pack a model's experts into a folder, for models larger than memory."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch

from expertcast.commands.options import Model, ModelOptions, Option
from expertcast.commands.output import Outcome, new_file
from expertcast.data.packed_experts import weight_bits
from expertcast.predictors import ExpertcastError

if TYPE_CHECKING:
    from expertcast.runtime.config import EXPERTS, OffloadConfig
    from expertcast.runtime.storage.codecs.lossless import ExponentHistogram
    from expertcast.runtime.storage.store import ExpertStore

_LEAST = 1e-4
"""Share from which an exponent is drawn."""


def draw_exponents(histogram: ExponentHistogram, path: Path, *, codec: str, ratio: float) -> None:
    """Write a bar for each exponent, with what coding them one by one takes at least beside what the codec stores.

    Args:
        histogram: of some experts.
        path: of the picture, in any format that matplotlib writes.
        codec: that packed them.
        ratio: share of the bytes that it stores.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counts = histogram.counts.tolist()
    total, bias = sum(counts), len(counts) // 2 - 1
    seen = [exponent for exponent, count in enumerate(counts) if count >= _LEAST * total]
    shares = [counts[exponent] / total for exponent in seen]
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axis = figure.subplots()
    axis.bar([exponent - bias for exponent in seen], [100 * share for share in shares], color="#0072B2")
    axis.set(xlabel="exponent: weights of size 2^x and more", ylabel="share of the weights (%)")
    axis.set_title(
        f"{histogram.entropy:.2f} of {len(counts).bit_length() - 1} bits: {histogram.bound:.1%} of the bytes at least, "
        f"{codec} stores {ratio:.1%}",
        fontsize=10,
    )
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def codecs() -> str:
    """Help of --codec."""
    from expertcast.runtime.storage.codecs import CODECS

    names = ", ".join(CODECS.names())
    return (
        f"{names}; the latter two move checkpoints that are in such a form as they are; generate and the others take "
        "what the folder was packed with"
    )


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """What `expertcast store` takes."""

    model: Model
    store_folder: Annotated[str, Option(metavar="DIR")]
    """Where the file lies, one folder per model; what is there of the same model is used as it is."""
    codec: Annotated[str | None, Option(metavar="CODEC", help=codecs())] = None
    """How experts are compressed (default: bitsplit, of experts that are not expanded raw)."""
    experts: Annotated[str, Option(choices=EXPERTS)] = "expanded"
    """Experts are expanded (in the model's dtype), packed (as a quantised checkpoint ships them), rounded to int8 or
    int4, or auto (packed where the checkpoint is quantised)."""
    picture: Annotated[Path | None, Option(metavar="FILE.png", read=picture_file)] = None
    """Draw how often each exponent occurs, beside what compression makes of it."""

    def __post_init__(self) -> None:
        self.configuration()

    def configuration(self) -> OffloadConfig:
        """The fewest slots: nothing is run.

        Raises:
            ExpertcastError: an unknown codec, or one that does not store such experts.
        """
        from expertcast.runtime.config import EXPANDED, OffloadConfig

        codec = self.codec or ("bitsplit" if self.experts == EXPANDED else "raw")
        return OffloadConfig(
            store="disk", store_folder=self.store_folder, codec=codec, experts=self.experts, cache=False
        )


def run(options: Options) -> Outcome:
    """Load the model offloaded, which packs it layer by layer, and say what the file takes."""
    from expertcast.runtime.loading import load_offloaded

    config = options.configuration()
    given = options.passed_on(options.model)
    with load_offloaded(options.model, config, device="cpu", dtype=options.dtype, **given) as offloaded:
        store = offloaded.store
        stored, histogram, bits = store.stored_nbytes, _histogram(store), weight_bits(offloaded.view[0].experts)
        bound = None if histogram is None else histogram.bound
        result = {
            "store_folder": options.store_folder, "codec": config.codec, "experts_form": options.experts,
            "weight_bits": bits, "layers": store.layers,
            "experts": store.experts, "nbytes": store.nbytes, "stored_nbytes": stored, "ratio": stored / store.nbytes,
            "bound": bound,
        }  # fmt: skip
    text = (
        f"{store.layers * store.experts} experts of {store.layout.block_bytes:,} bytes in {options.store_folder}, "
        f"codec {config.codec}, {bits:.3g} bits a weight: {stored:,} bytes, "
        f"{stored / store.nbytes:.3f} of {store.nbytes:,}"
    )
    if bound is not None:
        text += f"; coding exponents one by one takes {bound:.3f} at least (middle layer)"
    if options.picture is not None:
        if histogram is None:
            raise ExpertcastError(
                f"--picture {options.picture} is of 16-bit floats, these experts are others: leave it out"
            )
        draw_exponents(histogram, options.picture, codec=str(config.codec), ratio=stored / store.nbytes)
        text += f"\nwrote {options.picture}"
    return result, text


def picture_file(text: str) -> Path:
    """The file of a picture.

    Raises:
        ArgumentTypeError: no folder to write it to, or a name that does not end as pictures do.
    """
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise ArgumentTypeError(f"{text!r}: give a name that ends in .png, .svg or .pdf")
    return new_file(text)


def _histogram(store: ExpertStore) -> ExponentHistogram | None:
    """Of the middle layer's experts; None where a parameter is not of 16-bit floats, or where they are stored in the
    form of a quantised checkpoint, which holds less.
    """
    from expertcast.runtime.storage.codecs.lossless import exponent_histogram
    from expertcast.runtime.storage.codecs.quantised import Scaled
    from expertcast.runtime.storage.disk_store import DiskStore

    if isinstance(store, DiskStore) and isinstance(store.codec, Scaled):
        return None
    fields = store.layout.fields
    if {field.dtype for field in fields} not in ({torch.bfloat16}, {torch.float16}):
        return None
    return exponent_histogram(store.views(store.layers // 2).values())
