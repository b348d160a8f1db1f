"""Matrices in ggml's block types: products, expanded weights, and blocks written from other formats' codes."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.integrations.gguf.kernels import dequantize_blocks

from expertcast.data import ggml, packed_experts
from expertcast.data.experts import inner_activations
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.packed_experts import BlockForm, Piece, pack_module
from expertcast.data.packed_linear import PackedEmbedding, PackedLinear
from expertcast.data.weights.blocks import mxfp4_blocks, to_blocks
from expertcast.predictors import ExpertcastError
from tests.families.models import tiny_model

_EXPERTS = 3
_SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_M": (54,),
    "Q4_1": (0, 2), "Q5_1": (0, 2), "MXFP4": (),
}  # fmt: skip
"""First bytes of the fp16 numbers in a block, (0,) for others."""
_ERROR = {"F32": 1e-6, "F16": 1e-3, "BF16": 6e-3}
"""Largest relative error of a product; of quantised types that of inputs in 8 bits."""


def _random(kind: str, outputs: int = 48, inputs: int = 512, experts: int = _EXPERTS) -> Tensor:
    """Random blocks with small scales, uint8 [E, N, row bytes]."""
    draw = np.random.default_rng(outputs)
    _, elements, nbytes = ggml.TYPES[kind]
    if kind in ggml.FLOATS:
        numbers = torch.randn(experts, outputs, inputs, generator=torch.Generator().manual_seed(0))
        return numbers.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]).view(torch.uint8)
    blocks = draw.integers(256, size=(experts, outputs, inputs // elements, nbytes), dtype=np.uint8)
    for at in _SCALES.get(kind, (0,)):
        scales = draw.uniform(0.01, 0.02, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = draw.integers(120, 128, size=blocks.shape[:-1])
    return torch.from_numpy(blocks).flatten(-2)


def _weights(kind: str, blocks: Tensor) -> Tensor:
    """By the package gguf, float32 [E, N, I]."""
    gguf: Any = pytest.importorskip("gguf")
    stored = gguf.GGMLQuantizationType[kind]
    given = blocks.view({"F32": torch.float32, "F16": torch.float16}.get(kind, torch.uint8)).numpy()
    return torch.from_numpy(np.array(gguf.dequantize(given, stored), dtype=np.float32))


def _product(kind: str, blocks: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    own = ggml.Matrices.of(kind, blocks.flatten(1), 0, blocks.shape[1], rows.shape[-1])
    return ggml.product(own, rows, ids).clone()


def test_a_product_runs_on_the_faster_number_of_threads() -> None:
    team, work = ggml._Team(), 1 << 20

    def runs(seconds: dict[bool, float], total: float) -> list[bool]:
        """Return the choices, whether one thread, of products that take so many seconds together."""
        found = list[bool]()
        while total > 0:
            found.append(team.alone(work))
            total -= seconds[found[-1]]
            team.took(found[-1], seconds[found[-1]], work)
        return found

    quiet, busy = {True: 0.0004, False: 0.00025}, {True: 0.0004, False: 0.004}
    for seconds, fast in ((quiet, False), (busy, True), (quiet, False)):
        runs(seconds, 1.5)  # enough to find out
        found = runs(seconds, 2.0)
        tried = found.count(not fast)
        assert tried > 0
        assert tried * abs(seconds[True] - seconds[False]) <= 2.0 * 0.025


def test_one_product_that_stands_still_does_not_decide_for_long() -> None:
    """Threads that wait for each other take milliseconds in place of a tenth of one: the first time, and later."""
    team, work, quiet = ggml._Team(), 1 << 20, {True: 0.00005, False: 0.00003}
    for _ in range(3):
        alone = team.alone(work)
        team.took(alone, quiet[alone] if alone else 0.01, work)
        found = list[bool]()
        for _ in range(200):
            found.append(team.alone(work))
            team.took(found[-1], quiet[found[-1]], work)
        assert found[100:].count(True) <= 5


@pytest.mark.parametrize("kind", ggml.TYPES)
def test_products_are_those_of_the_dequantised_weights(kind: str) -> None:
    """Within the rounding of inputs to 8 bits; expanded weights exactly, as gguf has them."""
    blocks = _random(kind)
    weights = _weights(kind, blocks)
    assert torch.equal(ggml.dequantise(kind, blocks), weights)
    draw = torch.Generator().manual_seed(0)
    for tokens, top_k, given in ((1, 1, 1), (1, 2, 1), (5, 2, 1), (3, 2, 2), (70, 1, 1)):
        rows = torch.randn(tokens, given, 512, generator=draw)
        ids = torch.randint(_EXPERTS, (tokens, top_k), generator=draw)
        found = _product(kind, blocks, rows, ids)
        expected = torch.einsum("tkni,tki->tkn", weights[ids].double(), rows.expand(-1, top_k, -1).double())
        assert found.shape == (tokens, top_k, 48)
        assert (found - expected).norm() <= _ERROR.get(kind, 0.012) * expected.norm()


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (7, 32), (48, 96), (33, 256), (16, 1024)])
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "MXFP4", "Q4_K", "IQ2_XXS"])
def test_sizes(kind: str, outputs: int, inputs: int) -> None:
    """Any number of outputs, and inputs that are whole blocks; others are refused."""
    if inputs % ggml.TYPES[kind].elements:
        with pytest.raises(ExpertcastError, match=rf"{inputs} inputs cannot be packed as {kind}.* give experts='exp"):
            BlockForm((Piece(kind, outputs),), inputs)
        return
    blocks, rows = _random(kind, outputs, inputs), torch.randn(2, 1, inputs)
    found = _product(kind, blocks, rows, torch.tensor([[2], [0]]))[:, 0]
    for expert, row, own in zip((2, 0), rows, found, strict=True):
        weights = _weights(kind, blocks)[expert]
        most = weights.abs().sum(1) * row.abs().max() / 254  # half a step of 8 bits for each input
        assert ((own - weights @ row[0]).abs() <= 1.1 * most).all()


def test_graphs_take_as_much_memory_as_their_results_need() -> None:
    """Twice, since the first run of one with more results moves the memory of all."""
    rows = torch.randn(3, 64)
    for count in (2, 40, 2):
        graph, output = ggml.Graph("F32", 0, 2 * count + 8), torch.empty(6, 32)
        row = found = graph.tensor(rows)
        for _ in range(count):
            found = graph.apply("add", graph.view("reshape_2d", found, 64, 3), row)
        graph.cast(graph.view("reshape_2d", found, 32, 6), torch.float32, output)
        for _ in range(2):
            graph.run()
            expected = sum([rows] * count, rows).view(6, 32)
            assert torch.equal(output, expected)


@pytest.mark.parametrize("inner", [32, 96, 256])
def test_two_products_with_swiglu_between_them(inner: int) -> None:
    """The bits of one product, the gate by itself, and the other product, for one row and many; near torch's gate."""
    up, down = _random("Q4_0", 2 * inner, 64), _random("Q8_0", 48, inner)
    first = ggml.Matrices.of("Q4_0", up.flatten(1), 0, 2 * inner, 64)
    second = ggml.Matrices.of("Q8_0", down.flatten(1), 0, 48, inner)
    rows, ids = torch.randn(300, 1, 64), torch.randint(_EXPERTS, (300, 2))
    products = ggml.product(first, rows, ids).clone()
    gated = ggml.swiglu(products.flatten(0, 1))
    gates, ups = products.flatten(0, 1).chunk(2, dim=1)
    assert torch.allclose(gated, torch.nn.functional.silu(gates) * ups, rtol=1e-5, atol=1e-5)
    expected = ggml.product(second, gated.view(300, 2, inner), ids).clone()
    assert torch.equal(ggml.product(first, rows, ids, second), expected)
    for row in (0, 299):
        one = slice(row, row + 1)
        assert torch.equal(ggml.product(first, rows[one], ids[one], second), expected[one])
    assert ggml.swiglu(products.new_empty(0, 2 * inner)).shape == (0, inner)
    with pytest.raises(ExpertcastError, match="out of range"):
        ggml.product(first, rows, ids + _EXPERTS, second)


