"""Reading traces back: the same values through our reader and through `datasets`, splits, orders, shares; any file may
be damaged, which is one line that names it, or the rows that were collected.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from expertcast.data import trace_format as layout
from expertcast.data.batch import TraceBatch
from expertcast.data.plan import SPLITS
from expertcast.data.processes import Share
from expertcast.data.trace_format import TRACE_FILE, read_info
from expertcast.data.traces import TraceDataset
from expertcast.predictors.artefacts import SEAL
from expertcast.predictors.artefacts import digest as DIGEST
from expertcast.predictors.messages import ExpertcastError
from tests.data.small_traces import content, whole
from tests.irregular import IRREGULAR, in_seconds, put
from tests.sealed import edit_json


def keys(batch: TraceBatch) -> list[tuple[int, int]]:
    return list(zip(batch.document_T.tolist(), batch.position_T.tolist(), strict=True))


def test_datasets_reads_the_same_rows(dataset: TraceDataset, reference_tokenizer: Any) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.load_from_disk(str(dataset.folder)).with_format("numpy")
    assert len(table) == dataset.token_count("all")
    rows = table[500:520]
    ours = whole(dataset)[500:520]
    for name, values in (("residual", ours.residual_TLD), ("early", ours.early_TLD)):
        assert values is not None
        codes, scale = (torch.from_numpy(rows[f"{name}{end}"]).view(20, values.shape[1], -1) for end in ("", "_scale"))
        blocks = codes.double().unflatten(-1, (scale.shape[-1], -1))
        assert torch.equal((blocks * scale.double().exp2()[..., None]).flatten(-2), values.double())
    assert torch.equal(torch.from_numpy(rows["router_logits"]).reshape(ours.logits_TLE.shape), ours.logits_TLE)
    assert rows["position"].tolist() == ours.position_T.tolist()
    assert ours.token_T is not None
    assert rows["token"].tolist() == ours.token_T.tolist()
    assert reference_tokenizer.decode(rows["token"].tolist()).strip()


def test_splits_are_whole_documents_and_make_up_everything(dataset: TraceDataset) -> None:
    parts = {split: whole(dataset, split) for split in SPLITS}
    for split, part in parts.items():
        assert len(part) == dataset.token_count(split) == dataset.info["splits"][split]
    documents = [set(part.document_T.tolist()) for part in parts.values()]
    assert sum(map(len, documents)) == len(set.union(*documents)) == len(dataset.documents)
    together = TraceBatch.cat(list(parts.values()))
    assert torch.equal(together.residual_TLD, whole(dataset).residual_TLD)
    expected = [(d.index, position) for d in dataset.documents for position in range(d.tokens)]
    assert keys(together) == expected
    assert all(document.domain for document in dataset.documents)


def test_default_vectors_come_from_the_train_split(dataset: TraceDataset) -> None:
    defaults = dataset.defaults
    train = whole(dataset, "train")
    assert defaults.token_count == len(train) < dataset.token_count("all")
    for layer in dataset.view:
        ids_TK, _ = layer.route(train.logits_TLE[:, layer.index])
        counted = torch.bincount(ids_TK.reshape(-1), minlength=layer.num_experts)
        assert torch.equal(counted, defaults.count_LE[layer.index])


def test_shuffle_is_a_permutation_drawn_from_the_seed(dataset: TraceDataset) -> None:
    plain = whole(dataset, "train")
    first, again, other = (whole(dataset, "train", shuffle=True, seed=seed) for seed in (0, 0, 1))
    assert keys(first) == keys(again) != keys(other)
    assert keys(first) != keys(plain)
    order = {key: row for row, key in enumerate(keys(plain))}
    rows = torch.tensor([order[key] for key in keys(first)])
    assert sorted(rows.tolist()) == list(range(len(plain)))
    assert torch.equal(first.residual_TLD, plain.residual_TLD[rows])
    assert torch.equal(first.logits_TLE, plain.logits_TLE[rows])


def resident(folder: Path) -> int:
    """kB of the folder's files in this process."""
    maps = re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    return sum(int(each.split("Rss:")[1].split()[0]) for each in maps if str(folder) in each)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_leaves_no_pages_of_the_files_in_the_process(dataset: TraceDataset, shuffle: bool) -> None:
    traces = TraceDataset.open(dataset.folder)
    before = resident(dataset.folder)
    for batch in traces.batches("train", 700, shuffle=shuffle):
        batch.logits_TLE.fill_(9.0)
    assert before > 0
    assert resident(dataset.folder) <= before
    assert not whole(traces, "train").logits_TLE.eq(9.0).any(), "batches are copies"


