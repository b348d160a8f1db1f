"""What a process holds of a model whose experts are most of it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines import run
from family_models import make_model

LAYERS, EXPERTS, HIDDEN, INNER, SLOTS = 8, 64, 256, 512, 60
BLOCK = 3 * HIDDEN * INNER * 2
SPARE = 2 * EXPERTS * BLOCK
"""Two layers: the one that is being read, and the one before, whose memory may not be given back yet."""


def test_memory_while_loading_and_after(tmp_path: Path) -> None:
    model = make_model(
        tmp_path, "olmoe", num_hidden_layers=LAYERS, num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INNER,
        initializer_range=0.05,
    )  # fmt: skip
    ways = None, {"slots": SLOTS}, {"slots": SLOTS, "store": "disk"}
    with ThreadPoolExecutor(2) as pool:
        resident, memory, disk = pool.map(lambda options: run(options, model=model, tokens=8), ways)
    assert resident.tokens == memory.tokens == disk.tokens
    all_experts, slots = LAYERS * EXPERTS * BLOCK, SLOTS * BLOCK
    for offloaded in (memory, disk):
        (counted,) = offloaded.workers
        assert (counted["store_bytes"], counted["slots_bytes"]) == (all_experts, slots)
    for when in ("loading", "after"):
        # a store in memory has all experts once, beside the slots; steps bring slots together for the kernel, and what
        # one layer's were brought to may not be given back when the next one's are
        assert memory.memory[when] < resident.memory[when] + 3 * slots + SPARE
        assert disk.memory[when] < resident.memory[when] - all_experts + 3 * slots + SPARE
