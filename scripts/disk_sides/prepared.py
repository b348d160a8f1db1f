"""What all runs read, made once and kept: the model, its stores, the GGUF, and what the resident model computes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from disk_sides import model_files
from disk_sides.runs import TORCH, call, run
from disk_sides.sides import LLAMA, OWN, PROCESS, Side
from expertcast.commands.output import say
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json

PROCESS_OPTIONS = {"persistence": 0.3, "accuracy": 0.9}
"""Of the routing that is drawn: with what comes again by chance about .45 of the experts stay, as in real models (.43
in Qwen3-30B-A3B); forecasts are as good as trained ones."""
SHARES = (0.08, 0.15, 0.3)
"""Of the experts, at which a cache's hits over the routing are counted."""
_ROOM = 1.05


def codecs(sides: Sequence[Side]) -> list[str]:
    """Those of the sides, and raw: the disk's own rate and the memory for all are measured with it."""
    return list(dict.fromkeys(["raw", *(side.codec for side in sides)]))


class Prepared:
    """The files of one `--keep` folder.

    Args:
        folder: where they lie.
        args: of the command line.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self._args = folder, args
        self.model, self.gguf, self.truth = folder / "model", folder / "model.gguf", folder / "truth"
        self.ids: dict[str, list[list[list[int]]]] = {}
        """Routing [T, L, K] of each workload, once made."""
        self.tokens = model_files.text_tokens(args.prompt + args.warm + args.new_tokens)

    @property
    def base_spec(self) -> Json:
        """What every run is told."""
        args = self._args
        return {
            "model": str(self.model), "gguf": str(self.gguf), "index": str(self.folder / "accelerate"),
            "tokens": self.tokens, "prompt": args.prompt, "warm": args.warm, "timed": args.new_tokens,
            "threads": args.threads, "process": PROCESS_OPTIONS, "truth": None, "remember": None,
        }  # fmt: skip

    def make(self, sides: Sequence[Side]) -> Json:
        """All that some sides read; `model`, `stores`, `workloads`."""
        config = model_files.olmoe(self._args.layers, small=self._args.small)
        say(f"the model and its stores, in {self.folder}")
        if not (self.model / "made.json").is_file():
            self._check_room(config)
        model = model_files.write_model(self.model, config)
        stores = {codec: self._store(codec) for codec in codecs(sides)}
        if any(side.kind == LLAMA for side in sides) and not self.gguf.is_file():
            say("the GGUF")
            call(self._args.llama_python, "-m", "disk_sides.gguf_file", str(self.model), str(self.gguf))
        return {"model": model, "stores": stores, "workloads": self._workloads()}

    def store_folder(self, codec: str) -> Path:
        """Of one codec."""
        return self.folder / f"store-{codec}"

    def _check_room(self, config: object) -> None:
        shape = model_files.sizes(config)
        needed = _ROOM * 4 * shape
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise ExpertcastError(
                f"the model, two stores and a GGUF need {needed / 1e9:.0f} GB and {str(self.folder)!r} has "
                f"{free / 1e9:.0f} free: give fewer --layers, or another --keep"
            )

    def _store(self, codec: str) -> Json:
        """Pack, by `expertcast store`; the folder's own note says what it said."""
        note = self.store_folder(codec) / "packed.json"
        if not note.is_file():
            folder = str(self.store_folder(codec))
            say(f"packing, codec {codec}")
            options = ("--store-folder", folder, "--codec", codec, "--device", "cpu")
            made = self.folder / "packed.json"
            call(sys.executable, "-m", "expertcast.cli", "store", str(self.model), *options, "--json", str(made))
            made.replace(note)
        packed = json.loads(note.read_text())
        return {key: packed[key] for key in ("nbytes", "stored_nbytes", "ratio", "bound")}

    def _workloads(self) -> Json:
        """The resident model's run, once for these tokens."""
        args, note = self._args, self.truth / "workloads.json"
        asked = {"tokens": self.tokens, "prompt": args.prompt, "process": PROCESS_OPTIONS, "threads": args.threads}
        if note.is_file():
            kept = json.loads(note.read_text())
            if kept["asked"] == asked and "ids" in kept:
                self.ids = kept["ids"]
                return dict(kept["found"])
        say("the resident model")
        self.truth.mkdir(exist_ok=True)
        spec = {**self.base_spec, "kind": "resident", "remember": str(self.truth), "shares": SHARES}
        found = run(TORCH, spec, folder=self.folder)
        if "failed" in found:
            raise ExpertcastError(f"the resident model: {found['failed']}")
        self.ids = {workload: found[workload].pop("ids") for workload in (OWN, PROCESS)}
        kept = {workload: found[workload] for workload in (OWN, PROCESS)}
        note.write_text(json.dumps({"asked": asked, "found": kept, "ids": self.ids}))
        return kept


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a side takes beside its slots, measured; so that all get the same memory.

    The base is what our direct side needs without slots, and everyone gets it. A side of ours that needs more takes it
    from its slots.
    """

    beside: dict[str, int]
    """Bytes by codec."""
    spare: int = 64 << 20

    @property
    def base(self) -> int:
        """Bytes beside the experts' share."""
        return self.beside["raw"] + self.spare

    def slots(self, codec: str, share: int) -> int:
        """Bytes of slots out of a share of so many bytes."""
        return share - max(0, self.beside[codec] - self.beside["raw"])
