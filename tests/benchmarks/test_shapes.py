"""Shapes have the published sizes, random weights of the right distribution, and no second copy in memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from benchmarks.shapes import SHAPES, random_model, weight_bytes

from expertcast.data.models import meta_model
from expertcast.data.moe_layers import find_moe_layers
from tests.families.models import CONFIGS

PUBLISHED = {  # parameters in billions as the model cards have them; L, E, K, D
    "qwen3-30b-a3b": (30.5, 48, 128, 8, 2048),
    "gpt-oss-20b": (20.9, 24, 32, 4, 2880),
    "gpt-oss-120b": (116.8, 36, 128, 4, 2880),
    "olmoe-1b-7b": (6.9, 16, 64, 8, 2048),
}


@pytest.mark.parametrize("name", SHAPES)
def test_sizes(name: str) -> None:
    billions, *numbers = PUBLISHED[name]
    model = meta_model(SHAPES[name].config(), torch.bfloat16)
    assert weight_bytes(model) / 2e9 == pytest.approx(billions, rel=0.005)
    shape = find_moe_layers(model).shape
    assert [shape.layers, shape.experts, shape.top_k, shape.hidden] == numbers
    assert SHAPES[name].layers == shape.layers


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe_lite", "olmoe", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_weights(family: str, dtype: torch.dtype) -> None:
    model = random_model(CONFIGS[family], dtype=dtype, device="cpu", seed=0)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        if parameter.dim() > 1:
            assert 0.01 < parameter.float().std() < 0.04, name
            assert abs(parameter.float().mean()) < 0.01, name
        elif "norm" in name:
            assert (parameter == 1).all(), name
    with torch.no_grad():
        assert model(torch.arange(8).unsqueeze(0)).logits.isfinite().all()


def test_seed_decides() -> None:
    one, same, other = (
        random_model(CONFIGS["olmoe"], dtype=torch.bfloat16, device="cpu", seed=seed) for seed in (1, 1, 2)
    )
    weights = [model.model.layers[0].mlp.experts.down_proj for model in (one, same, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_no_second_copy() -> None:
    program = (
        "import re, torch; from benchmarks.shapes import SHAPES\n"
        "from benchmarks.shapes import random_model, weight_bytes\n"
        "def peak():\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]) * 1024\n"
        "config = SHAPES['olmoe-1b-7b'].config(1)\n"
        "config.vocab_size, config.intermediate_size = 100, 16\n"
        "small = random_model(config, dtype=torch.bfloat16, device='cpu', seed=0)\n"
        "config.intermediate_size = 192\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"  # resets the peak
        "before = peak()\n"
        "model = random_model(config, dtype=torch.bfloat16, device='cpu', seed=0)\n"
        "print((peak() - before) / weight_bytes(model))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert 0.9 < float(run.stdout) < 1.2
