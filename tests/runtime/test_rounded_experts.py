"""Experts rounded to 4 and 8 bits: the bits of the packed model with all experts resident, however it is offloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import expertcast
from expertcast import OffloadConfig, load_offloaded
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.data import packed_experts
from expertcast.data.collect import collect
from expertcast.data.models import load_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.packed_experts import packed_matrices, weight_bits
from expertcast.data.text import Document, load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.runtime.config import pack_experts
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.training.fit import fit
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy

BATCH = {"input_ids": torch.randint(3, 400, (2, 6), generator=torch.Generator().manual_seed(0))}
LONG = {"input_ids": torch.randint(3, 400, (1, 40), generator=torch.Generator().manual_seed(1))}
"""More experts than few slots hold: layers run in chunks."""
NEW = 4


def _model() -> PreTrainedModel:
    """Sizes that groups of 64 and 32 inputs divide."""
    torch.manual_seed(0)
    model = tiny_model("qwen3_moe", torch.bfloat16, hidden_size=64, moe_intermediate_size=32)
    model.generation_config.eos_token_id = None
    return model


def _packed(experts: str) -> PreTrainedModel:
    model = _model()
    pack_experts(find_moe_layers(model), experts)
    return model


@pytest.fixture(scope="module", params=["int4", "int8"])
def experts(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's checkpoint."""
    made = tmp_path_factory.mktemp("rounded") / "model"
    _model().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def resident(experts: str, folder: Path) -> dict[str, Any]:
    """What the packed model generates with all its experts resident."""
    model = load_model(str(folder))
    pack_experts(find_moe_layers(model), experts)
    return {"batch": greedy(model, BATCH, NEW), "long": greedy(model, LONG, NEW)}


WAYS: dict[str, dict[str, Any]] = {
    "few slots": {"slots": 3},
    "all": {"slots": 32},
    "emulated": {"slots": 5, "bandwidth": 1e9},
    "forecasts": {"slots": 6, "predictor": "next_norm", "bandwidth": 1e9, "forecasts": "always"},
    "disk": {"slots": 5, "store": "disk"},
    "lfu": {"slots": 5, "policies": Policies(eviction="lfu", scope="global")},
    "host": {"slots": 5, "link": "emulated", "misses": "host"},
    "host or link": {"slots": 5, "bandwidth": 1e7, "misses": "auto", "predictor": "next_norm", "forecasts": "always"},
    "no cache": {"cache": False, "predictor": "next_norm"},
    "equal shares": {"slots": 9, "policies": Policies(eviction="lru", scope="layer")},
}


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_is_resident(way: str, experts: str, resident: dict[str, Any], folder: Path) -> None:
    """A batch, and a prompt longer than what slots hold."""
    with load_offloaded(folder, device="cpu", experts=experts, **WAYS[way]) as offloaded:
        assert_same(greedy(offloaded, BATCH, NEW), resident["batch"])
        assert_same(greedy(offloaded, LONG, NEW), resident["long"])


def test_a_loaded_model_is_rounded_and_stays_so(experts: str, resident: dict[str, Any], folder: Path) -> None:
    """Offloaded, resident when that is closed, and offloaded again without `experts`."""
    model = load_model(str(folder))
    with (
        pytest.warns(UserWarning, match=f"rounded to {experts}"),
        expertcast.offload(model, slots=5, experts=experts, link="instant") as offloaded,
    ):
        assert_same(greedy(offloaded, BATCH, NEW), resident["batch"])
    assert_same(greedy(model, BATCH, NEW), resident["batch"])
    with pytest.raises(ExpertcastError, match="packed already"):
        expertcast.offload(model, slots=5, experts=experts)
    with expertcast.offload(model, slots=4) as offloaded:
        assert_same(greedy(offloaded, LONG, NEW), resident["long"])


@pytest.mark.parametrize("kernel", ["eager", "batched_mm"])
def test_the_models_own_kernel(kernel: str, experts: str, resident: dict[str, Any], folder: Path) -> None:
    """Packed experts run the grouped kernel, whichever the model names; a model of the same config keeps its own."""
    model = load_model(str(folder))
    other = type(model)(model.config)
    model.set_experts_implementation(kernel)
    pack_experts(find_moe_layers(model), experts)
    assert other.get_experts_implementation()[""] == kernel
    assert_same(greedy(model, BATCH, NEW), resident["batch"])
    with expertcast.offload(model, slots=5) as offloaded:
        assert_same(greedy(offloaded, BATCH, NEW), resident["batch"])


