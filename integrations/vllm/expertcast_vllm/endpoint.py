"""A page for Prometheus beside vLLM's own: what the experts of all workers do.

vLLM loads it where its name is given: VLLM_PLUGINS=expertcast vllm serve MODEL. Workers count, in processes of their
own; the server asks them when the page is asked for.
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
    """What vLLM calls an endpoint plug-in."""

    name = "expertcast"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the page."""
        app.add_api_route(PATH, _page, methods=["GET"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep what asks the workers."""
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
    """Pages of several workers as one: each sample says whose it is.

    Args:
        pages: by rank.
    """

    def __init__(self, pages: Sequence[str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        """Families of the pages, with a label `worker` more."""
        families: dict[str, Metric] = {}
        for worker, page in enumerate(self._pages):
            for family in text_string_to_metric_families(page):
                into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.add_sample(sample.name, {"worker": str(worker), **sample.labels}, sample.value)
        yield from families.values()
