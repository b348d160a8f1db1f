"""The device-side link: tables, copy kernels, their order, and the multiprocessors that it reserves."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest
import torch

from expertcast.predictors import ExpertcastError
from expertcast.runtime import offload
from expertcast.runtime.engine.kernels import has_persistent_grouped_mm
from expertcast.runtime.experimental import kernel_link
from expertcast.runtime.experimental.kernel_link import (
    COUNTS,
    BlockCopier,
    DeviceResidency,
    HostCopier,
    KernelCopier,
    KernelLink,
    Moves,
    ReservedMultiprocessors,
    has_triton,
)
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.blocks import Blocks, bytes_layout
from tests.runtime.links.simulated_device import SimulatedDevice, SimulatedStream

ROOT = Path(__file__).resolve().parents[3]
LAYOUT = bytes_layout(256)

# Tables, compared with a model in plain Python

LAYERS, EXPERTS = 3, 8


class _Model:
    """LRU with lists: `order` has the keys, least recently used first."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.order: list[int] = []
        self.counts = [[0] * len(COUNTS) for _ in range(LAYERS)]
        self.unused: set[int] = set()

    def request(self, layer: int, ids: list[int]) -> set[int]:
        keys = [layer * EXPERTS + expert for expert in dict.fromkeys(ids)]
        missing = [key for key in keys if key not in self.order]
        row = self.counts[layer]
        for name, count in (("requests", len(keys)), ("misses", len(missing)), ("chunks", 1)):
            row[COUNTS.index(name)] += count
        row[COUNTS.index("hits")] += len(keys) - len(missing)
        row[COUNTS.index("prefetched_used")] += len(self.unused.intersection(keys))
        self.unused.difference_update(keys)
        self._place(keys)
        return set(missing)

    def prefetch(self, layer: int, ids: list[int], running: int) -> set[int]:
        keys = [layer * EXPERTS + expert for expert in dict.fromkeys(ids)]
        hits = [key for key in keys if key in self.order]
        missing = [key for key in keys if key not in self.order][: max(0, self.slots - running - len(hits))]
        self.counts[layer][COUNTS.index("prefetched")] += len(missing)
        self._place([key for key in keys if key in hits or key in missing])
        self.unused.update(missing)
        return set(missing)

    def finish(self, layer: int, keep: bool) -> None:
        self.counts[layer][COUNTS.index("steps")] += 1
        if not keep:
            own = range(layer * EXPERTS, (layer + 1) * EXPERTS)
            self.order = [key for key in self.order if key not in own]
            self.unused.difference_update(own)

    def _place(self, keys: list[int]) -> None:
        self.order = [key for key in self.order if key not in keys] + keys
        lost = self.order[: max(0, len(self.order) - self.slots)]
        assert not set(lost) & set(keys)
        self.order = self.order[len(lost) :]
        self.unused.difference_update(lost)


def _moved(moves: Moves, held: dict[int, int]) -> set[int]:
    """Apply the copies to a dict slot -> key; return the moved keys."""
    moved = [(slot, key) for key, slot, move in zip(*(t.tolist() for t in moves), strict=True) if move]
    assert len({slot for slot, _ in moved}) == len(moved)
    held.update(moved)
    return {key for _, key in moved}


