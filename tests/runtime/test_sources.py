"""load_offloaded with options of from_pretrained: the same files and model, checked before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from expertcast import load_offloaded
from expertcast.data.models import load_model, load_tokenizer
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy, refused
from tests.runtime.quantised import IDS, same_weights

OWN_CODE = """
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


class OwnConfig(Qwen3MoeConfig):
    model_type = "own_moe"


class OwnForCausalLM(Qwen3MoeForCausalLM):
    config_class = OwnConfig
"""


def _saved(folder: Path, seed: int = 0) -> Path:
    model = tiny_model("qwen3_moe", seed=seed)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A hub cache with two revisions of a model, one of them with its files in a folder too."""
    cache = tmp_path_factory.mktemp("cache")
    repository = cache / "models--someone--moe"
    (repository / "refs").mkdir(parents=True)
    for seed, branch in enumerate(("main", "older")):
        commit = str(seed) * 40
        (repository / "refs" / branch).write_text(commit)
        _saved(repository / "snapshots" / commit, seed)
        _saved(repository / "snapshots" / commit / "inner", seed + 2)
    return {"cache_dir": str(cache), "local_files_only": True}


@pytest.mark.parametrize(
    "options", [{}, {"revision": "older"}, {"subfolder": "inner"}, {"revision": "older", "subfolder": "inner"}]
)
def test_files_are_those_of_from_pretrained(options: dict[str, Any], hub: dict[str, Any]) -> None:
    """Every one of these holds other weights."""
    given = {**hub, **options}
    resident = AutoModelForCausalLM.from_pretrained("someone/moe", dtype="auto", **given).eval()
    with load_offloaded(
        "someone/moe", device="cpu", slots=6, predictor="next_norm", forecasts="always", **given
    ) as offloaded:
        same_weights(offloaded, resident)
        assert offloaded.model.generation_config.eos_token_id is None
    loaded = dict(load_model("someone/moe", **given).named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in resident.named_parameters())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_how_the_model_is_made(attention: str, tmp_path: Path) -> None:
    path = _saved(tmp_path)
    resident = AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation=attention).eval()
    with load_offloaded(path, device="cpu", slots=6, attn_implementation=attention) as offloaded:
        assert offloaded.model.config._attn_implementation == attention
        assert_same(greedy(offloaded, IDS, 4), greedy(resident, IDS, 4))


def test_code_beside_the_weights(tmp_path: Path) -> None:
    """Run when it is trusted, and only then."""
    path = tmp_path / "model"
    tiny_model("qwen3_moe").save_pretrained(path, save_original_format=False)
    (path / "own.py").write_text(OWN_CODE)
    config = json.loads((path / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (path / "config.json").write_text(json.dumps({**config, "model_type": "own_moe", "auto_map": names}))
    with load_offloaded(path, device="cpu", slots=6, trust_remote_code=True) as offloaded:
        assert type(offloaded.model).__name__ == "OwnForCausalLM"
        same_weights(offloaded, tiny_model("qwen3_moe"))
    with refused(r"it contains custom code: set trust_remote_code=True .--trust-remote-code. if you trust it"):
        load_offloaded(path, trust_remote_code=False)


def test_what_is_done_anyway_may_be_asked_for(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    with load_offloaded(path, device="cpu", slots=6, use_safetensors=True, low_cpu_mem_usage=True) as offloaded:
        same_weights(offloaded, tiny_model("qwen3_moe"))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"revison": "main"}, "unknown option 'revison': choose from predictor, .*, or from_pretrained's revision"),
        ({"torch_dtype": "auto"}, "torch_dtype is not supported: use dtype"),
        ({"device_map": "auto"}, "device_map is not supported: use device"),
        ({"max_memory": {0: "8GB"}}, "max_memory is not supported: use memory"),
        ({"offload_folder": "x"}, "offload_folder is not supported: use store='disk' and store_folder"),
        ({"quantization_config": {}}, "quantization_config is not supported: a checkpoint's own"),
        ({"use_safetensors": False}, "use_safetensors is not supported: weights are read from safetensors"),
        ({"revision": "main", "mode": "fast"}, "unknown mode 'fast'"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(options: dict[str, Any], line: str) -> None:
    """There is no such model: what is wrong with the options is said first."""
    with refused(line):
        load_offloaded("no/such/folder", **options)


@pytest.mark.parametrize("load", [load_offloaded, load_model, load_tokenizer])
def test_a_revision_that_is_not_there(load: Callable[..., Any], hub: dict[str, Any]) -> None:
    with refused("'someone/moe'"):
        load("someone/moe", revision="newer", **hub)


def test_an_attention_that_is_not_there(tmp_path: Path) -> None:
    path = shutil.copytree(_saved(tmp_path / "model"), tmp_path / "copy")
    (path / "model.safetensors").unlink()
    with refused(r"cannot load model .*attn_implementation"):
        load_offloaded(path, attn_implementation="divided")
