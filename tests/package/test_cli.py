"""The command line: its shape is frozen, its errors are one line, and every command works on real folders."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.cli import build_parser, main
from expertcast.data.traces import TraceDataset
from expertcast.predictors import MoEView, PredictorConfig
from expertcast.predictors.baselines import Frequency
from expertcast.predictors.next_token import NextToken, NextTokenConfig
from expertcast.runtime import OffloadConfig, offload
from expertcast.runtime.storage.expert_file import FILE_NAME
from tests.runtime.quantised import fp8, mxfp4
from tests.sealed import edit_json

_LOADED = {"--dtype", "--device", "--revision", "--trust-remote-code", "--attn-implementation"}
_TARGET = {"--layers", "--slots", "--memory", "--bandwidth", "--copy-over-compute", "--latency", "--link",
           "--predictor", "--persistence", "--skew", "--accuracy", "--replay", "--seed", *_LOADED}  # fmt: skip
_OFFLOADED = {"--slots", "--memory", "--store-folder", "--codec", *_LOADED}
COMMANDS = {
    "demo": {"--tokens", "--steps", "--minutes", "--out"},
    "collect": {"--data", "--text-column", "--tokens", "--out", "--window", "--batch-size", "--early-rank",
                *_OFFLOADED},
    "train": {"--predictor", "--out", "--ahead", "--set", "--tokens", "--data", "--default-vectors", "--log", "--seed",
              "--text-column", "--window", "--batch-size", "--early-rank", *_OFFLOADED},
    "eval": {"--predictor", "--split", "--ahead", "--report", "--curve", "--model", "--data", "--quality-tokens",
             "--text-column", "--bandwidth", "--layer-time", "--expert-bytes", *_OFFLOADED},
    "generate": {"--prompt", "--predictor", "--mode", "--slots", "--memory", "--policies", "--next-token",
                 "--store-folder", "--codec", "--pools", "--bandwidth", "--new-tokens", "--config", "--forecasts",
                 "--draft", "--draft-length", "--chat", "--system", "--temperature", "--top-p", "--seed", *_LOADED},
    "serve": {"--predictor", "--mode", "--slots", "--memory", "--policies", "--next-token", "--store-folder", "--codec",
              "--pools", "--bandwidth", "--config", "--forecasts", "--draft", *_LOADED, "--host", "--port",
              "--served-name", "--continuous-batching", "--kv-tokens", "--warm", "--hot-experts"},
    "store": {"--store-folder", "--codec", "--picture", *_LOADED},
    "inspect": {"--verify", "--revision", "--trust-remote-code"},
    "push": {"--private", "--revision", "--message", "--license"},
    "pull": {"--out", "--traces"},
    "bench": {*_TARGET, "--mode", "--cache", "--ahead", "--prompt-tokens", "--new-tokens", "--repetitions",
              "--no-advice", "--peer", "--minutes", "--timeline", "--next-token", "--likely", "--policies",
              "--forecasts", "--draft"},
    "advise": {*_TARGET, "--prompt-tokens", "--new-tokens", "--save", "--capacity",
               "--experts", "--expert-bytes", "--store-folder", "--draft"},
    "simulate": {"--sweep", "--policy", "--prefetch", "--miss", "--routing", "--pre-eviction", "--scope", "--preset",
                 "--published", "--predictor", "--ahead", "--next-token", "--slots", "--capacity", "--bandwidth",
                 "--latency", "--write-back", "--layer-time", "--split", "--tokens", "--prefill", "--batch", "--model",
                 "--data", "--text-column", "--no-quality", "--quality-tokens", "--processes", "--out", *_LOADED,
                 "--memory", "--experts", "--expert-bytes", "--codec", "--stored", "--decode-rate", "--decoders",
                 "--pools", "--store-folder"},
}  # fmt: skip


def test_command_line_is_frozen() -> None:
    subparsers = next(action for action in build_parser()._actions if action.dest == "command")
    found = {
        name: {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
        - {"--help", "--json", "--threads"}
        for name, parser in subparsers.choices.items()  # type: ignore[union-attr]
    }
    assert found == COMMANDS


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail with status 2 and one line; return the line."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("expertcast: ")
    return lines[0]


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text\n")
    out = str(tmp_path / "out")
    assert "COMMAND" in fails(capsys)
    assert "'0'" in fails(capsys, "collect", "reference", "--data", str(text), "--tokens", "0", "--out", out)
    assert "no/model" in fails(capsys, "inspect", "no/model")
    assert "missing.txt" in fails(
        capsys, "collect", "reference", "--data", "missing.txt", "--tokens", "9", "--out", out
    )
    assert "--data" in fails(capsys, "train", "reference", "--predictor", "linear", "--out", out)
    assert "unknown predictor 'nope'" in fails(capsys, "train", "reference", "--predictor", "nope", "--out", out)
    assert "no/traces" in fails(capsys, "eval", "no/traces", "--predictor", "linear")
    scored = ("eval", "no/traces", "--predictor", "linear")
    assert "give --layer-time" in fails(capsys, *scored, "--bandwidth", "pcie4")
    assert "give --bandwidth" in fails(capsys, *scored, "--expert-bytes", "9")
    assert "slots" in fails(capsys, "generate", "reference", "--prompt", "x", "--slots", "1", "--new-tokens", "1")
    generate = ("generate", "reference", "--prompt", "x")
    assert "unknown device 'abacus'" in fails(capsys, *generate, "--device", "abacus")
    assert "'cuda:99' is not available" in fails(capsys, *generate, "--device", "cuda:99")
    assert "is a folder" in fails(capsys, *generate, "--json", str(tmp_path))
    assert "there is no folder" in fails(capsys, *generate, "--json", str(tmp_path / "no" / "result.json"))
    (tmp_path / "config.json").write_text('{"model')
    assert "JSON" in fails(capsys, "inspect", str(tmp_path))
    assert "is a file" in fails(capsys, "train", "no/traces", "--predictor", "linear", "--out", str(text))
    assert not Path(out).exists()


def test_options_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's own help and the nearest option are named; an option's beginning is no option."""
    generate = ["generate", "reference", "--prompt", "x"]
    said = "unknown option --max-new-tokens, the nearest one is --new-tokens; see `expertcast generate --help`"
    assert said in fails(capsys, *generate, "--max-new-tokens", "5")
    assert "unknown option --promt, the nearest one is --prompt;" in fails(
        capsys, "generate", "reference", "--promt", "x"
    )
    assert "unknown option --store, the nearest one is --store-folder;" in fails(capsys, *generate, "--store", "disk")
    assert "b; see `expertcast inspect --help`" in fails(capsys, "inspect", "a", "b")
    assert "needs store='disk' (--store-folder)" in fails(capsys, *generate, "--codec", "bitsplit")
    assert "--draft-length 2 needs a draft" in fails(capsys, *generate, "--draft-length", "2")


