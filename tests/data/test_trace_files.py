"""Any file of a trace dataset may be damaged: one line that names it, or the rows that were collected."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from expertcast.data import trace_format as layout
from expertcast.data.skeleton import load_skeleton
from expertcast.data.trace_format import read_info
from expertcast.data.traces import TraceDataset
from expertcast.predictors.artefacts import SEAL
from expertcast.predictors.artefacts import digest as DIGEST
from expertcast.predictors.messages import ExpertcastError
from tests.data.small_traces import content
from tests.irregular import IRREGULAR, in_seconds, put
from tests.sealed import edit_json

JSON_FILES = ("trace.json", "state.json", "skeleton/layers.json")
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
WEIGHTS = "skeleton/model.safetensors"
FREE = ("versions", "_format_columns", "_format_kwargs", "_format_type", "_split")
"""Members that hold what their writers please."""
OPTIONAL = ("collection_s", "hash")
"""Members that older files lack."""
EITHER = (("seed", -1), ("seed", 10**30), ("git_revision", None))


def line(folder: Path, expected: list[Any]) -> str | None:
    """What is said of a damaged folder; None where everything is as it was."""
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


@pytest.mark.filterwarnings("ignore:.*written by an older expertcast")
@pytest.mark.parametrize("name", JSON_FILES)
def test_every_member_of_the_json_files_is_checked(name: str, old: Path, expected: list[Any]) -> None:
    """In old traces, where no digest helps."""
    path = old / name
    original = path.read_bytes()

    def said(change: Callable[[Any], object], outer: list[Any]) -> str:
        edit_json(path, lambda values: change(at(values, outer)))
        told = line(old, expected)
        path.write_bytes(original)
        assert told is not None
        return told

    for place in members(json.loads(original)):
        *outer, last = place
        if place[0] in FREE and outer:
            continue
        named = last if isinstance(last, str) else ""
        if named not in OPTIONAL:
            missing = said(lambda holder, last=last: holder.pop(last), outer)
            assert f"{named} is missing" in missing or not named
        for wrong in () if place[0] in FREE else WRONG[type(at(json.loads(original), place))]:
            if (last, wrong) not in EITHER:
                told = said(lambda holder, last=last, wrong=wrong: holder.__setitem__(last, wrong), outer)
                assert str(path) in told, (place, wrong)
                assert named in told, (place, wrong)


@pytest.mark.parametrize("seed", range(3))
def test_no_byte_of_any_file_can_change_unnoticed(seed: int, traces: Path, expected: list[Any]) -> None:
    draw = random.Random(seed)
    files = sorted(path for path in traces.rglob("*") if path.is_file())
    assert {path.relative_to(traces).as_posix() for path in files} == {*read_files(traces), "trace.json"}
    for path in files:
        original = path.read_bytes()
        for place in [draw.randrange(min(len(original), 1000)), *(draw.randrange(len(original)) for _ in range(3))]:
            changed = bytearray(original)
            changed[place] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
            told = line(traces, expected)
            assert told is not None or path.suffix == ".json", (path, place)
            with pytest.raises(ExpertcastError):
                TraceDataset.open(traces).verify()
        path.write_bytes(original)
    assert line(traces, expected) is None


def read_files(folder: Path) -> dict[str, str]:
    info = read_info(folder)
    assert info is not None
    return info["files"]


@pytest.mark.parametrize("kind", ["cut", "empty", "longer", "other", "gone", "folder"])
@pytest.mark.parametrize("state", ["sealed", "old"])
@pytest.mark.filterwarnings("ignore:.*written by an older expertcast")
def test_files_that_are_cut_or_other_files(
    kind: str, state: str, request: pytest.FixtureRequest, expected: list[Any]
) -> None:
    folder: Path = request.getfixturevalue("traces" if state == "sealed" else "old")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path, other in zip(files, [*files[1:], files[0]], strict=True):
        original, others = path.read_bytes(), other.read_bytes()
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind != "gone":
            half = original[: len(original) // 2]
            path.write_bytes({"cut": half, "empty": b"", "longer": original + bytes(8), "other": others}[kind])
        told = line(folder, expected)
        unread = state == "old" and (path.name == "dataset_info.json" or (kind == "longer" and path.suffix == ".arrow"))
        assert told is not None or unread, path
        if kind == "folder":
            path.rmdir()
        path.write_bytes(original)
    assert line(folder, expected) is None


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("trace.json", lambda info: info["documents"][0].update(tokens=2**53), "documents have"),
        ("trace.json", lambda info: info.update(tokens=2**53), "tokens and splits say"),
        ("trace.json", lambda info: info["shape"].update(L=10**9), "shape.L is 1000000000"),
        ("trace.json", lambda info: info["shape"].update(L=9999), "columns.residual.shape"),
        ("trace.json", lambda info: info["shape"].update(K=65), "shape.K is 65"),
        ("trace.json", lambda info: info["documents"].reverse(), "not in the order train, validation, test"),
        ("trace.json", lambda info: info["documents"].append(info["documents"][-1]), "an index twice"),
        ("state.json", lambda state: state["_data_files"][0].update(filename="../data-00000-00000.arrow"), "filename"),
        ("state.json", lambda state: state["_data_files"].append(state["_data_files"][0]), "names a shard twice"),
        ("state.json", lambda state: state["_data_files"].pop(), "rows in the 1 shards"),
        ("state.json", lambda state: state["_data_files"].reverse(), "does not hold the documents"),
        ("skeleton/layers.json", lambda d: d["layers"][0].update(norm="__class__"), "is no module of the model"),
        ("skeleton/layers.json", lambda d: d["layers"][0].update(router="model.__init__"), "is no module of the model"),
        ("skeleton/layers.json", lambda d: d["layers"][3].update(experts="model.norm"), "num_experts"),
        ("skeleton/layers.json", lambda d: d["layers"][3].update(d["layers"][4]), "also holds tensor"),
        ("skeleton/layers.json", lambda d: d["layers"].reverse(), "is not of the model"),
        ("skeleton/layers.json", lambda d: d.update(top_k=65), "top_k is 65"),
        ("skeleton/layers.json", lambda d: d.update(top_k=3), "is not of the model"),
        ("skeleton/config.json", lambda config: config.update(num_hidden_layers=10**9), "num_hidden_layers"),
        ("skeleton/config.json", lambda config: config.update(text_config={"num_hidden_layers": 10**9}), "text_config"),
        ("skeleton/config.json", lambda config: config.update(vocab_size=10**30), "holds no router skeleton"),
        ("skeleton/config.json", lambda config: config.update(model_type=[]), "holds no router skeleton"),
        ("skeleton/config.json", lambda config: config.update(hidden_size=96), "model.safetensors: tensor"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*written by an older expertcast")
def test_old_traces_are_refused_by_what_does_not_fit(
    name: str, change: Callable[[dict[str, Any]], object], told: str, old: Path, expected: list[Any]
) -> None:
    edit_json(old / name, change)
    assert told in str(line(old, expected))


@pytest.mark.filterwarnings("ignore:.*written by an older expertcast")
@pytest.mark.parametrize(
    "name", ["default_vectors.safetensors", "data-00000-00000.arrow", "skeleton/model.safetensors"]
)
def test_old_values_that_cannot_be_are_refused(name: str, old: Path, expected: list[Any]) -> None:
    values = bytearray((old / name).read_bytes())
    middle = len(values) // 8 * 4
    values[middle : middle + 4] = b"\xff" * 4  # NaN in fp32 and bf16
    (old / name).write_bytes(values)
    assert "holds NaN or infinity" in str(line(old, expected))


def test_old_traces_open_with_a_warning(old: Path, expected: list[Any]) -> None:
    with pytest.warns(UserWarning, match="was written by an older expertcast"):
        assert content(old) == expected


def test_a_digest_cannot_be_left_out(traces: Path) -> None:
    values = json.loads((traces / "trace.json").read_bytes())
    del values[SEAL]
    (traces / "trace.json").write_text(json.dumps(values))
    with pytest.raises(ExpertcastError, match="files are named, digest is missing"):
        TraceDataset.open(traces)
    edit = json.loads((traces / "skeleton" / "layers.json").read_bytes())
    del edit[SEAL]
    (traces / "skeleton" / "layers.json").write_text(json.dumps(edit))
    with pytest.raises(ExpertcastError, match="does not name its files' digests"):
        load_skeleton(traces / "skeleton")


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
    """In the place of any file: also of those without a digest, as older versions left them."""
    for path in sorted(path for path in traces.rglob("*") if path.is_file() and path.suffix != ".md"):
        content_of = path.read_bytes()
        put(kind, path)
        with in_seconds(20):
            said = line(traces, expected)
        assert path.name == layout.DATASET_INFO_FILE or (said is not None and path.name in said), path
        path.rmdir() if kind == "folder" else path.unlink()
        path.write_bytes(content_of)
