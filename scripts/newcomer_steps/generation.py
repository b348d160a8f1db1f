"""What transformers and torch generate with: pipeline, streamers, beams, sampling, assistants, torch.compile."""

from __future__ import annotations

import copy
import io
import threading
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)  # fmt: skip

import expertcast
from newcomer_steps.world import PROMPTS, Found, World

INDUCTOR_TOKENS = 16
"""From so many new tokens on there is time for it."""
INDUCTOR_ROUNDING = 1e-4
"""Most that float32 logits of inductor's kernels differ by between an offloaded model and the resident one."""


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


def compiled(world: World) -> Found:
    """`torch.compile` around the model: its attention, norms and routers are compiled, the runtime is not."""
    found = world.compare(lambda model: _compiled_steps(model, "eager"), "to the bit by backend 'eager'")
    if world.new_tokens < INDUCTOR_TOKENS:
        return found
    tiny = _tiny()
    expected = _compiled_steps(tiny, "inductor")
    with expertcast.offload(tiny, slots=16, predictor="next_norm") as offloaded:
        torch.testing.assert_close(
            _compiled_steps(offloaded, "inductor"), expected, rtol=INDUCTOR_ROUNDING, atol=INDUCTOR_ROUNDING
        )
    return replace(found, note=f"{found.note}, by inductor to rounding")


@torch.no_grad()
def _compiled_steps(model: Any, backend: str, tokens: int = 4) -> Tensor:
    """Logits of a plain prefill and compiled decode steps over a static cache, [tokens, V]."""
    torch.compiler.reset()
    cache = StaticCache(config=copy.deepcopy(model.config), max_cache_len=32)
    ids, positions = torch.tensor([[3, 4, 5]], device=model.device), torch.arange(3, device=model.device).unsqueeze(0)
    rows, forward = [], model
    for _ in range(tokens):
        output = forward(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        rows.append(output.logits[0, -1].clone())
        ids, positions = rows[-1].argmax().view(1, 1), positions[:, -1:] + 1
        if len(rows) == 1:
            forward = torch.compile(model.forward, backend=backend, dynamic=False)
    return torch.stack(rows)


def _tiny() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()
