"""Slots are filled before the first request: with the experts that earlier runs used most, and by running prompts.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import inspect
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypedDict

from expertcast.data.trace_writer import write_where_told
from expertcast.predictors.artefacts import CLOSED, SEAL, read_bytes, read_json, seal
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.experimental.kernel_link import KernelLink, fill_tables, held_by_tables
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.recording.recorder import Observer

_HOT_REMEDY = "the next end of serving writes it anew"


class _File(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    model: str
    fingerprint: str
    layers: int
    experts: int
    keys: list[int]
    used: list[int]
    held: list[int]
    digest: str


class HotExperts(Observer):
    """Counts how often each expert is used, and keeps it in a file with those that have slots at the end.

    Uses of earlier runs count half as much with every run: what is hot follows what is asked for. Where the link
    decides on the device nobody counts uses; the order in which slots were last used is kept in their place.

    Args:
        path: of the file.
        offloaded: the model, with no forward under way.
    """

    def __init__(self, path: Path, offloaded: OffloadedModel) -> None:
        self.path = path
        self._offloaded = offloaded
        self._keeps = offloaded.link.decides_on_device or offloaded.residency.keep
        self._shape = offloaded.view.shape
        self._fingerprint = offloaded.view.fingerprint()
        self._used: Counter[int] = Counter()
        self._before: dict[int, int] = {}
        if not offloaded.link.decides_on_device:
            offloaded.residency.tell(self)

    def needed(self, layer: int, keys: Sequence[int]) -> None:
        self._used.update(keys)

    def load(self) -> int:
        """Fill free slots with the experts that the file names, the most used first, and wait for them.

        Returns:
            How many were loaded; 0 where there is no file so far.

        Raises:
            ExpertcastError: the file is damaged, or of another model; or this offload has no cache. Slots are as they
                were, and serving can go on.
        """
        if not self.path.exists():
            return 0
        values = self._read()
        self._before = dict(zip(values["keys"], values["used"], strict=True))
        if not self._keeps:
            raise ExpertcastError("with cache=False no expert keeps its slot: leave --hot-experts out")
        used, held = self._before, list(dict.fromkeys(values["held"]))
        if not any(used.values()):
            return self._fill(held[::-1])
        place = set(held)
        return self._fill(sorted(place.union(used), key=lambda key: (-used.get(key, 0), key not in place, key)))

    def save(self) -> bool:
        """Write the file in place of the one that is there, whole or not at all.

        Returns:
            Whether it was written: not where nothing was run since it was read.

        Raises:
            ExpertcastError: its folder cannot be written.
        """
        link = self._offloaded.link
        if isinstance(link, KernelLink):
            used, held = Counter[int](), held_by_tables(link)
        else:
            used, held = self._used.copy(), sorted(self._offloaded.pool.resident())
        if not used and not (held and isinstance(link, KernelLink)):
            return False
        for key, count in self._before.items():
            if count // 2:
                used[key] += count // 2
        order = sorted(used, key=lambda key: (-used[key], key))
        values: dict[str, object] = {
            "model": self._offloaded.view.model_id, "fingerprint": self._fingerprint, "layers": self._shape.layers,
            "experts": self._shape.experts, "keys": order, "used": [used[key] for key in order], "held": held,
        }  # fmt: skip
        write_where_told(self.path, (json.dumps(seal(values)) + "\n").encode())
        return True

    def _read(self) -> _File:
        values = read_json(self.path, _File, _HOT_REMEDY)
        assert SEAL in values
        shape = self._shape
        if (values["fingerprint"], values["layers"], values["experts"]) != (
            self._fingerprint, shape.layers, shape.experts,
        ):  # fmt: skip
            raise ExpertcastError(f"{self.path} is of another model, {values['model']}; {_HOT_REMEDY}")
        every = range(shape.layers * shape.experts)
        if (
            len(values["keys"]) != len(values["used"])
            or any(key not in every for key in [*values["keys"], *values["held"]])
            or any(count < 0 for count in values["used"])
        ):
            raise ExpertcastError(f"{self.path} names experts that its model has not; {_HOT_REMEDY}")
        return values

    def _fill(self, order: Sequence[int]) -> int:
        """The hottest of each layer's share, or of all, the hottest last: it is the newest then."""
        offloaded, experts = self._offloaded, self._shape.experts
        if isinstance(offloaded.link, KernelLink):
            free = offloaded.pool.count - len(held_by_tables(offloaded.link))
            return fill_tables(offloaded.link, order[:free][::-1], experts)
        residency = offloaded.residency
        room, chosen = Counter[int](), list[int]()
        shared = len(offloaded.pool.free_slots)
        for key in order:
            layer = key // experts
            if len(chosen) < shared and room[layer] < residency.free(layer) and not residency.holds(key):
                room[layer] += 1
                chosen.append(key)
        return residency.fill(chosen[::-1])