def test_a_rows_result_depends_on_nothing_else() -> None:
    """Not on other rows, threads, or the place and distance of the matrices: also at addresses of no alignment."""
    blocks, rows = _random("Q4_K", outputs=17), torch.randn(40, 1, 512)
    ids = torch.randint(_EXPERTS, (40, 2))
    expected = _product("Q4_K", blocks, rows, ids)
    assert torch.equal(
        torch.cat([_product("Q4_K", blocks, rows[i : i + 1], ids[i : i + 1]) for i in range(40)]), expected
    )
    assert torch.equal(_product("Q4_K", blocks, rows.expand(-1, 2, -1), ids), expected)
    pool = torch.zeros(5, blocks[0].numel() + 999, dtype=torch.uint8)
    for start in (0, 7, 256):
        pool[1:4, start : start + blocks[0].numel()] = blocks.flatten(1)
        slots = ggml.Matrices.of("Q4_K", pool, start, 17, 512)
        assert torch.equal(ggml.product(slots, rows, ids + 1), expected)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(_product("Q4_K", blocks, rows, ids), expected)
        assert torch.equal(_product("Q4_K", blocks.repeat(1, 9, 1), rows, ids)[..., 17:34], expected)
    finally:
        torch.set_num_threads(threads)


def test_threads_and_modes_have_memory_of_their_own() -> None:
    blocks, rows = _random("Q8_0"), torch.randn(64, 1, 512)
    ids = torch.randint(_EXPERTS, (64, 2))
    expected = _product("Q8_0", blocks, rows, ids)

    def run(mode: Any) -> bool:
        with mode():
            return all(torch.equal(_product("Q8_0", blocks, rows, ids), expected) for _ in range(20))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(run, [torch.inference_mode, torch.no_grad, torch.enable_grad] * 3))
    assert _product("Q8_0", blocks, rows.requires_grad_(), ids).requires_grad is False


