"""What a command refuses is one line with status 2, before anything is written; what a form of a command does not read
is refused."""

from __future__ import annotations

import argparse
import importlib
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from expertcast.cli import COMMANDS, build_parser
from expertcast.commands.options import read_options
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from tests.package.test_cli import fails
from tests.sealed import edit_json

ROUTING = Path(__file__).resolve().parents[2] / "benchmarks" / "routing" / "gpt-oss-120b-k2.parquet"
GENERATE = "generate reference --prompt x --new-tokens 1"
COLLECT = "collect reference --out {new} --data"
DISK = "advise reference --store-folder {tmp}"
TRAIN = "train {traces} --predictor linear --out {new}"
REFUSED = [
    ("", "COMMAND"),
    (f"{COLLECT} {{text}} --tokens 0", "'0'"),
    (f"{COLLECT} missing.txt --tokens 9", "missing.txt"),
    ("collect {model} --out {new} --data reference --tokens 1500 --early-rank 1000", "early_rank=1000 is out of range"),
    ("inspect no/model", "no/model"),
    ("inspect {damaged}", "JSON"),
    ("store reference", "give --store-folder for the packed experts, or --in-place"),
    ("store reference --in-place --store-folder {new}", "give store='disk' without store_folder"),
    (f"{GENERATE} --in-place --store-folder {{new}}", "give store='disk' without store_folder"),
    ("inspect a b", "b; see `expertcast inspect --help`"),
    ("train reference --predictor linear --out {new}", "--data"),
    (
        f"{TRAIN} --window 7 --slots 3 --store-folder x --dtype fp16",
        "--window, --slots, --store-folder, --dtype: not read by training on traces; leave it out",
    ),
    ("eval {traces} --predictor linear --data reference", "--data: not read by eval without --model"),
    ("inspect {traces} --memory 1GB --revision v2", "--memory, --revision: not read by"),
    ("store reference --store-folder {new} --device cuda", "unknown option --device"),
    (f"{TRAIN} --device cuda:99", "'cuda:99' is not available"),
    ("eval {traces} --predictor linear --device cuda:99", "'cuda:99' is not available"),
    ("train reference --predictor nope --out {new}", "unknown predictor 'nope'"),
    ("train no/traces --predictor linear --out {text}", "is a file"),
    (f"{COLLECT} reference --tokens 900".replace("{new}", "{broken}"), "is a broken link: give a folder"),
    ("store reference --store-folder {traces}", "give a new or empty store_folder"),
    ("eval no/traces --predictor linear", "no/traces"),
    ("eval no/file.npz --predictor frequency", "no such file"),
    ("eval {routing} --predictor frequency linear", "linear reads hidden states"),
    ("eval {routing} --predictor {damaged}", "nothing that a trained predictor reads"),
    (
        "eval {routing} --predictor frequency --ahead 2",
        "--ahead: not read by a routing file, which has expert ids only",
    ),
    ("eval no/traces --predictor linear --bandwidth pcie4", "give --layer-time"),
    ("eval no/traces --predictor linear --expert-bytes 9", "give --bandwidth"),
    # the command's own help and the nearest option are named; an option's beginning is no option
    (f"{GENERATE} --max-new-tokens 5", "unknown option --max-new-tokens, the nearest one is --new-tokens; see `expert"),
    ("generate reference --promt x", "unknown option --promt, the nearest one is --prompt;"),
    (f"{GENERATE} --store disk", "unknown option --store, the nearest one is --store-folder;"),
    (f"{GENERATE} --slots 1", "slots"),
    (f"{GENERATE} --device abacus", "unknown device 'abacus'"),
    (f"{GENERATE} --device cuda:99", "'cuda:99' is not available"),
    (f"{GENERATE} --json {{tmp}}", "is a folder"),
    (f"{GENERATE} --json {{tmp}}/no/result.json", "there is no folder"),
    (f"{GENERATE} --codec bitsplit", "needs store='disk' (--store-folder)"),
    (f"{GENERATE} --draft-length 2", "--draft-length 2 needs a draft"),
    (f"{GENERATE} --system \udcff", r"'\udcff' is not valid Unicode: write it in UTF-8"),
    (f"{GENERATE} --chat", "tokenizer of 'reference' has no chat template: leave --chat out"),
    (f"{GENERATE} --system Briefly", "give --chat too"),
    (f"{GENERATE} --seed 1", "--seed needs"),
    (f"{GENERATE} --temperature 1 --seed {10**20}", "is no whole number from 0 to 2^63 - 1"),
    (f"train traces --predictor linear --seed {10**20}", "is no whole number from 0 to 2^63 - 1"),
    (f"{GENERATE} --top-p 1.5", "--top-p 1.5: give a probability"),
    (f"{GENERATE} --temperature 0", "'0' is no number above 0"),
    (f"{GENERATE} --attn-implementation divided", "attn_implementation"),
    (f"{GENERATE} --policies lfu scope=layer", "KIND=POLICY of eviction, prefetch"),
    (f"{GENERATE} --policies lfu", "choose from on_demand"),
    (f"{GENERATE} --policies eviction=mru", "choose from lru"),
    (f"{GENERATE} --policies eviction=belady", "belady"),
    ("serve reference --kv-tokens 512", "--kv-tokens needs --continuous-batching"),
    ("serve reference --continuous-batching --draft int4", "--draft or --continuous-batching"),
    ("store reference --store-folder {tmp} --codec int4", "unknown codec 'int4'"),
    ("bench reference --bandwidth pcie9", "'pcie9'"),
    ("bench reference --copy-over-compute 0", "--copy-over-compute"),
    ("bench reference --copy-over-compute 2 --bandwidth 1e9", "both set"),
    ("bench reference --link instant --bandwidth 1e9", "bandwidth"),
    ("bench reference --link cuda --device cpu", "--link cuda"),
    ("bench reference --new-tokens 1", "new_tokens=1"),
    ("bench reference --policies eviction=lri", "'lri'"),
    (
        "advise reference --store-folder {new} --replay no/routing.csv",
        "no/routing.csv: no such file; give a routing file",
    ),
    ("advise reference --save {tmp}/no/offload.json", "there is no folder"),
    (f"{DISK} --link instant --predictor next_norm", "--link, --predictor: not read by --store-folder"),
    (DISK, "experts.safetensors"),
    ("simulate no/traces", "no/traces"),
    ("simulate {traces} --policy mru", "choose from lru, fifo"),
    ("simulate {traces} --predictor next_norm --prefetch top_k:depth=2", "'top_k' has no option"),
    ("simulate {traces} --prefetch top_k", "give --predictor"),
    ("simulate {traces} --preset fastest", "unknown preset 'fastest': choose from on_demand"),
    ("simulate {traces} --scope token", "choose from global, layer"),
    ("simulate {traces} --slots 3", "slots=3 is fewer than the 4 experts"),
    ("simulate {traces} --slots 9 --capacity 0.1", "give one of them"),
    ("simulate {traces} --capacity 2", "capacity=2: give the share"),
    ("simulate {traces} --bandwidth 0", "'0' is no bandwidth"),
    ("simulate {traces} --layer-time 1 2", "one for each of 12 layers"),
    ("simulate {traces} --batch 500", "not so many documents"),
    ("simulate {traces} --predictor nobody", "unknown predictor 'nobody'"),
    ("simulate {traces} --model no/model", "give --data"),
    ("simulate {others} --miss drop", "give --model and --data"),
    ("simulate {traces} --out {tmp}/no/folder", "there is no folder"),
    ("simulate no/file.parquet", "no such file"),
    ("simulate {routing} --predictor linear --miss drop", "--miss, --predictor: not read by a routing file"),
    ("collect reference --out {new} --tokens 900 --data reference --text-column body", "'body' (--text-column) is of"),
    ("simulate {routing} --memory 1GB --slots 9", "give one of them"),
    ("simulate {routing} --memory much", "memory='much' is no size"),
    ("simulate {routing} --memory 9MB", "give 26438400 or more"),
    ("simulate {routing} --scope token", "choose from global, layer"),
    ("simulate {routing} --policy mru", "choose from lru, fifo"),
    ("simulate {routing} --policy score", "score reads the router's scores"),
    ("simulate {routing} --capacity 2", "--capacity 2: give a share"),
    ("simulate {routing} --expert-bytes 3MiB", "leave --expert-bytes out"),
    ("simulate {routing} --experts-per-layer 100", "ids range from 0 to 99"),
    ("simulate {array}", "set --expert-bytes"),
]