def test_bench_and_advise_refuse_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'pcie9'" in fails(capsys, "bench", "reference", "--bandwidth", "pcie9")
    assert "--copy-over-compute" in fails(capsys, "bench", "reference", "--copy-over-compute", "0")
    assert "both set" in fails(capsys, "bench", "reference", "--copy-over-compute", "2", "--bandwidth", "1e9")
    assert "--layers cuts shapes" in fails(capsys, "bench", "no/model", "--layers", "2")
    assert "--layers 99" in fails(capsys, "bench", "olmoe-1b-7b", "--layers", "99")
    assert "leave it out" in fails(capsys, "bench", "olmoe-1b-7b", "--predictor", "next_norm")
    assert "give --new-tokens 4 or more" in fails(capsys, "advise", "reference", "--draft", "int4", "--new-tokens", "3")
    assert "--draft asks of a run from memory" in fails(
        capsys, "advise", "reference", "--draft", "int4", "--store-folder", "x"
    )
    assert "draft 'int4'" in fails(capsys, "advise", "reference", "--draft", "int4:acceptance=high")
    assert "--accuracy 1.5" in fails(capsys, "advise", "olmoe-1b-7b", "--accuracy", "1.5")
    assert "--accuracy 2" in fails(capsys, "bench", "reference", "--accuracy", "2", "--persistence", "0.5")
    assert "give --layers" in fails(capsys, "bench", "qwen3-235b-a22b")
    assert "emulated link" in fails(capsys, "bench", "reference", "--link", "instant", "--bandwidth", "1e9")
    assert "no/folder" in fails(capsys, "bench", "reference", "--timeline", "no/folder/trace.json")
    assert "new_tokens=1" in fails(capsys, "bench", "reference", "--new-tokens", "1")
    assert "--next-token CKPT" in fails(capsys, "bench", "reference", "--mode", "next_token")
    assert "'lri'" in fails(capsys, "bench", "reference", "--policies", "eviction=lri")
    assert "likely=2.0" in fails(capsys, "bench", "reference", "--likely", "2")
    assert "no/traces" in fails(capsys, "advise", "reference", "--replay", "no/traces")


