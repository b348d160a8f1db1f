"""What collection captures is what the model computed: routing, residuals, and expert outputs by brute force; a
collection that is stopped and run again is bit for bit the one that was left alone, and damage between is noticed.
"""

from __future__ import annotations

import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data import collect as collector
from expertcast.data import trace_format as layout
from expertcast.data.batch import TraceBatch
from expertcast.data.capture import ActivationStream
from expertcast.data.collect import collect
from expertcast.data.experts import ResidentExperts
from expertcast.data.means import MeanOutputs
from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.data.plan import Plan, Window, make_plan, pad_windows
from expertcast.data.text import Document
from expertcast.data.trace_writer import RankWriter, merged_progress
from expertcast.data.traces import TraceDataset
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView
from tests.data.small_traces import MANY, SETTINGS, Crash, content
from tests.families.models import tiny_model

FAMILIES = ("qwen3_moe", "gpt_oss", "qwen2_moe", "deepseek_v2")
ODD: dict[str, Any] = {"tokens": 400, "window": 24, "early_rank": None}
"""The batches need padding."""


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in FAMILIES), ("qwen2_moe", torch.bfloat16)]
)
def test_default_vectors_against_every_expert_token_by_token(
    family: str, dtype: torch.dtype, reference_tokenizer: Any, text: list[Document], tmp_path: Path
) -> None:
    model = tiny_model(family, dtype)
    traces = collect(model, reference_tokenizer, text[:80], tmp_path / "traces", batch_size=3, **ODD)
    plan = make_plan(text[:80], reference_tokenizer, **ODD)
    assert any(len(window.token_ids) < 24 for window in plan.windows["train"]), "the batches need padding"
    expert_LED, count_LE, shared_LD = brute_force_means(model, plan)
    defaults = traces.defaults
    # a bf16 router may settle a near-tie otherwise in another batch, so counts are exact in fp32 alone
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    if dtype == torch.float32:
        assert torch.equal(defaults.count_LE, count_LE)
    assert defaults.token_count == plan.token_count("train")
    assert defaults.count_LE.sum(1).tolist() == [2 * defaults.token_count] * traces.view.shape.layers
    often = (count_LE >= 20)[..., None]
    torch.testing.assert_close(defaults.expert_LED * often, expert_LED * often, **tolerance)
    torch.testing.assert_close(defaults.shared_LD, shared_LD, **tolerance)
    assert bool(shared_LD.any()) == traces.view[0].has_shared
    assert not defaults.expert_LED[defaults.count_LE == 0].any()


