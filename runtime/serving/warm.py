"""Filling of slots before the first request: with the experts that earlier runs used most, and by running prompts.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypedDict

from expertcast.data.models import check_token_ids
from expertcast.data.trace_writer import write_user_file
from expertcast.predictors.artefacts import CLOSED, SEAL, read_bytes, read_json, seal
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.recording.recorder import Observer

_HOT_REMEDY = "the server replaces it when it stops"


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
    """Counts the uses of each expert, and stores them in a file together with the resident experts.

    Counts of earlier runs are halved in every run, so the order follows recent requests.

    Args:
        path: the file.
        offloaded: the model, with no forward pass in progress.
    """

    def __init__(self, path: Path, offloaded: OffloadedModel) -> None:
        self.path = path
        self._offloaded = offloaded
        self._keeps = offloaded.residency.keep
        self._shape = offloaded.view.shape
        self._fingerprint = offloaded.view.fingerprint()
        self._used: Counter[int] = Counter()
        self._before: dict[int, int] = {}
        offloaded.residency.add_observer(self)

    def needed(self, layer: int, keys: Sequence[int]) -> None:
        self._used.update(keys)

    def load(self) -> int:
        """Fill free slots with the experts in the file, the most used first, and wait for their copies.

        Returns:
            Number of loaded experts; 0 if the file does not exist.

        Raises:
            ExpertcastError: the file is damaged or belongs to another model, or the offload runs without a cache.
                The slots are unchanged, and serving can go on.
        """
        if not self.path.exists():
            return 0
        values = self._read()
        self._before = dict(zip(values["keys"], values["used"], strict=True))
        if not self._keeps:
            raise ExpertcastError("--hot-experts has no effect with cache=False: leave it out")
        used, held = self._before, list(dict.fromkeys(values["held"]))
        if not any(used.values()):
            return self._fill(held[::-1])
        place = set(held)
        return self._fill(sorted(place.union(used), key=lambda key: (-used.get(key, 0), key not in place, key)))

    def save(self) -> bool:
        """Replace the file atomically.

        Returns:
            False if nothing ran since the file was read, and the file is unchanged.

        Raises:
            ExpertcastError: the folder is not writable.
        """
        used, held = self._used.copy(), sorted(self._offloaded.pool.resident())
        if not used:
            return False
        for key, count in self._before.items():
            if count // 2:
                used[key] += count // 2
        order = sorted(used, key=lambda key: (-used[key], key))
        values: dict[str, object] = {
            "model": self._offloaded.view.model_id, "fingerprint": self._fingerprint, "layers": self._shape.layers,
            "experts": self._shape.experts, "keys": order, "used": [used[key] for key in order], "held": held,
        }  # fmt: skip
        write_user_file(self.path, (json.dumps(seal(values)) + "\n").encode())
        return True

    def _read(self) -> _File:
        values = read_json(self.path, _File, _HOT_REMEDY)
        assert SEAL in values
        shape = self._shape
        if (values["fingerprint"], values["layers"], values["experts"]) != (
            self._fingerprint, shape.layers, shape.experts,
        ):  # fmt: skip
            raise ExpertcastError(f"{self.path} belongs to another model, {values['model']}; {_HOT_REMEDY}")
        every = range(shape.layers * shape.experts)
        if (
            len(values["keys"]) != len(values["used"])
            or any(key not in every for key in [*values["keys"], *values["held"]])
            or any(count < 0 for count in values["used"])
        ):
            raise ExpertcastError(f"{self.path} has keys or counts out of range; {_HOT_REMEDY}")
        return values

    def _fill(self, order: Sequence[int]) -> int:
        """Load the most used experts that fit each layer's share of the slots, the most used last, as the newest."""
        offloaded, experts = self._offloaded, self._shape.experts
        residency = offloaded.residency
        room, chosen = Counter[int](), list[int]()
        shared = len(offloaded.pool.free_slots)
        for key in order:
            layer = key // experts
            if len(chosen) < shared and room[layer] < residency.free(layer) and not residency.holds(key):
                room[layer] += 1
                chosen.append(key)
        return residency.fill(chosen[::-1])


_REMEDY = 'use a text file with one prompt per line, or a .jsonl file with one {"prompt": ...} per line'
_MOST_TOKENS = 2048
"""Tokens of a prompt that are run; its beginning shows which experts it uses."""


def read_prompts(path: Path) -> list[str]:
    """Read prompts: one per line, or in a .jsonl file the `prompt` of each line's object. Empty lines are skipped.

    Raises:
        ExpertcastError: the file cannot be read, is not UTF-8, has a line without a `prompt`, or has no prompts.
    """
    try:
        text = read_bytes(path).decode().removeprefix("\ufeff")
    except OSError as error:
        raise ExpertcastError(f"cannot read {path}: {error.strerror}; {_REMEDY}") from error
    except UnicodeDecodeError:
        raise ExpertcastError(f"{path} is not UTF-8 text; {_REMEDY}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ExpertcastError(f"{path} has no prompts; {_REMEDY}")
    if path.suffix != ".jsonl":
        return [line.rstrip("\r") for _, line in lines]
    return [_prompt_of(line, f"{path}, line {number}") for number, line in lines]


def warm(offloaded: OffloadedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> int:
    """Run one forward pass per prompt, one after another, and keep only the experts in the slots.

    Args:
        offloaded: the model, with no other forward pass in progress.
        tokenizer: its tokenizer.
        prompts: texts; only the first 2048 tokens of each run, or fewer if the model has fewer positions.

    Returns:
        Number of tokens.

    Raises:
        ExpertcastError: a token has no embedding.
    """
    model = offloaded.model
    most = min(_MOST_TOKENS, getattr(model.config.get_text_config(), "max_position_embeddings", None) or _MOST_TOKENS)
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    tokens = 0
    for prompt in prompts:
        ids_1T = tokenizer(prompt, return_tensors="pt")["input_ids"][:, :most].to(model.device)
        check_token_ids(ids_1T, model.config, tokenizer)
        if ids_1T.shape[1]:
            with torch.inference_mode():
                offloaded(input_ids=ids_1T, use_cache=False, **last)
            tokens += ids_1T.shape[1]
    return tokens


def prepare(
    offloaded: OffloadedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], hot: HotExperts | None
) -> list[str]:
    """Fill slots from the file of hot experts, then by running prompts, and reset the statistics.

    Args:
        offloaded: the model.
        tokenizer: its tokenizer.
        prompts: as for :func:`warm`; may be empty.
        hot: the file's counts; None without a file.

    Returns:
        One line per action. A file that cannot be used is reported here: serving then starts cold.
    """
    said = []
    if hot is not None:
        start = time.perf_counter()
        try:
            count = hot.load()
            said.append(f"hot experts: {count} loaded from {hot.path} in {time.perf_counter() - start:.1f} s")
        except ExpertcastError as error:
            said.append(f"hot experts are ignored: {error}")
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
        raise ExpertcastError(f"{where} is not JSON; {_REMEDY}") from None
    prompt = values.get("prompt") if isinstance(values, dict) else None
    if not isinstance(prompt, str) or not prompt or re.search("[\ud800-\udfff]", prompt):
        raise ExpertcastError(f'{where} has no string "prompt" of Unicode text; {_REMEDY}')
    return prompt
