"""Packages around transformers: PEFT, torchao, lm-eval, the Trainer, and transformers' server."""

from __future__ import annotations

import json
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from newcomer_steps.world import PROMPTS, Found, World

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ROWS = (
    {"question": "It is a truth universally", "answers": ["acknowledged", "theorem", "river"], "right": 0},
    {"question": "In the beginning God created the heaven and the", "answers": ["speech", "earth", "set"], "right": 1},
    {"question": "The President of the United", "answers": ["Kings", "Numbers", "States"], "right": 2},
)
TASK = """
task: newcomer
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{answers}}}}"
doc_to_target: right
metric_list:
  - metric: acc
"""
STARTS_S = 60.0
"""Within which a server answers."""


def peft_lora(world: World) -> Found:
    """LoRA on attention, put on and taken off."""
    from peft import LoraConfig, get_peft_model

    def run(model: Any) -> Any:
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules=list(ATTENTION), init_lora_weights=False, task_type="CAUSAL_LM")
        adapted = get_peft_model(model, config)
        try:
            return adapted.generate(**world.inputs, max_new_tokens=world.new_tokens, do_sample=False)
        finally:
            adapted.unload()

    return world.compare(run, "LoRA on attention; on experts or routers it is refused")


def torchao_int8(world: World) -> Found:
    """Attention's weights in int8."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def attention(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name.rpartition(".")[2] in ATTENTION

    def run(model: Any) -> Any:
        kept = {name: module.weight for name, module in world.model.named_modules() if attention(module, name)}
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=attention)
        try:
            assert all(world.model.get_submodule(name).weight is not weight for name, weight in kept.items())
            return model.generate(**world.inputs, max_new_tokens=world.new_tokens, do_sample=False)
        finally:
            for name, weight in kept.items():
                world.model.get_submodule(name).weight = weight

    return world.compare(run, "int8 weights of attention; experts stay as they are stored")


def lm_eval_harness(world: World) -> Found:
    """A task of multiple choice by the harness's own HFLM."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        data.write_text("\n".join(map(json.dumps, ROWS)))
        (Path(folder) / "newcomer.yaml").write_text(TASK.format(data=data))

        def run(model: Any) -> list[Any]:
            found = lm_eval.simple_evaluate(
                model=HFLM(pretrained=model, tokenizer=world.tokenizer, batch_size=2), tasks=["newcomer"],
                task_manager=TaskManager(include_path=folder), bootstrap_iters=0,
            )  # fmt: skip
            return [sample["filtered_resps"] for sample in found["samples"]["newcomer"]]

        return world.compare(run, "log-likelihoods of every answer, by `HFLM(pretrained=...)`")


def trainer_evaluate(world: World) -> Found:
    """The loss over a small data set."""
    rows = [{"input_ids": ids, "labels": ids} for ids in world.tokenizer(list(PROMPTS)).input_ids]

    def run(model: Any) -> float:
        with tempfile.TemporaryDirectory() as folder:
            options = TrainingArguments(folder, per_device_eval_batch_size=1, report_to=[], disable_tqdm=True)
            trainer = Trainer(model, options, eval_dataset=rows)
            return float(trainer.evaluate()["eval_loss"])

    return world.compare(run)


def server(world: World) -> Found:
    """transformers' own server, asked over HTTP: a whole answer, and one as a stream."""
    from transformers.cli.serve import Serve
    from transformers.cli.serving.model_manager import TimedModel

    def run(model: Any) -> tuple[str, str]:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        served = Serve(host="127.0.0.1", port=port, non_blocking=True, log_level="error", device="cpu")
        try:
            # its command line can only load models by itself; this is where it keeps them
            served._model_manager.loaded_models["newcomer@main"] = TimedModel(model, -1, world.tokenizer)
            with _connected(f"http://127.0.0.1:{port}") as base:
                whole = json.loads(_ask(base, world.new_tokens, stream=False))["choices"][0]["text"]
                events = _ask(base, world.new_tokens, stream=True).split("\n\n")
        finally:
            served.kill_server()
        pieces = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        return whole, "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"])

    return world.compare(run, "`transformers serve`, given the model in its model manager")


@contextmanager
def _connected(base: str) -> Iterator[str]:
    until = time.monotonic() + STARTS_S
    while True:
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=5):
                break
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    yield base


def _ask(base: str, tokens: int, *, stream: bool) -> str:
    body = {"model": "newcomer", "prompt": PROMPTS[0], "max_tokens": tokens, "temperature": 0.0, "stream": stream}
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())
