"""From live traffic to forecasts: collect under vLLM, train in the project's environment, forecast under vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from elsewhere import command, elsewhere, train
from engines import LOADING, PROMPTS, REFERENCE, Ran, run
from expertcast_vllm.traffic import Conversations
from family_models import make_model
from safetensors.torch import load_file, save_file
from servers import SECONDS, serve
from transformers import AutoTokenizer

TOKENS = 96
"""Tokens per request."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traffic")


@pytest.fixture(scope="module")
def resident() -> Ran:
    return run(tokens=TOKENS)


@pytest.fixture(scope="module")
def collected(folder: Path) -> Ran:
    """A run that forecasts with an untrained predictor and collects traffic."""
    return run(
        {"slots": 96, "predictor": "router_input", "forecasts": "always", "collect": str(folder / "traces")},
        tokens=TOKENS,
    )


@pytest.fixture(scope="module")
def checkpoint(collected: Ran, folder: Path) -> Path:
    """A checkpoint trained on the collected traffic."""
    train(folder / "traces", "linear", folder / "checkpoint", "inputs=router_input")
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def vectors(folder: Path) -> Path:
    """Traces of a text, for the model's default vectors."""
    text = ["collect", REFERENCE, "--data", "reference", "--tokens", "4000", "--early-rank", "none"]
    command(*text, "--out", str(folder / "vectors"))
    return folder / "vectors"


def prompts() -> dict[str, int]:
    """Return the prompts' lengths in tokens by hash."""
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    ids = [tokenizer(text)["input_ids"] for text in PROMPTS]
    return {Conversations(tokenizer).hash(each): len(each) for each in ids}


def test_forecasts_load_experts_and_change_no_token(resident: Ran, collected: Ran) -> None:
    assert collected.tokens == resident.tokens
    (counted,) = collected.workers
    assert counted["prefetched_used"] > 0.5 * counted["prefetched"] > 0


def test_documents_are_the_requests(collected: Ran, folder: Path) -> None:
    info = json.loads((folder / "traces" / "trace.json").read_text())
    lengths = {each["hash"]: each["tokens"] for each in info["documents"]}
    # the last generated token never runs
    expected = [count + len(tokens) - 1 for count, tokens in zip(prompts().values(), collected.tokens, strict=True)]
    assert lengths == dict(zip(prompts(), expected, strict=True))


def test_a_predictor_trained_from_the_traffic_forecasts_it(resident: Ran, checkpoint: Path, folder: Path) -> None:
    ran = run({"slots": 96, "predictor": str(checkpoint), "forecasts": "always"}, tokens=TOKENS)
    assert ran.tokens == resident.tokens
    (counted,) = ran.workers
    assert counted["prefetched_used"] > 0
    found = elsewhere(traces=str(folder / "traces"), predictor=str(checkpoint))
    assert min(found.values()) > 0.3, "chance is 0.0625"


@pytest.mark.parametrize("predictor", ["linear", "estimator"])
def test_with_default_vectors_from_elsewhere_what_reads_residuals_does_too(
    predictor: str, resident: Ran, checkpoint: Path, vectors: Path, folder: Path
) -> None:
    """They beat a predictor that reads only router inputs, on the same traffic."""
    made = folder / predictor
    settings = ["width=8", "steps=100"] if predictor == "estimator" else []
    train(folder / "traces", predictor, made, *settings, default_vectors=vectors)
    ran = run({"slots": 96, "predictor": str(made), "forecasts": "always"}, tokens=TOKENS)
    assert ran.tokens == resident.tokens
    (counted,) = ran.workers
    assert counted["prefetched_used"] > 0
    traces = str(folder / "traces")
    found = elsewhere(traces=traces, predictor=str(made))
    plain = elsewhere(traces=traces, predictor=str(checkpoint))
    assert sum(found.values()) > sum(plain.values())


def test_the_previous_token_of_each_request_is_known(collected: Ran, folder: Path) -> None:
    train(folder / "traces", "previous_token", folder / "previous")
    ran = run({"slots": 96, "predictor": str(folder / "previous"), "forecasts": "always"}, tokens=TOKENS)
    assert ran.tokens == collected.tokens
    (counted,) = ran.workers
    assert counted["prefetched_used"] > 0


def test_a_checkpoint_of_another_model_is_refused_once_weights_are_read(checkpoint: Path, folder: Path) -> None:
    other = Path(shutil.copytree(REFERENCE, folder / "other"))
    weights = load_file(other / "model.safetensors")
    weights["model.layers.3.mlp.gate.weight"] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError) as caught:
        run({"slots": 96, "predictor": str(checkpoint)}, model=str(other))
    (line,) = refusals(str(caught.value))
    assert f"{checkpoint} was trained for" in line
    assert "has different router or norm weights" in line
    assert LOADING in str(caught.value)


def test_a_server_ends_with_a_checkpoint_of_other_layers_before_weights_are_read(
    checkpoint: Path, folder: Path, tmp_path: Path
) -> None:
    other = make_model(folder / "layers", "mixtral")
    with serve(tmp_path, {"slots": 9, "predictor": str(checkpoint)}, model=other) as server:
        server.processes()
        assert server.process.wait(SECONDS) != 0
        assert server.ended()
    lines = refusals(server.log())
    assert len({line.partition("ExpertcastError: ")[2] for line in lines}) == 1
    assert f"with 64 experts per layer, but {other!r} has 8" in lines[0]
    assert LOADING not in server.log()


def refusals(log: str) -> list[str]:
    """Return the lines with expertcast's errors."""
    return [line for line in log.splitlines() if "ExpertcastError: " in line]


def test_one_of_two_workers_collects_and_both_forecast(folder: Path) -> None:
    options = {"slots": 96, "predictor": "router_input", "forecasts": "always", "collect": str(folder / "two")}
    engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    ran = run(options, engine=engine, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert [counted["prefetched_used"] > 0 for counted in ran.workers] == [True, True]
    info = json.loads((folder / "two" / "trace.json").read_text())
    assert info["tokens"] == sum(prompts().values()) + sum(len(tokens) - 1 for tokens in ran.tokens)
