"""The Prometheus page: every number equals the run's statistics, and counters only grow."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedModel

from expertcast import OffloadedModel, load_offloaded, offload
from expertcast.runtime.recording.recorder import LayerStatistics
from expertcast.runtime.serving import metrics as named
from expertcast.runtime.serving.metrics import ExpertMetrics, MetricSource
from tests.families.models import tiny_model
from tests.runtime.faults import INPUTS
from tests.runtime.serving.names import FAMILIES, query_name

Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Scraped:
    """A run and its page."""

    def __init__(self, offloaded: OffloadedModel) -> None:
        self.offloaded = offloaded
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(ExpertMetrics(MetricSource.of(offloaded, "tiny")))

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def page(self) -> Page:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    def generate(self, tokens: int = 12, **kwargs: Any) -> None:
        self.offloaded.generate(**INPUTS, max_new_tokens=tokens, do_sample=False, **kwargs)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


@pytest.fixture
def scraped(model: PreTrainedModel) -> Iterator[Scraped]:
    with offload(
        model, slots=10, predictor="next_norm", link="emulated", bandwidth=2e7, forecasts="always"
    ) as offloaded:
        yield Scraped(offloaded)


def _of(page: Page, spec: named.MetricSpec, **labels: str) -> float:
    return page[query_name(spec), tuple(sorted(labels.items()))]


def assert_is_the_runs(page: Page, offloaded: OffloadedModel) -> None:
    """Compare the page with every layer's counters, link, slots and store."""
    assert {field.name for field in fields(LayerStatistics)} == set(named.LAYER)
    counted = offloaded.stats.as_dict()
    for layer, counts in enumerate(counted["per_layer"]):
        for name, spec in named.LAYER.items():
            place = query_name(spec), (("layer", str(layer)),)
            assert page[place] == counts[name], (name, layer)
    assert _of(page, named.COPIES) == offloaded.link.copies > 0
    assert _of(page, named.BUSY) == pytest.approx(offloaded.link.busy_s)
    assert _of(page, named.SLOTS) == offloaded.pool.count
    assert _of(page, named.SLOT_BYTES) == offloaded.pool.nbytes
    assert _of(page, named.EXPERTS) == len(offloaded.view) * offloaded.view.shape.experts
    assert _of(page, named.STORE_BYTES, store=offloaded.store.name) == offloaded.store.stored_nbytes


def test_all_numbers_after_a_generation(scraped: Scraped) -> None:
    scraped.generate(80)
    page, offloaded = scraped.page(), scraped.offloaded
    assert_is_the_runs(page, offloaded)
    assert offloaded.stats.total.prefetched_used > 0
    assert offloaded.stats.waited_s > 0
    assert _of(page, named.HELD) == len(offloaded.residency.pool.slots)
    ((_, info),) = [place for place in page if place[0] == query_name(named.INFO)]
    said = dict(info)
    assert said["model"] == "tiny"
    assert (said["predictor"], said["mode"], said["link"]) == ("next_norm", "exact", "emulated")
    assert "eviction=lrfu," in said["policy"]
    assert re.match(r"\d+\.\d+", said["torch"])


def test_counters_begin_again_when_statistics_are_reset(scraped: Scraped) -> None:
    scraped.generate()
    first = scraped.page()
    scraped.offloaded.reset_stats()
    scraped.generate(3)
    assert_is_the_runs(scraped.page(), scraped.offloaded)
    assert 0 < _of(scraped.page(), named.COPIES) < _of(first, named.COPIES)


@pytest.mark.slow
def test_counters_only_grow_while_it_runs(scraped: Scraped) -> None:
    """Cancelled copies included."""
    seen: list[Page] = [scraped.page()]
    over = threading.Event()

    def scrape() -> None:
        while not over.is_set():
            seen.append(scraped.page())

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for _ in range(4):
            scraped.generate(20)
    finally:
        over.set()
        thread.join()
    seen.append(scraped.page())
    for before, after in pairwise(seen):
        for place, value in before.items():
            if place[0].endswith("_total"):
                assert after[place] >= value, place
    assert seen[-1] != seen[0]


def test_what_drafts_had_accepted(model: PreTrainedModel) -> None:
    with offload(model, slots=10) as offloaded:
        scraped = Scraped(offloaded)
        assert query_name(named.CYCLES) not in scraped.text
        scraped.generate(24, draft="int4", draft_length=3)
        page = scraped.page()
        assert offloaded.drafting is not None
        (governor,) = offloaded.drafting.governors.values()
        lengths = governor.report()["lengths"]
        cycles = {name: count for name, count in lengths.items() if name.startswith("int4")}
        assert _of(page, named.CYCLES, draft="int4") == sum(cycles.values()) > 0
        drafted, accepted = _of(page, named.DRAFTED, draft="int4"), _of(page, named.ACCEPTED, draft="int4")
        rows = len(INPUTS["input_ids"])
        assert drafted <= rows * sum(int(name.split()[-1]) * count for name, count in cycles.items())
        assert 0 <= accepted <= drafted
        assert drafted > 0
        assert _of(page, named.DRAFT_BYTES, draft="int4") == offloaded.drafting.memory["int4"] > 0


def test_reads_of_a_disk(tmp_path: Path) -> None:
    with load_offloaded("reference", slots=96, store="disk", store_folder=tmp_path, link="disk") as offloaded:
        scraped = Scraped(offloaded)
        offloaded.generate(**INPUTS, max_new_tokens=4, do_sample=False)
        page = scraped.page()
        assert_is_the_runs(page, offloaded)
        assert _of(page, named.BUSY) > 0


def test_the_page_says_name_type_and_help_of_each_once(scraped: Scraped) -> None:
    scraped.generate(80)
    lines = scraped.text.splitlines()
    spec = {query_name(what): what for what in FAMILIES}
    types = {"counter": "counter", "gauge": "gauge", "info": "gauge"}
    found = [line.split(" ", 3)[2:] for line in lines if line.startswith("# TYPE ")]
    helps = {line.split(" ", 3)[2]: line.split(" ", 3)[3] for line in lines if line.startswith("# HELP ")}
    assert len(found) == len({name for name, _ in found}) > 20
    for name, kind in found:
        assert types[spec[name].kind] == kind
        assert helps[name] == spec[name].help
