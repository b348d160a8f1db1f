"""A configuration and its file: the same options again, or one line that says what is wrong."""

from __future__ import annotations

import dataclasses
import json
import typing
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

import expertcast
from expertcast import OffloadConfig, load_offloaded, offload
from expertcast.cli import main
from expertcast.predictors import ExpertcastError
from expertcast.predictors.base import PREDICTORS
from expertcast.predictors.baselines import NextNorm
from expertcast.predictors.options import field_docs
from expertcast.runtime.config import EXPERTS, LINKS, MISSES, MODES, remarks
from expertcast.runtime.drafts.names import keeps_copies
from expertcast.runtime.engine.front import in_use
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.policies import LRU, MISS, PRESETS, ROUTING, Choice, Policies, PolicyConfig
from expertcast.runtime.policies.settings import FORECASTS
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy, refused
from tests.runtime.faults import INPUTS

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
_COUNT = st.integers(0, 2**63)
_PLACES = st.none() | _TEXT
_POLICIES = st.builds(
    Policies,
    eviction=st.sampled_from(["lru", "least_stale", "next_use"])
    | st.builds("importance:gamma={}".format, st.floats(0.1, 0.9)),
    prefetch=st.sampled_from(["top_k", "none", "percentile", "top_k:overfetch=1.5"]),
    miss=st.sampled_from(["fetch", "drop", "substitute"]),
    scope=st.sampled_from(["global", "layer"]),
)


def _field_values() -> dict[str, st.SearchStrategy[Any]]:
    return {
        "predictor": _PLACES,
        "mode": st.sampled_from(MODES),
        "cache": st.booleans(),
        "bandwidth": st.none() | st.floats(1, allow_infinity=False) | st.integers(1, 10**6),
        "latency": st.floats(0, 3600) | st.integers(0, 3600),
        "link": st.sampled_from(LINKS),
        "forecasts": st.sampled_from(FORECASTS),
        "misses": st.sampled_from(MISSES),
        "ahead": st.integers(1, 2**63),
        "context": st.integers(1, 2**63),
        "layers": st.none() | st.lists(_COUNT).map(tuple),
        "min_recall": st.floats(0, 1) | st.integers(0, 1),
        "speculate_prefill": st.booleans(),
    }


@st.composite
def configs(draw: st.DrawFn) -> OffloadConfig:
    """Any configuration without objects; options that rule each other out come from one draw."""
    room = draw(st.sampled_from(["slots", "memory"]))
    sizes = _COUNT if room == "slots" else _COUNT | st.sampled_from(["2GB", "512 MiB", " 1.5kb"])
    policies = draw(st.none() | st.sampled_from(list(PRESETS)) | _POLICIES)
    store = draw(st.sampled_from(["memory", "disk"]))
    codec = draw(st.sampled_from(["raw", "bitsplit"])) if store == "disk" else "raw"
    in_place = store == "disk" and codec == "raw" and draw(st.booleans())
    copying = keeps_copies(OffloadConfig(policies=policies).resolved_policies().miss)
    forms = ["auto", "expanded"] if copying else EXPERTS
    experts = draw(st.sampled_from(forms)) if codec == "raw" else "expanded"
    drafts = ["none", "auto", "drop:fetched=1", *(["int4"] if experts == "expanded" else [])]
    pooled = codec != "raw" and policies is None and draw(st.booleans())
    values = {name: draw(drawn) for name, drawn in _field_values().items()}
    values["cache"] |= pooled
    exact = values["mode"] == "exact" and not OffloadConfig(policies=policies).resolved_policies().lossy
    values |= {
        "slots": None,
        "memory": None,
        room: draw(st.none() | sizes),
        "policies": policies,
        "store": store,
        "store_folder": draw(_PLACES.filter(lambda place: place != "")) if store == "disk" and not in_place else None,
        "in_place": in_place,
        "codec": codec,
        "draft": draw(st.sampled_from(drafts)) if exact else "none",
        "pools": draw(st.sampled_from(["C=2GB", "C=1000,S=500MiB,E=1KB"])) if pooled else "",
        "experts": experts,
    }
    assert values.keys() == {field.name for field in dataclasses.fields(OffloadConfig)}, "every field is tried"
    return OffloadConfig(**values)