def brute_force_means(model: PreTrainedModel, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Windows one by one without padding; each expert a token is routed to is run on that token alone."""
    view = find_moe_layers(model)
    shape = view.shape
    sums_LED = torch.zeros(shape.layers, shape.experts, shape.hidden, dtype=torch.float64)
    count_LE = torch.zeros(shape.layers, shape.experts, dtype=torch.int64)
    shared_LD = torch.zeros(shape.layers, shape.hidden, dtype=torch.float64)
    for window in plan.windows["train"]:
        with torch.no_grad(), experts_implementation(model, "eager"):
            seen = inputs_of_experts(model, view, window)
            for layer in view:
                hidden_TD, ids_TK = seen[layer.index]
                for token, ids_K in enumerate(ids_TK.tolist()):
                    for expert in ids_K:
                        sums_LED[layer.index, expert] += one_expert(layer, hidden_TD[token], expert)
                        count_LE[layer.index, expert] += 1
                    shared_LD[layer.index] += shared_output(layer, hidden_TD[token])
    mean_LED = sums_LED / count_LE.clamp(min=1)[..., None]
    return mean_LED.float(), count_LE, (shared_LD / plan.token_count("train")).float()


def inputs_of_experts(model: PreTrainedModel, view: MoEView, window: Window) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer to (hidden [T, D], ids [T, K]) that its experts were called with in a plain forward."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    handles = [
        layer.experts.register_forward_pre_hook(
            lambda _m, args, index=layer.index: seen.__setitem__(index, (args[0], args[1]))
        )
        for layer in view
    ]
    model(input_ids=torch.from_numpy(window.token_ids).long()[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def one_expert(layer: MoELayer, hidden_D: Tensor, expert: int) -> Tensor:
    output: Tensor = layer.experts(hidden_D[None], torch.tensor([[expert]]), torch.ones(1, 1, dtype=hidden_D.dtype))
    return output[0]


def shared_output(layer: MoELayer, hidden_D: Tensor) -> Tensor:
    block: Any = layer.block
    if hasattr(block, "shared_expert_gate"):
        gated: Tensor = block.shared_expert_gate(hidden_D).sigmoid() * block.shared_expert(hidden_D)
        return gated
    output: Tensor = block.shared_experts(hidden_D) if hasattr(block, "shared_experts") else torch.zeros_like(hidden_D)
    return output


@pytest.mark.parametrize("family", [*FAMILIES, "reference"])
def test_stored_logits_route_as_the_model_did(
    family: str, reference_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document], tmp_path: Path
) -> None:
    """Ids and weights recomputed from what lies on disk are the ones the experts were called with."""
    model = reference_model if family == "reference" else tiny_model(family)
    view = find_moe_layers(model)
    routed: list[list[tuple[Tensor, Tensor]]] = [[] for _ in view]
    handles = [
        layer.router.register_forward_hook(
            lambda _m, _args, out, index=layer.index: routed[index].append((out[2], out[1]))  # returns None
        )
        for layer in view
    ]
    traces = collect(model, reference_tokenizer, text, tmp_path / "traces", batch_size=1, **ODD)
    for handle in handles:
        handle.remove()
    batch = next(traces.batches("all", 1000))
    for layer in traces.view:
        ids_TK, weights_TK = layer.route(batch.logits_TLE[:, layer.index])
        calls = routed[layer.index][-windows_in(traces) :]  # before them: the probe for the logits' dtype
        assert torch.equal(ids_TK, torch.cat([ids for ids, _ in calls]))
        assert torch.equal(weights_TK, torch.cat([weights for _, weights in calls]))


def windows_in(traces: TraceDataset) -> int:
    return sum(-(-document.tokens // traces.info["window"]) for document in traces.documents)


def test_logits_too_small_for_fp16_keep_their_order(
    reference_tokenizer: Any, text: list[Document], tmp_path: Path
) -> None:
    """Routers whose logits lie under fp16's resolution: fp16 storage would turn them into ties."""
    model = tiny_model("qwen3_moe")
    view = find_moe_layers(model)
    for layer in view:
        next(layer.router.parameters()).data.mul_(2.0**-22)
    traces = collect(model, reference_tokenizer, text, tmp_path / "traces", **ODD)
    batch = next(traces.batches("all", 400))
    assert float(batch.logits_TLE.abs().max()) < 1e-5
    assert not torch.equal(batch.logits_TLE, batch.logits_TLE.half().float()), "fp16 must lose something here"
    for layer in traces.view:
        state = batch.state(traces.view, layer.index)
        found_TE, wanted_TE = layer.router_logits(state.router_input_TD).float(), state.logits_TE
        assert float((found_TE - wanted_TE).norm()) < 0.02 * float(wanted_TE.norm()), "residuals in 8 bits"


def test_collection_leaves_the_model_as_it_was(small_model: PreTrainedModel) -> None:
    view = find_moe_layers(small_model)
    ids = torch.arange(5, 45)[None]
    window = Window(0, 0, ids[0].int().numpy())
    hooks = hook_counts(small_model)
    implementation = small_model.get_experts_implementation()
    with torch.no_grad():
        before = small_model(input_ids=ids).logits
    stream = ActivationStream(small_model, view, [window], means=MeanOutputs(view))
    batch = stream.run(pad_windows([window]))
    with torch.no_grad():
        after = small_model(input_ids=ids).logits
    assert torch.equal(before, after)
    assert hook_counts(small_model) == hooks
    assert small_model.get_experts_implementation() == implementation
    assert not any("_apply_gate" in layer.experts.__dict__ for layer in view)
    last = len(view) - 1
    state = batch.state(view, last)
    torch.testing.assert_close(view[last].router_logits(state.router_input_TD), state.logits_TE, rtol=0.03, atol=0.05)


def hook_counts(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_hooks_go_when_the_forward_fails(small_model: PreTrainedModel) -> None:
    view = find_moe_layers(small_model)
    hooks = hook_counts(small_model)
    window = Window(0, 0, torch.tensor([10**6]).int().numpy())  # no such token
    with pytest.raises(IndexError):
        ActivationStream(small_model, view, [window]).run(pad_windows([window]))
    assert hook_counts(small_model) == hooks


def test_padding_changes_nothing() -> None:
    """A short window in a batch with a long one gives the residuals it gives alone, and counts its own tokens only."""
    model = tiny_model("qwen2_moe", torch.float32)
    view = find_moe_layers(model)
    generator = torch.Generator().manual_seed(0)
    long, short = (
        Window(i, 0, torch.randint(5, 4000, (n,), generator=generator).int().numpy()) for i, n in enumerate((60, 17))
    )
    together, alone = MeanOutputs(view), MeanOutputs(view)
    exact: dict[str, Any] = {"residual_dtype": torch.float32}
    (both,) = list(ActivationStream(model, view, [long, short], means=together, **exact))
    parts = TraceBatch.cat(list(ActivationStream(model, view, [long, short], batch_size=1, means=alone, **exact)))
    assert len(both) == 77
    torch.testing.assert_close(both.residual_TLD, parts.residual_TLD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both.logits_TLE, parts.logits_TLE, rtol=1e-4, atol=1e-4)
    assert torch.equal(both.document_T, parts.document_T)
    assert torch.equal(both.position_T, parts.position_T)
    assert together.token_count == alone.token_count == 77
    for first, second in zip(together.tensors(), alone.tensors(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_experts_with_an_output_norm_leave_the_mean_step() -> None:
    """A normalised output is not linear in what is summed: no expert has a default vector then."""
    model = tiny_model("qwen3_moe")
    view = find_moe_layers(model)
    view[1].experts.has_post_expert_norm = True
    view[1].experts.post_expert_norm = nn.Identity()
    means = MeanOutputs(view)
    windows = [Window(0, 0, np.arange(3, 40))]
    (batch,) = ActivationStream(model, view, windows, means=means, residual_dtype=torch.float32)
    defaults = means.default_vectors(ResidentExperts(model, view))
    assert [bool(vectors_ED.any()) for vectors_ED in defaults.expert_LED] == [True, False, True, True]
    step_D = (batch.residual_TLD[:, 2] - batch.residual_TLD[:, 1]).mean(0)
    torch.testing.assert_close(defaults.shared_LD[1], step_D, rtol=1e-4, atol=1e-5)
    assert not defaults.shared_LD[[0, 2, 3]].any()


def test_windows_longer_than_the_context_are_refused(
    small_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document], tmp_path: Path
) -> None:
    with pytest.raises(ExpertcastError, match="context of 256"):
        collect(small_model, reference_tokenizer, text, tmp_path / "traces", tokens=4000, window=300)


# Stopped and gone on with


def test_stopped_again_and_again_it_comes_to_the_same_end(
    small_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document], expected: list[Any], collected: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """After any number of the files that it writes; the seconds before count."""
    folder, left, before_s = tmp_path / "traces", 0, 0.0
    view = find_moe_layers(small_model)
    while not ((info := layout.read_info(folder)) and info["complete"]):
        with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
            Crash(patch, left := left + 1)
            collect(small_model, reference_tokenizer, text, folder, **SETTINGS)
        if left == 4:
            with pytest.raises(ExpertcastError, match="incomplete"):
                TraceDataset.open(folder)
        if info := layout.read_info(folder):  # a shard that a kill leaves uncommitted must not be counted
            (folder / layout.shard_file(0, 7)).write_bytes(b"half a shard")
            done = merged_progress(folder, [MeanOutputs(view)])
            before_s = before_s if info["complete"] else info.get("collection_s", 0.0) + done["seconds"]
    assert left > 4
    (folder / layout.shard_file(0, 7)).unlink()
    assert collect(small_model, reference_tokenizer, text, folder, **SETTINGS).info["collection_s"] >= before_s > 0
    assert content(folder) == expected
    assert sorted(path.name for path in folder.rglob("*")) == sorted(path.name for path in collected.rglob("*"))


def test_complete_traces_are_opened_not_made_again(
    dataset: TraceDataset, small_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document]
) -> None:
    shard = next(dataset.folder.glob("data-*.arrow"))
    before, left = shard.stat().st_mtime_ns, dataset.folder / layout.PROGRESS_FOLDER
    left.mkdir()  # of a run that was killed behind trace.json
    again = collect(small_model, reference_tokenizer, text, dataset.folder, **MANY)
    assert not left.exists()
    assert again.token_count("all") == MANY["tokens"]
    assert shard.stat().st_mtime_ns == before
    for changed, expected in (
        ({"window": 128}, "has window=64, not 128"),
        ({"tokens": 4000}, "tokens=6000"),
        ({"batch_size": 4}, "batch_size=8"),
        ({"seed": 1}, "text="),
    ):
        with pytest.raises(ExpertcastError, match=expected):
            collect(small_model, reference_tokenizer, text, dataset.folder, **{**MANY, **changed})


def test_folders_that_are_not_ours_are_refused(
    small_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document], tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ExpertcastError, match="not empty and has no traces"):
        collect(small_model, reference_tokenizer, text, tmp_path, **SETTINGS)
    with pytest.raises(ExpertcastError, match="is a file"):
        collect(small_model, reference_tokenizer, text, tmp_path / "thesis.tex", **SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_full_disk_is_refused_with_the_estimate(
    small_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    usage = collector.shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(collector.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(
        ExpertcastError,
        match=r"3,000 tokens of 371 bytes and .* beside them need 1.14 MB more .* 1 MB are free: collect fewer",
    ):
        collect(small_model, reference_tokenizer, text, tmp_path / "traces", tokens=3000)


def test_the_estimate_has_all_files(
    small_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In few tokens of a large model the stand-in and the default vectors are half of the bytes."""
    collect(small_model, reference_tokenizer, text, tmp_path / "traces", tokens=400)
    found = re.search(r"about ([\d.]+) (k|M)B on disk", capsys.readouterr().err)
    assert found is not None
    there = sum(
        path.stat().st_size for path in (tmp_path / "traces").iterdir() if path.suffix in (".arrow", ".safetensors")
    )
    assert float(found[1]) * {"k": 1e3, "M": 1e6}[found[2]] == pytest.approx(there, rel=0.05)


def test_damage_between_a_kill_and_going_on_is_noticed(
    small_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document], tmp_path: Path, expected: list[Any]
) -> None:
    folder = tmp_path / "traces"

    def go_on() -> None:
        collect(small_model, reference_tokenizer, text, folder, **SETTINGS)

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr("expertcast.data.collect._finish", lambda *_args: (_ for _ in ()).throw(KeyboardInterrupt))
        go_on()
    view, info = find_moe_layers(small_model), layout.read_info(folder)
    assert info is not None
    columns, names = layout.columns_in(info), {path.name for path in folder.iterdir()}
    progress = folder / layout.PROGRESS_FOLDER / layout.progress_file(0)
    draw = random.Random(0)
    for path in (progress, folder / layout.shard_file(0, 1)):
        original = path.read_bytes()
        places = [draw.randrange(len(original)) for _ in range(6)]
        for content_now in [*(flipped(original, place) for place in places), original[:-9], b""]:
            path.write_bytes(content_now)
            with pytest.raises(ExpertcastError, match="delete the folder and collect again") as raised:
                RankWriter(folder, MeanOutputs(view), rank=0, columns=columns)
            assert "\n" not in str(raised.value)
            assert str(path) in str(raised.value)
            assert {path.name for path in folder.iterdir()} == names
        with pytest.raises(ExpertcastError, match="delete the folder and collect again"):
            go_on()
        path.write_bytes(original)
    go_on()
    assert content(folder) == expected


def flipped(original: bytes, place: int) -> bytes:
    return original[:place] + bytes([original[place] ^ 4]) + original[place + 1 :]


def test_a_model_that_gives_nan_is_not_collected_from(
    reference_tokenizer: Any, text: list[Document], tmp_path: Path
) -> None:
    model = tiny_model("qwen3_moe", torch.float32)
    model.get_input_embeddings().weight.data[200:] = float("nan")  # of no token that the probe gives
    with pytest.raises(ExpertcastError, match="contains NaN or infinity"):
        collect(model, reference_tokenizer, text, tmp_path / "t", tokens=200, window=24)


def test_logits_of_a_model_in_fp16_are_stored_and_read_as_such(
    reference_tokenizer: Any, text: list[Document], tmp_path: Path
) -> None:
    model, seen = tiny_model("qwen3_moe", torch.float16), list[Tensor]()
    router = find_moe_layers(model)[2].router
    router.register_forward_hook(lambda _router, _args, output: seen.append(output[0]))  # returns None
    traces = collect(model, reference_tokenizer, text, tmp_path / "traces", batch_size=1, **ODD)
    logits_TE = next(TraceDataset.open(traces.folder).batches("all", 10**6)).logits_TLE[:, 2]
    assert logits_TE.dtype == torch.float16
    assert torch.equal(logits_TE, torch.cat(seen[-windows_in(traces) :]))
