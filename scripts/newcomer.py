"""What a newcomer does: the commands of the README, and the tools that people already have. Run by `newcomer.sh`."""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import io
import json
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
    TextIteratorStreamer,
    TextStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)  # fmt: skip

import expertcast
from expertcast.commands.output import say, write_json
from expertcast.data.models import load_model, load_tokenizer
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "checkpoints" / "reference" / "text" / "test.parquet"
ROUTING = str(ROOT / "benchmarks" / "routing" / "gpt-oss-120b-k2.parquet")
STAND_INS = {
    "Qwen/Qwen3-30B-A3B": "reference",
    "MODEL": "reference",
    "200000": "6000",
    "1024": "256",
    "qwen3-30b-a3b": "reference",
    "8": "2",
    "ROUTING.parquet": ROUTING,
}
FEW_TOKENS = ["--prompt-tokens", "8", "--new-tokens", "4", "--repetitions", "1", "--slots", "96"]
SHORT = ["--set", "steps=8", "step_tokens=128"]
"""Fewer steps than a user would take; the rest of each command is the README's."""
SMALLER = {"estimator": ["parameters=80000"], "next_token": ["width=32"]}
HUB = " user/"
"""In commands that need a hub."""
SERVE = "serve "
"""A command that does not end by itself; the tests of serving run it."""