@settings(max_examples=150, deadline=None)
@given(config=configs())
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, config: OffloadConfig) -> None:
    path = tmp_path_factory.mktemp("config") / "offload.json"
    config.save(path)
    assert OffloadConfig.load(path) == config
    assert set(json.loads(path.read_text())) == {field.name for field in dataclasses.fields(OffloadConfig)}


def test_paths_are_saved_as_texts(tmp_path: Path) -> None:
    OffloadConfig(predictor=tmp_path / "checkpoint").save(tmp_path / "offload.json")
    assert OffloadConfig.load(tmp_path / "offload.json").predictor == str(tmp_path / "checkpoint")


def test_what_is_not_in_a_file_has_its_default() -> None:
    assert OffloadConfig.from_dict({}) == OffloadConfig()
    assert OffloadConfig.from_dict({"slots": 9, "bandwidth": 4}) == OffloadConfig(slots=9, bandwidth=4.0)


class _Aged(LRU):
    name = "aged"


class _Own(NextNorm):
    name = "own"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": Policies(eviction=Choice(_Aged, PolicyConfig()))}, "eviction policy 'aged' is a class of your"),
        ({"predictor": "own"}, "predictor 'own' is a class of your own, which a file cannot hold"),
        ({"link": InstantLink()}, "link is a InstantLink"),
    ],
)
def test_own_classes_and_objects_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    """Another process could not load them; beside a file they work."""
    monkeypatch.setattr(PREDICTORS, "_classes", {**PREDICTORS._classes, "own": _Own})
    path = tmp_path / "offload.json"
    config = OffloadConfig(slots=9, **fields)
    OffloadConfig(slots=9).save(path)
    with pytest.raises(ExpertcastError, match=message):
        config.save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert OffloadConfig.of(OffloadConfig.load(path), fields) == config


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(ExpertcastError, match="No such file or directory; use a path in an existing folder"):
        OffloadConfig().save(tmp_path / "no" / "offload.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"slots": 9', "is not valid JSON"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"[" * 100_000, "is not valid JSON .nested more than 32 deep"),
        (b'{"slots": 9} {"slots": 8}', "is not valid JSON"),
        (b'{"slots": 9, "slots": 8}', "duplicate key 'slots'"),
        (b'{"bandwidth": NaN}', "NaN is not a number"),
        (b'{"min_recall": 1e308}', r"min_recall=1e\+308: must be less than"),
        (b'{"store": "disk", "store_folder": "a\\u0000"}', "NUL in a text"),
        (b'{"latency": 1e999}', "1e999 overflows"),
        (b"[]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b'{"slot": 9}', "unknown option 'slot': choose from predictor, mode, slots"),
        (b'{"slots": "many"}', "slots='many': must be a valid integer"),
        (b'{"slots": 9.5}', "slots=9.5: must be a valid integer"),
        (b'{"cache": "maybe"}', "cache='maybe': must be a valid boolean"),
        (b'{"mode": null}', "unknown mode None: choose from exact"),
        (b'{"mode": "fast"}', "unknown mode 'fast': choose from exact"),
        (b'{"predictor": {}}', "predictor={}: must be a valid string"),
        (b'{"bandwidth": "much"}', "bandwidth='much': must be a valid number"),
        (b'{"layers": 3}', "layers=3: must be a valid tuple"),
        (b'{"layers": [1, "x"]}', "layers=.1, .x..: must be a valid integer"),
        (b'{"memory": "much"}', "memory='much' is no size"),
        (b'{"memory": [1]}', "memory=.1.: must be a valid string or a valid integer"),
        (b'{"slots": 9, "memory": "2GB"}', "give slots or memory, not both"),
        (b'{"policies": "fastest"}', "unknown preset 'fastest'"),
        (b'{"policies": 3}', "policies=3: must be an instance of Policies or a valid string"),
        (b'{"policies": {"evict": "lru"}}', "policies 'evict': give one preset, or KIND=POLICY of eviction, prefetch"),
        (b'{"policies": {"eviction": 1}}', "unknown eviction policy .1."),
        (b'{"policies": {"eviction": "mru"}}', "unknown eviction policy 'mru': choose from lru"),
        (b'{"policies": {"eviction": "belady"}}', "belady"),
        (b'{"store": "tape"}', "unknown store 'tape'"),
        (b'{"store_folder": "x"}', "store_folder needs"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "offload.json"
    path.write_bytes(content)
    with pytest.raises(ExpertcastError, match=message) as error:
        OffloadConfig.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def _of_another_type(hint: object) -> object:
    """A value that no field of this type takes; what takes texts takes no numbers."""
    kinds = typing.get_args(hint) or (hint,)
    return 2.5j if str in kinds else "so"


def test_every_field_refuses_values_of_another_type() -> None:
    for name, hint in typing.get_type_hints(OffloadConfig).items():
        with refused(rf"{name}[ =].*: (must be|choose from) \w+"):
            OffloadConfig(**{name: _of_another_type(hint)})
    assert OffloadConfig(slots=np.int64(9), latency=np.float32(1)) == OffloadConfig(slots=9, latency=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_recall": 7.0}, "min_recall=7.0: must be less than or equal to 1"),
        ({"min_recall": -0.1}, "min_recall=-0.1: must be greater than or equal to 0"),
        ({"min_recall": float("nan")}, "min_recall=nan: must be a finite number"),
        ({"ahead": 0}, "ahead=0: must be greater than or equal to 1"),
        ({"ahead": -1}, "ahead=-1: must be greater"),
        ({"bandwidth": 0.0}, "bandwidth=0.0"),
        ({"bandwidth": 1e-300}, "bandwidth=1e-300"),
        ({"bandwidth": float("nan")}, "bandwidth=nan"),
        ({"latency": -1.0}, "latency=-1.0"),
        ({"latency": float("nan")}, "latency=nan"),
        ({"latency": float("inf")}, "latency=inf"),
        ({"store": "disk", "store_folder": ""}, r"store_folder='': give a folder, '\.' for the current one"),
        ({"link": InstantLink(), "bandwidth": 1e9}, "bandwidth and latency"),
        ({"link": EmulatedLink(1e9), "latency": 1e-3}, "bandwidth and latency"),
    ],
)
def test_values_out_of_range(fields: dict[str, Any], message: str) -> None:
    with refused(f"^{message}"):
        OffloadConfig(**fields)


def test_what_is_no_model_or_no_configuration(reference_model: PreTrainedModel) -> None:
    for other, shown in (
        ("reference", "'reference'"), (reference_model.model.norm, "a Qwen3MoeRMSNorm"), (nn.Linear(2, 2), "a Linear"),
        (nn.DataParallel(nn.Linear(2, 2)), "a DataParallel"), (type(reference_model), "a type"),
    ):  # fmt: skip
        with refused(rf"{shown} is no loaded model: expertcast\.load_offloaded"):
            offload(other)
    with pytest.raises(ExpertcastError, match="config is a dict: give an OffloadConfig"):
        offload(reference_model, {"slots": 9})
    with pytest.raises(ExpertcastError, match=r"a Qwen3MoeForCausalLM is not a folder.*pass a loaded model"):
        load_offloaded(reference_model)


def test_options_are_refused_before_the_model_runs(tiny: PreTrainedModel) -> None:
    """A forward of two tokens finds its layers."""
    handle = tiny.base_model.register_forward_pre_hook(lambda *_: pytest.fail("the model runs"))
    try:
        with refused("tokens_per_step"):
            offload(tiny, tokens_per_step=1)
        link = InstantLink()
        with in_use(link), refused("serves another offload"):
            offload(tiny, link=link)
        with in_use(link), refused("serves another offload"):
            load_offloaded("no model", link=link)
    finally:
        handle.remove()


def test_what_is_shown_in_an_interpreter(reference_model: PreTrainedModel) -> None:
    assert dir(expertcast) == sorted(expertcast.__all__)
    config = OffloadConfig(slots=9, cache=True, mode="exact")
    assert repr(config) == "OffloadConfig(slots=9)"
    for name, doc in field_docs(OffloadConfig).items():
        assert f"        {name}: {doc}\n" in OffloadConfig.__doc__
    with offload(reference_model, config) as offloaded:
        assert repr(offloaded) == (
            "<OffloadedModel of reference: 9 of 768 experts in slots, no predictor, instant link>"
        )
        assert repr(offloaded.view) == (
            "<MoEView of reference: ModelShape(layers=12, experts=64, top_k=4, hidden=192)>"
        )
    assert repr(offloaded).endswith("link, closed>")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ExpertcastError, match=r"cannot read .*offload.json: No such file or directory"):
        OffloadConfig.load(tmp_path / "offload.json")
    with pytest.raises(ExpertcastError, match="Not a regular file"):
        OffloadConfig.load(tmp_path)


def test_a_predictor_that_no_path_can_have(reference_model: PreTrainedModel) -> None:
    with pytest.raises(ExpertcastError, match="unknown predictor"):
        offload(reference_model, OffloadConfig(predictor="9" * 400))


def test_a_preset_with_a_predictor_is_not_on_demand() -> None:
    assert OffloadConfig(policies="on_demand").on_demand
    assert not OffloadConfig(policies="specmd_1").on_demand
    assert not OffloadConfig(predictor="next_norm").on_demand


# Remarks: options that change the output in mode exact, or have no effect

LINES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"predictor": "next_norm", "ahead": 2, "forecasts": "always"}, []),
    ({"mode": "speculate", "predictor": "next_norm", "policies": Policies(miss="drop")}, []),
    ({"mode": "hybrid", "predictor": "next_norm", "min_recall": 0.5}, []),
    ({"policies": "on_demand"}, []),
    ({"policies": "specmd_5"}, []),
    ({"policies": Policies(prefetch="percentile"), "predictor": "next_norm"}, []),
    ({"layers": (1,), "speculate_prefill": True}, ["layers, speculate_prefill have no effect in mode 'exact'"]),
    ({"speculate_prefill": True}, ["speculate_prefill has no effect in mode 'exact'"]),
    (
        {"mode": "speculate", "predictor": "next_norm", "min_recall": 0.5},
        ["min_recall has no effect unless mode 'hybrid' chooses its layers by it"],
    ),
    ({"policies": Policies(prefetch="percentile")}, ["prefetch 'percentile' has no effect without a predictor"]),
    (
        {"policies": Policies(prefetch="top_k:overfetch=2.0", pre_eviction="gap"), "ahead": 2},
        ["ahead, prefetch 'top_k:overfetch=2.0', pre_eviction 'gap' have no effect without a predictor"],
    ),
    ({"forecasts": "never"}, ["forecasts has no effect without a predictor"]),
    ({"cache": False, "predictor": "next_norm", "forecasts": "never"}, []),
    (
        {"policies": Policies(miss="cascade", routing="cache_aware:strength=0.1")},
        [
            "miss 'cascade' and routing 'cache_aware' may change the output, also in mode 'exact': only lossless "
            "policies keep every bit"
        ],
    ),
]


