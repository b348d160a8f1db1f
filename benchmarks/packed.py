"""Packed experts beside llama.cpp and beside expanded ones: one GGUF file, one memory limit, the same tokens.

    python -m benchmarks.packed --keep FOLDER --peer PYTHON --out packed.json --page packed.md

writes a GGUF file of a published shape, cut to a few layers and as much less vocabulary, measures the memory that every
side takes beside its experts, and runs every side at every share of memory, rate of the disk (0: as it is) and length
of prompt, in turns. Each run is a process in a memory control group of its own, with a cold page cache. The command
writes the JSON after every run and continues an earlier one. PYTHON is an interpreter with `xllamacpp`. The predictor
of side `packed, trained` is fitted on other text, of the same packed model.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np
from tests.runtime.gguf_files import write
from transformers import PretrainedConfig

from benchmarks.children import abilities, run
from benchmarks.disk_files import RUN, local_model
from benchmarks.packed_fidelity import fidelity
from benchmarks.packed_page import TITLE, page
from benchmarks.results import ResultFile
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.commands.output import say
from expertcast.data.collect import collect
from expertcast.data.models import load_tokenizer
from expertcast.data.text import bundled_ids, load_documents
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime import load_offloaded
from expertcast.runtime.benchmarking.shapes import SHAPES
from expertcast.training.fit import fit

SETTINGS = ("shape", "kind", "layers", "small", "warm", "new_tokens", "threads")
"""Runs of a file with the same settings are kept."""
PEER, PEER_RUN = "llama.cpp", "benchmarks.packed_peer"
TRAINED, _TRAIN_TOKENS = "linear", 20_000
"""Predictor of the side with a trained one, and the tokens that are collected for it."""
_TEXT_DOCUMENTS = 8
"""The first documents of the bundled text: the runs read them, and the predictor is trained on others."""
_SPARE = 64 << 20
"""Bytes of memory that every side has beside the most that was seen."""
_OLMOE = {"num_experts": 64, "moe_intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16,
          "vocab_size": 50304}  # fmt: skip
SHAPE_FIELDS: dict[str, dict[str, int]] = {"qwen3-30b-a3b": {}, "olmoe-1b-7b": _OLMOE}
"""Fields in which a shape differs from Qwen3-30B-A3B's, whose architecture all files have."""
MIXED = "Q4_K_M"
KINDS = ("Q4_0", MIXED)
"""Kinds of a file. The mixed one has Q4_K experts, whose down projections are Q6_K in every second layer."""
_K_BLOCKS = {"Q4_K": (slice(4, 16), (160,) * 8 + (0,) * 4, {0: 1.36e-4, 2: 1.02e-3}),
             "Q6_K": (slice(192, 208), (32,) * 16, {208: 3.4e-5})}  # fmt: skip
"""Per kind the bytes of a block's scales, all 32, and by byte the floats that give random codes the model's size."""
_FORMS = ["int4", "int8", "Q4_0"]
_MEDIANS = ("tpot_s", "tpot_mean_s", "ttft_s", "again_s", "bytes_read", "prompt_bytes_read", "hit_rate", "waited_s")
_KEYS = ("side", "memory", "throttle", "prompt", "repetition")
BY_HAND = "\n## Kernels\n"
"""The page is kept from this heading on."""
_SMALL = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
          "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One way to run the file."""

    name: str
    options: Json = field(default_factory=dict)
    """Parameters of llama.cpp, or fields of an :class:`OffloadConfig`."""
    predictor: str | None = None

    @property
    def peer(self) -> bool:
        """It is llama.cpp."""
        return self.name.startswith(PEER)

    @property
    def form(self) -> str:
        """Form of the experts that it keeps in memory; sides of one form take the same memory beside them."""
        return PEER if self.peer else str(self.options["experts"])


