"""Continuous batching: a step holds one token of each request, one behind the other."""

from __future__ import annotations

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from expertcast import offload

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16], [17, 18]]


def _written(model: PreTrainedModel) -> list[list[int]]:
    options = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    memory = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    outputs = model.generate_batch(
        inputs=PROMPTS, generation_config=options, continuous_batching_config=memory, progress_bar=False
    )
    return [outputs[name].generated_tokens for name in sorted(outputs)]


def test_steps_of_several_requests_are_forecast(reference_model: PreTrainedModel) -> None:
    """Tokens stay; most of what layers after the first need is under way when they ask for it."""
    expected = _written(reference_model)
    hits = {}
    for forecasts in ("never", "always", "auto"):
        with offload(
            reference_model, predictor="next_norm", slots=192, bandwidth=5e8, forecasts=forecasts
        ) as offloaded:
            assert _written(reference_model) == expected
            hits[forecasts] = offloaded.stats.hit_rate
            if forecasts == "always":
                assert offloaded.stats.total.prefetched_used > 100
            if forecasts == "auto":
                assert "4" in offloaded.stats.as_dict()["forecasts"]
    assert hits["always"] > hits["never"]
