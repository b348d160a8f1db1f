"""Stand-ins for MoE layers: against direct least squares; experts run once, and no byte of the traces is another."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data import collect as collector
from expertcast.data import stand_in as expert_maps
from expertcast.data import trace_format as layout
from expertcast.data.batch import RouterCall
from expertcast.data.capture import ActivationStream
from expertcast.data.collect import collect
from expertcast.data.experts import ResidentExperts
from expertcast.data.means import MeanOutputs
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.plan import Plan, TextOptions, Window
from expertcast.data.stand_in import PRIOR_TOKENS, KeptOutputs, fit_stand_in, largest, with_rank
from expertcast.data.taps import RouterTaps
from expertcast.data.text import Document
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.view import ModelShape
from tests.families.models import tiny_model

SIZES = (24, 40, 31)
"""Tokens of the windows: batches are padded."""


def windows() -> list[Window]:
    random = np.random.default_rng(1)
    return [Window(number, 0, random.integers(3, 4096, size, dtype=np.int32)) for number, size in enumerate(SIZES)]


@torch.no_grad()
def gathered(model: PreTrainedModel, view: MoEView) -> list[dict[str, Tensor]]:
    """Per layer, every token's input, routing, and what its block put out, one window after another."""
    seen: list[dict[str, list[Tensor]]] = [{name: [] for name in ("input", "ids", "weights", "output")} for _ in view]

    def on_router(call: RouterCall) -> None:
        for name, tensor in (("input", call.router_input_TD), ("ids", call.ids_TK), ("weights", call.weights_TK)):
            seen[call.layer][name].append(tensor)

    def after_block(layer: int, output: Any) -> None:
        block = output[0] if isinstance(output, tuple) else output
        seen[layer]["output"].append(block.reshape(-1, view.shape.hidden))

    handles = [
        each.block.register_forward_hook(lambda _m, _a, output, layer=each.index: after_block(layer, output))
        for each in view
    ]
    with closing(RouterTaps(model, view, on_router)):
        for window in windows():
            model.base_model(input_ids=torch.from_numpy(window.token_ids.astype(np.int64))[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return [{name: torch.cat(parts) for name, parts in layer.items()} for layer in seen]


@torch.no_grad()
def expert_output(experts: nn.Module, expert: int, hidden_TD: Tensor) -> Tensor:
    """One expert alone, by the module itself."""
    ids_T1 = torch.full((len(hidden_TD), 1), expert)
    output: Tensor = experts(hidden_TD, ids_T1, torch.ones(len(hidden_TD), 1))
    return output


def solution(z_TR: Tensor, y_TD: Tensor, spread_Z: Tensor) -> Tensor:
    """Ridge by least squares over the rows and those of the prior, in float64."""
    z_TZ = torch.cat([torch.ones(len(z_TR), 1), z_TR], dim=1).double()
    prior_ZZ = (PRIOR_TOKENS * spread_Z).clamp(min=1e-12).sqrt().diag()
    rows = torch.cat([z_TZ, prior_ZZ])
    return torch.linalg.lstsq(rows, torch.cat([y_TD.double(), torch.zeros(len(prior_ZZ), y_TD.shape[1])])).solution


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v2"])
def test_maps_are_the_least_squares_solutions(family: str) -> None:
    """Of every expert, and of what the block adds to them: shared experts."""
    model = tiny_model(family, torch.float32)
    view = find_moe_layers(model)
    stand_in = fit_stand_in(model, view, windows(), rank=4, batch_size=2)
    for layer, seen in zip(view, gathered(model, view), strict=True):
        own = seen["input"]
        centred = own - own.mean(dim=0)
        directions = torch.linalg.svd(centred.double(), full_matrices=False).Vh[:4].T.float()
        found = stand_in.projection_LDR[layer.index]
        assert torch.allclose((found.T @ directions).abs(), torch.eye(4), atol=1e-3)
        z_TR = own @ found - stand_in.centre_LR[layer.index]
        assert float(z_TR.mean(dim=0).abs().max()) < 1e-4 * float(z_TR.std())
        pairs = z_TR.repeat_interleave(view.shape.top_k, dim=0).double()
        spread_Z = torch.cat([torch.tensor([1e-6]), pairs.square().mean(dim=0)])
        routed_TD = torch.zeros_like(own)
        for expert in range(view.shape.experts):
            rows_T, places_T = (seen["ids"] == expert).nonzero(as_tuple=True)
            assert len(rows_T), "each expert is reached"
            y_SD = expert_output(layer.experts, expert, own[rows_T])
            routed_TD.index_add_(0, rows_T, y_SD * seen["weights"][rows_T, places_T][:, None])
            wanted = solution(z_TR[rows_T], y_SD, spread_Z)
            near = stand_in.map_LEZD[layer.index, expert].double()
            assert float((near - wanted).norm()) < 5e-3 * float(wanted.norm()) + 1e-6, "bf16"
        rest_TD = seen["output"] - routed_TD
        if layer.has_shared:
            wanted = solution(z_TR, rest_TD, spread_Z)
            torch.testing.assert_close(stand_in.shared_LZD[layer.index].double(), wanted, rtol=1e-3, atol=1e-4)
        else:
            assert float(rest_TD.abs().max()) < 1e-3
            assert not stand_in.shared_LZD[layer.index].any()
        one = stand_in.output(layer.index, own, seen["ids"], seen["weights"])
        few = [stand_in.output(layer.index, *(seen[name][:5] for name in ("input", "ids", "weights")))]
        torch.testing.assert_close(one[:5], few[0], rtol=1e-4, atol=1e-5)
        alone = stand_in.output(layer.index, *(seen[name][:1] for name in ("input", "ids", "weights")))
        off = (alone - one[:1]).norm() / one[:1].norm()
        assert float(off) < 0.02, "the products of many tokens round in bf16"
        mean_off = (seen["output"] - seen["output"].mean(dim=0)).square().sum()
        assert float((seen["output"] - one).square().sum()) < 0.9 * float(mean_off), "better than one mean for all"


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe_lite"])
def test_rank_0_are_default_vectors(family: str) -> None:
    model = tiny_model(family, torch.float32)
    view = find_moe_layers(model)
    means = MeanOutputs(view)
    for _ in ActivationStream(model, view, windows(), batch_size=2, means=means):
        pass
    defaults = means.default_vectors(ResidentExperts(model, view))
    stand_in = fit_stand_in(model, view, windows(), rank=0, batch_size=2)
    torch.testing.assert_close(stand_in.map_LEZD[:, :, 0].float(), defaults.expert_LED, rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(stand_in.shared_LZD[:, 0], defaults.shared_LD, rtol=1e-4, atol=1e-5)
    assert stand_in.rank == 0


def test_the_model_is_left_as_it_was_and_odd_ranks_are_refused() -> None:
    model = tiny_model("qwen2_moe").train()
    view, before = find_moe_layers(model), model.get_experts_implementation()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    fit_stand_in(model, view, windows()[:1], rank=1)
    assert model.training
    assert model.get_experts_implementation() == before
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    with pytest.raises(ExpertcastError, match="rank=33 "):
        fit_stand_in(model, view, windows(), rank=33)


@pytest.mark.parametrize(
    ("hidden", "given", "rank"),
    [(32, "auto", 8), (192, "auto", 32), (2048, "auto", 8), (2048, 32, 32), (32, None, None)],
)
def test_the_default_rank_is_chosen_by_width(hidden: int, given: Any, rank: int | None) -> None:
    view = cast("MoEView", SimpleNamespace(shape=ModelShape(layers=2, experts=4, top_k=1, hidden=hidden)))
    plan = Plan(documents=(), windows={}, options=TextOptions(early_rank=given), digest="")
    assert with_rank(plan, view).early_rank == rank


SETTINGS: dict[str, Any] = {"tokens": 600, "window": 32, "batch_size": 4, "early_rank": 2}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Pairs of a token and an expert that were run, by layer."""
    seen: Counter[int] = Counter()
    run = ResidentExperts.run

    def counted(self: ResidentExperts, layer: Any, hidden: Any, ids: Any, weights: Any, inner: Any = None) -> Any:
        seen[layer.index] += len(ids)
        return run(self, layer, hidden, ids, weights, inner)

    monkeypatch.setattr(ResidentExperts, "run", counted)
    return seen


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.suffix in (".arrow", ".safetensors")}


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as the traces take is free, and nothing beside it."""
    monkeypatch.setattr(collector, "check_disk", lambda *_: ("", 1))


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_experts_run_once(
    family: str, runs: Counter[int], reference_tokenizer: Any, text: list[Document], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = tiny_model(family)
    monkeypatch.setattr(expert_maps, "DIRECTION_TOKENS", 100)
    traces = collect(model, reference_tokenizer, text, tmp_path / "kept", **SETTINGS)
    assert dict(runs) == dict.fromkeys(range(len(traces.view)), SETTINGS["tokens"])
    assert not (traces.folder / layout.PROGRESS_FOLDER).exists()
    no_room(monkeypatch)
    collect(model, reference_tokenizer, text, tmp_path / "run", **SETTINGS)
    assert runs[0] > 2 * SETTINGS["tokens"], "the second collection runs the train split's twice"
    assert files(tmp_path / "kept") == files(tmp_path / "run")
    without = collect(model, reference_tokenizer, text, tmp_path / "without", **{**SETTINGS, "early_rank": None})
    for name in ("expert_LED", "shared_LD", "count_LE"):
        assert torch.equal(getattr(without.defaults, name), getattr(traces.defaults, name)), name


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "others"])
def test_what_was_damaged_is_run_again(
    damage: str, reference_tokenizer: Any, text: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3_moe")
    collect(model, reference_tokenizer, text, tmp_path / "whole", **SETTINGS)
    writer = collector.RankWriter

    def damaged(folder: Path, *args: Any, **kwargs: Any) -> Any:
        paths = sorted((folder / layout.PROGRESS_FOLDER).glob("experts-*"))
        assert len(paths) > 3
        content = paths[1].read_bytes()
        if damage == "gone":
            paths[1].unlink()
        elif damage == "flip":
            middle = len(content) // 2
            paths[1].write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
        else:
            paths[1].write_bytes(content[: len(content) // 2] if damage == "cut" else paths[-1].read_bytes())
        return writer(folder, *args, **kwargs)

    monkeypatch.setattr(collector, "RankWriter", damaged)
    collect(model, reference_tokenizer, text, tmp_path / "damaged", **SETTINGS)
    assert files(tmp_path / "damaged") == files(tmp_path / "whole")


def test_one_pass_chooses_the_directions_too(monkeypatch: pytest.MonkeyPatch, reference_model: PreTrainedModel) -> None:
    """From the first forward's tokens, and in the end from all: they hold nearly the variance of the best ones."""
    view = find_moe_layers(reference_model)
    forwards: list[int] = []
    hook = reference_model.base_model.register_forward_pre_hook(lambda *_: forwards.append(1))
    exact = fit_stand_in(reference_model, view, windows(), rank=4, batch_size=2)
    assert len(forwards) == 4
    monkeypatch.setattr(expert_maps, "DIRECTION_TOKENS", 60)
    near = fit_stand_in(reference_model, view, windows(), rank=4, batch_size=2)
    hook.remove()
    assert len(forwards) == 6
    for layer, seen in enumerate(gathered(reference_model, view)):
        rows = seen["input"].float() - seen["input"].float().mean(dim=0)
        best, found = (float((rows @ each.projection_LDR[layer]).square().sum()) for each in (exact, near))
        own_RR = near.projection_LDR[layer].T @ near.projection_LDR[layer]
        assert torch.allclose(own_RR, torch.eye(4), atol=1e-4)
        assert 0.9 * best < found <= 1.001 * best


def test_directions_of_large_layers() -> None:
    """By iteration as by all of them."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.cat([torch.tensor([9.0, 8, 7, 6, 5, 4, 3, 2]), torch.linspace(1, 0.1, 592)])
    rows = torch.randn(3000, 600, generator=generator, dtype=torch.float64) * scales
    covariance = rows.T @ rows / len(rows)
    state = torch.random.get_rng_state()
    found = largest(covariance, 6)
    assert torch.equal(state, torch.random.get_rng_state())
    expected = torch.linalg.eigh(covariance).eigenvectors[:, -6:].flip(1)
    torch.testing.assert_close((found.T @ expected).abs(), torch.eye(6, dtype=torch.float64), atol=1e-6, rtol=0)
    assert torch.equal(found, largest(covariance, 6))


def test_room_is_what_the_files_take(reference_tokenizer: Any, text: list[Document], tmp_path: Path) -> None:
    model = tiny_model("qwen2_moe")
    view = find_moe_layers(model)
    kept = KeptOutputs(tmp_path / "kept")
    fit_stand_in(model, view, windows(), rank=2, batch_size=2, keep=kept)
    found = sum(path.stat().st_size for path in (tmp_path / "kept").iterdir())
    expected = KeptOutputs.nbytes(view, windows(), 2, model.dtype.itemsize, 2) - KeptOutputs.nbytes(view, [], 1, 0, 2)
    assert expected < found < expected + 2 * 4096, "the headers beside them"
