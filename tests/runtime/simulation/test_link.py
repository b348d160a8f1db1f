"""The virtual links: order, cancellation and arrival times."""

from __future__ import annotations

import math

import pytest
import torch

from expertcast.predictors import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast.runtime.pools.states import State
from expertcast.runtime.simulation.link import StoredExperts, VirtualDisk, VirtualLink
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool

FULL_ONLY = {"full": 1}


@pytest.mark.parametrize(("window", "arrival"), [(1, 2.0), (2, 3.0), (3, 4.0), (8, 4.0)])
def test_misses_overtake_what_has_not_been_issued(window: int, arrival: float) -> None:
    link = VirtualLink(FULL_ONLY, 1.0, window=window)
    forecasts = [link.submit(key, key, urgent=False) for key in range(3)]
    assert [copy.started for copy in forecasts] == [n < window for n in range(3)]
    miss = link.submit(9, 9, urgent=True)
    link.wait(miss)
    assert link.now == arrival
    assert [link.cancel(copy) for copy in forecasts] == [False, False, window == 1]


def test_promoted_copies_go_before_forecasts() -> None:
    link = VirtualLink(FULL_ONLY, 1.0)
    first, second, third = (link.submit(key, key, urgent=False) for key in range(3))
    link.promote(third)
    link.wait(third)
    assert (link.now, first.done, second.done) == (2.0, True, False)
    link.spend(0.5)
    assert not second.done
    link.spend(0.5)
    assert second.done
    link.spend(5.0)
    late = link.submit(3, 3, urgent=False)
    link.wait(late)
    assert link.now == 9.0  # an idle link saves up no bandwidth


def test_cancelled_copies_take_no_time() -> None:
    link = VirtualLink(FULL_ONLY, 1.0)
    first, second, third = (link.submit(key, key, urgent=False) for key in range(3))
    assert link.cancel(second)
    assert not link.cancel(first)
    link.wait(third)
    assert (link.now, first.done, second.done, link.copies, link.busy_s) == (2.0, True, False, 2, 2.0)


def test_a_forecast_is_waited_for_behind_what_is_before_it() -> None:
    link = VirtualLink(FULL_ONLY, 1.0)
    copies = [link.submit(key, key, urgent=False) for key in range(3)]
    link.wait(copies[2])
    assert (link.now, [copy.done for copy in copies]) == (3.0, [True, True, True])


def test_an_evicted_expert_goes_back_behind_the_copies_under_way() -> None:
    """Two copies arrive after 2 seconds. The eviction takes half a second more, before the next copy."""
    link = VirtualLink(FULL_ONLY, 1.0, write_back=0.5)
    for key in range(2):
        link.submit(key, key, urgent=True)
    link.write_back()
    link.wait(link.submit(2, 2, urgent=True))
    assert link.now == 3.5


def test_precisions_have_their_own_bytes_and_seconds() -> None:
    """0.5 + 4 / 2 = 2.5 s in full, 0.5 + 1 / 2 = 1 s packed."""
    link = VirtualLink({"full": 4, "int4": 1}, 2.0, 0.5)
    assert (link.copy_s, link.block_bytes("int4")) == (2.5, 1)
    link.wait(link.submit(0, 0, urgent=True))
    assert link.now == 2.5
    link.wait(link.submit(1, 1, urgent=True, precision="int4"))
    assert link.now == 3.5


def test_speeds_that_are_refused() -> None:
    for bandwidth in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ExpertcastError, match="bandwidth="):
            VirtualLink(FULL_ONLY, bandwidth)
    with pytest.raises(ExpertcastError, match="latency=-1"):
        VirtualLink(FULL_ONLY, 1.0, -1.0)


# The disk in virtual time; expected times are computed by hand


CODED = StoredExperts(plain=4, coded=(2,), shards=2, decode_s=3.0, threads=1)


def disk(stored: StoredExperts) -> VirtualDisk:
    """Return a disk of one byte per second."""
    return VirtualDisk(stored, 1.0, block_bytes={"full": 8, "int8": 3})


def pooled(stored: StoredExperts, experts: int = 8) -> VirtualDisk:
    """Return a disk with pools, for one layer; its slot belongs to no pool."""
    link = disk(stored)
    block = Field(name="block", shape=(8,), dtype=torch.uint8, offset=0)
    slots = SlotPool(BlockLayout(fields=(block,), block_bytes=8), 1, torch.device("meta"))
    link.use_pools(slots, ModelShape(layers=1, experts=experts, top_k=1, hidden=1), passing=1)
    return link


def used(link: VirtualDisk, *keys: int) -> None:
    """Request the experts of a step."""
    assert link.pools is not None
    link.pools.use(0, keys)


def states(link: VirtualDisk, count: int) -> list[State]:
    assert link.pools is not None
    return [link.pools.state(key) for key in range(count)]


def arrivals(link: VirtualDisk, *keys: int) -> list[float]:
    """Return the arrival times of a step's experts."""
    copies = [link.submit(key, key, urgent=True) for key in keys]
    times = []
    for copy in copies:
        link.wait(copy)
        times.append(link.now)
    return times


def test_raw_experts_follow_one_another() -> None:
    link = disk(StoredExperts(plain=6))
    assert arrivals(link, 0, 1, 2) == [6, 12, 18]
    assert link.bytes_read == 18
    link.spend(10)
    assert arrivals(link, 3) == [34], "the disk begins when it is asked"


