"""How far a language model's run is from the text and from another run: perplexity, agreement, KL divergence.

T tokens, V vocabulary. All take log probabilities, in which no probability is too small to be told from zero.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from expertcast.training.metrics.means import TokenMean


class Perplexity(TokenMean):
    """exp of the mean of -log p(token).

    torchmetrics' own takes softmax and then log: from log probabilities that rounds twice, and gives infinity for a
    token whose probability underflows.
    """

    higher_is_better = False

    def update(self, log_probs_TV: Tensor, token_T: Tensor) -> None:
        """Add the tokens that came where these distributions stood."""
        self.total_LR += functional.nll_loss(log_probs_TV, token_T, reduction="sum")
        self.count_L += len(token_T)

    def compute(self) -> Tensor:
        return super().compute().exp()


class Agreement(TokenMean):
    """Share of positions at which two runs hold the same token for the likeliest.

    torchmetrics' accuracy counts per class and wants to know their number; this is one mean.
    """

    def update(self, log_probs_TV: Tensor, reference_TV: Tensor) -> None:
        """Add some positions of a run and of the one it is compared with."""
        self.add(log_probs_TV.argmax(dim=-1) == reference_TV.argmax(dim=-1))


class Divergence(TokenMean):
    """Mean KL(reference || run) in nats.

    torchmetrics' own sums p log(p / q) in fp32 over all batches and, from log probabilities, is NaN where both
    probabilities are zero; a sum below zero by rounding is zero here.
    """

    higher_is_better = False

    def update(self, log_probs_TV: Tensor, reference_TV: Tensor) -> None:
        """Add some positions of a run and of the one it is compared with; a run does not diverge from itself."""
        if log_probs_TV is not reference_TV:
            self.total_LR += functional.kl_div(log_probs_TV, reference_TV, reduction="sum", log_target=True)
        self.count_L += len(log_probs_TV)

    def compute(self) -> Tensor:
        return super().compute().clamp(min=0.0)
