"""Two workers, each with half of every expert: their tokens are those of two workers without expertcast."""

from pathlib import Path

import pytest
from engines import both
from family_models import HIDDEN, LAYERS, make_model

EXPERTS, INNER, SLOTS = 8, 128, 11


@pytest.mark.smoke
def test_two_processes(tmp_path: Path) -> None:
    resident, offloaded = both(
        {"slots": SLOTS, "predictor": "router_input"},
        model=make_model(tmp_path, "mixtral", intermediate_size=INNER),
        engine={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    )
    assert offloaded.tokens == resident.tokens
    first, second = offloaded.workers
    for counted in (first, second):
        assert counted["slots"] == SLOTS
        assert counted["requests"] == counted["hits"] + counted["misses"] > 0
        assert counted["prefetched_used"] > 0
    assert first["requests"] == second["requests"]  # both ran all layers of all tokens
    whole = LAYERS * EXPERTS * 3 * HIDDEN * INNER * 2
    assert first["store_bytes"] == second["store_bytes"] == whole // 2
