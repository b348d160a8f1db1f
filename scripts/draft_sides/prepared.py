"""What runs of a model need to know before they begin: its folder, its layers' time, what it says."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from draft_sides.models import layer_seconds, opened, prompts, widened
from draft_sides.sides import EMULATED, NONE, REFERENCE, WIDENED, Setting
from expertcast.predictors.messages import Json


@dataclass(frozen=True, slots=True)
class Prepared:
    """One model."""

    path: Path | str
    options: dict[str, object]
    """Of its offload: where the experts lie."""
    kept: Json
    """In the result: `layer_s`, `shape`, `expert_bytes`, `ids` said after each text; `int4_bytes` once known."""
    new_tokens: int

    def slots(self, capacity: float, *, same_memory: bool) -> int:
        """Experts that fit; without a cache, three layers' worth of a token. The bytes of int4 copies come on top."""
        shape = self.kept["shape"]
        total = shape["L"] * shape["E"]
        slots = int(capacity * total) or 3 * shape["K"]
        more = self.kept["int4_bytes"] // self.kept["expert_bytes"] if same_memory else 0
        return int(min(total, slots + more))

    def link_options(self, setting: Setting) -> dict[str, object]:
        """Of the offload, with the link."""
        options = {**self.options, "link": setting.link}
        if setting.link == EMULATED:
            assert setting.ratio is not None
            copied = self.kept["shape"]["K"] * self.kept["expert_bytes"]
            options["bandwidth"] = copied / (self.kept["layer_s"] * setting.ratio)
        return options


class Models:
    """Prepares models when they are first asked for.

    Args:
        args: of the command line.
        kept: by name, what the result has of them.
    """

    def __init__(self, args: argparse.Namespace, kept: Json) -> None:
        self._args, self._kept = args, kept
        count = max(args.prompts, args.other_prompts)
        found = prompts(args.prompt, count + args.warm)
        self.prompts, self.warm = found[:count], found[count:]
        """Texts that are continued, and those that governors learn on."""

    def get(self, name: str) -> Prepared:
        """The model of this name."""
        args, kept = self._args, self._kept.setdefault(name, {})
        path: Path | str = REFERENCE if name == REFERENCE else widened(args.keep, args.expert_bytes)
        tokens = args.new_tokens if name == REFERENCE else args.wide_tokens
        options: dict[str, object] = {"device": "cpu", "dtype": "bf16"}
        if name == WIDENED:
            options |= {"store": "disk", "store_folder": Path(path) / "store"}
        if "layer_s" not in kept:
            kept["layer_s"] = layer_seconds(path, options, self.warm[0], 8 if args.small else 48)
        if len(kept.get("ids", ())) < len(self.prompts):
            with opened(path, {**options, "link": "instant"}) as offloaded:
                shape, layout = offloaded.view.shape, offloaded.store.layout
                kept |= {"shape": shape.as_dict(), "expert_bytes": layout.block_bytes}
                kwargs = {"max_new_tokens": tokens + 1, "do_sample": False, "draft": NONE}
                outputs = [offloaded.generate(ids, **kwargs) for ids in self.prompts]
            kept["ids"] = [output[0, args.prompt :].tolist() for output in outputs]
        return Prepared(path, options, kept, tokens)