_MAPPED = {"lazy_mode": "OFF", "load_mode": "MMAP"}
_AS_IT_LIES = {"no_extra_bufts": True}
"""No repacked copy in memory of its own."""
SIDES = (
    Side(f"{PEER}, mmap", _MAPPED | _AS_IT_LIES),
    Side(f"{PEER}, repacked", {"lazy_mode": "OFF", "load_mode": "NONE"}),
    Side(f"{PEER}, lazy auto", {"lazy_mode": "AUTO"} | _AS_IT_LIES),
    Side(f"{PEER}, lazy on", {"lazy_mode": "ON"} | _AS_IT_LIES),
    Side("expanded", {"experts": "expanded"}),
    Side("packed", {"experts": "packed"}),
    Side("packed, forecasts", {"experts": "packed"}, predictor="next_norm"),
    Side("packed, trained", {"experts": "packed"}, predictor=TRAINED),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error."""
    args = _parser().parse_args(arguments)
    try:
        args.keep.mkdir(parents=True, exist_ok=True)
        Bench(args).measure()
    except ExpertcastError as error:
        print(f"benchmarks.packed: {error}", file=sys.stderr)
        return 2
    return 0


def shape(name: str, layers: int, *, small: bool) -> PretrainedConfig:
    """Return a shape with so many of its layers and that part of its vocabulary; `small`: of toy size, for tests."""
    config = SHAPES["qwen3-30b-a3b"].config(layers)
    for entry, value in SHAPE_FIELDS[name].items():
        setattr(config, entry, value)
    whole = SHAPES[name].config().num_hidden_layers
    config.vocab_size = max(4096, config.vocab_size * layers // whole // 32 * 32)
    for entry, value in (_SMALL if small else {}).items():
        setattr(config, entry, value)
    return config


def write_model(path: Path, config: PretrainedConfig, kind: str) -> None:
    """Write a GGUF file with random weights; all matrices of a Q4_K_M file but the experts' are Q4_0."""
    others = {}
    if kind == MIXED:
        for layer in range(config.num_hidden_layers):
            down = "Q6_K" if layer % 2 else "Q4_K"
            others |= {f"blk.{layer}.ffn_{part}_exps.weight": "Q4_K" for part in ("gate", "up")}
            others[f"blk.{layer}.ffn_down_exps.weight"] = down
    write(path, local_model(config), "Q4_0", others=others)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.tensor_type.name in _K_BLOCKS:
            place, scales, floats = _K_BLOCKS[tensor.tensor_type.name]
            blocks = tensor.data.reshape(-1, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1])
            blocks[:, place] = scales
            for start, value in floats.items():
                blocks[:, start : start + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)


