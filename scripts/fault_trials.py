"""Shared code of the scripts of faults: small artefacts, functions run in forks, outcomes, and their table.

The parent process runs no tensor operation: the threads that those start would be missing in a fork.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the tests' models

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a fork has one thread

TRACES, ESTIMATOR, FREE = "traces", "estimator", "quasi_hidden"
STORE, CONFIG, DATA = "store", "config", "data"
PACKED_STORE, ROUNDED_STORE = "packed_store", "rounded_store"
"""Stores of blocks of a GGUF file, and of experts that were rounded to blocks."""
QUANTISED = "gguf", "gguf_k", "gptq", "awq", "compressed", "mxfp4", "fp8"
"""Checkpoints whose experts stay packed, but for FP8. Their files have no digests."""
ARTEFACTS = (TRACES, ESTIMATOR, FREE, STORE, CONFIG, DATA, PACKED_STORE, ROUNDED_STORE, *QUANTISED)
CONFIG_FILE = "offload.json"
GGUF_FILE = "model.gguf"
MODEL, TEXTS = "model", "text.jsonl"
"""A model with a tokenizer, and the text of the traces; both beside the artefacts."""
PROMPT = "It was a dark and stormy night"
TEXT = "the old man went down to the river and saw that the boat was gone so he sat by the water until morning came"
TOKENS = 360
_SPEED = ("bandwidth", "latency")
"""Options left out of the file: a damaged value could be a valid link of one byte per second."""
ESTIMATOR_SETTINGS = "width=8", "steps=6", "step_tokens=32"


def collect_words(made: Path, out: Path, data: Path | None = None) -> list[str]:
    """Return the command that collects traces, from `data` or the default text."""
    text = str(data or made / TEXTS)
    return ["collect", str(made / MODEL), "--data", text, "--tokens", str(TOKENS), "--window", "16", "--batch-size",
            "2", "--out", str(out)]  # fmt: skip


def train_words(traces: Path, name: str, out: Path) -> list[str]:
    """Return the command that trains a checkpoint."""
    settings = ESTIMATOR_SETTINGS if name == ESTIMATOR else ()
    words = ["train", str(traces), "--predictor", name, "--out", str(out)]
    return [*words, "--set", *settings] if settings else words


def generate_words(made: Path, *more: str) -> list[str]:
    """Return the command that decodes a few tokens with slots for a third of the experts."""
    slots = () if "--config" in more else ("--slots", "8")
    return ["generate", str(made / MODEL), "--prompt", PROMPT, "--new-tokens", "3", *slots, *more]


def make(made: Path, seed: int) -> None:
    """Create all artefacts from random weights. Runs tensor operations."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from expertcast.cli import main
    from expertcast.data.collect import collect
    from expertcast.data.models import load_model, load_tokenizer
    from expertcast.data.text import load_documents
    from expertcast.runtime.config import OffloadConfig

    made.mkdir(parents=True)
    _save_model(made / MODEL, seed)
    lines = [{"text": TEXT[number % 7 * 5 :] + TEXT[: number % 5 * 4] + "."} for number in range(24)]
    (made / TEXTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    model, documents = made / MODEL, load_documents([str(made / TEXTS)])
    options = {"tokens": TOKENS, "window": 16, "batch_size": 2, "shard_bytes": 40_000}
    collect(load_model(model), load_tokenizer(model), documents, made / TRACES, **options)
    runs = [train_words(made / TRACES, name, made / name) for name in (ESTIMATOR, FREE)]
    runs += [generate_words(made, "--store-folder", str(made / STORE))]
    for words in runs:
        assert main(words) == 0, words
    (made / DATA).mkdir()
    pq.write_table(pa.table({"text": [line["text"] for line in lines[:12]]}), made / DATA / "a.parquet")
    shutil.copy(made / TEXTS, made / DATA / "b.jsonl")
    (made / DATA / "c.txt").write_text("\n\n".join([TEXT] * 60))
    (made / CONFIG).mkdir()
    values = OffloadConfig(slots=8, predictor="next_norm", mode="exact").as_dict()
    values = {name: value for name, value in values.items() if name not in _SPEED}
    (made / CONFIG / CONFIG_FILE).write_text(json.dumps(values, indent=2))


def make_quantised(made: Path, seed: int) -> None:
    """Make the quantised checkpoints, and stores of packed experts. Runs tensor operations."""
    from tests.runtime.gguf_files import tiny, write
    from tests.runtime.quantised import fp8, mxfp4
    from tests.runtime.test_packed import awq, checkpoint, compressed, gptq, of_modules

    groups = {"all": of_modules(4, ["Linear"], group_size=32)}
    packed = {
        "gptq": (gptq(group=32), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
        "awq": (lambda weight: awq(weight, 32), {"quant_method": "awq", "bits": 4, "group_size": 32}),
        "compressed": (
            compressed(group=32),
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups},
        ),
    }
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64}
    for name, (pack, settings) in packed.items():
        folder, _ = checkpoint(made / f"{name}.both", pack, sizes, **settings)
        Path(folder).rename(made / name)
    fp8("qwen3_moe", made / "fp8", **sizes)
    mxfp4(made / "mxfp4")
    mixes: dict[str, tuple[str, int, dict[str, str]]] = {
        "gguf": ("Q4_0", 64, {"blk.0.ffn_down_exps.weight": "Q8_0"}),
        # types of Q4_K_M by layer and matrix; gates and up projections of unequal types as well
        "gguf_k": ("Q4_K", 256, {"blk.0.ffn_down_exps.weight": "Q6_K", "blk.1.ffn_gate_exps.weight": "Q5_K",
                                 "blk.1.ffn_down_exps.weight": "Q2_K", "blk.0.attn_v.weight": "Q6_K",
                                 "output.weight": "Q6_K"}),
    }  # fmt: skip
    for name, (kind, width, others) in mixes.items():
        (made / name).mkdir()
        model = tiny("qwen3_moe", hidden_size=width, moe_intermediate_size=width, vocab_size=260)
        for parameter in model.parameters():
            parameter.data *= 1 + seed
        write(made / name / GGUF_FILE, model, kind, others=others)
    for name, source in _STORED.items():
        _run_quantised(made / source, store="disk", store_folder=made / name)


