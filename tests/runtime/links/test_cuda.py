"""The CUDA link's ordering, executed by a simulation of streams and events; its small costs by counts."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from expertcast.predictors import ExpertcastError
from expertcast.runtime import CudaLink
from expertcast.runtime.links.base import Copy
from expertcast.runtime.links.driver import CudaDevice, Pending, Readback, Sent, Upload
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.runtime.links.simulated_device import SimulatedDevice, SimulatedStream

KEYS, SLOTS = 24, 4
LAYOUT = BlockLayout(fields=(Field(name="w", shape=(64,), dtype=torch.float32, offset=0),), block_bytes=256)


class _Store:
    """Block k is filled with k."""

    addressable, layout, experts = True, LAYOUT, KEYS

    def __init__(self) -> None:
        self.blocks = torch.arange(KEYS, dtype=torch.uint8).repeat_interleave(LAYOUT.block_bytes)

    def block(self, key: int) -> torch.Tensor:
        return self.blocks[key * LAYOUT.block_bytes : (key + 1) * LAYOUT.block_bytes]


class _SimulatedLink(CudaLink):
    def __init__(self, seed: int = 0, window: int | None = None) -> None:
        super().__init__(window)
        self.device = SimulatedDevice(seed)

    def _device_of(self, pool: SlotPool) -> CudaDevice:
        return cast(CudaDevice, self.device)


def _attached(seed: int = 0, window: int | None = None) -> tuple[_SimulatedLink, SlotPool]:
    link, pool = _SimulatedLink(seed, window), SlotPool(LAYOUT, SLOTS, torch.device("cpu"))
    link.attach(cast(ExpertStore, _Store()), pool)
    return link, pool


class _Reader:
    """Launches kernels that look at slots when the compute stream comes to them."""

    def __init__(self, link: _SimulatedLink, pool: SlotPool) -> None:
        self._link, self._pool = link, pool
        self.read = 0
        self.wrong = 0

    def launch(self, keys: dict[int, int]) -> None:
        def kernel() -> None:
            for key, slot in keys.items():
                self.read += 1
                self.wrong += bool((self._pool.block(slot) != key).any())

        self._link.device.compute.push(kernel)
        self._link.device.compute.push(kernel)  # a second one: the layer's other projection


def _drive(seed: int, link: _SimulatedLink, pool: SlotPool, layers: int = 40) -> _Reader:
    """Random layers: some keys are read, others are forecast, promoted, dropped or overwritten."""
    order, reader = random.Random(seed), _Reader(link, pool)
    held: dict[int, tuple[int, Copy]] = {}
    for _ in range(layers):
        needed = order.sample(range(KEYS), 2)
        forecast = [key for key in order.sample(range(KEYS), 2) if key not in needed]
        for key in needed + forecast:
            if key in held:
                continue
            if len(held) == SLOTS:
                victim = order.choice([other for other in held if other not in needed])
                slot, copy = held.pop(victim)
                if not link.cancel(copy) and order.random() < 0.5:
                    link.wait(copy)
            else:
                slot = next(s for s in range(SLOTS) if s not in {other for other, _ in held.values()})
            held[key] = slot, link.submit(key, slot, urgent=key in needed)
        for key in needed:
            if order.random() < 0.5:
                link.promote(held[key][1])
            link.wait(held[key][1])
        reader.launch({key: held[key][0] for key in needed})
        link.mark_read([held[key][0] for key in needed])
        link.device.steps(order.randrange(30))
        link.progress()
    link.device.synchronize()
    return reader


@pytest.mark.parametrize("window", [1, 3])
def test_no_schedule_lets_a_kernel_see_another_block(window: int) -> None:
    for seed in range(60):
        link, pool = _attached(seed, window)
        reader = _drive(seed, link, pool)
        assert reader.read == 40 * 4
        assert reader.wrong == 0
        link.close()


@pytest.mark.parametrize("missing", ["wait", "mark_read"])
def test_either_event_left_out_is_seen(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = 0
    for seed in range(20):
        link, pool = _attached(seed, 3)
        if missing == "wait":
            monkeypatch.setattr(link.device.compute, "wait_event", lambda _event: None)
        else:
            monkeypatch.setattr(link, "mark_read", lambda _slots: None)
        wrong += _drive(seed, link, pool).wrong
    assert wrong > 0


@pytest.mark.parametrize("followed", [True, False])
def test_forwards_on_two_streams(followed: bool) -> None:
    """A slot that one stream has waited for is a hit on the other, and is then overwritten while both may read it."""
    wrong = 0
    for seed in range(60):
        link, pool = _attached(seed)
        reader = _Reader(link, pool)
        for forward in range(4):
            link.device.compute = SimulatedStream(link.device)
            if followed:
                link.follow()
            if forward == 0:
                link.wait(link.submit(5, 0, urgent=True))
            reader.launch({5: 0})
            link.mark_read([0])
        link.wait(link.submit(6, 0, urgent=True))
        link.device.synchronize()
        assert reader.read == 8
        wrong += reader.wrong
        link.close()
    assert (wrong == 0) is followed


def test_nothing_is_waited_for_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    link, _ = _attached()
    link.device.compute.push(lambda: None)
    link.device.compute = SimulatedStream(link.device)
    monkeypatch.setattr(link.device, "capturing", lambda: True)
    link.follow()
    assert not link.device.compute.queue
    monkeypatch.undo()
    link.follow()
    assert link.device.compute.queue


def test_misses_overtake_queued_forecasts_and_those_follow_in_order() -> None:
    link, _ = _attached(window=1)
    moved: list[int] = []
    original = link.device.to_device
    link.device.to_device = lambda target, source, stream: (  # type: ignore[method-assign]
        moved.append((source.data_ptr() - link._store.block(0).data_ptr()) // len(source)),
        original(target, source, stream),
    )
    forecasts = [link.submit(key, slot, urgent=False) for slot, key in enumerate((5, 6, 7))]
    assert moved == [5]
    link.submit(9, 3, urgent=True)
    link.promote(forecasts[2])
    assert moved == [5, 9, 7]
    assert not link.cancel(forecasts[0])
    assert link.cancel(forecasts[1])
    link.device.synchronize()
    link.progress()
    assert moved == [5, 9, 7]
    assert all(copy.done for copy in (forecasts[0], forecasts[2]))
    assert link.copies == 3


def test_events_are_used_again_and_every_copy_is_timed() -> None:
    link, pool = _attached(seed=1, window=2)
    link.observer = Recorder()
    link.observer.device_time = lambda event: cast(Any, event).record_made.time  # type: ignore[method-assign]
    _drive(1, link, pool, layers=20)
    link.progress()
    after_20 = link.device.events
    _drive(2, link, pool, layers=300)
    link.synchronize()
    assert link.device.events <= after_20 + 12  # as many as can be under way, not as many as there are copies
    assert link.bytes_moved == link.copies * LAYOUT.block_bytes
    spans = link.observer.copies()
    assert len(spans) == link.copies > 300
    assert sum(span.seconds for span in spans) == pytest.approx(link.busy_s)
    assert all(earlier.end <= later.start for earlier, later in pairwise(spans))


def test_a_run_without_misses_makes_no_more_events() -> None:
    link, _ = _attached()
    for _ in range(1000):
        link.mark_read([0, 1])
        link.device.steps(2)
    assert link.device.events < 100


def test_a_refused_copy_is_the_error_of_whoever_waits_for_it() -> None:
    link, _ = _attached(window=2)
    link.device.fail_next_copy = True
    bad, good = link.submit(1, 0, urgent=True), link.submit(2, 1, urgent=True)
    with pytest.raises(RuntimeError, match="copy refused"):
        link.wait(bad)
    link.wait(good)
    link.device.fail_next_copy = True
    forecast = link.submit(3, 2, urgent=False)
    assert link.poll(forecast)
    assert forecast.error is not None
    link.close()
    assert link.copies == 1


def test_refused_copies_make_no_more_events() -> None:
    """Each gives the events back that it took."""
    link, _ = _attached()
    link.wait(link.submit(1, 0, urgent=True))
    link.synchronize()
    before = link.device.events
    for _ in range(20):
        link.device.fail_next_copy = True
        assert link.submit(2, 1, urgent=True).error is not None
    assert link.device.events <= before + 2


def test_window_is_worth_16_mib_of_blocks() -> None:
    assert _attached()[0]._window == (16 << 20) // 256
    with pytest.raises(ExpertcastError, match="window=0"):
        CudaLink(window=0)


# Values read back are those that the producing stream wrote, whatever else runs meanwhile


def _simulated(seed: int = 0) -> tuple[Readback, SimulatedDevice]:
    readback, device = Readback(None), SimulatedDevice(seed)
    readback._open(cast(CudaDevice, device))
    return readback, device


def _produced(device: SimulatedDevice, values: Tensor) -> Tensor:
    """A tensor that the compute stream fills some time later."""
    made = torch.full_like(values, -1)
    device.compute.push(lambda: made.copy_(values))
    return made


def test_on_the_cpu_values_come_at_once() -> None:
    ids_TK = torch.tensor([[3, 1], [0, 2]])
    assert Readback(None).start(ids_TK).tolist() == [[3, 1], [0, 2]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_copy_waits_for_the_stream_that_makes_the_tensor(dtype: torch.dtype) -> None:
    for seed in range(20):
        readback, device = _simulated(seed)
        values = torch.arange(8).to(dtype).view(2, 4)
        pending = readback.start(_produced(device, values))
        assert pending.tolist() == values.tolist()
        assert pending.tolist() == values.tolist()


def test_tolist_waits_for_its_own_copy_only() -> None:
    readback, device = _simulated()
    pending = readback.start(_produced(device, torch.tensor([7])))
    later: list[int] = []
    device.compute.push(lambda: later.append(1), lambda: False)  # kernels that never end
    assert pending.tolist() == [7]
    assert not later


def test_ring_comes_round_to_values_nobody_has_read() -> None:
    readback, device = _simulated()
    order = random.Random(3)
    expected, pending = [], []
    for step in range(150):
        values = torch.arange(1 + step % 7) + step
        expected.append(values.tolist())
        pending.append(readback.start(_produced(device, values)))
        if step % 5 == 0:
            assert pending[order.randrange(len(pending))].tolist() is not None
    assert [entry.tolist() for entry in pending] == expected
    assert device.events == 2 * len(readback._ring)


def test_more_than_an_entry_holds_and_strided_values() -> None:
    readback, device = _simulated()
    large = torch.arange(40_000).view(5000, 8)
    pending: list[Pending] = [readback.start(_produced(device, large)) for _ in range(3)]
    assert all(entry.tolist() == large.tolist() for entry in pending)
    assert readback.start(large[:3, ::2]).tolist() == large[:3, ::2].tolist()


def test_the_host_does_something_else_while_it_waits() -> None:
    device, looked = SimulatedDevice(), [0]

    def meanwhile() -> None:
        looked[0] += 1

    readback = Readback(cast(CudaDevice, device), meanwhile)
    pending = readback.start(_produced(device, torch.tensor([7])))
    for _ in range(50):
        device.compute.queue.appendleft((lambda: True, lambda: None))  # kernels before
    assert pending.tolist() == [7]
    assert looked[0] > 10


class TestUpload:
    def _read(self, device: SimulatedDevice, sent: Sent, into: list[list[int]]) -> None:
        """A kernel of the compute stream that reads the values some time later."""
        values = sent.take()
        device.compute.push(lambda: into.append(values.tolist()))

    @pytest.mark.parametrize("capacity", [1, 2, 5])
    def test_kernels_read_what_was_sent_for_them(self, capacity: int) -> None:
        for seed in range(20):
            device, read = SimulatedDevice(seed), list[list[int]]()
            upload = Upload(cast(CudaDevice, device), cast(torch.cuda.Stream, device.new_stream()), capacity)
            expected = [[step + place for place in range(1 + step % 5)] for step in range(30)]
            for values in expected:
                self._read(device, upload.send(values), read)
            device.synchronize()
            assert read == expected

    def test_without_its_waits_they_would_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The test above can fail: a copy that does not wait for the readers before it, or readers not for it."""
        for stream in ("compute", "copies"):
            wrong = False
            for seed in range(20):
                device, read = SimulatedDevice(seed), list[list[int]]()
                copies = device.new_stream()
                monkeypatch.setattr(
                    {"compute": device.compute, "copies": copies}[stream], "wait_event", lambda _e: None
                )
                upload = Upload(cast(CudaDevice, device), cast(torch.cuda.Stream, copies), 1)
                for step in range(10):
                    self._read(device, upload.send([step]), read)
                device.synchronize()
                wrong |= read != [[step] for step in range(10)]
            assert wrong, stream

    def test_its_buffers_outlive_inference_mode(self) -> None:
        """The first forward may run in inference_mode and the next, as `generate` does, in no_grad."""
        device = SimulatedDevice()
        upload = Upload(cast(CudaDevice, device), cast(torch.cuda.Stream, device.new_stream()), 1)

        def sent(values: list[int]) -> object:
            made = upload.send(values)
            device.synchronize()
            return made.take().tolist()

        with torch.inference_mode():
            assert sent([3, 4]) == [3, 4]
        with torch.no_grad():
            assert sent([5]) == [5]
        assert device.events == 2


def test_values_would_be_wrong_without_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation shows a copy that does not wait: the tests above can fail."""
    wrong: list[Any] = []
    for seed in range(20):
        readback, device = _simulated(seed)
        for entry in readback._ring:
            monkeypatch.setattr(entry._stream, "wait_event", lambda _event: None)
        wrong.append(readback.start(_produced(device, torch.tensor([7]))).tolist() != [7])
    assert any(wrong)