def test_batches_are_full_but_the_last(dataset: TraceDataset) -> None:
    sizes = [len(batch) for batch in dataset.batches("all", 700, max_tokens=3000)]
    assert sizes == [700, 700, 700, 700, 200]


def test_max_tokens_is_a_prefix_also_when_shuffled(dataset: TraceDataset) -> None:
    prefix = whole(dataset, "train", max_tokens=2500)
    assert keys(prefix) == keys(whole(dataset, "train"))[:2500]
    assert sorted(keys(whole(dataset, "train", max_tokens=2500, shuffle=True))) == sorted(keys(prefix))


@pytest.mark.parametrize("shuffle", [False, True])
def test_without_some_documents(dataset: TraceDataset, shuffle: bool) -> None:
    """The rows of the others as they were, routing of the token before included, in batches that are full."""
    left_out = {document.index for document in dataset.documents[1::3]}
    rest, every = dataset.without(left_out), whole(dataset)
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
    assert torch.equal(rest.defaults.count_LE, dataset.defaults.count_LE)
    assert not list(dataset.without({d.index for d in rest.documents}).without(left_out).batches("all", 9))


def test_writing_to_a_batch_never_reaches_the_disk(dataset: TraceDataset) -> None:
    batch = next(TraceDataset.open(dataset.folder).batches("all", 8))
    expected = batch.residual_TLD.clone()
    batch.residual_TLD.zero_()
    assert torch.equal(next(TraceDataset.open(dataset.folder).batches("all", 8)).residual_TLD, expected)


