"""Tools that people already have take an offload and `offloaded.model`, and give what the resident model gives.

`scripts/newcomer.sh` runs this on the installed wheel with every package that a tool needs; elsewhere a test whose
package is missing is skipped.
"""

from __future__ import annotations

import copy
import io
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TextIteratorStreamer, TextStreamer, Trainer, TrainingArguments, pipeline

import expertcast

PROMPTS = ("The old man went down to the river and", "To be, or not to be,", "In the beginning")
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SLOTS = 384
"""As many as any step here needs: within a step's experts exact mode is bit for bit."""


def same(one: Any, other: Any) -> bool:
    """Whether two results are the same, tensors bit by bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check(model: PreTrainedModel, run: Callable[[Any], Any]) -> None:
    """Run a tool on the resident model, on the offload's model, on the offload, and on the resident model again."""
    expected = run(model)
    with expertcast.offload(model, slots=SLOTS, predictor="next_norm", forecasts="always") as offloaded:
        assert same(run(offloaded.model), expected)
        assert offloaded.stats.total.requests, "the tool never ran an offloaded layer"
        assert same(run(offloaded), expected)
    assert same(run(model), expected)


@pytest.fixture
def model(reference_model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    yield reference_model
    torch.compiler.reset()  # type: ignore[no-untyped-call]


@pytest.fixture
def tokenizer(reference_tokenizer: Any) -> Any:
    """Prompts of different lengths are padded on the left."""
    found = copy.deepcopy(reference_tokenizer)
    found.padding_side = "left"
    return found


@pytest.fixture
def inputs(tokenizer: Any) -> dict[str, Tensor]:
    return dict(tokenizer(list(PROMPTS), return_tensors="pt", padding=True))


def test_pipeline(model: PreTrainedModel, tokenizer: Any) -> None:
    def run(model: Any) -> list[Any]:
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
        return list(generator(list(PROMPTS), batch_size=2, **GREEDY))

    check(model, run)


def test_text_streamers(model: PreTrainedModel, tokenizer: Any) -> None:
    """Tokens printed as they come, and taken from a thread."""

    def run(model: Any) -> tuple[str, list[str]]:
        inputs, printed = tokenizer(PROMPTS[0], return_tensors="pt"), io.StringIO()
        with redirect_stdout(printed):
            model.generate(**inputs, **GREEDY, streamer=TextStreamer(tokenizer))
        streamer = TextIteratorStreamer(tokenizer, timeout=120)
        thread = threading.Thread(target=model.generate, kwargs={**inputs, **GREEDY, "streamer": streamer})
        thread.start()
        pieces = list(streamer)
        thread.join()
        return printed.getvalue(), pieces

    check(model, run)


def test_beam_search(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    """Over a padded batch, with the scores of each beam."""
    options = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}

    def run(model: Any) -> tuple[Any, Any]:
        found = model.generate(**inputs, **GREEDY, **options)
        return found.sequences, found.sequences_scores

    check(model, run)


def test_sampling(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    def run(model: Any) -> Any:
        torch.manual_seed(7)
        return model.generate(**inputs, max_new_tokens=3, do_sample=True, top_p=0.9, temperature=0.8)

    check(model, run)


def test_assisted_generation(model: PreTrainedModel, tokenizer: Any) -> None:
    """An assistant model drafts for the offload, the offload drafts for another model, and the prompt drafts."""
    other, inputs = copy.deepcopy(model), tokenizer(PROMPTS[0], return_tensors="pt")
    other.generation_config.num_assistant_tokens = 4  # type: ignore[union-attr]

    def run(model: Any) -> list[Any]:
        return [
            model.generate(**inputs, **GREEDY, assistant_model=other),
            other.generate(**inputs, **GREEDY, assistant_model=model),  # type: ignore[operator]
            model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=3),
        ]

    check(model, run)


def test_peft(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    """LoRA on attention, put on and taken off."""
    peft = pytest.importorskip("peft")

    def run(model: Any) -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=4, target_modules=list(ATTENTION), init_lora_weights=False, task_type="CAUSAL_LM"
        )  # fmt: skip
        adapted = peft.get_peft_model(model, config)
        try:
            return adapted.generate(**inputs, **GREEDY)
        finally:
            adapted.unload()

    check(model, run)


@pytest.mark.parametrize("how", ["PeftModel", "load_adapter"])
def test_a_trained_adapter(how: str, model: PreTrainedModel, inputs: dict[str, Tensor], tmp_path: Path) -> None:
    """Loaded, saved again and taken off; steps before it are not those of the adapted model."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=list(ATTENTION), init_lora_weights=False, task_type="CAUSAL_LM")
    made = peft.get_peft_model(model, config)
    made.save_pretrained(tmp_path)
    made.unload()

    def run(model: Any) -> Any:
        plain = model.generate(**inputs, **GREEDY)
        if how == "PeftModel":
            adapted = peft.PeftModel.from_pretrained(model, tmp_path)
            adapted.save_pretrained(tmp_path / "again")
            output = adapted.generate(**inputs, **GREEDY)
            adapted.unload()
        else:
            model.load_adapter(str(tmp_path))
            output = model.generate(**inputs, **GREEDY)
            model.delete_adapter("default")
        assert not torch.equal(output, plain)
        return output

    check(model, run)


def test_torchao(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    """Attention's weights in int8; experts stay as they are stored."""
    quantization = pytest.importorskip("torchao.quantization")

    def attention(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name.rpartition(".")[2] in ATTENTION

    def run(given: Any) -> Any:
        kept = {name: module.weight for name, module in model.named_modules() if attention(module, name)}
        quantization.quantize_(given, quantization.Int8WeightOnlyConfig(), filter_fn=attention)
        try:
            assert all(model.get_submodule(name).weight is not weight for name, weight in kept.items())
            return given.generate(**inputs, **GREEDY)
        finally:
            for name, weight in kept.items():
                model.get_submodule(name).weight = weight

    check(model, run)


def test_trainer_evaluate(model: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    rows: Any = [{"input_ids": ids, "labels": ids} for ids in tokenizer(list(PROMPTS)).input_ids]
    options = TrainingArguments(str(tmp_path), per_device_eval_batch_size=1, report_to=[], disable_tqdm=True)
    check(model, lambda model: float(Trainer(model, options, eval_dataset=rows).evaluate()["eval_loss"]))


def test_transformers_serve(model: PreTrainedModel, tokenizer: Any) -> None:
    """transformers' own server, given the model in its model manager: a whole answer over HTTP, and a streamed one."""
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name)
    from transformers.cli.serve import Serve
    from transformers.cli.serving.model_manager import TimedModel

    def run(model: Any) -> tuple[str, str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        served = Serve(host="127.0.0.1", port=port, non_blocking=True, log_level="error", device="cpu")
        try:
            # its command line can only load models by itself; this is where it keeps them
            served._model_manager.loaded_models["newcomer@main"] = TimedModel(model, -1, tokenizer)
            whole = json.loads(ask(port, stream=False))["choices"][0]["text"]
            events = ask(port, stream=True).split("\n\n")
        finally:
            served.kill_server()
        pieces = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        return whole, "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"])

    check(model, run)


def ask(port: int, *, stream: bool) -> str:
    """The answer of the server, which may not listen yet."""
    body = {"model": "newcomer", "prompt": PROMPTS[0], "max_tokens": 3, "temperature": 0.0, "stream": stream}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    until = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError:
            raise
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
