"""Prompts that are run before the first request, so that slots hold what such prompts use."""

from __future__ import annotations

import inspect
import json
import time
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from expertcast.predictors.artefacts import read_bytes
from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.serving.hot_experts import HotExperts

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