@pytest.mark.parametrize("slots", [4, 6, 11, 24])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_same_hits_misses_and_victims_as_the_model(slots: int, tokens: int) -> None:
    order = random.Random(slots * 100 + tokens)
    tables = DeviceResidency(layers=LAYERS, experts=EXPERTS, slots=slots, device=torch.device("cpu"))
    model, held = _Model(slots), dict[int, int]()
    for step in range(60):
        layer, keep = step % LAYERS, order.random() < 0.8
        pool = order.sample(range(EXPERTS), min(slots, 4))  # so that 40 tokens need at most 4 experts
        ids = [order.choice(pool) for _ in range(2 * tokens)]
        ids_TK = torch.tensor(ids).view(tokens, 2)
        many = len(ids) > 64
        expected = sorted(set(ids)) if many else ids
        assert _moved(tables.request(layer, ids_TK), held) == model.request(layer, expected)
        if tables.width(ids_TK) <= slots:
            slots_of = tables.slots_for(layer, ids_TK).view(-1).tolist()
            assert [held[slot] for slot in slots_of] == [layer * EXPERTS + expert for expert in ids]
        if tokens == 1:
            forecast = order.sample(range(EXPERTS), 3)
            later = (layer + 1) % LAYERS
            moves = tables.prefetch(later, torch.tensor(forecast), running=2)
            assert _moved(moves, held) == model.prefetch(later, forecast, running=2)
            assert [held[slot] for slot in slots_of] == [layer * EXPERTS + expert for expert in ids]
        tables.finish(layer, keep=keep)
        model.finish(layer, keep)
    assert tables.counts.tolist() == model.counts
    resident = [key for key in range(LAYERS * EXPERTS) if tables.slot_of[key] >= 0]
    assert sorted(model.order) == resident
    for key in resident:
        assert held[int(tables.slot_of[key])] == key


def test_a_chunk_counts_its_own_experts_only() -> None:
    tables = DeviceResidency(layers=1, experts=EXPERTS, slots=4, device=torch.device("cpu"))
    ids_TK = torch.arange(EXPERTS).view(4, 2)
    within_E = torch.arange(EXPERTS) < 3
    moves = tables.request(0, ids_TK, within_E)
    assert _moved(moves, {}) == {0, 1, 2}
    assert (tables.slots_for(0, ids_TK.view(-1)) >= 0).tolist() == within_E.tolist()


def test_clear_forgets_everything_but_the_counters() -> None:
    tables = DeviceResidency(layers=1, experts=EXPERTS, slots=4, device=torch.device("cpu"))
    ids_TK = torch.tensor([[1, 2]])
    tables.request(0, ids_TK)
    assert not tables.request(0, ids_TK).moved_N.any()
    tables.clear()
    assert tables.request(0, ids_TK).moved_N.all()
    assert tables.counts[0, :3].tolist() == [6, 2, 4]


# Copies by kernel


def test_host_copier_moves_what_is_marked() -> None:
    store = Blocks(LAYOUT, 5, torch.Generator().manual_seed(0))
    pool = SlotPool(LAYOUT, 4, torch.device("cpu"))
    moves = Moves(torch.tensor([4, 1, 2]), torch.tensor([0, 3, 2]), torch.tensor([True, False, True]))
    HostCopier(store, pool).copy(moves)
    assert torch.equal(pool.block(0), store.block(4))
    assert torch.equal(pool.block(2), store.block(2))
    assert not pool.block(3).any()
    assert not pool.block(1).any()