@pytest.mark.parametrize("many", [8, 1])
def test_experts_with_many_rows(many: int, experts: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanded for their products, some or, as on CUDA, all: offloaded is resident, and nearly ggml's products."""
    model, by_ggml = load_model(str(folder)), load_model(str(folder))
    for each in (model, by_ggml):
        pack_experts(find_moe_layers(each), experts)
    with torch.no_grad():
        near = by_ggml(**LONG).logits.float()
    monkeypatch.setattr(packed_experts, "MANY_ROWS", many)
    expected = {name: greedy(model, ids, NEW) for name, ids in (("batch", BATCH), ("long", LONG))}
    with torch.no_grad():
        assert (model(**LONG).logits.float() - near).norm() < 0.1 * near.norm()  # some tokens are routed elsewhere
    with expertcast.offload(model, slots=5) as offloaded:
        assert_same(greedy(offloaded, BATCH, NEW), expected["batch"])
        assert_same(greedy(offloaded, LONG, NEW), expected["long"])


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["few slots", "all", "disk", "no cache"])
def test_on_cuda(way: str, experts: str, folder: Path) -> None:
    """Offloaded is resident, expanded by torch's operations."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = load_model(str(folder)).cuda()
    pack_experts(find_moe_layers(model), experts, "cuda")
    with load_offloaded(folder, device="cuda", experts=experts, **WAYS[way]) as offloaded:
        for ids in (BATCH, LONG):
            on_device = {name: each.cuda() for name, each in ids.items()}
            assert_same(greedy(offloaded, on_device, NEW), greedy(model, on_device, NEW))


@pytest.mark.parametrize("draft", ["drop", "resident"])
def test_drafts(draft: str, experts: str, folder: Path) -> None:
    """The tokens of plain decoding; a draft in few bits is refused."""
    ids = LONG["input_ids"][:, :8]
    with load_offloaded(folder, device="cpu", experts=experts, slots=8) as offloaded:
        plain = offloaded.generate(ids, max_new_tokens=8, do_sample=False)
        drafted = offloaded.generate(ids, max_new_tokens=8, do_sample=False, draft=draft, draft_length=2)
        assert torch.equal(drafted, plain)
        with pytest.raises(ExpertcastError, match="no cheaper"):
            offloaded.generate(ids, max_new_tokens=2, draft="int4")


def test_a_store_is_made_once_for_each_form(folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Found again as it is; another form is another file, and one line says why."""
    sizes = []
    for experts in ("int4", "int4", "int8", "expanded"):
        options: dict[str, Any] = {"store": "disk", "store_folder": tmp_path, "codec": "raw"}
        with load_offloaded(folder, device="cpu", slots=4, experts=experts, **options) as offloaded:
            sizes.append(offloaded.store.layout.block_bytes)
    assert sizes[0] == sizes[1] < sizes[2] < sizes[3]
    said = [str(warning.message) for warning in recwarn if "is rebuilt" in str(warning.message)]
    assert said
    assert all("packed in another form" in line for line in said)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"experts": "int3"}, "unknown experts 'int3'"),
        ({"experts": "int4", "store": "disk", "codec": "bitsplit"}, "does not store"),
        ({"experts": "int8", "draft": "int4"}, "no cheaper"),
    ],
)
def test_options_that_rule_each_other_out(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ExpertcastError, match=match):
        OffloadConfig(**fields)


def test_what_cannot_be_packed_is_refused() -> None:
    """8 inner inputs: no group of the kernel divides them; and copies of packed experts in fewer bits."""
    model = tiny_model("qwen3_moe", moe_intermediate_size=8)
    expected = greedy(model, BATCH, NEW)
    with pytest.raises(ExpertcastError, match="give experts='expanded'"):
        expertcast.offload(model, slots=4, experts="int4")
    assert_same(greedy(model, BATCH, NEW), expected)
    with pytest.raises(ExpertcastError, match="packed already"):
        expertcast.offload(_packed("int4"), slots=4, policies=Policies(miss="fetch_lowest"))
    with pytest.raises(ExpertcastError, match="expanded: give experts='int4' or 'int8'"):
        expertcast.offload(_model(), slots=4, experts="packed")