@pytest.fixture(scope="module")
def paths(
    reference_traces: TraceDataset, tiny_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """What the commands are given, by the name in braces."""
    folder = tmp_path_factory.mktemp("refused")
    names = ("new", "text", "damaged", "others", "broken", "array.npy")
    found = {Path(name).stem: folder / name for name in names}
    found |= {"tmp": folder, "traces": reference_traces.folder, "routing": ROUTING}
    found["model"] = Path(tiny_folder)
    found["text"].write_text("some text\n")
    found["broken"].symlink_to(folder / "nothing")
    found["damaged"].mkdir()
    (found["damaged"] / "config.json").write_text('{"model')
    (folder / "experts.safetensors").write_bytes(b"something else")
    shutil.copytree(reference_traces.folder, found["others"])
    edit_json(found["others"] / "trace.json", lambda info: info.update(model="another"))
    np.save(found["array"], np.array([[[0, 1]], [[1, 2]]]))
    return found


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused(line: str, said: str, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert said in fails(capsys, *line.format(**paths).split())
    assert not paths["new"].exists()


FORMS = (
    "demo", "collect {model} --data reference --tokens 900 --out {new}", f"{GENERATE}", "serve reference",
    "chat reference", "store reference --store-folder {new}",
    "train {traces} --predictor frequency --out {new}", "eval {traces} --predictor frequency",
    "eval {routing} --predictor frequency",
    "train {model} --data reference --predictor frequency --out {new}",
    "eval {traces} --predictor frequency --model reference",
    "inspect {traces}", "inspect {model}", "inspect {traces} --verify", "simulate {routing}", "simulate {traces}",
    "simulate {traces} --miss drop", "simulate {traces} --miss drop --no-quality",
    "advise reference", "advise reference --store-folder {new}", "bench reference",
)  # fmt: skip
"""Each way to run each command, as short as it can be."""
VALUES = {"--experts": "int4", "--policies": "lru", "--config": "x.json", "--draft": "none", "--picture": "x.png"}


def module_and_parser(line: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    command = line.split()[0]
    parsers = next(action for action in build_parser(command)._actions if action.dest == "command").choices
    assert isinstance(parsers, dict)
    return importlib.import_module(f"expertcast.commands.{command}"), parsers[command]


@pytest.mark.parametrize("line", FORMS)
def test_options_that_a_form_does_not_read_are_refused(line: str, paths: dict[str, Path]) -> None:
    module, parser = module_and_parser(line)
    words = line.format(**paths).split()[1:]
    for action in parser._actions:
        if action.dest in ("help", "json", "threads") or not action.option_strings:
            continue
        (flag,) = action.option_strings
        value = VALUES.get(flag) or next(iter(action.choices or ["1"]))
        try:
            with_it = parser.parse_args([*words, flag, *([] if action.nargs == 0 else [value])])
            form = getattr(read_options(module.Options, with_it), "form", None)
        except ExpertcastError:
            continue
        assert form is None or action.dest in form.reads, flag


def test_every_option_is_read_by_some_form(paths: dict[str, Path]) -> None:
    read = {command: set[str]() for command in COMMANDS}
    for line in FORMS:
        module, parser = module_and_parser(line)
        form = getattr(read_options(module.Options, parser.parse_args(line.format(**paths).split()[1:])), "form", None)
        known = {action.dest for action in parser._actions}
        assert form is None or known >= form.reads, line
        read[line.split()[0]] |= known if form is None else form.reads
    for command, names in read.items():
        _, parser = module_and_parser(command)
        assert {action.dest for action in parser._actions} - names <= {"help", "json", "threads"}, command
