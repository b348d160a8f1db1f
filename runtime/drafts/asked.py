"""What transformers' `generate` was asked for, as far as a draft has to do with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import BaseStreamer, StopStringCriteria

from expertcast.predictors.errors import ExpertcastError


def check_asked(
    config: GenerationConfig, kwargs: Mapping[str, Any], input_ids: Tensor, streamer: BaseStreamer | None
) -> None:
    """What a draft cannot be combined with.

    Raises:
        ExpertcastError: that, in one line.
    """
    refused = {
        "num_beams": config.num_beams > 1,
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "guidance_scale": config.guidance_scale not in (None, 1.0),
        "use_cache=False": not config.use_cache,
        "a streamer for several texts": streamer is not None and len(input_ids) > 1,
        "inputs_embeds": kwargs.get("inputs_embeds") is not None,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        "assistant_early_exit": config.assistant_early_exit is not None,
    }
    for what, given in refused.items():
        if given:
            raise ExpertcastError(f"a draft does not go with {what}: leave one of them out")


def own_stop_strings(kwargs: dict[str, Any]) -> None:
    """Make stop strings a stopping criterion here: `generate` has no tokenizer left where a loop is given to it."""
    config = kwargs.get("generation_config")
    strings = kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None)
    tokenizer = kwargs.pop("tokenizer", None)
    if strings is None:
        return
    if tokenizer is None:
        raise ExpertcastError("stop_strings need the tokenizer: give tokenizer=... beside them")
    if config is not None:
        kwargs["generation_config"] = config = copy.copy(config)
        config.stop_strings = None
    given = kwargs.get("stopping_criteria") or []
    kwargs["stopping_criteria"] = StoppingCriteriaList([*given, StopStringCriteria(tokenizer, strings)])