_STORED = {PACKED_STORE: "gguf", ROUNDED_STORE: "fp8"}
"""Source of each store."""


def _run_quantised(folder: Path, **options: Any) -> Any:
    """Two tokens of a quantised checkpoint with a few of its experts in slots, and the digest of their logits."""
    import torch

    from expertcast.runtime.loading import load_offloaded

    model = folder / GGUF_FILE if folder.name.startswith("gguf") else folder
    options["experts"] = "packed" if folder.name != "fp8" else "int4" if "store" in options else "expanded"
    with load_offloaded(model, device="cpu", dtype="bf16", slots=6, **options) as offloaded:
        written = offloaded.generate(
            torch.tensor([[5, 9, 2, 77, 31]]), attention_mask=torch.ones(1, 5, dtype=torch.long), max_new_tokens=2,
            do_sample=False, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        logits = {str(number): each for number, each in enumerate(written.logits)}
        return {"tokens": written.sequences.tolist(), "logits": _tensors(logits)}


def _save_model(folder: Path, seed: int) -> None:
    from tests.families.models import tiny_model

    from expertcast.checkpoints.bundled import REFERENCE
    from expertcast.data.models import load_tokenizer

    tokenizer = load_tokenizer(REFERENCE)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
             "num_key_value_heads": 1, "moe_intermediate_size": 8, "max_position_embeddings": 128}  # fmt: skip
    tiny_model("qwen3_moe", seed=seed, **sizes, tie_word_embeddings=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


_IMPORTS = ("cli", "commands.collect", "commands.eval", "commands.generate", "commands.inspect", "commands.simulate",
            "commands.train", "training.estimator", "runtime.loading", "runtime.simulation.sweep")  # fmt: skip
_TIMED_OUT = "Timeout ("
_RAISED = 70
"""Exit status after an exception: EX_SOFTWARE of sysexits.h."""


def prepare() -> None:
    """Import everything that the commands need, before the first fork."""
    for module in _IMPORTS:
        importlib.import_module(f"expertcast.{module}")
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would copy every page with an object


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of a fork."""

    seconds: float = 30.0
    """Time limit; at its end the fork prints a traceback and exits."""
    memory: int | None = None
    """Address space in bytes beyond that at the start."""
    file_bytes: int | None = None
    """Largest size of a file in bytes; longer writes fail, similar to a full disk."""
    user: int | None = None
    """User id to run as, because root may write anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Result of a fork."""

    status: int
    """Exit status, negative for a signal."""
    out: str
    err: str
    seconds: float

    @property
    def hung(self) -> bool:
        """Whether it exceeded its time limit."""
        return _TIMED_OUT in self.err


def run(
    work: Callable[[], int], folder: Path, limits: Limits, signal_after: float | None = None, number: int = 0
) -> Ended:
    """Run a function in a fork to its end, or until a signal ends it.

    Args:
        work: function that returns the exit status.
        folder: folder for the output, in the files `out` and `err`.
        limits: resource limits.
        signal_after: seconds until the signal; None: no signal.
        number: number of the signal.
    """
    wait, child = start(work, folder, limits)
    if signal_after is not None:
        time.sleep(signal_after)
        os.kill(child, number)  # not waited for yet, so the process id is still its own
    return wait()


def start(work: Callable[[], int], folder: Path, limits: Limits) -> tuple[Callable[[], Ended], int]:
    """Start a fork; return a function that waits for its end, and the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("out", "err"):
        (folder / name).unlink(missing_ok=True)  # output of an earlier fork
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(work, folder, limits)

    def wait() -> Ended:
        _, status = os.waitpid(child, 0)
        out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
        return Ended(status=os.waitstatus_to_exitcode(status), out=out, err=err, seconds=time.monotonic() - begin)

    return wait, child


def call(work: Callable[[], object], folder: Path) -> object:
    """Run a function in a fork and return its result, by JSON.

    Raises:
        RuntimeError: the function raised.
    """
    result = folder / "result.json"

    def written() -> int:
        result.write_text(json.dumps(work()))
        return 0

    ended = run(written, folder, Limits(seconds=600.0))
    if ended.status:
        raise RuntimeError(f"exit status {ended.status}: {ended.err[-3000:]}")
    return json.loads(result.read_text())


def _child(work: Callable[[], int], folder: Path, limits: Limits) -> None:
    status = _RAISED
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's own handler is not the command's
    try:
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        faulthandler.dump_traceback_later(limits.seconds, exit=True, file=2)
        _limit(limits)
        status = work()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _limit(limits: Limits) -> None:
    if limits.memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + limits.memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if limits.file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    if limits.user is not None:
        os.setuid(limits.user)


RIGHT, EDITED, REFUSED = "right", "edited", "refused"
UNNAMED, TRACEBACK, CHANGED, HUNG = "unnamed", "traceback", "changed", "hung"
GOOD = (RIGHT, EDITED, REFUSED)
CLASSES = (*GOOD, UNNAMED, TRACEBACK, CHANGED, HUNG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trial."""

    again: str
    """Options that run it again."""
    group: str
    """Row of the table that counts it."""
    what: str
    """Description of the fault."""
    outcome: str
    line: str = ""
    """Description of the outcome."""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a script's parser, with the options that all of them have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there as well")
    return parser


def conclude(
    trials: Iterable[Row], classes: Sequence[str], path: Path | None, *, every: bool = False,
    counts: Mapping[str, int] | None = None,
) -> int:  # fmt: skip
    """Run trials; print those that fail, then a table; return the exit status.

    Args:
        trials: the trials, run as they are iterated over.
        classes: outcomes; each is a column of the table.
        path: JSON file to write; None: none.
        every: print every trial.
        counts: further counts of the trials.
    """
    rows: list[Row] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # background jobs of a shell inherit an ignored SIGINT
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # what is counted so far is written
        for row in trials:
            rows.append(row)
            if every or row.outcome not in GOOD:
                print(f"{row.again}: {row}", flush=True)
    groups = dict.fromkeys(sorted({row.group for row in rows}))
    found = {group: dict.fromkeys(classes, 0) for group in (*groups, "all")}
    for row in rows:
        for group in (row.group, "all"):
            found[group][row.outcome] += 1
    for group, cells in {"": {name: name for name in classes}, **found}.items():
        print(f"{group:44}" + "".join(f"{cell:>11}" for cell in cells.values()))
    for name, count in (counts or {}).items():
        print(f"{count:>11} {name}")
    result = {"trials": len(rows), "table": found, "counts": counts or {}}
    failures = [asdict(row) for row in rows if row.outcome not in GOOD]
    if path:
        path.write_text(json.dumps({**result, "failures": failures}, indent=2) + "\n")
    return int(bool(failures))


LIMITS = Limits(seconds=20.0, memory=2 << 30)
_EXPECTED = ("command", "git_revision", "checkpoint", "folder")
"""Members of a result that depend on place and time."""

Operation = Callable[[Path, Path, Path], Any]
"""Function of the undamaged artefacts, the damaged artefact and an output folder; it returns the result to compare."""


def _command(words: Callable[[Path, Path, Path], list[str]]) -> Operation:
    def operation(made: Path, target: Path, out: Path) -> Any:
        from expertcast.cli import main

        path = out / "result.json"
        status = main([*words(made, target, out), "--json", str(path)])
        if status:
            raise SystemExit(status)
        return json.loads(path.read_text())

    return operation


def _inspect(_: Path, target: Path, __: Path) -> list[str]:
    return ["inspect", str(target), "--verify"]


def _simulate(_: Path, target: Path, __: Path) -> list[str]:
    words = "--policy lru --slots 8 --predictor router_input --processes 1 --layer-time 0.001"
    return ["simulate", str(target), *words.split()]


def _open_traces(_: Path, target: Path, __: Path) -> Any:
    from expertcast.data.traces import TraceDataset
    from expertcast.predictors.artefacts import digest

    traces = TraceDataset.open(target)
    columns = "residual_TLD", "logits_TLE", "early_TLD", "document_T", "position_T"
    batches = [[getattr(batch, name) for name in columns] for batch in traces.batches("all", 100)]
    read = [digest(tensor.float().contiguous().numpy().tobytes()) for batch in batches for tensor in batch]
    splits = {split: traces.token_count(split) for split in ("train", "validation", "test")}
    return {"rows": read, "splits": splits, "defaults": _tensors(traces.defaults.as_tensors()), "stand_in":
            _tensors(traces.stand_in.state_dict()), "fingerprint": traces.view.fingerprint()}  # fmt: skip


def _open_checkpoint(_: Path, target: Path, __: Path) -> Any:
    from expertcast.checkpoints.checkpoint import PredictorCheckpoint

    predictor = PredictorCheckpoint.open(target).load()
    return {"config": predictor.config.as_dict(), "tensors": _tensors(predictor.state_dict())}


def _open_store(_: Path, target: Path, __: Path) -> Any:
    from expertcast.runtime.storage.expert_file import verify_store

    verify_store(target)


def _open_config(_: Path, target: Path, __: Path) -> Any:
    from expertcast.runtime.config import OffloadConfig

    return json.loads(json.dumps(OffloadConfig.load(target / CONFIG_FILE).as_dict()))


def _open_data(_: Path, target: Path, __: Path) -> Any:
    from expertcast.data.text import load_documents

    return [[document.text, document.hash] for document in load_documents(target)]


def _tensors(tensors: dict[str, Any]) -> dict[str, str]:
    from expertcast.predictors.artefacts import digest

    return {name: digest(tensor.float().contiguous().numpy().tobytes()) for name, tensor in tensors.items()}


_PREDICTORS = ("quasi_hidden", "early_attention", "linear")
_CHECKPOINT: dict[str, tuple[int, Operation]] = {
    "open": (4, _open_checkpoint),
    "inspect": (3, _command(_inspect)),
    "eval": (2, _command(lambda made, target, _: ["eval", str(made / TRACES), "--predictor", str(target)])),
    "generate": (1, _command(lambda made, at, _: generate_words(made, "--predictor", str(at), "--mode", "speculate"))),
}
OPERATIONS: dict[str, dict[str, tuple[int, Operation]]] = {
    TRACES: {
        "open": (3, _open_traces),
        "inspect": (3, _command(_inspect)),
        "eval": (3, _command(lambda _, target, __: ["eval", str(target), "--predictor", *_PREDICTORS])),
        "simulate": (2, _command(_simulate)),
        "train": (2, _command(lambda _, target, out: train_words(target, "linear", out / "trained"))),
    },
    ESTIMATOR: _CHECKPOINT,
    FREE: _CHECKPOINT,
    STORE: {
        "open": (2, _open_store),
        "generate": (2, _command(lambda made, target, _: generate_words(made, "--store-folder", str(target)))),
    },
    CONFIG: {
        "open": (2, _open_config),
        "generate": (2, _command(lambda made, target, _: generate_words(made, "--config", str(target / CONFIG_FILE)))),
    },
    DATA: {
        "open": (2, _open_data),
        "collect": (1, _command(lambda made, target, out: collect_words(made, out / "collected", target))),
    },
    **{
        name: {
            "open": (1, _open_store),
            "run": (2, lambda made, target, _, source=source: _run_quantised(
                made / source, store="disk", store_folder=target
            )),
        }
        for name, source in _STORED.items()
    },
    **{name: {"run": (1, lambda _, target, __: _run_quantised(target))} for name in QUANTISED},
}  # fmt: skip
"""Operations by artefact and name, each with its relative frequency; cheap ones are more frequent."""


def refusing(work: Callable[[], object]) -> Callable[[], int]:
    """Wrap a fork's function so that an expertcast error ends it as it ends the command line."""

    def refused() -> int:
        from expertcast.predictors import ExpertcastError

        try:
            work()
        except ExpertcastError as error:
            print(f"expertcast: {error}", file=sys.stderr)
            return 2
        return 0

    return refused


def perform(artefact: str, name: str, made: Path, target: Path, out: Path) -> tuple[Ended, Any]:
    """Run an operation in a fork; return how it ended and its result, None if it failed."""
    result, operation = out / "given.json", OPERATIONS[artefact][name][1]
    ended = run(refusing(lambda: result.write_text(json.dumps(operation(made, target, out)))), out, LIMITS)
    return ended, comparable(json.loads(result.read_text())) if result.is_file() else None


def open_artefact(artefact: str, target: Path) -> Any:
    """Return what the loader reads from an artefact."""
    return OPERATIONS[artefact]["open"][1](target, target, target)


def refusal(ended: Ended, status: int = 2) -> str:
    """Return the one line of a refusal; empty if the process did not end with this status and one line."""
    words = ended.err.split("expertcast: ")
    one = ended.status == status and len(words) > 1 and "\n" not in words[-1].strip() and "Traceback" not in ended.err
    return words[-1].strip() if one else ""


def outcome(ended: Ended, given: Any, right: Any, target: Path, edited: bool) -> tuple[str, str]:
    """Classify an outcome and describe it in a line.

    Args:
        ended: how the operation ended.
        given: its result.
        right: the result for undamaged files.
        target: the artefact; a refusal names it or one of its files.
        edited: whether a different result is correct because the file may be edited by hand, or was sealed again.
    """
    last = ended.err.strip().splitlines()[-1:] or [""]
    if ended.hung:
        return HUNG, " | ".join(line.strip() for line in ended.err.splitlines() if line.startswith("  File"))[:400]
    if ended.status == 0:
        if given == right:
            return RIGHT, ""
        return (EDITED, "") if edited else (CHANGED, difference(right, given))
    words = refusal(ended)
    if not words:
        frames = [line.strip() for line in ended.err.splitlines() if line.startswith("  File")]
        return TRACEBACK, f"status {ended.status}: {last[0]} <- {frames[-1] if frames else ''}"
    if target.name not in words and not any(path.name in words for path in target.rglob("*")):
        return UNNAMED, words
    return REFUSED, words


def comparable(given: Any) -> Any:
    """Return a result without values that depend on place, time or speed."""
    if isinstance(given, dict):
        if "tokens" in given and "stats" in given:
            return {"tokens": given["tokens"], "text": given["text"]}
        return {name: comparable(value) for name, value in given.items() if not _varies(name)}
    return [comparable(value) for value in given] if isinstance(given, list) else given


def difference(right: Any, given: Any, place: str = "") -> str:
    """Describe the first difference between two results."""
    if isinstance(right, dict) and isinstance(given, dict):
        for name in sorted(right.keys() | given.keys()):
            if right.get(name) != given.get(name):
                return difference(right.get(name), given.get(name), f"{place}.{name}")
    if isinstance(right, list) and isinstance(given, list) and len(right) == len(given):
        for number, (one, other) in enumerate(zip(right, given, strict=True)):
            if one != other:
                return difference(one, other, f"{place}[{number}]")
    return f"{place}: {str(right)[:60]} became {str(given)[:60]}"


def _varies(name: str) -> bool:
    return name in _EXPECTED or name == "ledger" or "seconds" in name or name.endswith(("_s", "_ms", "_at"))
