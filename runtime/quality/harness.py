"""EleutherAI's lm-evaluation-harness on an offloaded model (row B18): any of its tasks, one of them a user's own.

The harness's own `HFLM(pretrained=model)` takes a model inside `with expertcast.offload(model)` as it is. It scores
likelihoods with one forward over context and answer, which to the runtime is a prefill: what acts in decode steps only
costs nothing there. The class made here reads the second half of each text token by token instead.

B texts of S tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.quality.decoding import forwards
from expertcast.runtime.simulation.trace import PREFILL, prefilled

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM


def harness_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, prefill: int = PREFILL, **options: Any
) -> HFLM:
    """What `lm_eval.simple_evaluate(model=...)` takes, around a model that is offloaded or not.

    Args:
        model: offloaded for as long as the evaluation runs; of :func:`expertcast.load_offloaded`, its `.model`.
        tokenizer: the model's.
        prefill: tokens of each text that are read at once when a likelihood is asked for, half of a text that is
            shorter than twice as many; the others are decode steps. Generation is transformers' own.
        options: further ones of the harness's `HFLM`, such as `batch_size`.

    Raises:
        ExpertcastError: the harness is not installed, or a prefill of no token.
    """
    if prefill < 1:
        raise ExpertcastError(f"prefill={prefill}: give 1 token or more")
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ExpertcastError("lm-eval is not installed: pip install 'expertcast[eval]'") from error

    class Decoding(HFLM):  # type: ignore[misc]
        """Likelihoods from a prefill and decode steps."""

        def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
            """Logits [B, S, V]; shorter texts of a batch are filled up on the right, where nobody looks."""
            assert attn_mask is None, "an encoder-decoder model"
            return torch.cat(list(forwards(self.model, inps, max(1, prefilled(inps.shape[1], prefill)))), dim=1)

    return Decoding(pretrained=model, tokenizer=tokenizer, backend="causal", **options)