def test_the_disk_reads_on_while_a_thread_decodes() -> None:
    """Shards arrive at 5 and 6 and are decoded at 8 and 11. The next expert's arrive at 11 and 12, decoded at 14 and
    17.
    """
    link = disk(CODED)
    assert arrivals(link, 0, 1) == [11, 17]
    assert (link.bytes_read, link.busy_s) == (12, 12)
    assert CODED.copy_s(1.0) == 6, "decoding takes as long as reading"


def test_shards_are_decoded_by_several_threads() -> None:
    slow = StoredExperts(plain=4, coded=(2,), shards=2, decode_s=10.0, threads=2)
    assert arrivals(disk(slow), 0, 1) == [16, 26]
    alone = StoredExperts(plain=4, coded=(2,), shards=2, decode_s=10.0, threads=1)
    assert arrivals(disk(alone), 0, 1) == [25, 45]


def test_experts_of_any_size() -> None:
    link = disk(StoredExperts(plain=4, coded=(1, 2, 3, 4, 5, 6, 7, 8)))
    assert arrivals(link, 7, 0) == [12, 17]


def test_pools_keep_parts() -> None:
    """Pools S and E have room for one expert each. First everything is read. Of two equally used experts, the one with
    the smaller number ranks first and keeps its plane; the other one keeps its shards.
    """
    link = pooled(StoredExperts(plain=4, coded=(2,), pools={State.S: 4, State.E: 2}))
    used(link, 0, 1)
    assert arrivals(link, 0, 1) == [6, 12]
    assert states(link, 3) == [State.S, State.E, State.M]
    used(link, 0)
    assert arrivals(link, 0) == [14], "its shards"
    used(link, 1)
    assert arrivals(link, 1) == [18], "its plane"


def test_shards_that_are_held_wait_for_what_lies_under_them() -> None:
    """The plane arrives until 10: half at 8, decoded at 9; the rest at 10, decoded at 11."""
    link = pooled(StoredExperts(plain=4, coded=(2,), shards=2, decode_s=1.0, pools={State.E: 2}))
    for expected in (7, 12):
        used(link, 0)
        assert arrivals(link, 0) == [expected]
    assert link.bytes_read == 10


def test_an_expert_that_is_held_needs_no_disk() -> None:
    """A compressed expert is decoded at once, while the disk reads expert 1, whose shards arrive at 15 and 16."""
    link = pooled(StoredExperts(plain=4, coded=(2,), shards=2, decode_s=2.5, pools={State.C: 6}))
    used(link, 0)
    assert arrivals(link, 0) == [10]
    busy = link.submit(1, 1, urgent=True)
    assert arrivals(link, 0) == [15]
    link.wait(busy)
    assert link.now == 20
    assert link.bytes_read == 12


def test_forecasts_wait_their_turn() -> None:
    """Two prefetches have begun; a miss overtakes the third, and a dropped one keeps no parts."""
    link = pooled(StoredExperts(plain=4, coded=(2,), pools={State.C: 60}))
    assert [StoredExperts(plain=count).window for count in (1000, 3 << 20, 1 << 30)] == [4, 2, 1]
    begun, _, queued, dropped = (link.submit(key, key, urgent=False) for key in range(4))
    assert link.cancel(dropped)
    assert not link.cancel(begun)
    used(link, 0, 1, 2, 4)
    assert arrivals(link, 4) == [18]
    link.wait(queued)
    assert link.now == 24
    assert arrivals(link, 0, 1, 2, 4, 3) == [24, 24, 24, 24, 30]


def test_misses_are_asked_for_in_the_order_that_keeps_disk_and_threads_busy() -> None:
    """Expert 5 is compressed in memory: a thread decodes it while expert 0 is read."""
    link = pooled(StoredExperts(plain=4, coded=(2,), decode_s=1.0, pools={State.C: 6}))
    used(link, 5)
    arrivals(link, 5)
    assert states(link, 6)[5] is State.C
    assert link.in_order([0, 5]) == [5, 0]
    assert link.in_order([0, 1]) == [0, 1]


def test_a_prefill_may_need_any_number_of_experts() -> None:
    link = pooled(StoredExperts(plain=4, coded=(2,), pools={State.C: 6}), experts=100)
    used(link, *range(100))
    assert arrivals(link, *range(100))[-1] == 600


def test_a_pool_holds_an_expert() -> None:
    with pytest.raises(ExpertcastError, match="but one expert takes 6"):
        pooled(StoredExperts(plain=4, coded=(2,), pools={State.C: 5}))


def test_copies_in_lower_precision_lie_in_memory() -> None:
    link = disk(CODED)
    link.wait(link.submit(0, 0, urgent=True, precision="int8"))
    assert (link.now, link.bytes_read, link.block_bytes("int8")) == (0.0, 0, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"plain": 0}, "plain=0"),
        ({"plain": 1, "coded": (2, 0)}, r"\(2, 0\)"),
        ({"plain": 1, "threads": 0}, "threads=0"),
        ({"plain": 1, "coded": (1,), "pools": {State.F: 1}}, r"pools \['F'\]"),
        ({"plain": 1, "coded": (1,), "pools": {State.C: -1}}, r"pools \['C'\]"),
        ({"plain": 1, "pools": {State.C: 1}}, "choose a codec"),
    ],
)
def test_what_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ExpertcastError, match=message):
        StoredExperts(**fields)  # type: ignore[arg-type]
    with pytest.raises(ExpertcastError, match="bandwidth=0"):
        VirtualDisk(CODED, 0.0, block_bytes={"full": 8})
