"""Ways of generating that transformers itself has: pipeline, streamers, beams, sampling, assisted generation."""

from __future__ import annotations

import copy
import io
import threading
from contextlib import redirect_stdout
from typing import Any

import torch
from transformers import TextIteratorStreamer, TextStreamer, pipeline

from newcomer_steps.world import PROMPTS, Found, World


def text_pipeline(world: World) -> Found:
    """A batch through the text-generation pipeline."""

    def run(model: Any) -> list[Any]:
        generator = pipeline("text-generation", model=model, tokenizer=world.tokenizer)
        return list(generator(list(PROMPTS), batch_size=2, max_new_tokens=world.new_tokens, do_sample=False))

    return world.compare(run)


def streamers(world: World) -> Found:
    """Tokens printed as they come, and taken from a thread."""

    def run(model: Any) -> tuple[str, list[str]]:
        inputs, printed = world.tokenizer(PROMPTS[0], return_tensors="pt").to(model.device), io.StringIO()
        wanted = {"max_new_tokens": world.new_tokens, "do_sample": False}
        with redirect_stdout(printed):
            model.generate(**inputs, **wanted, streamer=TextStreamer(world.tokenizer))
        streamer = TextIteratorStreamer(world.tokenizer, timeout=120)
        thread = threading.Thread(target=model.generate, kwargs={**inputs, **wanted, "streamer": streamer})
        thread.start()
        pieces = list(streamer)
        thread.join()
        return printed.getvalue(), pieces

    return world.compare(run)


def beams(world: World) -> Found:
    """Beam search over a padded batch, with the scores of each beam."""

    def run(model: Any) -> tuple[Any, Any]:
        found = model.generate(
            **world.inputs, max_new_tokens=world.new_tokens, num_beams=3, num_return_sequences=2, do_sample=False,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        return found.sequences, found.sequences_scores

    return world.compare(run)


def sampling(world: World) -> Found:
    """Sampling with one seed, top-p and a temperature."""

    def run(model: Any) -> Any:
        torch.manual_seed(7)
        return model.generate(
            **world.inputs, max_new_tokens=world.new_tokens, do_sample=True, top_p=0.9, temperature=0.8
        )

    return world.compare(run)


def assisted(world: World) -> Found:
    """An assistant model writes for the offload, the offload writes for another model, and the prompt writes."""
    other = copy.deepcopy(world.model)
    other.generation_config.num_assistant_tokens = 4

    def run(model: Any) -> list[Any]:
        inputs = world.tokenizer(PROMPTS[0], return_tensors="pt").to(model.device)
        wanted = {"max_new_tokens": world.new_tokens, "do_sample": False}
        return [
            model.generate(**inputs, **wanted, assistant_model=other),
            other.generate(**inputs, **wanted, assistant_model=model),
            model.generate(**inputs, **wanted, prompt_lookup_num_tokens=3),
        ]

    return world.compare(run)