class Bench:
    """Measures what is not known yet."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._folder, self._began = args, args.keep.resolve(), time.monotonic()
        self._model = self._folder / "model.gguf"
        self._config = shape(args.shape, args.layers, small=args.small)
        self._file = ResultFile(args.out, {name: getattr(args, name) for name in SETTINGS})
        self.result = self._file.values

    def measure(self) -> None:
        """All runs that are not in the file, until the time is up."""
        args = self._args
        for form in args.fidelity:
            found = self.result.setdefault("fidelity", [])
            if form not in [each["form"] for each in found]:
                found.append(fidelity("reference", args.fidelity_tokens, form))
        self._make()
        self.result |= {"abilities": abilities(self._folder)}
        sides = [side for side in SIDES if not args.sides or side.name in args.sides]
        for side in [*sides, SIDES[0]] if any(args.memory) else sides:  # llama.cpp's memory sets the limit
            if self._time_is_left():
                self._beside(side)
        done = {_key(each) for each in self.result["runs"]}
        for repetition in range(args.repetitions):
            for memory in args.memory:
                for rate in args.bandwidth if memory else [0]:
                    for prompt in args.prompts:
                        for side in sides:
                            row: Json = {"side": side.name, "memory": memory or None, "throttle": rate or None,
                                         "prompt": prompt, "repetition": repetition}  # fmt: skip
                            if _key(row) not in done and self._time_is_left():
                                self._keep({**row, **self._run(side, memory or None, rate or None, prompt)})
        self._write()

    def _make(self) -> None:
        if not self._model.is_file():
            say(f"the model, {self._model}")
            partial = self._model.with_suffix(".partial")
            write_model(partial, self._config, self._args.kind)
            partial.rename(self._model)
        config, layers = self._config, self._args.layers
        stored = [int(each.n_bytes) for each in gguf.GGUFReader(self._model).tensors if "_exps" in each.name]
        self.result["model"] = {
            "shape": self._args.shape, "kind": self._args.kind, "layers": layers, "experts": config.num_experts,
            "top_k": config.num_experts_per_tok, "count": layers * config.num_experts,
            "weights": 3 * config.hidden_size * config.moe_intermediate_size, "vocabulary": config.vocab_size,
            "experts_bytes": sum(stored),
        }  # fmt: skip

    def _time_is_left(self) -> bool:
        return self._args.most_seconds is None or time.monotonic() - self._began < self._args.most_seconds

    def _beside(self, side: Side) -> None:
        """Note the bytes of memory that a side's form takes beside its experts, and how its store was made."""
        beside = self.result.setdefault("beside", {}).setdefault(side.form, {})
        if not side.peer and side.form not in self.result.setdefault("stores", {}):
            self.result["stores"][side.form] = self._packed(side)
        for prompt in map(str, self._args.prompts):
            if prompt not in beside:
                say(f"memory beside experts, {side.form}, prompt of {prompt}")
                count = self.result["model"]["count"] // (1 if side.peer else 4)
                found = self._child(side, side.options if side.peer else self._slots(side, count), int(prompt))
                if "failed" in found:
                    raise ExpertcastError(f"a first run, {side.form}: {found['failed']}")
                beside[prompt] = found["peak_bytes"] - count * self._block(side)
                self._write()

    def _packed(self, side: Side) -> Json:
        """Seconds of the run that makes a side's store, and the store's bytes."""
        say(f"the store, {side.form}")
        start = time.monotonic()
        untrained = replace(side, predictor=None)  # training would make the store, in more time
        self._child(untrained, self._slots(side, 2 * self.result["model"]["experts"]), 16, more={"timed": 1})
        files = [path for path in self._store(side).rglob("*") if path.is_file()]
        return {"first_run_s": time.monotonic() - start, "bytes": sum(path.stat().st_size for path in files)}

    def _run(self, side: Side, share: float | None, rate: float | None, prompt: int) -> Json:
        model, beside = self.result["model"], self.result["beside"]
        if share is None:
            return self._child(side, side.options if side.peer else self._slots(side, model["count"]), prompt)
        limit = max(beside[PEER].values()) + _SPARE + int(share * model["experts_bytes"])
        options = side.options
        if not side.peer:
            own = beside[side.form][str(prompt)]
            memory = limit - 2 * _SPARE - own
            if memory < model["top_k"] * self._block(side):
                return {"failed": f"no room for experts beside {own / 1e9:.2f} GB", "limit_bytes": limit}
            options = self._slots(side, min(model["count"], memory // self._block(side)))
        return {**self._child(side, options, prompt, limit, rate), "limit_bytes": limit}

    def _child(
        self, side: Side, options: Json, prompt: int, limit: int | None = None, rate: float | None = None,
        more: Json | None = None,
    ) -> Json:  # fmt: skip
        args = self._args
        tokens = bundled_ids(load_tokenizer("reference"), prompt + args.warm + args.new_tokens)
        spec: Json = {
            "model": str(self._model), "tokens": tokens, "prompt": prompt, "warm": args.warm, "timed": args.new_tokens,
            "threads": args.threads, "options": options, "kind": "ours", "truth": None,
            "again": limit is None, "predictor": self._predictor(side), "dtype": "bf16",
            "store_folder": str(self._store(side)),
        }  # fmt: skip
        module, python = (PEER_RUN, str(args.peer)) if side.peer else (RUN, sys.executable)
        limits: Json = {"memory": limit, "rate": rate, "cold": [self._folder]}
        return run(module, spec | (more or {}), folder=self._folder, python=python, **limits)

    def _predictor(self, side: Side) -> str | None:
        """Return a predictor that needs no training, or the folder of the one that is trained here once."""
        if side.predictor != TRAINED:
            return side.predictor
        folder, tokenizer = self._folder / TRAINED, load_tokenizer("reference")
        if not folder.is_dir():
            say(f"predictor {TRAINED}, of {_TRAIN_TOKENS} tokens")
            documents = load_documents("reference")[_TEXT_DOCUMENTS:]
            slots, stored = self._slots(side, self.result["model"]["count"]), str(self._store(side))
            with load_offloaded(self._model, device="cpu", dtype="bf16", store_folder=stored, **slots) as offloaded:
                out = self._folder / "traces"
                traces = collect(offloaded.model, tokenizer, documents, out, tokens=_TRAIN_TOKENS, early_rank=None)
            save_predictor(fit(TRAINED, traces).predictor, folder, view=traces.view)
        return str(folder)

    def _slots(self, side: Side, count: int) -> Json:
        return {**side.options, "store": "disk", "slots": count}

    def _block(self, side: Side) -> int:
        """Return the bytes of one expert in memory."""
        model = self.result["model"]
        if side.peer:
            return int(model["experts_bytes"] // model["count"])
        return int(self.result["stores"][side.form]["bytes"] // model["count"])

    def _store(self, side: Side) -> Path:
        return self._folder / f"store-{side.form}"

    def _keep(self, row: Json) -> None:
        self.result["runs"].append(row)
        shown = row.get("failed") or f"{row['ttft_s']:.3g} s, then {row['tpot_s'] * 1e3:.4g} ms"
        say(", ".join(str(row[name]) for name in _KEYS) + f": {shown}")
        self._write()

    def _write(self) -> None:
        self.result["results"] = summaries(self.result["runs"])
        self._file.write()
        if self._args.page is not None:
            written = self._args.page.read_text() if self._args.page.exists() else ""
            _, heading, by_hand = written.partition(BY_HAND)
            results = [json.loads(path.read_text()) for path in (self._args.out, *self._args.beside)]
            self._args.page.write_text(TITLE + "\n".join(map(page, results)) + heading + by_hand)


def _key(row: Json) -> tuple[object, ...]:
    return tuple(row[name] for name in _KEYS)


def summaries(runs: Sequence[Json]) -> list[Json]:
    """Medians over repetitions: one row per side, memory, rate and prompt, in the order of the first runs."""
    groups: dict[tuple[object, ...], list[Json]] = {}
    for each in runs:
        groups.setdefault(_key(each)[:-1], []).append(each)
    return [_summary(dict(zip(_KEYS, key, strict=False)), group) for key, group in groups.items()]


def _summary(row: Json, group: Sequence[Json]) -> Json:
    good = [each for each in group if "failed" not in each]
    if not good:
        return row | {name: group[0].get(name) for name in ("failed", "limit_bytes")}
    for name in _MEDIANS:
        values = [each[name] for each in good if each.get(name) is not None]
        row[name] = statistics.median(values) if values else None
    times = [each["tpot_s"] for each in good]
    row |= {"tpot_range_s": [min(times), max(times)], "repetitions": len(good)}
    row["peak_bytes"] = max(each["peak_bytes"] for each in good)
    return row | {name: good[0].get(name) for name in ("limit_bytes", "slots", "capped", "throttled", "largest")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [side.name for side in SIDES]
    parser.add_argument("--keep", type=Path, required=True, help="folder for the file and stores")
    parser.add_argument("--peer", type=Path, default=Path(sys.executable), help="interpreter with xllamacpp")
    parser.add_argument("--sides", nargs="*", choices=names, default=[], help="(default: all)")
    memory = [0.25, 0.5, 0.75, 0]
    parser.add_argument("--memory", nargs="+", type=float, default=memory, help="shares of the experts; 0: no limit")
    parser.add_argument("--bandwidth", nargs="+", type=float, default=[0, 5e8], help="bytes/s; 0: as it is")
    parser.add_argument("--prompts", nargs="+", type=int, default=[16, 512], help="tokens read at once")
    parser.add_argument("--repetitions", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--fidelity", nargs="*", choices=_FORMS, default=_FORMS, help="of the bundled model")
    parser.add_argument("--fidelity-tokens", type=int, default=8192, help="(default: %(default)s)")
    parser.add_argument("--shape", choices=SHAPE_FIELDS, default="qwen3-30b-a3b", help="(default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, default="Q4_0", help="of the file (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=8, help="tokens before those timed (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens that are timed (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of everyone's products (default: %(default)s)")
    parser.add_argument("--most-seconds", type=float, help="no run starts after so many (default: all are made)")
    parser.add_argument("--small", action="store_true", help="a model of toy size")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--page", type=Path, help="Markdown page to write")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="JSON files of other models for the page")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run under way and its groups go, too
    raise SystemExit(main())
