"""What clients ask for, as metrics: whatever counts requests has these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from expertcast.runtime.serving import families as named
from expertcast.runtime.serving.families import Described


class Buckets(Protocol):
    """Durations, counted by size."""

    @property
    def bounds(self) -> Sequence[float]:
        """Seconds up to which each bucket reaches, ascending; the last one, of all above, is not among them."""

    @property
    def counts(self) -> Sequence[int]:
        """Durations in each bucket alone; one more than there are bounds."""

    @property
    def sum(self) -> float:
        """Seconds, all together."""


class Requests(Protocol):
    """Counts of a server's requests since it began."""

    @property
    def ended(self) -> Mapping[tuple[str, str], int]:
        """Requests that ended, by route and status."""

    @property
    def in_flight(self) -> int:
        """Requests that did not."""

    @property
    def disconnected(self) -> int:
        """Those whose client went away."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""

    @property
    def generated_tokens(self) -> int:
        """Tokens generated."""

    @property
    def seconds(self) -> Buckets:
        """From arrival to end."""

    @property
    def first_token(self) -> Buckets:
        """From arrival to the first token, of requests that had one."""


def request_metrics(requests: Requests) -> Iterator[Metric]:
    """The families of a server's requests."""
    ended = CounterMetricFamily(named.REQUESTS.family, named.REQUESTS.help, labels=named.REQUESTS.labels)
    for (route, status), count in sorted(dict(requests.ended).items()):
        ended.add_metric((route, status), count)
    yield ended
    yield GaugeMetricFamily(named.IN_FLIGHT.family, named.IN_FLIGHT.help, requests.in_flight)
    for described, value in (
        (named.GONE, requests.disconnected),
        (named.PROMPT_TOKENS, requests.prompt_tokens),
        (named.GENERATED_TOKENS, requests.generated_tokens),
    ):
        yield CounterMetricFamily(described.family, described.help, value)
    yield _histogram(named.SECONDS, requests.seconds)
    yield _histogram(named.FIRST_TOKEN, requests.first_token)


def _histogram(described: Described, buckets: Buckets) -> Metric:
    bounds = [*(repr(float(bound)) for bound in buckets.bounds), "+Inf"]
    cumulative = accumulate(list(buckets.counts))
    return HistogramMetricFamily(
        described.family, described.help, list(zip(bounds, cumulative, strict=True)), buckets.sum
    )
