"""What each codec makes of an expert's bytes, and how fast a core makes an expert of them again.

    python scripts/bench_codecs.py --json benchmarks/results/codecs.json

Ratios are of the block's bytes; bounds are what the exponents' entropy allows a code of single exponents, with one
table for all experts together, and on average with one for each. Rates are GB/s of the model's own weights by process
time, in one thread: `expand` checks parts and decodes the compressed ones, `recover` makes a block of planes, `decode`
is both with memory of its own. All cases take turns; `copy`, of a block's bytes, is what the machine could do then.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.output import new_file, write_json
from expertcast.data.models import load_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.messages import Json
from expertcast.runtime.benchmarking.bench import hardware
from expertcast.runtime.storage.codecs import Codec, Fp8, Mxfp4, Part, exponent_histogram, make_codec
from expertcast.runtime.storage.layout import BlockLayout, Field

HIDDEN, INTERMEDIATE = 2048, 1024
"""Of an expert of OLMoE-1B-7B, 12.6 MB."""
SPREAD = 0.02
CODECS = ("raw", "bitsplit", "bitsplit:shards=1", "int8", "int4", "int2")
STAGES = ("expand", "recover", "decode")


@dataclass(frozen=True)
class Case:
    """Some experts in one codec."""

    experts: str
    codec: Codec
    coded: Sequence[tuple[Part, ...]]

    @property
    def ratio(self) -> float:
        """Stored bytes by the blocks' own."""
        stored = sum(len(part.data) for parts in self.coded for part in parts)
        return stored / (len(self.coded) * self.codec.layout.block_bytes)

    def stages(self, block: Tensor) -> dict[str, Callable[[], None]]:
        """What is timed, over all experts."""
        codec, planes = self.codec, self.codec.new_planes(block)
        compressed = [i for i, shard in enumerate(codec.shards) if codec.planes[shard.plane].compressed]
        for index, shard in enumerate(codec.shards):
            if index not in compressed:
                planes[shard.plane] = self.coded[0][index].data

        def expand() -> None:
            for parts in self.coded:
                for index, part in enumerate(parts):
                    if index in compressed:
                        codec.expand(index, part, planes)
                    else:
                        part.intact()

        def recover() -> None:
            for _ in self.coded:
                codec.recover(planes, block)

        def decode() -> None:
            for parts in self.coded:
                codec.decode(parts, block)

        return {"expand": expand, "recover": recover, "decode": decode}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--every", type=int, default=5, help="of the reference model's experts (default: %(default)s)")
    parser.add_argument("--json", type=new_file)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    reference, large = reference_experts(args.every), normal_experts()
    cases = [
        Case(name, codec, [codec.encode(block) for block in blocks])
        for name, (layout, blocks) in (("reference", reference), ("normal, 12.6 MB", large))
        for codec in (make_codec(text, layout) for text in CODECS)
    ]
    cases += shipped_cases(large[0])
    rows = measure(cases, args.repetitions)
    bounds = {name: bounds_of(*experts) for name, experts in (("reference", reference), ("normal, 12.6 MB", large))}
    for row in rows:
        rates = "  ".join(
            f"{stage} {row[stage]['best']:6.2f} ({row[stage]['median']:.2f})" for stage in (*STAGES, "copy")
        )
        print(f"{row['experts']:16} {row['codec']:18} {row['ratio']:.4f}  {rates}")
    for name, values in bounds.items():
        print(f"bound of {name}: {values['together']:.4f} together, {values['each']:.4f} each")
    if args.json:
        write_json(args.json, {**provenance(), "hardware": hardware(), "bounds": bounds, "results": rows})
    return 0


def reference_experts(every: int) -> tuple[BlockLayout, list[Tensor]]:
    """Every so-many-th expert of the bundled model."""
    view = find_moe_layers(load_model("reference"))
    layout, blocks = BlockLayout.of(view), []
    for key in range(0, len(view) * view.shape.experts, every):
        layer, expert = divmod(key, view.shape.experts)
        parameters = dict(view[layer].experts.named_parameters())
        blocks.append(torch.zeros(layout.block_bytes, dtype=torch.uint8))
        for name, target in layout.views(blocks[-1]).items():
            target[0].copy_(parameters[name][expert])
    return layout, blocks


def normal_experts() -> tuple[BlockLayout, list[Tensor]]:
    """One large expert with normal weights."""
    up = Field(name="gate_up_proj", shape=(2 * INTERMEDIATE, HIDDEN), dtype=torch.bfloat16, offset=0)
    down = Field(name="down_proj", shape=(HIDDEN, INTERMEDIATE), dtype=torch.bfloat16, offset=up.nbytes)
    layout = BlockLayout(fields=(up, down), block_bytes=up.nbytes + down.nbytes)
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(layout.block_bytes // 2, generator=generator).mul_(SPREAD).bfloat16()
    return layout, [block.view(torch.uint8)]


def shipped_cases(layout: BlockLayout) -> list[Case]:
    """Random codes of the large expert's shape."""
    generator = torch.Generator().manual_seed(0)
    mxfp4, fp8 = make_codec("mxfp4", layout), make_codec("fp8", layout)
    assert isinstance(mxfp4, Mxfp4)
    assert isinstance(fp8, Fp8)
    fours, eights = {}, {}
    for field in layout.fields:
        rows, columns = field.shape
        blocks = torch.randint(256, (columns, rows // 32, 16), dtype=torch.uint8, generator=generator)
        fours[field.name] = blocks, torch.full((columns, rows // 32), 120, dtype=torch.uint8)
        codes = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        eights[field.name] = codes, torch.full((rows // 128, columns // 128), SPREAD)
    name = "normal, 12.6 MB"
    return [Case(name, mxfp4, [mxfp4.encode_shipped(fours, {})]), Case(name, fp8, [fp8.encode_shipped(eights, {})])]


def bounds_of(layout: BlockLayout, blocks: Sequence[Tensor]) -> dict[str, float]:
    """Of some experts together, and the mean of each one's."""
    weights = [list(layout.views(block).values()) for block in blocks]
    together = exponent_histogram(tensor for tensors in weights for tensor in tensors)
    each = statistics.fmean(exponent_histogram(tensors).bound for tensors in weights)
    return {"together": together.bound, "each": each}


def measure(cases: Sequence[Case], repetitions: int) -> list[Json]:
    """Rates of every case's stages, taken in turns."""
    seconds: dict[tuple[int, str], list[float]] = {}
    works: dict[tuple[int, str], Callable[[], object]] = {}
    for number, case in enumerate(cases):
        block, source = (torch.zeros(case.codec.layout.block_bytes, dtype=torch.uint8) for _ in range(2))
        works |= {(number, stage): work for stage, work in case.stages(block).items()}
        works[number, "copy"] = lambda case=case, block=block, source=source: [block.copy_(source) for _ in case.coded]
    for _ in range(repetitions):
        for key, work in works.items():
            start = time.process_time()
            work()
            seconds.setdefault(key, []).append(time.process_time() - start)
    rows: list[Json] = []
    for number, case in enumerate(cases):
        gigabytes = len(case.coded) * case.codec.layout.block_bytes / 1e9
        row: Json = {"experts": case.experts, "codec": case.codec.text, "ratio": case.ratio}
        for stage in (*STAGES, "copy"):
            times = seconds[number, stage]
            row[stage] = {"best": gigabytes / min(times), "median": gigabytes / statistics.median(times)}
        rows.append(row)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
