"""Loading time and peak host memory of load_offloaded and of its alternatives.

The script writes a checkpoint of random weights in the shape of Qwen3-MoE (one tensor per expert, several shards) to a
temporary folder. Every measurement is a fresh process that has loaded the bundled model before, so that libraries are
not counted. While it loads, this process reads its memory from /proc every millisecond.

rss       peak resident memory above the level before loading, including mapped files
anonymous the same without file pages, which the system can drop

    python -m benchmarks loading
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import expertcast
from benchmarks.children import environment
from benchmarks.results import ResultFile, markdown, result_parser, shown, spread
from expertcast import OffloadedModel
from expertcast.data.models import load_model

METHODS = ("load_offloaded memory", "load_offloaded disk", "from_pretrained", "from_pretrained then offload")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every method `--rounds` times, in alternation, and print the table."""
    parser = result_parser("loading", __doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    args = parser.parse_args(arguments)
    file = ResultFile(args, {name: getattr(args, name) for name in ("layers", "experts", "hidden", "intermediate")})
    with tempfile.TemporaryDirectory(prefix="expertcast-bench-") as folder:
        checkpoint = Path(folder) / "model"
        size = file.values["checkpoint_bytes"] = make_checkpoint(checkpoint, args)
        for number in range(args.rounds):
            for method in args.methods:
                file.values["runs"].append({"method": method, "round": number, **measure(method, checkpoint)})
    file.write()
    rows = []
    for method in dict.fromkeys(each["method"] for each in file.values["runs"]):
        own = [each for each in file.values["runs"] if each["method"] == method]
        peaks = [f"{max(each[name] for each in own) / size:.2f}" for name in ("rss", "anonymous")]
        rows.append([f"`{method}`", shown(spread(each["seconds"] for each in own)), *peaks])
    print(f"checkpoint {size / 1e6:.0f} MB\n")
    print(markdown(["", "seconds", "peak RSS / checkpoint", "peak anonymous memory / checkpoint"], rows))
    return 0


def make_checkpoint(folder: Path, args: argparse.Namespace) -> int:
    """Save a model of random bf16 weights; return the bytes of its safetensors files."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, num_experts=args.experts, num_experts_per_tok=4,
        moe_intermediate_size=args.intermediate, max_position_embeddings=512,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size="200MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def child(method: str, folder: str) -> None:
    """Warm up, wait for a line on standard input, load, print the seconds, and run three tokens."""
    finish(load(method, "reference"))
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    model = load(method, folder)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds}), flush=True)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    finish(model)


def load(method: str, folder: str) -> PreTrainedModel | OffloadedModel:
    """Load a model by one of `METHODS`."""
    if method.startswith("load_offloaded"):
        return expertcast.load_offloaded(folder, device="cpu", slots=16, store=method.split()[1])
    model = load_model(folder)
    return expertcast.offload(model, slots=16) if method.endswith("offload") else model


def finish(model: object) -> None:
    """Close an offloaded model."""
    if isinstance(model, OffloadedModel):
        model.close()


def measure(method: str, folder: Path) -> dict[str, float]:
    """Run one child; return its seconds, and peak bytes above the level before loading."""
    command = [sys.executable, "-m", "benchmarks.loading", method, str(folder)]
    own = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment() | own,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while process.stdout.readline().strip() != "ready":
            if process.poll() is not None:
                raise SystemExit(f"the process for {method!r} failed")
        before = memory(process.pid)
        peak = dict(before)
        process.stdin.write("go\n")
        process.stdin.flush()
        while process.poll() is None:  # includes the first forward pass
            with contextlib.suppress(OSError):
                for name, value in memory(process.pid).items():
                    peak[name] = max(peak[name], value)
            time.sleep(0.001)
        line = process.stdout.read()
    return {name: float(peak[name] - before[name]) for name in peak} | json.loads(line)


def memory(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process by kind."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    if "VmRSS" not in rows:  # the process is ending
        return {}
    size = {name: int(rows[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon")}
    return {"rss": size["VmRSS"], "anonymous": size["RssAnon"]}


if __name__ == "__main__":
    child(*sys.argv[1:])