def test_what_would_end_the_process_is_refused() -> None:
    blocks, rows = _random("Q4_0"), torch.randn(1, 1, 512)
    for ids in ([[3]], [[-1]], [[2**31 + 1]]):
        with pytest.raises(ExpertcastError, match="out of range: there are 3"):
            _product("Q4_0", blocks, rows, torch.tensor(ids))
    assert _product("Q4_0", blocks, torch.empty(0, 1, 512), torch.empty(0, 2, dtype=torch.long)).shape == (0, 2, 48)


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ([], r"cannot be used \(no library ggml-base\): pip install 'libggml-python"),
        (["libggml-base.so", "libggml-cpu.so"], r"cannot be used .*: pip install 'libggml-python"),
    ],
)
def test_another_library(files: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"no library")
    monkeypatch.setenv(ggml.FOLDER, str(tmp_path))
    ggml._library.cache_clear()
    with pytest.raises(ExpertcastError, match=line):
        ggml.check()
    monkeypatch.setattr(ggml, "VERSION", "0.19")
    monkeypatch.delenv(ggml.FOLDER)
    with pytest.raises(ExpertcastError, match=r"ggml 0\..* is not 0\.19"):
        ggml.check()
    monkeypatch.setattr(ggml.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ExpertcastError, match=r"ggml, which is not installed: pip install 'libggml-python"):
        ggml.check()


_MIXED = BlockForm((Piece("Q4_0", 16), Piece("Q6_K", 40)), 512)


def _octets(form: BlockForm) -> Tensor:
    return torch.cat([_random(kind, outputs).flatten(1) for kind, outputs in form.pieces], dim=1)


# Interleaved rows


def _interleaving(kind: str) -> None:
    if not ggml.interleaves(kind, 8):
        pytest.skip(f"ggml has no kernel for interleaved rows of {kind} on this processor")


