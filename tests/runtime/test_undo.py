"""What offload changes it puts back; what goes wrong leaves the model usable; bad input gives one line."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.data.models import meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, predictor_class
from expertcast.runtime import EmulatedLink, InstantLink, offload
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.transfer import Transfer
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy


def _hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def test_everything_is_put_back() -> None:
    model = tiny_model("gpt_oss")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    facts = (_hooks(model), model.get_experts_implementation(), [m.training for m in model.modules()])
    numbers = [module.num_experts for module in model.modules() if hasattr(module, "num_experts")]
    strides = [parameter.stride() for parameter in parameters.values()]
    with offload(model, slots=2, predictor="next_norm") as offloaded:
        greedy(offloaded, {"input_ids": torch.tensor([[3, 4, 5]])})
        assert parameters["model.layers.0.mlp.experts.gate_up_proj"].numel() == 0, "the model's own memory is released"
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert facts == (_hooks(model), model.get_experts_implementation(), [m.training for m in model.modules()])
    assert numbers == [module.num_experts for module in model.modules() if hasattr(module, "num_experts")]
    assert strides == [parameter.stride() for parameter in parameters.values()]


class _FailingLink(InstantLink):
    """Fails on one copy, or on attach."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def attach(self, *arguments: Any) -> None:
        super().attach(*arguments)
        if self.at < 0:
            raise RuntimeError("no link")

    def submit(self, key: int, slot: int, *, urgent: bool) -> Transfer:
        self.at -= 1
        if self.at == 0:
            raise RuntimeError("copy failed")
        return super().submit(key, slot, urgent=urgent)


