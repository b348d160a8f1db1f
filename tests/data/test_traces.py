"""Reading traces back: the same values through our reader and through `datasets`, splits, orders, shares."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertcast.data import trace_format as layout
from expertcast.data.batch import TraceBatch
from expertcast.data.plan import SPLITS
from expertcast.data.processes import Share
from expertcast.data.trace_format import TRACE_FILE
from expertcast.data.traces import TraceDataset
from expertcast.predictors.messages import ExpertcastError
from tests.sealed import edit_json


def whole(traces: TraceDataset, split: str = "all", **options: Any) -> TraceBatch:
    return TraceBatch.cat(list(traces.batches(split, 1000, **options)))


def keys(batch: TraceBatch) -> list[tuple[int, int]]:
    return list(zip(batch.document_T.tolist(), batch.position_T.tolist(), strict=True))


def test_datasets_reads_the_same_rows(reference_traces: TraceDataset, reference_tokenizer: Any) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.load_from_disk(str(reference_traces.folder)).with_format("numpy")
    assert len(table) == reference_traces.token_count("all")
    rows = table[500:520]
    ours = whole(reference_traces)[500:520]
    bits = torch.from_numpy(rows["residual"].astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(bits.reshape(20, *reference_traces.info["columns"]["residual"]["shape"]), ours.residual_TLD)
    assert torch.equal(torch.from_numpy(rows["router_logits"]).reshape(ours.logits_TLE.shape), ours.logits_TLE)
    assert rows["position"].tolist() == ours.position_T.tolist()
    assert ours.token_T is not None
    assert rows["token"].tolist() == ours.token_T.tolist()
    assert reference_tokenizer.decode(rows["token"].tolist()).strip()


def test_splits_are_whole_documents_and_make_up_everything(reference_traces: TraceDataset) -> None:
    parts = {split: whole(reference_traces, split) for split in SPLITS}
    for split, part in parts.items():
        assert len(part) == reference_traces.token_count(split) == reference_traces.info["splits"][split]
    documents = [set(part.document_T.tolist()) for part in parts.values()]
    assert sum(map(len, documents)) == len(set.union(*documents)) == len(reference_traces.documents)
    together = TraceBatch.cat(list(parts.values()))
    assert torch.equal(together.residual_TLD, whole(reference_traces).residual_TLD)
    expected = [(d.index, position) for d in reference_traces.documents for position in range(d.tokens)]
    assert keys(together) == expected
    assert all(document.domain for document in reference_traces.documents)


def test_default_vectors_come_from_the_train_split(reference_traces: TraceDataset) -> None:
    defaults = reference_traces.defaults
    train = whole(reference_traces, "train")
    assert defaults.token_count == len(train) < reference_traces.token_count("all")
    for layer in reference_traces.view:
        ids_TK, _ = layer.route(train.logits_TLE[:, layer.index])
        counted = torch.bincount(ids_TK.reshape(-1), minlength=layer.num_experts)
        assert torch.equal(counted, defaults.count_LE[layer.index])


def test_shuffle_is_a_permutation_drawn_from_the_seed(reference_traces: TraceDataset) -> None:
    plain = whole(reference_traces, "train")
    first, again, other = (whole(reference_traces, "train", shuffle=True, seed=seed) for seed in (0, 0, 1))
    assert keys(first) == keys(again) != keys(other)
    assert keys(first) != keys(plain)
    order = {key: row for row, key in enumerate(keys(plain))}
    rows = torch.tensor([order[key] for key in keys(first)])
    assert sorted(rows.tolist()) == list(range(len(plain)))
    assert torch.equal(first.residual_TLD, plain.residual_TLD[rows])
    assert torch.equal(first.logits_TLE, plain.logits_TLE[rows])


def test_batches_are_full_but_the_last(reference_traces: TraceDataset) -> None:
    sizes = [len(batch) for batch in reference_traces.batches("all", 700, max_tokens=3000)]
    assert sizes == [700, 700, 700, 700, 200]


def test_max_tokens_is_a_prefix_also_when_shuffled(reference_traces: TraceDataset) -> None:
    prefix = whole(reference_traces, "train", max_tokens=2500)
    assert keys(prefix) == keys(whole(reference_traces, "train"))[:2500]
    assert sorted(keys(whole(reference_traces, "train", max_tokens=2500, shuffle=True))) == sorted(keys(prefix))


@pytest.mark.parametrize("shuffle", [False, True])
def test_without_some_documents(reference_traces: TraceDataset, shuffle: bool) -> None:
    """The rows of the others as they were, routing of the token before included, in batches that are full."""
    left_out = {document.index for document in reference_traces.documents[1::3]}
    rest, every = reference_traces.without(left_out), whole(reference_traces)
    batches = list(rest.batches("all", 700, shuffle=shuffle))
    assert [len(batch) for batch in batches[:-1]] == [700] * (len(batches) - 1)
    place = {key: row for row, key in enumerate(keys(every))}
    found = [key for batch in batches for key in keys(batch)]
    assert (sorted(found) if shuffle else found) == sorted(
        (key for key in place if key[0] not in left_out), key=(lambda key: key) if shuffle else place.__getitem__
    )
    joined, expected = TraceBatch.cat(batches), every[torch.tensor([place[key] for key in found])]
    for name in ("residual_TLD", "logits_TLE", "token_T", "early_TLD"):
        assert torch.equal(getattr(joined, name), getattr(expected, name)), name
    assert torch.equal(joined.previous_TLE.nan_to_num(-1e4), expected.previous_TLE.nan_to_num(-1e4))
    for split in SPLITS:
        assert rest.token_count(split) == sum(map(len, rest.batches(split, 1000)))
    assert torch.equal(rest.defaults.count_LE, reference_traces.defaults.count_LE)
    assert not list(reference_traces.without({d.index for d in rest.documents}).without(left_out).batches("all", 9))


def test_writing_to_a_batch_never_reaches_the_disk(reference_traces: TraceDataset) -> None:
    batch = next(TraceDataset.open(reference_traces.folder).batches("all", 8))
    expected = batch.residual_TLD.clone()
    batch.residual_TLD.zero_()
    assert torch.equal(next(TraceDataset.open(reference_traces.folder).batches("all", 8)).residual_TLD, expected)


def test_shares_are_disjoint_documents_in_equally_many_full_batches(reference_traces: TraceDataset) -> None:
    shares = [list(reference_traces.batches("train", 256, share=Share(rank, 3))) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    assert {len(batch) for share in shares for batch in share} == {256}
    documents = [set(TraceBatch.cat(share).document_T.tolist()) for share in shares]
    assert sum(map(len, documents)) == len(set.union(*documents))


def test_bad_requests_are_one_clear_line(reference_traces: TraceDataset, tmp_path: Path) -> None:
    for request, expected in (
        (lambda: next(reference_traces.batches("dev", 8)), "unknown split 'dev'"),
        (lambda: next(reference_traces.batches("train", 0)), "batch_size=0"),
        (lambda: next(reference_traces.batches("test", 4096, share=Share(0, 2))), "holds no batch of 4096"),
        (lambda: TraceDataset.open(tmp_path), "holds no traces"),
        (lambda: TraceDataset.open(tmp_path / "nowhere"), "nowhere holds no traces .no such folder"),
    ):
        with pytest.raises(ExpertcastError, match=expected) as raised:
            request()
        assert "\n" not in str(raised.value)


def test_damaged_traces_are_one_clear_line(reference_traces: TraceDataset, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    shutil.copytree(reference_traces.folder, folder)
    shard = next(folder.glob("data-*"))
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(ExpertcastError, match="cannot read"):
        TraceDataset.open(folder)
    edit_json(folder / TRACE_FILE, lambda info: info.update(complete=False, files={}))
    with pytest.raises(ExpertcastError, match="not finished"):
        TraceDataset.open(folder)


def test_trace_json_says_where_the_traces_come_from(reference_traces: TraceDataset) -> None:
    info = json.loads((reference_traces.folder / TRACE_FILE).read_text())
    assert info["model"] == "reference"
    assert info["fingerprint"] == reference_traces.view.fingerprint()
    assert info["window"] == 256
    assert info["command"]
    assert {"torch", "transformers"} <= set(info["versions"])
    assert not (reference_traces.folder / layout.PROGRESS_FOLDER).exists()
