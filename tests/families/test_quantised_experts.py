"""Every family's experts in 4 and 8 bits: transformers' own kernel over weights rounded by hand says the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.integrations.moe import batched_mm_experts_forward

from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime.drafts.quantised import QuantisedExperts
from tests.families.table import FAMILIES, REFUSED, tiny_family
from tests.runtime.drafts.by_hand import distance, resident_views, rounded_experts, step


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in REFUSED])
@torch.no_grad()
def test_outputs(family: str) -> None:
    """Last layer, one token and three. The experts' input may be narrower than the model. Weights rounded otherwise are
    off by a tenth with 4 bits."""
    view = find_moe_layers(tiny_family(family))
    layer = list(view)[-1]
    experts: Any = layer.experts
    width = experts.down_proj.shape[-1 if experts.is_transposed else -2]
    for precision, bits in (("int4", 4), ("int8", 8)):
        quantised = QuantisedExperts.of(view, resident_views(view), precision)
        rounded = rounded_experts(layer, bits)
        for tokens in (1, 3):
            hidden, ids, weights = step(tokens, width, layer.num_experts, layer.top_k)
            hidden, weights = hidden.bfloat16(), weights.bfloat16()
            found = quantised.run(layer, hidden, ids, weights)
            assert (found.shape, found.dtype) == (hidden.shape, hidden.dtype)
            assert distance(found, batched_mm_experts_forward(rounded, hidden.float(), ids, weights.float())) < 0.02