@pytest.mark.parametrize(("fields", "lines"), LINES)
def test_lines(fields: dict[str, Any], lines: list[str]) -> None:
    assert remarks(OffloadConfig(**fields)) == lines


def test_every_lossy_policy_says_so() -> None:
    lossless = {"miss": {"fetch"}, "routing": {"standard"}}
    for kind, registry in (("miss", MISS), ("routing", ROUTING)):
        for name in registry.names():
            said = remarks(OffloadConfig(policies=Policies(**{kind: name})))
            assert said == [] if name in lossless[kind] else said[0].startswith(f"{kind} '{name}' may change")
    for name, preset in PRESETS.items():
        said = " ".join(remarks(OffloadConfig(policies=name)))
        assert (f"of preset {name!r} may change the output" in said) == preset.policies.lossy


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


def test_an_offload_warns(tiny: PreTrainedModel) -> None:
    expected = greedy(tiny, INPUTS)
    with pytest.warns(UserWarning, match="miss 'fetch_lowest' may change the output") as told:
        lossy = offload(tiny, slots=4, policies=Policies(miss="fetch_lowest"))
    with lossy:
        got = greedy(lossy, INPUTS)
        assert any(not (own == other).all() for own, other in zip(got[1], expected[1], strict=True))
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with offload(tiny, slots=5, predictor="next_norm", policies=Policies(prefetch="percentile")) as offloaded:
            assert_same(greedy(offloaded, INPUTS), expected)


def test_generate_says_so_in_one_line(tmp_path: Path) -> None:
    words = ["generate", "reference", "--prompt", "It is", "--new-tokens", "3", "--slots", "48"]
    with pytest.warns(UserWarning, match="may change the output") as told:
        assert main([*words, "--policies", "specmd_4", "--json", str(tmp_path / "found.json")]) == 0
    (warning,) = [warning for warning in told if "may change" in str(warning.message)]
    shown = warnings.formatwarning(warning.message, warning.category, warning.filename, warning.lineno)
    assert shown == f"warning: {remarks(OffloadConfig(policies='specmd_4'))[0]}\n", "as the command line prints it"
    assert json.loads((tmp_path / "found.json").read_text())["stats"]["requests"] > 0