@pytest.mark.parametrize(
    "fields",
    [
        {"predictor": "no such"},
        {"predictor": "next_norm", "mode": "hybrid"},
        {"predictor": "next_norm", "ahead": 9},
        {"link": "cuda"},
    ],
)
def test_nothing_is_rounded_before_a_refusal(fields: dict[str, Any]) -> None:
    model = _model()
    expected = greedy(model, BATCH, NEW)
    with pytest.raises(ExpertcastError):
        expertcast.offload(model, slots=4, experts="int4", **fields)
    assert not packed_matrices(find_moe_layers(model)[0].experts)
    assert_same(greedy(model, BATCH, NEW), expected)


def test_sizes(experts: str) -> None:
    """64 x 64 and 64 x 32 in blocks of 32, each with a scale in fp16."""
    model, packed = _model(), _packed(experts)
    first = find_moe_layers(packed)[0]
    bits = int(experts.removeprefix("int"))
    nbytes = (64 * 64 + 64 * 32) // 32 * (32 * bits // 8 + 2)
    assert sum(matrix.form.nbytes for matrix in packed_matrices(first.experts).values()) == nbytes
    assert weight_bits(find_moe_layers(packed)) == pytest.approx(8 * nbytes / (64 * 64 + 64 * 32))
    assert nbytes <= BlockLayout.of(find_moe_layers(packed)).block_bytes < nbytes + 4 * 256
    assert weight_bits(find_moe_layers(model)) == 16


def test_outputs_stay_near(experts: str) -> None:
    """The rounding of random weights: 4 bits in groups of 64 leave about a tenth, 8 bits a hundredth."""
    model, packed, found = _model(), _packed(experts), []
    for each in (model, packed):
        layer = find_moe_layers(each)[0]
        hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
        ids = torch.tensor([[0, 1], [2, 1], [3, 4], [5, 6], [7, 0]])
        weights: Tensor = torch.full((5, 2), 0.5).bfloat16()
        with torch.no_grad():
            found.append(layer.experts(hidden, ids, weights).float())
    assert packed_matrices(find_moe_layers(packed)[0].experts)
    error = float((found[1] - found[0]).norm() / found[0].norm())
    assert error < {"int4": 0.2, "int8": 0.02}[experts]


def _same_traces(found: TraceDataset, expected: TraceDataset) -> None:
    """Every column, the default vectors and the stand-in of early attention, bit for bit."""
    (rows,), (others,) = (list(each.batches("all", batch_size=10_000)) for each in (found, expected))
    for name in ("residual_TLD", "logits_TLE", "early_TLD"):
        assert torch.equal(getattr(rows, name), getattr(others, name)), name
    assert torch.equal(found.defaults.expert_LED, expected.defaults.expert_LED)


def test_traces(experts: str, folder: Path, tmp_path: Path, reference_tokenizer: Any) -> None:
    """Those of the resident packed model however it runs; a predictor of the expanded model forecasts them as well."""
    documents = [Document(each.index, each.text[:150]) for each in load_documents("reference")[:40]]

    def traces(name: str, model: Any) -> TraceDataset:
        return collect(
            model, reference_tokenizer, documents, tmp_path / name, tokens=600, window=16, early_rank=2, batch_size=8
        )

    model = load_model(str(folder))
    expanded = traces("expanded", model)
    pack_experts(find_moe_layers(model), experts)
    resident = traces("resident", model)
    with load_offloaded(folder, device="cpu", experts=experts, slots=6) as offloaded:
        packed = traces("offloaded", offloaded)
    _same_traces(packed, resident)
    save_predictor(fit("linear", expanded).predictor, tmp_path / "linear", view=expanded.view)
    forecasting = {"predictor": tmp_path / "linear", "bandwidth": 1e9, "forecasts": "always"}
    policies = Policies(eviction="importance")
    with load_offloaded(folder, device="cpu", experts=experts, slots=6, policies=policies, **forecasting) as offloaded:
        assert_same(greedy(offloaded, BATCH, NEW), greedy(model, BATCH, NEW))