@pytest.mark.skipif(not has_triton(), reason="triton comes with CUDA builds of torch only")
def test_interpreted_kernels_do_what_the_torch_forms_do() -> None:
    """It runs in a separate process: Triton decides at its import whether to interpret."""
    command = [sys.executable, "-m", "tests.runtime.links.kernel_script"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "same"


class _Launches:
    """Replaces the Triton kernel and records its launches."""

    def __init__(self) -> None:
        self.grid: tuple[int, ...] = ()
        self.given: dict[str, int] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid = grid
        return lambda *_tensors, **given: self.given.update(given)


@pytest.mark.parametrize(
    ("multiprocessors", "megabytes", "programs"), [(132, 9, 16), (132, 300, 16), (40, 9, 10), (16, 9, 4), (2, 9, 1)]
)
def test_few_programs_and_wide_ones(
    multiprocessors: int, megabytes: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a quarter of the device; whole blocks, and enough bytes in flight for 55 GB/s at 2 us."""
    launches, size = _Launches(), megabytes * 2**20 + 256
    made = SimpleNamespace(copy_blocks=launches)
    monkeypatch.setitem(sys.modules, "expertcast.runtime.experimental.triton_kernels", made)
    monkeypatch.setattr(kernel_link, "has_triton", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _tensor: True)
    found = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)
    pool = SlotPool(bytes_layout(size), 1, torch.device("cpu"))
    to_tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values, **_on_cuda: to_tensor(values))
    pool.device = torch.device("cuda", 0)
    copier = kernel_link.block_copier(Blocks(LAYOUT, 2, torch.Generator()), pool)
    copier.copy(Moves(torch.arange(1), torch.arange(1), torch.ones(1).bool()))
    assert launches.grid == (copier.programs,) == (programs,)
    given = launches.given
    assert given["WORDS"] * 8 == size
    assert programs * given["WIDTH"] * given["TURNS"] >= given["WORDS"]
    assert programs * given["WIDTH"] * (given["TURNS"] - 1) < given["WORDS"]
    if programs == 16:
        assert programs * given["WIDTH"] * 8 >= 55e9 * 2e-6
    assert given["WIDTH"] * 8 % (given["num_warps"] * 32 * 16) == 0, "whole loads of 16 bytes for each thread"


def test_small_blocks_take_no_more_programs_than_they_fill() -> None:
    pool = SlotPool(LAYOUT, 2, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "expertcast.runtime.experimental.triton_kernels", SimpleNamespace(copy_blocks=None))
        assert KernelCopier(torch.zeros(1), pool).programs == 1
    assert HostCopier(Blocks(LAYOUT, 1, torch.Generator()), pool).programs == 0


def test_memory_that_is_not_page_locked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store, pool = Blocks(LAYOUT, 5, torch.Generator()), SlotPool(LAYOUT, 2, torch.device("cpu"))
    pool.device = torch.device("cuda")
    monkeypatch.setattr(kernel_link, "has_triton", lambda: False)
    with pytest.raises(ExpertcastError, match="needs the package triton"):
        kernel_link.block_copier(store, pool)
    monkeypatch.setattr(kernel_link, "has_triton", lambda: True)
    with pytest.raises(ExpertcastError, match="expert 0 of the store"):
        kernel_link.block_copier(store, pool)


# The order of copies and kernels

KEYS, SLOTS = 12, 5


class _LateCopier(BlockCopier):
    """Copies when the simulated stream reaches the call."""

    def __init__(self, link: KernelLink, pool: SlotPool) -> None:
        self._link, self._pool = link, pool

    def copy(self, moves: Moves) -> None:
        device = cast(SimulatedDevice, self._link.driver)
        for key, slot, moved in zip(*(tensor.tolist() for tensor in moves), strict=True):
            if moved:
                device.to_device(self._pool.block(slot), STORE.block(key), cast(Any, self._link._stream))


STORE = Blocks(LAYOUT, KEYS, torch.Generator().manual_seed(1))


def _attached(seed: int = 0) -> tuple[KernelLink, SimulatedDevice, SlotPool]:
    link, device, pool = KernelLink(), SimulatedDevice(seed), SlotPool(LAYOUT, SLOTS, torch.device("cpu"))
    link.driver = device
    link.attach(STORE, pool)
    link._copier = _LateCopier(link, pool)
    return link, device, pool


def _drive(seed: int, link: KernelLink, device: SimulatedDevice, pool: SlotPool) -> tuple[int, int]:
    """Run layers that request, prefetch and read random experts; return (reads, wrong reads)."""
    order, wrong = random.Random(seed), list[bool]()

    def compute(slots: list[int], keys: list[int]) -> None:
        for slot, key in zip(slots, keys, strict=True):
            wrong.append(not torch.equal(pool.block(slot), STORE.block(key)))

    for _ in range(40):
        ids = order.sample(range(KEYS), 2)
        ids_TK = torch.tensor([ids])
        link.move(link.residency.request(0, ids_TK))
        calls = link.calls_in_flight()
        if order.random() < 0.7:
            forecast = torch.tensor(order.sample(range(KEYS), 3))
            link.move(link.residency.prefetch(0, forecast, running=2), urgent=False)
        slots = link.residency.slots_for(0, ids_TK)[0].tolist()
        link.join(calls)
        for _ in range(2):
            device.compute.push(partial(compute, slots, ids))
        device.steps(order.randrange(30))
    link.synchronize()
    return len(wrong), sum(wrong)


def test_no_schedule_lets_a_kernel_see_another_block() -> None:
    for seed in range(15):
        assert _drive(seed, *_attached(seed)) == (160, 0)


@pytest.mark.parametrize("missing", ["fork", "join"])
def test_either_event_left_out_is_seen(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(seed: int) -> int:
        link, device, pool = _attached(seed)
        if missing == "join":
            monkeypatch.setattr(link, "join", lambda _calls: None)
        else:
            monkeypatch.setattr(link._stream, "wait_stream", lambda _stream: None)
        return _drive(seed, link, device, pool)[1]

    assert any(map(wrong, range(10)))


@pytest.mark.parametrize("followed", [True, False])
def test_forwards_on_two_streams(followed: bool) -> None:
    """Slots that one stream may still read are not overwritten for another."""
    wrong = []

    def read(pool: SlotPool, slot: int, key: int) -> None:
        wrong.append(not torch.equal(pool.block(slot), STORE.block(key)))

    for seed in range(20):
        link, device, pool = _attached(seed)
        for ids in ([3, 7, 8, 9, 10], [0, 1, 2, 4, 5]):
            device.compute = SimulatedStream(device)
            if followed:
                link.follow()
            link.move(link.residency.request(0, torch.tensor([ids])))
            slots = link.residency.slots_for(0, torch.tensor(ids)).tolist()
            link.join(link.calls_in_flight())
            for slot, key in zip(slots, ids, strict=True):
                device.compute.push(partial(read, pool, slot, key))
        link.synchronize()
    assert len(wrong) == 20 * 10
    assert any(wrong) is not followed


def test_closing_lets_go_of_the_slots() -> None:
    """Close frees the slots' memory before the experts are restored."""
    link, _, pool = _attached()
    words = pool.block(0).view(torch.int64)
    link._copier.words = words  # type: ignore[attr-defined]  # as the kernel's copier has them
    held = ref(words)
    del words
    link.close()
    link.close()
    assert held() is None


def test_calls_are_timed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls outside a graph are timed; a graph's events have no times. Single transfers are refused."""
    link, device, pool = _attached()
    link.observer = Recorder()
    link.observer.device_time = lambda event: cast(Any, event).record_made.time  # type: ignore[method-assign]
    _drive(0, link, device, pool)
    spans = link.observer.copies()
    assert len(spans) > 40
    assert {span.urgent for span in spans} == {True, False}
    assert sum(span.seconds for span in spans) == pytest.approx(link.busy_s)
    counts = link.residency.counts[0].tolist()
    assert link.copies == counts[2] + counts[3] > 40
    assert link.bytes_moved == link.copies * LAYOUT.block_bytes
    monkeypatch.setattr(device, "capturing", lambda: True)
    _drive(1, link, device, pool)
    assert len(link.observer.copies()) == len(spans)
    link.reset()
    assert link.copies == link.busy_s == 0
    with pytest.raises(ExpertcastError, match="single transfers"):
        link.wait(link.submit(0, 0, urgent=True))


# Multiprocessors reserved for copies


def _now() -> int | None:
    return torch._C._get_sm_carveout_experimental()


def test_it_holds_while_entered_and_the_larger_one_wins() -> None:
    small, large = ReservedMultiprocessors(8), ReservedMultiprocessors(16)
    assert _now() is None
    with large:
        with small, large:
            assert _now() == 16
        assert _now() == 16
    with small:
        assert _now() == 8
        with large:
            assert _now() == 16
        assert _now() == 8
    assert _now() is None


def test_an_error_inside_leaves_what_was_set_before() -> None:
    torch._C._set_sm_carveout_experimental(4)
    try:
        with pytest.raises(RuntimeError, match="inside"), ReservedMultiprocessors(16):
            raise RuntimeError("inside")
        assert _now() == 4
    finally:
        torch._C._set_sm_carveout_experimental(None)


@pytest.mark.parametrize("reason", ["nothing copies", "a torch without it", "cuBLASLt preferred"])
def test_nothing_is_set_where_it_would_do_harm(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "a torch without it":
        monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    if reason == "cuBLASLt preferred":
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: torch._C._BlasBackend.Cublaslt)
    with ReservedMultiprocessors(0 if reason == "nothing copies" else 16):
        assert _now() is None


def test_who_has_the_persistent_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_persistent_grouped_mm(torch.zeros(1, dtype=torch.bfloat16))
    for capability, dtype, has in (
        ((9, 0), torch.bfloat16, True), ((10, 0), torch.bfloat16, True), ((8, 0), torch.bfloat16, False),
        ((12, 0), torch.bfloat16, False), ((9, 0), torch.float16, False),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, found=capability: found)
        weight = cast(Any, type("Weight", (), {"device": torch.device("cuda", 0), "dtype": dtype}))
        assert has_persistent_grouped_mm(weight) is has


def test_a_link_leaves_as_many_as_its_copies_take(monkeypatch: pytest.MonkeyPatch) -> None:
    store, pool = Blocks(LAYOUT, 4, torch.Generator()), SlotPool(LAYOUT, 2, torch.device("cpu"))
    link = KernelLink()
    link.attach(store, pool)
    assert link.reserved.multiprocessors == 0
    monkeypatch.setattr(HostCopier, "programs", 7)
    link.attach(store, pool)
    assert link.reserved.multiprocessors == 7


class _Link(KernelLink):
    """Streams are simulated; copies run at once and claim 16 multiprocessors."""

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        self.driver = SimulatedDevice()
        super().attach(store, pool)
        self.reserved = ReservedMultiprocessors(16)


class _Spy:
    """Runs the kernel and records the current setting."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.seen: list[int | None] = []

    def run(self, *args: Any) -> torch.Tensor:
        self.seen.append(_now())
        return cast(torch.Tensor, self._kernel.run(*args))

    def run_pairs(self, *args: Any) -> torch.Tensor:
        self.seen.append(_now())
        return cast(torch.Tensor, self._kernel.run_pairs(*args))


@pytest.mark.parametrize(
    ("ids", "predictor", "expected"),
    [([3], "next_norm", [16, 16, 16, None]), ([3], None, [None] * 4), (list(range(3, 40)), None, None)],
)
def test_experts_beside_copies_leave_them_room(
    ids: list[int], predictor: str | None, expected: list[int | None] | None
) -> None:
    """Prefetches run beside all layers but the last, and a chunk's copies beside the chunk before; misses are waited
    for.
    """
    model = tiny_model("qwen3_moe")
    outside: set[int | None] = set()
    with offload(model, link=_Link(), slots=5, predictor=predictor) as offloaded:
        spy = _Spy(offloaded._engine._kernel)
        offloaded._engine._kernel = cast(Any, spy)
        for layer in offloaded.view:
            layer.router.register_forward_pre_hook(lambda *_: outside.add(_now()))
        offloaded(torch.tensor([ids]))
    if expected is None:
        assert len(spy.seen) > 4, "some layers ran in chunks"
        assert set(spy.seen) == {16}
    else:
        assert spy.seen == expected
    assert outside == {None}
    assert _now() is None


def test_an_interrupted_forward_leaves_nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with offload(tiny_model("qwen3_moe"), link=_Link(), slots=5, predictor="next_norm") as offloaded:
        kernel = offloaded._engine._kernel
        seen = []

        def fail(*_args: object) -> None:
            seen.append(_now())
            raise KeyboardInterrupt

        monkeypatch.setattr(kernel, "run", fail)
        with pytest.raises(KeyboardInterrupt):
            offloaded(torch.tensor([[3]]))
    assert seen == [16]
    assert _now() is None