def test_simulate_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], reference_traces: TraceDataset, tmp_path: Path
) -> None:
    traces = str(reference_traces.folder)
    assert "no/traces" in fails(capsys, "simulate", "no/traces")
    assert "choose from lru, fifo" in fails(capsys, "simulate", traces, "--policy", "mru")
    assert "'top_k' has no option" in fails(
        capsys, "simulate", traces, "--predictor", "next_norm", "--prefetch", "top_k:depth=2"
    )
    assert "give --predictor" in fails(capsys, "simulate", traces, "--prefetch", "top_k")
    assert "followed by --policy forecast only" in fails(capsys, "simulate", traces, "--next-token", "no/checkpoint")
    published = ("simulate", traces, "--published", "--preset")
    assert "specmd_1, specmd_2" in fails(capsys, *published, "activeevict")
    assert "unknown preset 'fastest': choose from on_demand" in fails(capsys, "simulate", traces, "--preset", "fastest")
    assert "choose from global, layer" in fails(capsys, "simulate", traces, "--scope", "token")
    assert "slots=3 is fewer than the 4 experts" in fails(capsys, "simulate", traces, "--slots", "3")
    assert "give one of them" in fails(capsys, "simulate", traces, "--slots", "9", "--capacity", "0.1")
    assert "capacity=2: give the share" in fails(capsys, "simulate", traces, "--capacity", "2")
    assert "'0' is no bandwidth" in fails(capsys, "simulate", traces, "--bandwidth", "0")
    assert "one for each of 12 layers" in fails(capsys, "simulate", traces, "--layer-time", "1", "2")
    assert "not so many documents" in fails(capsys, "simulate", traces, "--batch", "500")
    assert "neither a checkpoint folder nor a predictor" in fails(capsys, "simulate", traces, "--predictor", "nobody")
    assert "give --data" in fails(capsys, "simulate", traces, "--model", "no/model")
    generate = ["generate", "reference", "--prompt", "It is", "--new-tokens", "1", "--policies"]
    assert "KIND=POLICY of eviction, prefetch" in fails(capsys, *generate, "lfu", "scope=layer")
    assert "choose from on_demand" in fails(capsys, *generate, "lfu")
    assert "choose from lru" in fails(capsys, *generate, "eviction=mru")
    assert "needs to know the future" in fails(capsys, *generate, "eviction=belady")
    others = shutil.copytree(traces, tmp_path / "others")
    edit_json(others / "trace.json", lambda info: info.update(model="another"))
    assert "give --model and --data" in fails(capsys, "simulate", str(others), "--miss", "drop")
    assert "there is no folder" in fails(capsys, "simulate", traces, "--out", str(tmp_path / "no" / "folder"))


def test_simulate(capsys: pytest.CaptureFixture[str], reference_traces: TraceDataset, tmp_path: Path) -> None:
    out, result = tmp_path / "out", tmp_path / "result.json"
    command = ["simulate", str(reference_traces.folder), "--tokens", "200", "--processes", "1"]
    assert main([*command, "--sweep", "--policy", "lru", "lfu", "--out", str(out), "--json", str(result)]) == 0
    got = json.loads(result.read_text())
    assert json.loads((out / "results.json").read_text())["results"] == got["results"]
    evictions = ["lru", "lfu", "belady", "belady_bypass"]
    assert [row["eviction"] for row in got["results"]] == ["lru", "lfu"] * 5 + evictions[2:] * 5
    assert [row["slots"] for row in got["results"][:10:2]] == [7, 38, 76, 192, 345]
    wanted = {
        "eviction", "prefetch", "miss", "routing", "scope", "slots", "capacity", "bandwidth", "hit_rate", "misses",
        "collisions", "bytes", "tpot_s", "perplexity", "agreement",
    }  # fmt: skip
    assert all(wanted <= set(row) for row in got["results"])
    assert {path.name for path in out.iterdir()} == {
        "results.json", "table.txt", "hit_rate.png", "tpot.png", "collisions.png",
    }  # fmt: skip
    assert "belady_bypass" in (out / "table.txt").read_text()
    capsys.readouterr()
    options = ["--scope", "layer", "--capacity", "0.01", "0.25", "--bandwidth", "1e9", "--miss", "fetch", "drop"]
    assert main([*command, *options, "--no-quality", "--json", str(result)]) == 0
    unknown = json.loads(result.read_text())["results"]
    assert [(row["perplexity"], row["agreement"], row["kl"]) for row in unknown] == [(None, None, None)] * 2
    capsys.readouterr()
    assert main([*command, *options, "--quality-tokens", "40", "--json", str(result)]) == 0
    got = json.loads(result.read_text())
    assert "left out 2" in capsys.readouterr().out
    exact, lossy = got["results"]
    assert (exact["agreement"], exact["kl"]) == (1.0, 0.0)
    assert lossy["perplexity"] != exact["perplexity"]
    assert lossy["kl"] > 0
    assert lossy["tpot_s"] < exact["tpot_s"]