def test_a_failure_while_offloading_undoes_it(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    expected = greedy(reference_model, one, 3)
    with pytest.raises(RuntimeError, match="no link"):
        offload(reference_model, link=_FailingLink(-1))
    assert_same(greedy(reference_model, one, 3), expected)


@pytest.mark.parametrize("cache", [True, False])
def test_a_failure_in_a_forward_leaves_the_model_usable(
    cache: bool, reference_model: PreTrainedModel, one: dict[str, Tensor]
) -> None:
    expected = greedy(reference_model, one, 3)
    with offload(reference_model, slots=9, predictor="next_norm", link=_FailingLink(300), cache=cache) as offloaded:
        with pytest.raises(RuntimeError, match="copy failed"):
            greedy(offloaded, one, 20)
        assert_same(greedy(offloaded, one, 3), expected)
        inner = offloaded.view[5].experts.act_fn
        handle = inner.register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            greedy(offloaded, one, 3)
        handle.remove()
        assert_same(greedy(offloaded, one, 3), expected)
    assert_same(greedy(reference_model, one, 3), expected)


def _interrupt(_module: nn.Module, _args: Any) -> None:
    raise KeyboardInterrupt


def test_routing_changed_by_another_hook(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    """Ids that are not the router's are executed as given."""

    def turn(_module: nn.Module, _args: Any, output: Any) -> Any:
        logits_TE, weights_TK, ids_TK = output
        return logits_TE, weights_TK, (ids_TK + 7) % 64

    view = find_moe_layers(reference_model)
    with offload(reference_model, slots=9, predictor="next_norm") as offloaded:
        handle = view[4].router.register_forward_hook(turn)
        got = greedy(offloaded, one, 4)
        handle.remove()
    handle = view[4].router.register_forward_hook(turn)
    expected = greedy(reference_model, one, 4)
    handle.remove()
    assert_same(got, expected)


def test_closed(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    offloaded = offload(reference_model, slots=8)
    with pytest.raises(ExpertcastError, match="offloaded already: close the other"):
        offload(reference_model, slots=8)
    with pytest.raises(ExpertcastError, match="close the offload before saving"):
        reference_model.state_dict()
    find_moe_layers(reference_model)  # routers run, our experts function does not
    assert offloaded(**one).logits.shape[-1] == 4096
    offloaded.close()
    offloaded.close()
    for use in (lambda: offloaded.generate(**one), lambda: offloaded(**one), lambda: offloaded.__enter__()):
        with pytest.raises(ExpertcastError, match="this offload is closed"):
            use()


def test_no_gradients(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    with offload(reference_model, slots=8) as offloaded:
        loss = offloaded(**one, labels=one["input_ids"]).loss
        with pytest.raises(ExpertcastError, match="close the offload before training"):
            loss.backward()


def test_weights_moved_under_us() -> None:
    model = tiny_model("qwen3_moe")
    with offload(model, slots=8) as offloaded:
        with pytest.raises(ExpertcastError, match="close the offload before moving or converting"):
            model.to(torch.float64)
        offloaded(input_ids=torch.tensor([[1]]))
        offloaded.view[1].experts.down_proj = nn.Parameter(torch.zeros(8, 32, 16, dtype=torch.bfloat16))
        with pytest.raises(ExpertcastError, match="changed or moved while the model is offloaded"):
            offloaded(input_ids=torch.tensor([[1]]))


def test_experts_function_outside_an_offload() -> None:
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("expertcast")
    with pytest.raises(ExpertcastError, match=r"runs only inside expertcast\.offload"):
        model(input_ids=torch.tensor([[1]]))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"slots": 3}, "slots=3 is fewer than the 4 experts one token needs: give slots=4"),
        ({"memory": "100KB"}, "memory='100KB' holds 2 experts of 36864 bytes, one token needs 4: give 147456 bytes"),
        ({"memory": "lots"}, "memory='lots' is no size"),
        ({"memory": "1GB", "slots": 8}, "slots or memory, not both"),
        ({"mode": "fast"}, "unknown mode 'fast': choose from exact, speculate, hybrid"),
        ({"mode": "speculate"}, "mode 'speculate' executes forecasts: give a predictor"),
        ({"mode": "hybrid", "predictor": "next_norm"}, r"give layers=\[...\], or a checkpoint"),
        ({"mode": "hybrid", "predictor": "next_norm", "layers": [12]}, r"layers=\[12\] do not exist"),
        ({"predictor": "quasi_hidden"}, "'quasi_hidden' must be trained"),
        ({"predictor": "oracle"}, "'oracle' is neither a folder nor one of frequency"),
        ({"predictor": "next_norm", "ahead": 2}, r"looks \[1\] layers ahead, not 2"),
        ({"predictor": "next_norm", "overfetch": 0.5}, "overfetch=0.5: give 1.0 to 65536"),
        ({"link": "telepathy"}, "unknown link 'telepathy'"),
        ({"link": "cuda"}, "link 'cuda' needs a model on CUDA"),
        ({"link": "instant", "bandwidth": 1e9}, "belong to the links emulated and cuda"),
        ({"bandwidth": 0.0}, "bandwidth=0.0: give bytes per second, 1 or more"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], line: str, reference_model: PreTrainedModel) -> None:
    with pytest.raises(ExpertcastError, match=line) as caught:
        offload(reference_model, **arguments)
    assert "\n" not in str(caught.value)
    offload(reference_model, slots=4).close()


def test_wrong_models_and_predictors(reference_model: PreTrainedModel, tmp_path: Path) -> None:
    tiny = tiny_model("olmoe")
    view = find_moe_layers(tiny)
    cls = predictor_class("next_norm")
    predictor = cls(cls.config_class(), view.shape)
    with pytest.raises(ExpertcastError, match="predictor next_norm was made for"):
        offload(reference_model, predictor=predictor)
    save_predictor(predictor, tmp_path / "p", view=view)
    with pytest.raises(ExpertcastError, match="routers' or norms' weights are not those"):
        offload(reference_model, predictor=tmp_path / "p")
    with offload(tiny, predictor=str(tmp_path / "p"), slots=2) as offloaded:
        offloaded(input_ids=torch.tensor([[1]]))
    with pytest.raises(ExpertcastError, match="no weights"):
        offload(meta_model("reference"))


def test_defaults_and_memory(reference_model: PreTrainedModel) -> None:
    with offload(reference_model) as offloaded:
        assert offloaded.pool.count == 12 * 64 // 4
    with offload(reference_model, cache=False, overfetch=1.5) as offloaded:
        assert offloaded.pool.count == 4 + 2 * 6
    with offload(reference_model, memory="1MiB") as offloaded:
        assert offloaded.pool.count == 2**20 // 36864
        assert isinstance(offloaded.link, InstantLink)


# Two hundred times offloaded and closed: no memory, thread or file handle stays

CYCLES, WARM_UP = 201, 21
MOST_BYTES = 8 << 20
"""Of growth over 180 cycles, in which each takes about 1 MB for its forecasts alone."""


def _held() -> tuple[int, int, int]:
    """Threads and file handles of this process as the system counts them, and Python's threads.

    The least of a second: a thread that was joined is still counted for a moment.
    """
    counts = []
    for _ in range(50):
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), threading.active_count()))
        time.sleep(0.02)
    return min(counts)


def _resident() -> int:
    """Bytes of anonymous memory, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(rows["RssAnon"].split()[0]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc says")
def test_two_hundred_cycles(tmp_path: Path) -> None:
    """Over a link that copies from a thread, with a predictor whose forecasts are traced.

    From memory, from a temporary disk store, and from a packed one that is opened again every time, as a loaded
    model does it; both have a thread that reads ahead.
    """
    model = tiny_model("qwen3_moe")
    prompt = torch.arange(1, 9)[None]
    expected = model(prompt).logits
    held, resident = [], []
    for cycle in range(CYCLES):
        kept = DiskStore(find_moe_layers(model), tmp_path, fingerprint="a") if cycle % 3 == 2 else None
        store = kept or ("memory", "disk")[cycle % 3]
        with offload(model, store=store, link=EmulatedLink(4e9), predictor="next_norm", slots=20) as offloaded:
            logits = offloaded(prompt).logits
        if kept is not None:
            kept.close()
        del offloaded, store, kept
        if cycle in (WARM_UP, CYCLES - 1):
            assert torch.equal(logits, expected)
            held.append(_held())
            resident.append(_resident())
    assert all(now <= then for then, now in zip(*held, strict=True)), held
    assert resident[1] - resident[0] < MOST_BYTES