def test_shares_are_disjoint_documents_in_equally_many_full_batches(dataset: TraceDataset) -> None:
    shares = [list(dataset.batches("train", 256, share=Share(rank, 3))) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    assert {len(batch) for share in shares for batch in share} == {256}
    documents = [set(TraceBatch.cat(share).document_T.tolist()) for share in shares]
    assert sum(map(len, documents)) == len(set.union(*documents))


def test_bad_requests_are_one_clear_line(dataset: TraceDataset, tmp_path: Path) -> None:
    for request, expected in (
        (lambda: next(dataset.batches("dev", 8)), "unknown split 'dev'"),
        (lambda: next(dataset.batches("train", 0)), "batch_size=0"),
        (lambda: next(dataset.batches("test", 2048, share=Share(0, 2))), "smaller than a batch of 2048"),
        (lambda: TraceDataset.open(tmp_path), "no traces in"),
        (lambda: TraceDataset.open(tmp_path / "nowhere"), "no traces in .*nowhere .no such folder"),
    ):
        with pytest.raises(ExpertcastError, match=expected) as raised:
            request()
        assert "\n" not in str(raised.value)


def test_trace_json_says_where_the_traces_come_from(dataset: TraceDataset) -> None:
    info = json.loads((dataset.folder / TRACE_FILE).read_text())
    assert info["model"] == "Qwen2MoeForCausalLM"
    assert info["fingerprint"] == dataset.view.fingerprint()
    assert info["window"] == 64
    assert info["command"]
    assert {"torch", "transformers"} <= set(info["versions"])
    assert not (dataset.folder / layout.PROGRESS_FOLDER).exists()


# Damage

WRONG: dict[type, tuple[Any, ...]] = {
    str: (None, True, 0, [], {}),
    int: (None, True, -1, 0.5, 10**30, "1", [1]),
    float: (None, True, -1.0, "1", [1]),
    bool: (None, 1, "true"),
    list: (None, {}, "x", 3, [[]], [None]),
    dict: (None, [], "x", {"odd\nname": 1}),
    type(None): (),
}
"""Values that are none of what a member may be, by the kind of what it is."""
OPTIONAL = ("collection_s", "experts_fingerprint")
EITHER = (("seed", -1), ("seed", 10**30), ("git_revision", None))


def line(folder: Path, expected: list[Any]) -> str | None:
    """Return the error message for a damaged folder; None if everything is unchanged."""
    try:
        found = content(folder)
    except ExpertcastError as error:
        told = str(error)
    else:
        assert found == expected
        return None
    assert "\n" not in told
    assert str(folder) in told
    return told


def members(values: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every member of an object, of lists the first item."""
    for key in values if isinstance(values, dict) else range(min(1, len(values))):
        yield (*place, key)
        if isinstance(values[key], dict | list):
            yield from members(values[key], (*place, key))


def at(values: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        values = values[key]
    return values


def test_every_member_of_trace_json_is_checked(traces: Path, expected: list[Any]) -> None:
    """Where its seal is right."""
    path = traces / "trace.json"
    original = path.read_bytes()

    def said(change: Callable[[Any], object], outer: list[Any]) -> str:
        edit_json(path, lambda values: change(at(values, outer)))
        told = line(traces, expected)
        path.write_bytes(original)
        assert told is not None
        return told

    for place in members(json.loads(original)):
        *outer, last = place
        if place == (SEAL,) or (place[0] == "versions" and outer):
            continue
        named = last if isinstance(last, str) and place[0] not in ("columns", "files") else ""
        if named not in OPTIONAL and last not in layout.FOR_DATASETS:
            missing = said(lambda holder, last=last: holder.pop(last), outer)
            assert f"{named} is missing" in missing or not named
        for wrong in () if place[0] == "versions" else WRONG[type(at(json.loads(original), place))]:
            if (last, wrong) not in EITHER:
                told = said(lambda holder, last=last, wrong=wrong: holder.__setitem__(last, wrong), outer)
                assert str(path) in told, (place, wrong)
                assert named in told, (place, wrong)


def test_no_byte_of_any_file_can_change_unnoticed(traces: Path, expected: list[Any]) -> None:
    draw = random.Random(0)
    files = read_files(traces)
    assert {path for path in traces.rglob("*") if path.is_file()} - {*files} == {
        *map(traces.joinpath, (*layout.FOR_DATASETS, layout.CARD))
    }
    for path in files:
        original = path.read_bytes()
        for place in [draw.randrange(min(len(original), 1000)), *(draw.randrange(len(original)) for _ in range(3))]:
            changed = bytearray(original)
            changed[place] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
            assert line(traces, expected) is not None, (path, place)
            with pytest.raises(ExpertcastError):
                TraceDataset.open(traces).verify()
        path.write_bytes(original)
    assert line(traces, expected) is None


def read_files(folder: Path) -> list[Path]:
    """Those that a reader looks at."""
    info = read_info(folder)
    assert info is not None
    return sorted(folder / name for name in {*info["files"], "trace.json"}.difference(layout.FOR_DATASETS))


@pytest.mark.parametrize("kind", ["cut", "empty", "longer", "other", "gone"])
def test_files_that_are_cut_or_other_files(kind: str, traces: Path, expected: list[Any]) -> None:
    files = read_files(traces)
    for path, other in zip(files, [*files[1:], files[0]], strict=True):
        original, others = path.read_bytes(), other.read_bytes()
        path.unlink()
        if kind != "gone":
            half = original[: len(original) // 2]
            path.write_bytes({"cut": half, "empty": b"", "longer": original + bytes(8), "other": others}[kind])
        assert line(traces, expected) is not None, path
        path.write_bytes(original)
    assert line(traces, expected) is None


def changed(traces: Path, name: str, content: bytes) -> None:
    """Another file of the traces, with its digest in trace.json."""
    (traces / name).write_bytes(content)
    edit_json(traces / "trace.json", lambda info: info["files"].update({name: DIGEST(content)}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda info: info["documents"][0].update(tokens=2**53), "documents have"),
        (lambda info: info.update(tokens=2**53), "tokens and splits are"),
        (lambda info: info["shape"].update(L=10**9), "shape.L is 1000000000"),
        (lambda info: info["shape"].update(L=9999), "columns are not those of a model"),
        (lambda info: info["columns"].pop("early"), "columns are not those of a model"),
        (lambda info: info["shape"].update(K=65), "shape.K is 65"),
        (lambda info: info["documents"].append(info["documents"][-1]), "duplicate index"),
        (lambda info: info["files"].pop("data-00000-00000.arrow"), "rows in 1 shards"),
        (lambda info: info["files"].pop("skeleton/config.json"), "files lack skeleton/config.json"),
        (lambda info: info.update(format="expertcast-traces-1"), "format is 'expertcast-traces-1'"),
    ],
)
def test_parts_that_do_not_fit_each_other(
    change: Callable[[dict[str, Any]], object], told: str, traces: Path, expected: list[Any]
) -> None:
    edit_json(traces / "trace.json", change)
    found = str(line(traces, expected))
    assert told in found
    assert "collect the traces again" in found


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"vocab_size": 10**30}, "not a valid router skeleton"),
        ({"model_type": []}, "not a valid router skeleton"),
        ({"hidden_size": 96}, "model.safetensors: tensor"),
        ({"num_experts_per_tok": 3}, "belongs to another model"),
    ],
)
def test_a_configuration_of_another_model(
    members: dict[str, Any], told: str, traces: Path, expected: list[Any]
) -> None:
    config = json.loads((traces / "skeleton/config.json").read_bytes())
    changed(traces, "skeleton/config.json", json.dumps({**config, **members}).encode())
    assert told in str(line(traces, expected))


@pytest.mark.parametrize("name", ["default_vectors.safetensors", "skeleton/model.safetensors"])
def test_values_that_cannot_be_are_refused(name: str, traces: Path, expected: list[Any]) -> None:
    values = bytearray((traces / name).read_bytes())
    middle = len(values) // 8 * 4
    values[middle : middle + 4] = b"\xff" * 4  # NaN in fp32 and bf16
    changed(traces, name, bytes(values))
    assert "contains NaN or infinity" in str(line(traces, expected))


def test_a_shard_is_read_for_its_digest_once_and_when_it_is_used(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("expertcast.data.traces.digest", lambda data: sizes.append(len(data)) or DIGEST(data))
    dataset = TraceDataset.open(traces)
    assert not sizes
    for _ in range(2):
        next(iter(dataset.batches("train", 8)))
    assert sizes == [(traces / layout.shard_file(0, 0)).stat().st_size]
    dataset.verify()
    assert len(sizes) == 2


@pytest.mark.parametrize("kind", IRREGULAR)
def test_what_is_no_file(kind: str, traces: Path, expected: list[Any]) -> None:
    """In the place of any file."""
    for path in read_files(traces):
        content_of = path.read_bytes()
        put(kind, path)
        with in_seconds(20):
            said = line(traces, expected)
        assert said is not None, path
        assert path.name in said, path
        path.rmdir() if kind == "folder" else path.unlink()
        path.write_bytes(content_of)


def replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


def narrower(table: pa.Table) -> pa.Table:
    """As many numbers in lists half as long would be twice as many rows."""
    column = table.column(layout.LOGITS).combine_chunks()
    lists = pa.FixedSizeListArray.from_arrays(column.values, column.type.list_size // 2)
    return replaced(table, layout.LOGITS, lists[: len(column)])


def wider(table: pa.Table) -> pa.Table:
    return replaced(table, "position", table.column("position").cast(pa.int64()))


def empty_row(table: pa.Table) -> pa.Table:
    documents = [None, *table.column("document").to_pylist()[1:]]
    return replaced(table, "document", pa.array(documents, pa.int32()))


def renamed(table: pa.Table) -> pa.Table:
    return table.rename_columns(["hidden", *table.column_names[1:]])


@pytest.mark.parametrize(
    ("change", "rows_at_once", "compression", "told"),
    [
        (narrower, None, None, "column router_logits is fixed_size_list"),
        (wider, None, None, "column position is int64, not int32"),
        (empty_row, None, None, "1 chunks and 1 nulls instead of 1 and 0"),
        (renamed, None, None, "has other columns than residual, residual_scale, router_logits"),
        (lambda table: table, 100, None, "chunks and 0 nulls"),
        (lambda table: table, None, "lz4", "points outside the file"),
    ],
)
def test_other_columns_are_refused(
    change: Callable[[pa.Table], pa.Table], rows_at_once: int | None, compression: str | None, told: str, traces: Path
) -> None:
    path = traces / layout.shard_file(0, 0)
    table = change(pa.ipc.open_stream(path.read_bytes()).read_all())
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows_at_once)
    with pytest.raises(ExpertcastError, match=told) as raised:
        TraceDataset.open(traces)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_as_many_experts_per_token_as_there_are_do_not_contradict_each_other(traces: Path, expected: list[Any]) -> None:
    """The error names the model, whose fingerprint differs."""
    edit_json(traces / "trace.json", lambda info: info["shape"].update(K=info["shape"]["E"]))
    assert "belongs to another model" in str(line(traces, expected))