def test_simulate_with_forecasts(reference_traces: TraceDataset, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = ["simulate", str(reference_traces.folder), "--tokens", "200", "--processes", "1", "--json", str(result)]
    options = ["--predictor", "next_norm", "--prefetch", "none", "top_k", "--preset", "on_demand", "--policy", "lru"]
    assert main([*command, *options, "--bandwidth", "4e9"]) == 0
    preset, without, forecast = json.loads(result.read_text())["results"]
    assert preset["predictor"] is None
    assert without["misses"] == preset["misses"] > forecast["misses"]
    assert forecast["prefetch_precision"] > 0.5


def test_names_of_links_are_bandwidths() -> None:
    for name, value in (("pcie3", 12e9), ("pcie4", 25e9), ("pcie5", 50e9), ("1.5e9", 1.5e9)):
        assert build_parser().parse_args(["bench", "reference", "--bandwidth", name]).bandwidth == value


def test_bench_a_shape(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result, trace = tmp_path / "result.json", tmp_path / "trace.json"
    options = ["--layers", "3", "--slots", "24", "--accuracy", "1", "--prompt-tokens", "6", "12", "--new-tokens", "4"]
    assert (
        main(["bench", "reference", *options, "--repetitions", "1", "--timeline", str(trace), "--json", str(result)])
        == 0
    )
    got = json.loads(result.read_text())
    modes = ["on_demand", "exact", "speculate", "hybrid"]
    assert list(got["runs"]) == [*modes, *(f"{mode}_cache" for mode in modes)]
    wanted = {
        "tpot_s", "ttft_s", "compute_s", "copy_s", "idle_s", "bytes_per_token", "hit_rate", "overlap_efficiency",
        "link_utilisation", "tpot_over_bound", "identical",
    }  # fmt: skip
    assert all(wanted <= set(run) for run in got["runs"].values())
    assert all(run["identical"] for run in got["runs"].values())  # forecasts were set to be right
    per_layer = got["runs"]["exact"]["stats"]["per_layer"]
    assert all(layer["hits"] == layer["requests"] > 0 for layer in per_layer[1:])  # layer 0 has no forecast
    assert got["measured_routing"]["accuracy"] == 1.0
    assert "drawn" in got["routing"]
    assert list(got["prompts"]) == ["6", "12"]
    assert set(got["advice"]["errors"]) == set(got["runs"])
    assert got["hardware"]["machine"]
    assert got["versions"]["torch"]
    assert {"command", "date", "git_revision"} <= set(got)
    assert json.loads(trace.read_text())["traceEvents"]
    assert trace.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "routing: drawn" in capsys.readouterr().out


def test_bench_and_advise_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    options = ["--prompt-tokens", "8", "--new-tokens", "3", "--slots", "96", "--json", str(result)]
    command = ["bench", "reference", *options, "--mode", "on_demand", "exact", "--cache", "with", "--repetitions", "1"]
    assert main([*command, "--no-advice", "--bandwidth", "pcie3"]) == 0
    got = json.loads(result.read_text())
    assert list(got["runs"]) == ["on_demand_cache", "exact_cache"]
    assert all(run["identical"] for run in got["runs"].values())
    assert got["routing"] == "the model's own routers"
    assert got["bandwidth"] == 12e9
    drafts = ("int4:acceptance=0.95", "drop:acceptance=0.6,cost=0.5")
    assert main(["advise", "reference", *options, "--new-tokens", "6", "--draft", *drafts]) == 0
    advice = json.loads(result.read_text())
    assert [draft["draft"]["name"] for draft in advice["drafts"]] == ["int4", "drop"]
    assert [option["length"] for option in advice["drafts"][0]["options"]] == [0, 1, 2, 3]  # 5 steps
    assert advice["slots"] == 96
    assert {option["mode"] for option in advice["options"]} == {"on_demand", "exact", "speculate"}
    assert "advice: " in capsys.readouterr().out


def test_store_and_generate_from_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two commands for a model larger than memory: the second finds what the first packed."""
    packed, result = ["--store-folder", str(tmp_path / "store"), "--codec", "bitsplit"], tmp_path / "result.json"
    assert main(["store", "reference", *packed, "--json", str(result)]) == 0
    said = json.loads(result.read_text())
    assert said["bound"] < said["ratio"] < 0.8
    assert "768 experts" in capsys.readouterr().out
    changed = (tmp_path / "store" / FILE_NAME).stat().st_mtime_ns
    texts = []
    there = packed[:2]
    for options in ([], [*packed, "--memory", "2MB"], there, [*there, "--memory", "4MB", "--pools", "C=2MB"]):
        assert main(["generate", "reference", "--prompt", "It was", "--new-tokens", "4", *options]) == 0
        texts.append(capsys.readouterr().out.split("\n\n")[0])
    assert len(set(texts)) == 1
    assert (tmp_path / "store" / FILE_NAME).stat().st_mtime_ns == changed
    assert len(list((tmp_path / "store").iterdir())) == 1, "no second store"
    assert "loses bits" in fails(capsys, "store", "reference", "--store-folder", str(tmp_path), "--codec", "int4")


def test_exponents_as_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words, picture = ["store", "reference", "--store-folder", str(tmp_path / "store"), "--picture"], tmp_path / "e.png"
    assert main([*words, str(picture)]) == 0
    assert f"wrote {picture}" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "ends in .png" in fails(capsys, *words, str(tmp_path / "e.txt"))
    whole = ["--dtype", "fp32", "--codec", "raw"]
    assert "of 16-bit floats" in fails(capsys, *words, str(tmp_path / "other.png"), *whole)
    assert not (tmp_path / "other.png").exists()


@pytest.mark.parametrize(("codec", "most"), [("fp8", 0.68), ("mxfp4", 0.33)])
def test_store_of_what_is_shipped(codec: str, most: float, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Tiny experts, of which padding is a third; another form is refused, and inspect names the right one."""
    model = fp8("qwen3_moe", tmp_path / "model") if codec == "fp8" else mxfp4(tmp_path / "model")
    packed, result = ["--store-folder", str(tmp_path / "store"), "--codec", codec], tmp_path / "result.json"
    assert main(["store", model, *packed, "--json", str(result)]) == 0
    said = json.loads(result.read_text())
    assert said["ratio"] < most
    assert said["bound"] is None
    assert main(["inspect", str(tmp_path / "store"), "--verify"]) == 0
    capsys.readouterr()
    assert main(["inspect", model]) == 0
    assert f"{codec}, computed in bfloat16" in capsys.readouterr().out
    other = "mxfp4" if codec == "fp8" else "fp8"
    line = fails(capsys, "store", model, "--store-folder", str(tmp_path / "store"), "--codec", other)
    assert f"is shipped in {codec}: choose codec 'raw' or 'bitsplit'" in line


def test_bench_with_forecasts_of_tokens(tmp_path: Path, reference_view: MoEView) -> None:
    """Runs with forecasts take policies and next_token, those on demand do not; advice leaves them out."""
    forecaster = NextToken(NextTokenConfig(tokens=2, width=16, inner=8, known_ids=5000), reference_view.shape)
    torch.nn.init.normal_(forecaster.network.head.weight)  # sure of something else for every token
    forecaster.know(torch.arange(5000))
    save_predictor(forecaster, tmp_path / "tokens", view=reference_view, metrics={})
    result = tmp_path / "result.json"
    options = ["--prompt-tokens", "8", "--new-tokens", "3", "--slots", "96", "--repetitions", "1", "--cache", "with"]
    forecasts = ["--next-token", str(tmp_path / "tokens"), "--likely", "0.05", "--policies", "eviction=forecast"]
    chosen = ["--mode", "on_demand", "next_token", "--bandwidth", "pcie3", "--json", str(result)]
    assert main(["bench", "reference", *options, *forecasts, *chosen]) == 0
    got = json.loads(result.read_text())
    on_demand, tokens = got["runs"]["on_demand_cache"], got["runs"]["next_token_cache"]
    assert tokens["identical"]
    assert tokens["stats"]["prefetched"] > on_demand["stats"]["prefetched"] == 0
    assert list(got["advice"]["errors"]) == ["on_demand_cache"]


def test_inspect_verify(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    reference_model: PreTrainedModel,
    reference_view: MoEView,
    reference_traces: TraceDataset,
) -> None:
    """A changed file is one line by its name, and what was read is told; folders of others have nothing to verify."""
    checkpoint = tmp_path / "checkpoint"
    frequency = Frequency(PredictorConfig(), reference_view.shape)
    frequency.learned_from = reference_traces.learned_from()
    save_predictor(frequency, checkpoint, view=reference_view, metrics={"ahead": 1})
    traces = tmp_path / "traces"
    shutil.copytree(reference_traces.folder, traces)
    store = tmp_path / "store"
    offload(reference_model, store="disk", store_folder=store).close()
    for target, kinds in ((checkpoint, 4), (traces, 5), (store, 1)):
        assert main(["inspect", str(target), "--verify"]) == 0
        assert capsys.readouterr().out.count(": right\n") == kinds
        for path in sorted(target.rglob("*")):
            if path.is_file() and path.name != "README.md":
                content = path.read_bytes()
                path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
                assert path.name in fails(capsys, "inspect", str(target), "--verify")
                path.write_bytes(content)
    assert "holds neither traces nor" in fails(capsys, "inspect", str(tmp_path), "--verify")
    assert "holds neither traces nor" in fails(capsys, "inspect", "reference", "--verify")


def test_collect_train_eval_generate_inspect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    traces, checkpoint, report = (str(tmp_path / name) for name in ("traces", "ckpt", "report"))
    result = tmp_path / "result.json"
    assert main(["collect", "reference", "--data", "reference", "--tokens", "6000", "--out", traces]) == 0
    assert main(["train", traces, "--predictor", "linear", "--out", checkpoint, "--ahead", "1", "2"]) == 0
    capsys.readouterr()
    evaluate = ["eval", traces, "--predictor", "quasi_hidden", checkpoint, "--report", report, "--json", str(result)]
    assert main([*evaluate, "--bandwidth", "4e9", "--layer-time", "1e-4", "--expert-bytes", "200000"]) == 0
    scored = json.loads(result.read_text())
    assert scored["split"] == "test"
    assert set(scored["recall_at_k"]) == set(scored["ledger"]) == {"quasi_hidden", "linear"}
    for name, costs in scored["ledger"].items():  # a copy takes half of a layer, whatever the forecast takes of it
        assert scored["timely@link"][name]["mean"] <= scored["timely_bytes@link"][name]["mean"] < 0.5, name
        assert scored["calibration"][name]["ece"] < scored["calibration"][name]["before"]["ece"], name
        assert min(costs["training_s"], costs["collection_s"], costs["forecast_ms"]) > 0, name
    printed = capsys.readouterr().out
    assert "timely@link" in printed
    assert "collection s" in printed
    assert "collection s" in (Path(report) / "index.html").read_text()
    metrics = json.loads((Path(checkpoint) / "metrics.json").read_text())
    assert metrics["ledger"]["linear"]["training_s"] == scored["ledger"]["linear"]["training_s"]
    assert set(metrics) >= {"timely@R1", "timely@R2", "timely@R5", "calibration"}
    card = (Path(checkpoint) / "README.md").read_text()
    for row in ("timely@R2", "ECE before", "ms per forecast", "collection s"):
        assert f"{row} | " in card
    command = ["generate", "reference", "--prompt", "It is a truth", "--predictor", checkpoint, "--new-tokens", "4"]
    assert main([*command, "--json", str(result)]) == 0
    exact = json.loads(result.read_text())
    assert main([*command[:4], "--new-tokens", "4", "--json", str(result)]) == 0
    assert json.loads(result.read_text())["tokens"] == exact["tokens"]
    policies = ["--policies", "eviction=importance:gamma=0.8", "prefetch=value"]
    assert main([*command, *policies, "--json", str(result)]) == 0
    assert json.loads(result.read_text())["tokens"] == exact["tokens"]
    assert main([*command, "--policies", "activeevict", "--slots", "96", "--json", str(result)]) == 0
    assert json.loads(result.read_text())["stats"]["skipped"] > 0  # its routing is lossy
    on_disk = ["--store-folder", str(tmp_path / "packed"), "--memory", "4MB"]
    assert main([*command, *on_disk, "--json", str(result)]) == 0
    assert json.loads(result.read_text())["tokens"] == exact["tokens"]
    for target in ("reference", traces, checkpoint):
        capsys.readouterr()
        assert main(["inspect", target]) == 0
        assert capsys.readouterr().out.strip()


def _decoded(*argv: str, result: Path) -> list[int]:
    assert (
        main(["generate", "reference", "--prompt", "It is a truth", "--new-tokens", "4", "--json", str(result), *argv])
        == 0
    )
    tokens: list[int] = json.loads(result.read_text())["tokens"]
    return tokens


def test_what_is_advised_is_saved_and_deployed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved, result = tmp_path / "offload.json", tmp_path / "result.json"
    short = ["--prompt-tokens", "8", "--new-tokens", "3", "--memory", "4MB"]
    assert main(["advise", "reference", *short, "--save", str(saved), "--json", str(result)]) == 0
    assert f"wrote {saved}" in capsys.readouterr().out
    advice, config = json.loads(result.read_text()), OffloadConfig.load(saved)
    assert (config.predictor, config.ahead) == (advice["predictor"], advice["ahead"] or 1)
    assert (config.link, config.bandwidth) == ("emulated", advice["bandwidth"])
    tokens = _decoded("--config", str(saved), result=result)
    assert tokens == _decoded(result=result)


def test_options_win_over_the_file(tmp_path: Path) -> None:
    saved, result = tmp_path / "offload.json", tmp_path / "result.json"
    OffloadConfig(predictor="next_norm", mode="speculate", slots=96, policies="activeevict").save(saved)
    plain, file = _decoded(result=result), ["--config", str(saved)]
    stats = json.loads(result.read_text())["stats"]
    _decoded(*file, result=result)
    assert json.loads(result.read_text())["stats"]["skipped"] > 0  # the file's preset is lossy
    exact = ["--mode", "exact", "--policies", "eviction=lru"]
    assert _decoded(*file, *exact, "--slots", "192", result=result) == plain
    assert json.loads(result.read_text())["stats"]["hits"] > stats["hits"]  # of the file's predictor
    on_disk = ["--memory", "4MB", "--store-folder", str(tmp_path / "packed")]
    assert _decoded(*file, *exact, *on_disk, result=result) == plain
    assert any((tmp_path / "packed").iterdir())


def test_bad_configurations_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "offload.json"
    generate = ["generate", "reference", "--prompt", "It is", "--new-tokens", "1", "--config", str(saved)]
    assert "cannot read" in fails(capsys, *generate)
    for content, message in (
        ("{", "is no JSON"),
        ("[]", "holds no JSON object"),
        ('{"slot": 8}', "unknown option 'slot': choose from predictor"),
        ('{"slots": "8"}', "slots='8': give a whole number or leave it out"),
        ('{"mode": "fast"}', "unknown mode 'fast'"),
        ('{"predictor": "nobody"}', "predictor 'nobody' is neither a folder nor one of"),
    ):
        saved.write_text(content)
        assert message in fails(capsys, *generate)
    OffloadConfig(overfetch=1.5).save(saved)
    line = fails(capsys, *generate, "--policies", "eviction=lfu")
    assert "overfetch belongs to the policies" in line
    assert str(saved) in line
    assert "give slots or memory, not both" in fails(capsys, *generate, "--slots", "9", "--memory", "4MB")
    advise = ["advise", "reference", "--save"]
    assert "there is no folder" in fails(capsys, *advise, str(tmp_path / "no" / "offload.json"))
    assert "routes by itself" in fails(capsys, *advise, str(saved), "--accuracy", "0.5")
    assert OffloadConfig.load(saved).overfetch == 1.5


@pytest.mark.parametrize(
    ("code", "status", "before"),
    [
        ("from expertcast.cli import main; sys.exit(main(['inspect', 'reference']))", 2, "expertcast: "),
        ("import expertcast; expertcast.offload", 1, "ImportError: "),
    ],
)
def test_another_system_is_refused_in_one_line(code: str, status: int, before: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.platform = 'win32'; {code}"], capture_output=True, text=True
    )
    assert ran.returncode == status
    line = ran.stderr.splitlines()[-1]
    assert line == f"{before}expertcast runs on Linux and macOS, not on win32: on Windows, install it in WSL"
