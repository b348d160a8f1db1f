"""One worker in one process: tokens are vLLM's, counters say that slots did it."""

import pytest
from engines import Ran, run

LAYERS, EXPERTS, TOP_K = 12, 64, 4


@pytest.fixture(scope="module")
def resident() -> Ran:
    return run()


@pytest.mark.smoke
def test_off_unless_asked_for(resident: Ran) -> None:
    assert "RoutedExperts" in resident.layers
    assert "OffloadedExperts" not in resident.layers


@pytest.mark.smoke
def test_same_tokens_from_few_slots(resident: Ran) -> None:
    ran = run({"slots": 200})
    assert ran.tokens == resident.tokens
    assert "OffloadedExperts" in ran.layers
    assert "RoutedExperts" not in ran.layers
    (counted,) = ran.workers
    assert counted["slots"] == 200
    assert counted["misses"] > 200
    assert counted["hits"] > 0
    assert counted["requests"] == counted["hits"] + counted["misses"]
    block = counted["store_bytes"] // (LAYERS * EXPERTS)
    assert counted["bytes_moved"] == counted["misses"] * block
    assert counted["slots_bytes"] == 200 * block
    assert "200 of 768 experts have a slot" in ran.log
    assert f"{counted['requests']} experts needed" in ran.log


def test_same_tokens_from_slots_for_hardly_more_than_a_token_and_a_disk(resident: Ran) -> None:
    ran = run(engine={"additional_config": {"expertcast": {"slots": TOP_K + 1, "store": "disk"}}})
    assert ran.tokens == resident.tokens
    (counted,) = ran.workers
    assert counted["link"] == "disk"
    assert counted["steps"] > resident_steps(ran) * LAYERS


def test_same_tokens_in_single_precision() -> None:
    assert run({"slots": 90}, engine={"dtype": "float32"}).tokens == run(engine={"dtype": "float32"}).tokens


def test_too_few_slots_are_one_line() -> None:
    with pytest.raises(RuntimeError, match=r"slots=3 is fewer than the 4 experts one token needs"):
        run({"slots": 3})


def resident_steps(ran: Ran) -> int:
    """Forwards of a run: one for the prompts, one for each token that follows the first."""
    return len(ran.tokens[0])
