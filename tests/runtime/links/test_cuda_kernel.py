"""The device-side link on a real device: kernels, order between streams, graph capture."""

from __future__ import annotations

import pytest
import torch

from expertcast.predictors import ExpertcastError
from expertcast.runtime import offload
from expertcast.runtime.engine.kernels import has_persistent_grouped_mm
from expertcast.runtime.experimental.graph_decoder import GraphDecoder
from expertcast.runtime.experimental.kernel_link import (
    CarveOut,
    DeviceResidency,
    KernelLink,
    KernelResidency,
    Moves,
    has_triton,
)
from expertcast.runtime.links.driver import CudaDevice
from tests.runtime.links import kernel_script
from tests.runtime.links.cuda_helpers import LONG, MARKS, attached, cuda_model, holds, prompt

pytestmark = [*MARKS, pytest.mark.skipif(not has_triton(), reason="no triton")]


def _moves(*pairs: tuple[int, int]) -> Moves:
    """(key, slot) of each copy."""
    numbers = torch.tensor(pairs, device="cuda").t().contiguous()
    return Moves(numbers[0], numbers[1], torch.ones(len(pairs), dtype=torch.bool, device="cuda"))


@pytest.mark.parametrize("slots", [4, 6, 9, 24])
def test_table_kernel_is_torchs(slots: int) -> None:
    kernel_script.compare_tables(slots, slots=slots, device="cuda")


@pytest.mark.parametrize("slots", [500, 1536, 6144])
def test_table_kernel_at_real_sizes(slots: int) -> None:
    generator = torch.Generator("cuda").manual_seed(slots)
    shape = {"layers": 48, "experts": 128, "slots": slots, "device": torch.device("cuda")}
    tables = DeviceResidency(**shape), KernelResidency(**shape)  # type: ignore[arg-type]
    for step in range(3 * 48):
        ids_TK = torch.rand(1, 128, generator=generator, device="cuda").topk(8).indices
        expected, got = (table.bring(step % 48, ids_TK) for table in tables)
        assert torch.equal(got.moved_N, expected.moved_N)
        assert torch.equal(got.slots_N[got.moved_N], expected.slots_N[got.moved_N])
    assert torch.equal(tables[0].counts, tables[1].counts)
    assert torch.equal(tables[0].slot_of[:-1], tables[1].slot_of[:-1])


def test_every_block_arrives() -> None:
    link = KernelLink()
    store, pool = attached(link)
    link.move(_moves(*((key, key) for key in range(12))))
    link.join(link.ticket())
    assert all(holds(pool, store, slot, slot) for slot in range(12))
    link.close()
    assert link.busy_s > 0


def test_pageable_memory_is_refused() -> None:
    with pytest.raises(ExpertcastError, match="page-locked memory only"):
        attached(KernelLink(), pinned=False)


def test_a_slot_is_not_overwritten_while_it_is_read() -> None:
    link = KernelLink()
    store, pool = attached(link)
    link.move(_moves((0, 0)))
    link.join(link.ticket())
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    read = pool.block(0).clone()
    link.move(_moves((9, 0)))
    assert torch.equal(read.cpu(), store.block(0))
    link.join(link.ticket())
    assert holds(pool, store, 0, 9)
    link.close()


@pytest.mark.parametrize("joined", [True, False])
def test_compute_waits_for_the_copy(joined: bool) -> None:
    link = KernelLink()
    store, pool = attached(link)
    assert link._stream is not None
    link.move(_moves((6, 1)))  # compiles the kernel, which takes longer than the other stream sleeps
    link.synchronize()
    with torch.cuda.stream(link._stream):
        torch.cuda._sleep(LONG)
    link.move(_moves((5, 0)))
    if joined:
        link.join(link.ticket())
    read = pool.block(0).clone()
    assert torch.equal(read.cpu(), store.block(5) if joined else torch.zeros_like(store.block(5)))
    link.close()


@pytest.mark.parametrize("rows", [8, 2000])
def test_what_is_left_to_copies_changes_no_bit(rows: int) -> None:
    """Rows of 8 experts: a decode step's, and a prefill's with the large tile."""
    weight = torch.randn(8, 512, 1024, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    if not has_persistent_grouped_mm(weight):
        pytest.skip("grouped_mm is not one persistent kernel here")
    hidden = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    ends = (torch.arange(1, 9, dtype=torch.int32, device="cuda") * rows) // 8
    plain = torch._grouped_mm(hidden, weight, offs=ends)
    with CarveOut(16):
        assert torch.equal(torch._grouped_mm(hidden, weight, offs=ends), plain)


def test_a_thousand_calls_make_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    link = KernelLink()
    store, pool = attached(link)
    made: list[bool] = []
    new_event = CudaDevice.new_event

    def count(self: CudaDevice, *, timing: bool = False) -> torch.cuda.Event:
        made.append(timing)
        return new_event(self, timing=timing)

    monkeypatch.setattr(CudaDevice, "new_event", count)
    for step in range(1000):
        link.move(_moves((step % 24, step % 12)))
        link.join(link.ticket())
        if step % 100 == 99:
            torch.cuda.synchronize()
    assert len(made) < 800
    assert all(holds(pool, store, step % 12, step % 24) for step in range(988, 1000))
    link.close()
    assert link.busy_s > 0


@pytest.mark.parametrize("slots", [12, 40])
@pytest.mark.parametrize("predictor", [None, "next_norm"])
@pytest.mark.parametrize("mode", ["exact", "speculate"])
def test_a_graphs_steps_have_the_bits_of_eager_ones(slots: int, predictor: str | None, mode: str) -> None:
    if predictor is None and mode == "speculate":
        pytest.skip("nothing to execute")
    model = cuda_model("mixtral" if slots == 12 else "qwen3_moe")
    ids = prompt(3, 4, 5)["input_ids"]
    logits = []
    for captured in (False, True):
        with offload(model, link="kernel", slots=slots, predictor=predictor, mode=mode) as offloaded:
            decoder = GraphDecoder(offloaded, 64, capture=captured)
            decoder.start(ids)
            logits.append([decoder.step().clone() for _ in range(40)])
            assert (decoder._graph is not None) is captured
            requests = offloaded.stats.total.requests
            assert requests >= 40 * len(offloaded.view) * offloaded.view.shape.top_k
    assert all(torch.equal(own, other) for own, other in zip(*logits, strict=True))


def test_graph_and_eager_forwards_take_turns() -> None:
    model = cuda_model()
    inputs = prompt(3, 4, 5)
    with offload(model, link="kernel", slots=9, predictor="next_norm") as offloaded:
        decoder = GraphDecoder(offloaded, 40)
        expected = decoder.generate(inputs["input_ids"], 20)
        offloaded.generate(**prompt(9, 8, 7, 6), max_new_tokens=5, do_sample=False)
        assert torch.equal(decoder.generate(inputs["input_ids"], 20), expected)
