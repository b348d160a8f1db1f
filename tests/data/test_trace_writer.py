"""What is written beside the rows: the accounts of ranks that collect together, and files at a user's path."""

from __future__ import annotations

import math
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data import trace_format as layout
from expertcast.data.means import MeanOutputs
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.trace_writer import RankWriter, merged_progress
from expertcast.data.traces import TraceDataset
from expertcast.predictors.artefacts import file_digest, is_finite, write_user_file
from expertcast.predictors.messages import ExpertcastError


def test_what_two_ranks_committed_is_one_account(
    dataset: TraceDataset, small_model: PreTrainedModel, tmp_path: Path
) -> None:
    """Shards of a thousand rows: two of the first rank, one of the second. Each goes on from its own."""
    view, info = find_moe_layers(small_model), layout.read_info(dataset.folder)
    assert info is not None
    columns = layout.columns_in(info)

    def writer(rank: int) -> RankWriter:
        size = 1000 * layout.row_bytes(columns)
        return RankWriter(tmp_path, MeanOutputs(view), rank=rank, columns=columns, shard_bytes=size)

    ranks, every = [writer(0), writer(1)], MeanOutputs(view)
    for number, batch in enumerate(list(dataset.batches("all", 500))[:5]):
        for means in (ranks[number % 2].means, every):
            means.add_shared(1, batch.residual_TLD[:, 1])
            means.token_count += len(batch)
        ranks[number % 2].append(batch)
        assert ranks[number % 2].held == 500 * (number in (0, 1, 4))
    for rank in ranks:
        rank.commit()
    found = [MeanOutputs(view), MeanOutputs(view)]
    done = merged_progress(tmp_path, found)
    assert list(done["shards"]) == [layout.shard_file(0, 0), layout.shard_file(0, 1), layout.shard_file(1, 0)]
    assert all(file_digest(tmp_path / name) == digest for name, digest in done["shards"].items())
    assert done["rows"] == 2500
    assert done["seconds"] == ranks[0].done["seconds"] > 0
    for name, tensor in found[0].as_tensors().items():
        torch.testing.assert_close(tensor, every.as_tensors()[name])
    for rank, batches, rows in ((0, 3, 1500), (1, 2, 1000)):
        again = writer(rank)
        assert (again.done["batches"], again.done["rows"], again.held) == (batches, rows, 0)
        assert all(torch.equal(a, b) for a, b in zip(again.means.tensors(), ranks[rank].means.tensors(), strict=True))


def test_a_file_at_a_users_path(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for content in (b"old", b"new"):
        write_user_file(path, content)
        assert path.read_bytes() == content
    os.mkfifo(pipe := tmp_path / "pipe")  # neither replaced nor opened for reading, as /dev/null
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_user_file(pipe, b"sent")
    assert pipe.is_fifo()
    assert os.read(reader, 9) == b"sent"
    os.close(reader)
    with pytest.raises(ExpertcastError, match="replaced"), patch("os.replace", side_effect=OSError(16, "not replaced")):
        write_user_file(path, b"newest")  # a mounted file
    assert {each.name for each in tmp_path.iterdir()} == {path.name, pipe.name}
    with pytest.raises(ExpertcastError, match=f"{tmp_path / 'nowhere' / 'file'}: No such file"):
        write_user_file(tmp_path / "nowhere" / "file", b"")


@pytest.mark.parametrize("hidden", [96, 80, 7])
def test_residuals_in_eight_bits(hidden: int) -> None:
    """Half a step of a block's largest value at most, never rounded twice; what is not finite stays so."""
    generator = torch.Generator().manual_seed(hidden)
    size = torch.randn(50, 3, hidden, generator=generator, dtype=torch.float64).mul(9).exp2()
    values = (torch.randn(50, 3, hidden, generator=generator) * size).bfloat16()
    values[0], values[1, 0], values[2, 0, :5] = 0, 127.5, torch.tensor([3e38, -1e-38, 1e-40, 255, 1])
    found = layout.rounded(values)
    block = math.gcd(hidden, 32)
    largest = values.double().abs().unflatten(-1, (-1, block)).amax(-1).repeat_interleave(block, -1)
    error = (found.double() - values.double()).abs()
    assert bool((error <= (largest / 126).clamp(min=2.0**-120)).all())
    assert torch.equal(layout.rounded(found), found)
    assert torch.equal(layout.decoded(*layout.coded(values)), found)
    assert torch.equal(layout.decoded(*layout.coded(found)), found)
    for odd in (math.nan, math.inf, -math.inf):
        values[3, 1, 0] = odd
        assert not is_finite(layout.rounded(values)[3])