@pytest.mark.parametrize("kind", ["Q4_0", "IQ4_NL", "MXFP4"])
def test_interleaved_rows(kind: str) -> None:
    """Products are those of the dequantised weights, and a row's bits the same alone, among others and with ids."""
    _interleaving(kind)
    blocks = _random(kind, outputs=40)
    weights = _weights(kind, blocks)
    pool = torch.zeros(_EXPERTS, blocks[0].numel() + 999, dtype=torch.uint8)
    for rows, own in zip(blocks, pool, strict=True):
        place = own[7 : 7 + rows.numel()].view_as(rows)
        ggml.interleave(kind, rows.shape[1], rows.data_ptr(), place.data_ptr(), rows.numel())
        assert not torch.equal(place, rows)
        assert torch.equal(ggml.separate(kind, place, torch.empty_like(rows)), rows)
        assert torch.equal(ggml.separate(kind, place[8:24], torch.empty_like(rows[8:24])), rows[8:24])
    matrices = ggml.Matrices.of(kind, pool, 7, 40, 512, interleaved=True)
    rows = torch.randn(67, 1, 512, generator=torch.Generator().manual_seed(0))
    together = ggml.product(matrices.at(2), rows).clone()
    expected = rows.double() @ weights[2].double().T
    assert (together - expected).norm() <= 0.012 * expected.norm()
    for first, last in ((0, 1), (1, 4), (3, 8), (60, 67)):
        some, ids = slice(first, last), torch.full((last - first, 1), 2)
        assert torch.equal(ggml.product(matrices.at(2), rows[some]), together[some])
        assert torch.equal(ggml.product(matrices, rows[some], ids), together[some])


def test_sizes_that_are_not_interleaved() -> None:
    assert not ggml.interleaves("Q4_0", 12)
    assert not ggml.interleaves("Q6_K", 16)
    assert BlockForm((Piece("Q4_0", 12), Piece("Q6_K", 16)), 512, interleave=True).suffix == packed_experts.BLOCKS


def test_interleaved_pieces() -> None:
    """Written, expanded and multiplied as the plain ones are; their parameters have another name."""
    _interleaving("Q4_0")
    plain, octets = _MIXED, _octets(_MIXED)
    form = packed_experts.for_device(plain, "cpu")
    assert (plain.suffix, form.suffix) == (packed_experts.BLOCKS, packed_experts.INTERLEAVED)
    assert (plain.order, form.order) == ("Q4_0 and Q6_K", "Q4_0 x 8 and Q6_K")
    rows = torch.zeros(_EXPERTS, 56, form.row_bytes, dtype=torch.uint8)
    for (_, own), place in zip(plain.split(octets), (slice(16), slice(16, 56)), strict=True):
        rows[:, place, : own.shape[-1]] = own
    made = torch.zeros_like(octets)
    form.put(rows, made)
    assert not torch.equal(made, octets)
    given = torch.randn(100, 512)
    for own, expected in zip(made, octets, strict=True):
        assert torch.equal(form.expand(own), plain.expand(expected))
        assert torch.equal(form.multiply(given, own), plain.multiply(given, expected))
        for some in form.ordered():
            some.separate(own)
        assert torch.equal(own, expected)