_REMEDY = 'give a text file with one prompt per line, or a .jsonl file of {"prompt": ...} per line'
_MOST_TOKENS = 2048
"""Of a prompt that are run: its beginning shows what it uses."""


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file: its lines, or, where its name ends in .jsonl, the member `prompt` of the object in each.
    Empty lines are passed over.

    Raises:
        ExpertcastError: no such file, no text in UTF-8, a line that is no such object, or no prompt at all.
    """
    try:
        text = read_bytes(path).decode()
    except OSError as error:
        raise ExpertcastError(f"cannot read {path}: {error.strerror}; {_REMEDY}") from error
    except UnicodeDecodeError:
        raise ExpertcastError(f"{path} is no text in UTF-8; {_REMEDY}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ExpertcastError(f"{path} holds no prompt; {_REMEDY}")
    if path.suffix != ".jsonl":
        return [line.rstrip("\r") for _, line in lines]
    return [_prompt_of(line, f"{path}, line {number}") for number, line in lines]


def warm(offloaded: OffloadedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> int:
    """Run one forward of each prompt, one after another, with nothing kept of it but what is in the slots.

    Args:
        offloaded: the model, with no other forward under way.
        tokenizer: its own.
        prompts: of longer ones the first 2048 tokens are run, or what the model's positions have room for.

    Returns:
        Tokens that were run.
    """
    model = offloaded.model
    most = min(_MOST_TOKENS, getattr(model.config.get_text_config(), "max_position_embeddings", None) or _MOST_TOKENS)
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    tokens = 0
    for prompt in prompts:
        ids_1T = tokenizer(prompt, return_tensors="pt")["input_ids"][:, :most].to(model.device)
        if ids_1T.shape[1]:
            with torch.inference_mode():
                offloaded(input_ids=ids_1T, use_cache=False, **last)
            tokens += ids_1T.shape[1]
    return tokens


def prepare(
    offloaded: OffloadedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], hot: HotExperts | None
) -> list[str]:
    """Fill slots from the file of hot experts first, then by running prompts. Statistics begin anew afterwards.

    Args:
        offloaded, tokenizer, prompts: as for :func:`warm`; there may be no prompts.
        hot: None: there is no such file.

    Returns:
        One line of each that was done, or left out: a file that is of no use makes a cold start, not an end.
    """
    said = []
    if hot is not None:
        start = time.perf_counter()
        try:
            count = hot.load()
            said.append(f"hot experts: {count} loaded from {hot.path} in {time.perf_counter() - start:.1f} s")
        except ExpertcastError as error:
            said.append(f"hot experts are left out: {error}")
    if prompts:
        start = time.perf_counter()
        tokens = warm(offloaded, tokenizer, prompts)
        said.append(f"warmed by {len(prompts)} prompts of {tokens} tokens in {time.perf_counter() - start:.1f} s")
    offloaded.reset_stats()
    return said


def _prompt_of(line: str, where: str) -> str:
    try:
        values = json.loads(line)
    except ValueError:
        raise ExpertcastError(f"{where} is no JSON; {_REMEDY}") from None
    prompt = values.get("prompt") if isinstance(values, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ExpertcastError(f'{where} is no object with a text as "prompt"; {_REMEDY}')
    return prompt
