"""Every family of transformers: what works works bit for bit, also in 4 and 8 bits, and what does not is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import batched_mm_experts_forward

import expertcast
from expertcast.data.batch import RouterCall
from expertcast.data.collect import collect
from expertcast.data.models import meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.packed_experts import run_experts
from expertcast.data.taps import RouterTaps
from expertcast.data.text import Document, load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.view import MoEView
from expertcast.runtime.drafts.kinds import QuantisedExperts
from expertcast.runtime.engine.front import speculate
from expertcast.training.fit import fit
from tests.families.page import PAGE, describe
from tests.families.table import FAMILIES, REFUSED, WORKING_CLASSES, decorated, tiny_config, tiny_family
from tests.runtime.drafts.by_hand import distance, resident_views, rounded_experts, step

WORKING = [family for family in FAMILIES if family not in REFUSED]
SLOTS = 5
"""Slots for 16 to 32 experts: every decode step evicts."""


@dataclass
class Made:
    """A family's model, and what it says of a prompt."""

    family: str
    model: PreTrainedModel
    view: MoEView
    prompt: Tensor
    tokens: Tensor
    logits: Tensor


def greedy(model: PreTrainedModel, prompt: Tensor) -> tuple[Tensor, Tensor]:
    output = model.generate(
        prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return output.sequences, torch.stack(output.logits)


@pytest.fixture(scope="module", params=WORKING)
def made(request: pytest.FixtureRequest) -> Made:
    model = tiny_family(request.param)
    prompt = torch.randint(10, 4096, (1, 7), generator=torch.Generator().manual_seed(3))
    tokens, logits = greedy(model, prompt)
    return Made(request.param, model, find_moe_layers(model), prompt, tokens, logits)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return load_documents(["reference"])


@pytest.fixture(scope="module")
def traces(
    made: Made, documents: list[Document], reference_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> TraceDataset:
    folder = tmp_path_factory.mktemp(made.family)
    return collect(
        made.model, reference_tokenizer, documents, folder / "traces",
        tokens=120, window=20, batch_size=4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def predictor(traces: TraceDataset) -> Predictor:
    return fit("quasi_hidden", traces).predictor


def test_every_family_of_the_installed_transformers_is_listed() -> None:
    assert decorated() == list(FAMILIES), "transformers decorates other families than tests/families/table.py lists"


def test_the_page_names_them_all() -> None:
    """Written by `python -m tests.families.page`."""
    works, refused = PAGE.read_text().split("## Refused")
    assert re.findall(r"^\| `(\w+)` \|", works, flags=re.MULTILINE) == WORKING
    found = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", refused, flags=re.MULTILINE))
    assert list(found) == list(REFUSED)
    assert all(REFUSED[family] in line or "no language model" in line for family, line in found.items())


@pytest.mark.parametrize("family", REFUSED)
def test_refused_in_one_line(family: str) -> None:
    with pytest.raises(ExpertcastError) as caught:
        find_moe_layers(meta_model(tiny_config(family)))
    assert REFUSED[family] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("error:experts implementation")
@pytest.mark.parametrize("family", WORKING_CLASSES)
def test_another_class_of_a_refused_family(family: str) -> None:
    model = tiny_family(family)
    ids_BT = torch.randint(10, 4096, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model(input_ids=ids_BT)[0]
        with expertcast.offload(model, predictor="next_norm", slots=SLOTS, forecasts="always") as offloaded:
            assert torch.equal(model(input_ids=ids_BT)[0], expected)
            assert offloaded.stats.as_dict()["bytes_moved"] > 0
    assert bool(expected.isfinite().all())


def test_rule_gives_the_routers_own_ids_and_weights(made: Made) -> None:
    """Bit for bit, in the router's own forward, in prefill and in a decode step."""
    seen: list[int] = []

    def check(call: RouterCall) -> None:
        ids_TK, weights_TK = made.view[call.layer].route(call.logits_TE)
        assert torch.equal(ids_TK, call.ids_TK)
        assert torch.equal(weights_TK, call.weights_TK)
        assert weights_TK.dtype == call.weights_TK.dtype
        seen.append(call.layer)

    taps = RouterTaps(made.model, made.view, check)
    try:
        greedy(made.model, made.prompt)
    finally:
        taps.close()
    assert seen == [layer.index for layer in made.view] * 3


def test_meta_model_says_the_same(made: Made) -> None:
    config = tiny_config(made.family)
    report = describe(meta_model(config, torch.bfloat16), made.family)
    assert report.supported, report.reason
    here = describe(made.model, made.family)
    assert (report.layers, report.experts, report.top_k, report.hidden) == (here.layers, 8, here.top_k, 32)
    assert (report.default_vectors, report.router) == (here.default_vectors, here.router)


def test_traces_route_as_the_model_does(made: Made, traces: TraceDataset) -> None:
    """From the skeleton on disk, which holds norms and routers alone."""
    batch = next(traces.batches("all", 64))
    assert traces.view.fingerprint() == made.view.fingerprint()
    for layer in traces.view:
        logits_TE = batch.logits_TLE[:, layer.index].to(made.model.dtype)
        for kept, own in zip(layer.route(logits_TE), made.view[layer.index].route(logits_TE), strict=True):
            assert torch.equal(kept, own)
        state = batch.state(traces.view, layer.index)
        found_TE, logits_TE = layer.router_logits(state.router_input_TD).float(), state.logits_TE.float()
        assert (found_TE - logits_TE).norm() <= 0.03 * logits_TE.norm()  # residuals are kept in 8 bits
    defaults = traces.defaults
    assert torch.isfinite(defaults.expert_LED).all()
    for layer in made.view:
        assert bool(defaults.expert_LED[layer.index].any()) == (layer.adds is not None)


def test_offloaded_with_forecasts_is_bit_identical(made: Made, predictor: Predictor) -> None:
    with expertcast.offload(made.model, predictor=predictor, slots=SLOTS, forecasts="always") as offloaded:
        tokens, logits = greedy(made.model, made.prompt)
        assert offloaded.stats.as_dict()["bytes_moved"] > 0
    assert torch.equal(tokens, made.tokens)
    assert torch.equal(logits, made.logits)


@pytest.mark.parametrize("rows", [1, 3])
def test_misses_on_the_host_are_bit_identical(made: Made, rows: int) -> None:
    """One sequence, and a batch; every step that decodes lacks experts."""
    prompt = torch.randint(10, 4096, (rows, 7), generator=torch.Generator().manual_seed(4))
    expected = greedy(made.model, prompt)
    with expertcast.offload(made.model, slots=SLOTS + 2, link="emulated", misses="host") as offloaded:
        tokens, logits = greedy(made.model, prompt)
        assert offloaded.stats.total.on_host > 0
    assert torch.equal(tokens, expected[0])
    assert torch.equal(logits, expected[1])


def test_forecasts_are_executed(made: Made, predictor: Predictor) -> None:
    with expertcast.offload(made.model, predictor=predictor, mode="speculate", slots=SLOTS):
        _, logits = greedy(made.model, made.prompt)
    assert torch.isfinite(logits).all()
    ran: dict[int, Tensor] = {}
    with speculate(
        made.model, made.view, predictor.bind(made.view), observe=lambda call, ids: ran.update({call.layer: ids})
    ):
        made.model(input_ids=made.prompt, use_cache=False)
    assert sorted(ran) == [layer.index for layer in made.view]


@torch.no_grad()
def test_experts_in_4_and_8_bits(made: Made) -> None:
    """transformers' own kernel over the rounded weights says the same: last layer, one token and three.

    The experts' input may be narrower than the model. Weights rounded otherwise are off by a tenth with 4 bits.
    """
    view, layer = made.view, list(made.view)[-1]
    experts: Any = layer.experts
    width = experts.down_proj.shape[-1 if experts.is_transposed else -2]
    for precision, bits in (("int4", 4), ("int8", 8)):
        quantised = QuantisedExperts(view, resident_views(view), precision)
        rounded = rounded_experts(layer, bits)
        for tokens in (1, 3):
            hidden, ids, weights = step(tokens, width, layer.num_experts, layer.top_k)
            hidden, weights = hidden.bfloat16(), weights.bfloat16()
            found = run_experts(quantised.layers[-1], hidden, ids, weights)
            assert (found.shape, found.dtype) == (hidden.shape, hidden.dtype)
            assert distance(found, batched_mm_experts_forward(rounded, hidden.float(), ids, weights.float())) < 0.04
