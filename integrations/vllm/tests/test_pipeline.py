"""Two workers, each with half of the layers. vLLM's CPU engine runs a pipeline of compiled layers only."""

from pathlib import Path

from engines import both
from family_models import LAYERS, make_model

EXPERTS, SLOTS = 8, 5


def test_two_stages(tmp_path: Path) -> None:
    resident, offloaded = both(
        {"slots": SLOTS},
        model=make_model(tmp_path, "mixtral"),
        engine={"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "enforce_eager": False},
    )
    assert offloaded.tokens == resident.tokens
    held = []
    for counted in offloaded.workers:
        assert counted["slots"] == SLOTS
        assert counted["misses"] > SLOTS
        held.append(len(counted["per_layer"]))
        assert f"{SLOTS} of {held[-1] * EXPERTS} experts have a slot" in offloaded.log
    assert sorted(held) == [LAYERS // 2, LAYERS - LAYERS // 2]