_FORKS = """
import os, signal, torch
from expertcast.data import packed_experts

packed_experts._EXPANDED = 4096
torch.set_num_threads(2)
rows = torch.zeros(48, 544, dtype=torch.uint8)
packed_experts._widened("Q8_0", rows, torch.float32, False)  # a product of torch with AMX stands still in a child
if not (child := os.fork()):
    signal.alarm(100)
    packed_experts._widened("Q8_0", rows, torch.float32, False)
    os._exit(0)
raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_0"])
def test_threads_expand_the_same_weights(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    form = packed_experts.for_device(BlockForm((Piece(kind, 48),), 512), "cpu")
    octets, given = torch.empty(form.nbytes, dtype=torch.uint8), torch.randn(100, 512)
    form.put(_random(kind)[0], octets)
    expected = (given.to(packed_experts.WIDE) @ form.expand(octets).to(packed_experts.WIDE).T).float()
    monkeypatch.setattr(packed_experts, "_EXPANDED", 8 * 512)
    for threads in (1, 2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(form.multiply(given, octets), expected)


def test_products_with_expanded_weights_have_few_sizes() -> None:
    """oneDNN keeps .9 MB for each number of rows: a prompt of 4,080 tokens through 48 layers took 2 GB more."""
    form, given = packed_experts.for_device(BlockForm((Piece("Q8_0", 48),), 512), "cpu"), torch.randn(200, 512)
    octets, sizes = torch.empty(form.nbytes, dtype=torch.uint8), set[int]()
    form.put(_random("Q8_0")[0], octets)

    class Sizes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (Tensor.matmul, Tensor.__matmul__, torch.matmul):
                sizes.add(len(args[0]))
            return func(*args, **(kwargs or {}))

    expected = form.multiply(given, octets)
    with Sizes():
        for count in range(1, 200, 7):
            found = form.multiply(given[:count], octets)
            assert found.shape == (count, 48)
            assert torch.allclose(found, expected[:count], atol=1e-3, rtol=1e-2)
    assert len(sizes) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_child_process_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", _FORKS], check=True, timeout=200)


def test_groups_of_rows_by_interleaved_matrices() -> None:
    """One row, some and many of an expert: the first two have the bits of rows alone."""
    _interleaving("Q4_0")
    form = packed_experts.for_device(BlockForm((Piece("Q4_0", 48),), 512), "cpu")
    blocks = torch.stack([torch.empty(form.nbytes, dtype=torch.uint8) for _ in range(_EXPERTS)])
    form.put(_random("Q4_0"), blocks)
    matrix = packed_experts.PackedMatrix({"up_blocks8": blocks}, "up", form, False, torch.float32)
    rows, groups = torch.randn(21 + form.many_rows, 512), [(1, 1), (2, 20), (0, form.many_rows)]
    found = matrix.products(rows, groups).clone()
    alone = [matrix.by_ggml(rows[i : i + 1, None], None, 1 if i == 0 else 2)[0].clone() for i in range(21)]
    assert torch.equal(found[:21], torch.cat(alone))
    assert torch.equal(found[21:], form.multiply(rows[21:], blocks[0]))


def test_rows_of_a_long_prompt_run_in_parts() -> None:
    """No more rows than the limit and one expert's are held at once, and no bit changes."""
    draw, most, counts = torch.Generator().manual_seed(0), 12, list[int]()
    hidden, ids = torch.randn(30, 8, generator=draw), torch.randint(5, (30, 3), generator=draw)
    weights = torch.rand(30, 3, generator=draw)

    def outputs(rows_PD: Tensor, groups: packed_experts.Groups, ids_P: Tensor) -> Tensor:
        counts.append(len(rows_PD))
        assert len(ids_P) == len(rows_PD) == sum(count for _, count in groups)
        return rows_PD * (ids_P + 1).unsqueeze(1)

    expected = packed_experts.run_groups(outputs, hidden, ids, weights)
    assert counts == [90]
    assert torch.equal(packed_experts.run_groups(outputs, hidden, ids, weights, at_once=most), expected)
    assert sum(counts[1:]) == 90
    assert max(counts[1:]) <= most + max(torch.bincount(ids.flatten()).tolist()) < 90


