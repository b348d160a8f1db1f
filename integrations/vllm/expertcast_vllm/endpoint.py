"""A Prometheus page beside vLLM's own, with the expert counters of all workers.

vLLM loads this plug-in only by name: VLLM_PLUGINS=expertcast vllm serve MODEL. The workers count in their own
processes; the server collects their counters at each scrape.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from expertcast_vllm.settings import METRICS, Settings

PATH = "/expertcast/metrics"


class MetricsPage:
    """vLLM endpoint plug-in with one page."""

    name = "expertcast"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the page to vLLM's server."""
        app.add_api_route(PATH, _page, methods=["GET"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Store the engine client, which reaches the workers."""
        del args
        state.expertcast_engine = engine_client


async def _page(request: Request) -> Response:
    engine = request.app.state.expertcast_engine
    offloads = Settings.of(engine.vllm_config.additional_config) is not None
    pages = await engine.collective_rpc(METRICS) if offloads else []
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Workers(pages))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class Workers(Collector):
    """Merges the pages of several workers and labels each sample with its worker.

    Args:
        pages: Prometheus pages by rank.
    """

    def __init__(self, pages: Sequence[str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        """Yield the families of all pages with the additional label `worker`."""
        families: dict[str, Metric] = {}
        for worker, page in enumerate(self._pages):
            for family in text_string_to_metric_families(page):
                into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.add_sample(sample.name, {"worker": str(worker), **sample.labels}, sample.value)
        yield from families.values()
