"""The link that is the disk: the resident model's bits from a file, in no memory but the slots."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.predictors import ExpertcastError
from expertcast.runtime import InstantLink, offload
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.expert_file import FILE_NAME
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.faults import INPUTS, RaiseAt


@pytest.mark.parametrize("fields", [{}, {"cache": False}, {"predictor": "next_norm"}, {"slots": 5}])
def test_same_bits(
    fields: dict[str, object], reference_model: PreTrainedModel, one: dict[str, Tensor], tmp_path: Path
) -> None:
    """Without forecasts and with, also where a layer's experts come in chunks; then the model is what it was."""
    before = greedy(reference_model, one, 5)
    slots = {} if fields.get("cache") is False else {"slots": 60}
    with offload(reference_model, store="disk", store_folder=tmp_path, **{**slots, **fields}) as offloaded:  # type: ignore[arg-type]
        assert isinstance(offloaded.link, DiskLink)
        assert_same(greedy(offloaded, one, 5), before)
        stats = offloaded.stats.as_dict()
        assert stats["bytes_moved"] >= stats["misses"] * offloaded.store.layout.block_bytes
        assert offloaded.link.busy_s > 0
        assert offloaded.pool.block(0).data_ptr() % 4096 == 0
    assert_same(greedy(reference_model, one, 5), before)


def test_bytes_read(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    """Those of the experts where they are not compressed; set to zero with the others."""
    with offload(reference_model, store="disk", slots=60) as offloaded:
        greedy(offloaded, one, 3)
        link = offloaded.link
        assert link.bytes_read == link.bytes_moved > 0
        offloaded.reset_stats()
        assert link.bytes_read == link.bytes_moved == 0


def test_a_slower_disk(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    """No more bytes per second than were asked for, in all and by the link's own books."""
    bandwidth = 20e6
    with offload(reference_model, store="disk", link="disk", bandwidth=bandwidth, slots=60) as offloaded:
        greedy(offloaded, one, 3)
        link = offloaded.link
        assert link.bytes_moved / link.busy_s < 1.2 * bandwidth
        assert isinstance(link.twin(), DiskLink)


def test_lower_precision_comes_from_memory(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    texts = []
    for link in (DiskLink(), InstantLink()):
        with offload(
            reference_model, store="disk", link=link, slots=60, policies=Policies(miss="fetch_lowest")
        ) as offloaded:
            texts.append(greedy(offloaded, one, 3))
    assert_same(*texts)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    """One error for each forward, and one for putting the experts back; with the bytes there again the model is right.

    The same file mapped would have killed the process.
    """
    model = tiny_model("qwen3_moe")
    before = greedy(model, INPUTS)
    offloaded = offload(model, store="disk", store_folder=tmp_path, slots=5)
    path = tmp_path / FILE_NAME
    content, times = path.read_bytes(), path.stat()
    os.truncate(path, len(content) // 2)
    for _ in range(2):
        with pytest.raises(ExpertcastError, match="was changed or cut off while it was in use"):
            greedy(offloaded, INPUTS)
    with pytest.raises(ExpertcastError, match="was cut off while it was in use"):
        offloaded.store.views(0)
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert_same(greedy(offloaded, INPUTS), before)
    offloaded.close()
    assert_same(greedy(model, INPUTS), before)


def test_a_file_that_is_replaced_while_in_use(tmp_path: Path) -> None:
    """A reader that is opened again, after a forward was interrupted, reads the store's own file."""
    one, two = tiny_model("qwen3_moe"), tiny_model("qwen3_moe", seed=1)
    expected = greedy(one, INPUTS)
    with offload(one, store="disk", store_folder=tmp_path, slots=5) as offloaded:
        with offload(two, store="disk", store_folder=tmp_path, slots=5):
            pass
        interrupt = offloaded.view[2].experts.act_fn.register_forward_hook(RaiseAt(1, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            greedy(offloaded, INPUTS)
        interrupt.remove()
        assert_same(greedy(offloaded, INPUTS), expected)


def test_a_file_that_is_written_over_while_in_use(tmp_path: Path) -> None:
    """A reader that is opened again refuses it too."""
    one, two = tiny_model("qwen3_moe"), tiny_model("qwen3_moe", seed=1)
    with offload(two, store="disk", store_folder=tmp_path / "two", slots=5):
        pass
    with offload(one, store="disk", store_folder=tmp_path / "one", slots=5) as offloaded:
        shutil.copyfile(tmp_path / "two" / FILE_NAME, tmp_path / "one" / FILE_NAME)
        for _ in range(2):
            with pytest.raises(ExpertcastError, match="was changed or cut off while it was in use"):
                greedy(offloaded, INPUTS)


def test_refusals(reference_model: PreTrainedModel) -> None:
    with pytest.raises(ExpertcastError, match="give store='disk'"):
        offload(reference_model, link="disk")
    with pytest.raises(ExpertcastError, match="bandwidth also to disk"):
        offload(reference_model, store="disk", link="disk", latency=1e-3)
    with pytest.raises(ExpertcastError, match="threads=0"):
        DiskLink(0)
    with pytest.raises(ExpertcastError, match="give bytes per second, 1 or more"):
        DiskLink(bandwidth=0)
    assert all(torch.isfinite(parameter).all() for parameter in reference_model.parameters())