@torch.no_grad()
def test_observed_rows_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observers of inner activations get those of all experts in one call."""
    monkeypatch.setattr(packed_experts, "_AT_ONCE", 4)
    layer, draw, seen = find_moe_layers(tiny_model("qwen3_moe"))[0], torch.Generator().manual_seed(0), list[int]()
    hidden = torch.randn(9, layer.hidden_size, generator=draw).to(layer.dtype)
    ids = torch.stack([torch.randperm(layer.num_experts, generator=draw)[: layer.top_k] for _ in range(9)])
    weights, order = torch.rand(ids.shape, generator=draw).to(layer.dtype), torch.sort(ids.flatten()).indices
    outputs = []
    for grouped in (True, False):
        with inner_activations(layer.experts, lambda inner: seen.append(len(inner))):
            outputs.append(
                packed_experts.run_experts(layer.experts, hidden, ids, weights, lambda: order, grouped=grouped)
            )
    assert seen[0] == ids.numel()
    assert len(seen) > 2
    assert sum(seen[1:]) == ids.numel()
    assert torch.equal(*outputs)


def test_a_large_matrix_is_interleaved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no thread keeps a copy of all of it; the bytes are those of one write."""
    _interleaving("Q4_0")
    form = packed_experts.for_device(BlockForm((Piece("Q4_0", 48),), 512), "cpu")
    blocks, sizes = _random("Q4_0")[0], list[int]()
    whole, found = torch.empty(form.nbytes, dtype=torch.uint8), torch.empty(form.nbytes, dtype=torch.uint8)
    form.put(blocks, whole)
    write = packed_experts.OrderedRows.write
    monkeypatch.setattr(packed_experts.OrderedRows, "write", lambda *given: (sizes.append(given[3]), write(*given)))
    for most, expected in ((20 * 288, [16 * 288] * 3), (1, [8 * 288] * 6)):
        monkeypatch.setattr(packed_experts, "_REORDERED", most)
        form.put(blocks, found)
        assert torch.equal(found, whole)
        assert sizes == expected
        sizes.clear()


def test_interleaved_rows_on_other_devices_are_refused() -> None:
    """They were made for the kernels of a processor."""
    _interleaving("Q4_0")
    form = packed_experts.for_device(BlockForm((Piece("Q4_0", 48),), 512), "cpu")
    blocks = torch.empty(_EXPERTS, form.nbytes, dtype=torch.uint8, device="meta")
    matrix = packed_experts.PackedMatrix({"up_blocks8": blocks}, "up", form, False, torch.float32)
    for run in (lambda: form.expand(blocks[0]), lambda: matrix.products(torch.empty(6, 512, device="meta"), [(1, 6)])):
        with pytest.raises(ExpertcastError, match="packed for the CPU cannot run on meta: load it for that device"):
            run()


def test_embeddings_on_other_devices_are_no_memory_of_this_one() -> None:
    """ggml would read address 0, and end the process."""
    embedding = PackedEmbedding(BlockForm((Piece("Q8_0", 16),), 64), torch.float32).to("meta")
    assert embedding(torch.zeros(2, 3, dtype=torch.long, device="meta")).shape == (2, 3, 64)
    with pytest.raises(ExpertcastError, match="packed for the CPU cannot run on meta"):
        PackedLinear(BlockForm((Piece("Q8_0", 16),), 64), None, torch.float32).to("meta")(
            torch.empty(1, 64, device="meta")
        )