def readme_lines() -> list[str]:
    """What stands behind `expertcast` in the README, but for what needs a hub or serves: `tests/hub`
    and `tests/runtime/serving` run these."""
    lines = re.findall(r"^    expertcast (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    return [line for line in lines if HUB not in line and not line.startswith(SERVE)]


def words_of(line: str) -> list[str]:
    """A command with what this machine has in place of names."""
    return [STAND_INS.get(word, word) for word in shlex.split(line)]


def shortened(command: list[str]) -> list[str]:
    """The same command over fewer tokens and steps."""
    if ROUTING in command:
        return command
    short = command + {"bench": FEW_TOKENS, "advise": FEW_TOKENS[:4]}.get(command[0], [])
    if command[0] == "train":
        short += [*SHORT, *SMALLER[command[command.index("--predictor") + 1]]]
    if command[0] == "simulate":
        short += ["--tokens", "300", "--quality-tokens", "40"]
    return short


def write_texts(folder: Path) -> None:
    """The files that the commands read: several domains, small enough to run online."""
    rows = pq.read_table(TEXT)
    for first, name in enumerate(("my.parquet", "other.parquet")):
        pq.write_table(rows.take(list(range(first, len(rows), len(rows) // 10))), folder / name)


LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool and the function that tries it."""

    name: str
    function: str
    """Of this module; takes a :class:`World`, returns a :class:`Found`."""
    packages: tuple[str, ...] = ()
    """Without which it cannot be tried."""


TOOLS = (
    Tool("`pipeline`", "text_pipeline"),
    Tool("text streamers", "streamers"),
    Tool("beam search", "beams"),
    Tool("sampling", "sampling"),
    Tool("assisted generation", "assisted"),
    Tool("`torch.compile`", "compiled"),
    Tool("PEFT", "peft_lora", ("peft",)),
    Tool("torchao", "torchao_int8", ("torchao",)),
    Tool("lm-eval", "lm_eval_harness", ("lm_eval",)),
    Tool("`Trainer.evaluate`", "trainer_evaluate", ("accelerate",)),
    Tool("`transformers serve`", "server", ("fastapi", "uvicorn", "openai")),
)


@dataclass(slots=True, kw_only=True)
class Row:
    """A row of the table."""

    name: str
    works: bool | None = None
    """None: it was not tried."""
    takes: str = ""
    identical: bool | None = None
    seconds: float = 0.0
    note: str = ""

    @property
    def outcome(self) -> str:
        """In a few words."""
        if self.works is None:
            return f"not tried: {self.note}"
        return f"{'works' if self.works else 'does not work'}, {self.seconds:.0f} s{self.note and ', ' + self.note}"

    def as_dict(self) -> Json:
        """For JSON."""
        return asdict(self)


def chosen(only: Sequence[str]) -> list[Tool]:
    """Tools whose function's name was given; all where none was."""
    return [tool for tool in TOOLS if not only or tool.function in only]


def try_tool(tool: Tool, *, small: bool, limit_s: float = LIMIT_S) -> Row:
    """A tool in a process of its own.

    Args:
        tool: which.
        small: over few tokens.
        limit_s: seconds after which the process is ended.
    """
    missing = [name for name in tool.packages if importlib.util.find_spec(name) is None]
    if missing:
        return Row(name=tool.name, note=f"{', '.join(missing)} not installed")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "found.json"
        command = [__file__, "--child", tool.function, "--out", str(answer), *["--small"] * small]
        row = _timed(tool.name, [sys.executable, *command], Path.cwd(), limit_s)
        if row.works:
            found = json.loads(answer.read_text())
            row.takes, row.identical, row.note = found["takes"], found["identical"], found["note"]
            row.works = row.identical is not False
    return row


def try_in_this_process(function: str, *, small: bool) -> Json:
    """What a child does: load the bundled model, call the tool's function, and say what it found."""
    tokens = 4 if small else 16
    return asdict(
        globals()[function](
            World(model=load_model("reference"), tokenizer=load_tokenizer("reference"), new_tokens=tokens)
        )
    )


def try_commands(folder: Path, *, small: bool, limit_s: float = LIMIT_S) -> Iterator[Row]:
    """The README's commands, one after another in one folder, by the `expertcast` that is installed."""
    write_texts(folder)
    script = Path(sys.executable).with_name("expertcast")
    start = [str(script)] if script.is_file() else [sys.executable, "-m", "expertcast.cli"]
    if not small:
        yield _timed("expertcast demo", [*start, "demo"], folder, limit_s)
    for line in readme_lines():
        yield _timed(f"expertcast {line}", [*start, *shortened(words_of(line))], folder, limit_s)


def _timed(name: str, command: Sequence[str], folder: Path, limit_s: float) -> Row:
    begin = time.monotonic()
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False)
        failed, said = done.returncode != 0, (done.stderr.strip().splitlines() or [""])[-1]
    except subprocess.TimeoutExpired:
        failed, said = True, f"not done in {limit_s:g} s"
    return Row(name=name, works=not failed, seconds=time.monotonic() - begin, note=said if failed else "")


PROMPTS = ("The old man went down to the river and", "To be, or not to be,", "In the beginning")
EITHER, MODEL_ONLY = "`offloaded` or `offloaded.model`", "`offloaded.model`"


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a tool."""

    takes: str
    """What it was given: the offload, its model, or either."""
    identical: bool | None
    """Whether it did the same as on the resident model, to the bit; None where there is nothing to compare with."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A model with its tokenizer, resident."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    new_tokens: int = 16
    slots: int = 384
    """As many as any step here needs: within a step's experts exact mode is bit for bit."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Prompts of different lengths, padded on the left."""
        self.tokenizer.padding_side = "left"
        return dict(self.tokenizer(list(PROMPTS), return_tensors="pt", padding=True).to(self.model.device))

    def compare(self, run: Callable[[Any], Any], note: str = "") -> Found:
        """Run a tool on the resident model, on the offload and on the offload's model.

        Args:
            run: the tool; returns what can be compared by :func:`same`.
            note: of what is found.

        Raises:
            Exception: whatever the tool raises on `offloaded.model`; on the offload it is the note.
        """
        expected = run(self.model)
        with expertcast.offload(self.model, slots=self.slots, predictor="next_norm") as offloaded:
            identical = same(run(offloaded.model), expected)
            requests = offloaded.stats.total.requests
            try:
                identical &= same(run(offloaded), expected)
            except Exception as error:  # whatever a tool makes of what is no model
                line = str(error).partition("\n")[0]
                return Found(MODEL_ONLY, identical, note or f"on `offloaded`: {type(error).__name__}: {line}")
            if not requests:
                raise ExpertcastError("the tool never ran an offloaded layer: it was not tried")
        return Found(EITHER, identical and same(run(self.model), expected), note)


def same(one: Any, other: Any) -> bool:
    """Whether two results are the same, tensors bit by bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


INDUCTOR_TOKENS = 16
"""From so many new tokens on there is time for it."""
INDUCTOR_ROUNDING = 1e-4
"""Most that float32 logits of inductor's kernels differ by between an offloaded model and the resident one."""


def text_pipeline(world: World) -> Found:
    """A batch through the text-generation pipeline."""

    def run(model: Any) -> list[Any]:
        generator = pipeline("text-generation", model=model, tokenizer=world.tokenizer)
        return list(generator(list(PROMPTS), batch_size=2, max_new_tokens=world.new_tokens, do_sample=False))

    return world.compare(run)


def streamers(world: World) -> Found:
    """Tokens printed as they come, and taken from a thread."""

    def run(model: Any) -> tuple[str, list[str]]:
        inputs, printed = world.tokenizer(PROMPTS[0], return_tensors="pt").to(model.device), io.StringIO()
        wanted = {"max_new_tokens": world.new_tokens, "do_sample": False}
        with redirect_stdout(printed):
            model.generate(**inputs, **wanted, streamer=TextStreamer(world.tokenizer))
        streamer = TextIteratorStreamer(world.tokenizer, timeout=120)
        thread = threading.Thread(target=model.generate, kwargs={**inputs, **wanted, "streamer": streamer})
        thread.start()
        pieces = list(streamer)
        thread.join()
        return printed.getvalue(), pieces

    return world.compare(run)


def beams(world: World) -> Found:
    """Beam search over a padded batch, with the scores of each beam."""

    def run(model: Any) -> tuple[Any, Any]:
        found = model.generate(
            **world.inputs, max_new_tokens=world.new_tokens, num_beams=3, num_return_sequences=2, do_sample=False,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        return found.sequences, found.sequences_scores

    return world.compare(run)


def sampling(world: World) -> Found:
    """Sampling with one seed, top-p and a temperature."""

    def run(model: Any) -> Any:
        torch.manual_seed(7)
        return model.generate(
            **world.inputs, max_new_tokens=world.new_tokens, do_sample=True, top_p=0.9, temperature=0.8
        )

    return world.compare(run)


def assisted(world: World) -> Found:
    """An assistant model writes for the offload, the offload writes for another model, and the prompt writes."""
    other = copy.deepcopy(world.model)
    other.generation_config.num_assistant_tokens = 4

    def run(model: Any) -> list[Any]:
        inputs = world.tokenizer(PROMPTS[0], return_tensors="pt").to(model.device)
        wanted = {"max_new_tokens": world.new_tokens, "do_sample": False}
        return [
            model.generate(**inputs, **wanted, assistant_model=other),
            other.generate(**inputs, **wanted, assistant_model=model),
            model.generate(**inputs, **wanted, prompt_lookup_num_tokens=3),
        ]

    return world.compare(run)


def compiled(world: World) -> Found:
    """`torch.compile` around the model: its attention, norms and routers are compiled, the runtime is not."""
    found = world.compare(lambda model: _compiled_steps(model, "eager"), "to the bit by backend 'eager'")
    if world.new_tokens < INDUCTOR_TOKENS:
        return found
    tiny = _tiny()
    expected = _compiled_steps(tiny, "inductor")
    with expertcast.offload(tiny, slots=16, predictor="next_norm") as offloaded:
        torch.testing.assert_close(
            _compiled_steps(offloaded, "inductor"), expected, rtol=INDUCTOR_ROUNDING, atol=INDUCTOR_ROUNDING
        )
    return replace(found, note=f"{found.note}, by inductor to rounding")


@torch.no_grad()
def _compiled_steps(model: Any, backend: str, tokens: int = 4) -> Tensor:
    """Logits of a plain prefill and compiled decode steps over a static cache, [tokens, V]."""
    torch.compiler.reset()
    cache = StaticCache(config=copy.deepcopy(model.config), max_cache_len=32)
    ids, positions = torch.tensor([[3, 4, 5]], device=model.device), torch.arange(3, device=model.device).unsqueeze(0)
    rows, forward = [], model
    for _ in range(tokens):
        output = forward(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        rows.append(output.logits[0, -1].clone())
        ids, positions = rows[-1].argmax().view(1, 1), positions[:, -1:] + 1
        if len(rows) == 1:
            forward = torch.compile(model.forward, backend=backend, dynamic=False)
    return torch.stack(rows)


def _tiny() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


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


VERSIONS = ("expertcast", "torch", "transformers", "accelerate", "peft", "torchao", "lm_eval")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 when something that should work does not."""
    args = _parser().parse_args(arguments)
    if args.child is not None:
        write_json(args.out, try_in_this_process(args.child, small=args.small))
        return 0
    say(f"expertcast is {Path(expertcast.__file__).parent}")
    result: Json = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: _version(name) for name in VERSIONS if _version(name)},
        "tools": [],
        "commands": [],
    }
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        for kind, rows in _tried(args, Path(folder)):
            for row in rows:
                say(f"{row.name}: {row.outcome}")
                result[kind].append(row.as_dict())
                if args.out is not None:  # whoever stops it here has what was tried
                    write_json(args.out, result)
    tried = [*result["tools"], *result["commands"]]
    untried = [row for row in result["tools"] if row["works"] is None and not args.allow_missing]
    return int(bool(untried) or any(row["works"] is False for row in tried))


def _tried(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Iterable[Row]]]:
    """Rows as they come, tools first."""
    yield "tools", (try_tool(tool, small=args.small, limit_s=args.limit) for tool in chosen(args.only))
    if args.commands:
        yield "commands", try_commands(folder, small=args.small, limit_s=args.limit)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _parser() -> argparse.ArgumentParser:
    names = [tool.function for tool in TOOLS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="few tokens, and no demo")
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="TOOL", help=", ".join(names))
    parser.add_argument("--no-commands", dest="commands", action="store_false", help="leave the README's commands out")
    parser.add_argument("--allow-missing", action="store_true", help="tools whose packages are missing are no failure")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for each (%(default)g)")
    parser.add_argument("--out", type=Path, metavar="JSON", help="write the result there")
    parser.add_argument("--child", metavar="FUNCTION", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