def test_packed_modules_are_pickled_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their blocks, in other memory; where the kernels take rows in another order they are refused."""
    _interleaving("Q4_0")
    model = tiny_model("qwen3_moe", hidden_size=64, moe_intermediate_size=32)
    layers, ids = find_moe_layers(model), torch.arange(9)[None]
    for layer in layers:
        pack_module(layer.experts, layer.num_experts, 4)
    with torch.no_grad():
        expected = model(ids).logits
        written = pickle.dumps(model)
        made = pickle.loads(written), copy.deepcopy(model)
        for layer in layers:
            for parameter in layer.experts.parameters():
                parameter.zero_()
        for own in made:
            assert torch.equal(own(ids).logits, expected)
    monkeypatch.setattr(ggml, "interleaves", lambda *_: False)
    with pytest.raises(ExpertcastError, match="packed on another processor and pickled: load it again here"):
        pickle.loads(written)


# Forms of several pieces, and many rows


def test_pieces() -> None:
    """Rows of several types lie one after another."""
    octets = _octets(_MIXED)
    weights = torch.cat([_weights(kind, _random(kind, outputs)) for kind, outputs in _MIXED.pieces], dim=1)
    assert octets.shape == (_EXPERTS, _MIXED.nbytes)
    assert (str(_MIXED), _MIXED.outputs) == ("Q4_0 and Q6_K", 56)
    assert all(torch.equal(_MIXED.expand(own), expected) for own, expected in zip(octets, weights, strict=True))
    rows = torch.zeros(_EXPERTS, 56, _MIXED.row_bytes, dtype=torch.uint8)
    for (_, own), place in zip(_MIXED.split(octets), (slice(16), slice(16, 56)), strict=True):
        rows[:, place, : own.shape[-1]] = own
    again = torch.zeros_like(octets)
    _MIXED.put(rows, again)
    assert torch.equal(again, octets)


@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
def test_many_rows(wide: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanded piece by piece, as on a processor with and without bf16 in oneDNN."""
    monkeypatch.setattr(packed_experts, "WIDE", wide)
    monkeypatch.setattr(packed_experts, "_EXPANDED", 7 * 512)
    monkeypatch.setattr(packed_experts, "_MULTIPLIED", 17 * 512)
    octets, rows = _octets(_MIXED)[0], torch.randn(100, 512)
    expected = rows.double() @ _MIXED.expand(octets).double().T
    error = (_MIXED.multiply(rows, octets) - expected).norm() / expected.norm()
    assert error < {torch.bfloat16: 5e-3, torch.float32: 1e-6}[wide]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0", "Q6_K"])
def test_expanded_on_other_devices(kind: str) -> None:
    """By torch's operations: nearly the same weights."""
    rows = _random(kind)[0]
    found = dequantize_blocks(rows, ggml.TYPES[kind].number, 48, 512, torch.float32)
    assert torch.allclose(found, ggml.dequantise(kind, rows), rtol=1e-5, atol=1e-6)
    form = BlockForm((Piece(kind, 48),), 512)
    assert packed_experts.for_device(form, "cuda") == form
    with pytest.raises(ExpertcastError, match="MXFP4 are computed on the CPU only: give experts='expanded'"):
        packed_experts.for_device(BlockForm((Piece("MXFP4", 48),), 512), "cuda")


# Blocks of other formats


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_codes(kind: str, group: int) -> None:
    """The weights exactly, but for minima that fp16 does not hold."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(256 if kind == "Q8_0" else 16, (48, 256), dtype=torch.uint8, generator=draw)
    scales = torch.randn(48, 256 // group, generator=draw).half().float()
    minima = torch.randn(48, 256 // group, generator=draw).half().float() if kind == "Q4_1" else None
    numbers = codes.view(torch.int8).float() if kind == "Q8_0" else codes.float() - (8 if kind == "Q4_0" else 0)
    expected = numbers * scales.repeat_interleave(group, 1)
    if minima is not None:
        expected += minima.repeat_interleave(group, 1)
    found = ggml.dequantise(kind, to_blocks(kind, codes, scales, minima))
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6) if minima is not None else torch.equal(found, expected)
    with pytest.raises(ExpertcastError, match="outside of fp16"):
        to_blocks(kind, codes, scales * 1e6, minima)


def test_mxfp4_of_safetensors() -> None:
    """Exactly transformers' weights."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (_EXPERTS, 32, 4, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(1, 240, (_EXPERTS, 32, 4), dtype=torch.uint8, generator=draw)
    found = ggml.dequantise("MXFP4", mxfp4_blocks(codes, scales))
    assert torch.equal(found.bfloat16(), convert_moe_packed_tensors(codes, scales, dtype=torch.bfloat16).mT)


@pytest.mark.parametrize(("kind", "most"), [("Q4_0", 0.1), ("Q4_K", 0.08), ("Q8_0", 0.01)])
def test_rounding(kind: str, most: float) -> None:
    weights = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    weights[1] = 0
    found = ggml.dequantise(kind, ggml.quantise(kind, weights.bfloat16()))
    assert (found - weights).norm() < most * weights.norm()
    assert not found[1].any()
