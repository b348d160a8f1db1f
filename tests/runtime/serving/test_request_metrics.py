"""What clients ask for, as families of metrics."""

from __future__ import annotations

from dataclasses import dataclass

from expertcast.runtime.serving.metrics import request_metrics


@dataclass(frozen=True)
class _Buckets:
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True)
class _Counted:
    ended: dict[tuple[str, str], int]
    in_flight: int
    disconnected: int
    prompt_tokens: int
    generated_tokens: int
    seconds: _Buckets
    first_token: _Buckets


COUNTED = _Counted(
    ended={("/v1/completions", "200"): 5, ("/v1/completions", "400"): 2}, in_flight=3, disconnected=1, prompt_tokens=70,
    generated_tokens=41, seconds=_Buckets((0.5, 2), (1, 4, 2), 17.25), first_token=_Buckets((0.1,), (4, 0), 0.3),
)  # fmt: skip


def test_what_clients_asked_for() -> None:
    families = {family.name: family for family in request_metrics(COUNTED)}
    samples = {(s.name, *s.labels.values()): s.value for family in families.values() for s in family.samples}
    assert samples["expertcast_http_requests_total", "/v1/completions", "200"] == 5
    assert samples["expertcast_http_requests_total", "/v1/completions", "400"] == 2
    assert samples["expertcast_http_requests_in_flight",] == 3
    assert samples["expertcast_http_disconnects_total",] == 1
    assert (samples["expertcast_prompt_tokens_total",], samples["expertcast_generated_tokens_total",]) == (70, 41)
    seconds = [samples["expertcast_http_request_seconds_bucket", le] for le in ("0.5", "2.0", "+Inf")]
    assert seconds == [1, 5, 7]
    assert samples["expertcast_http_request_seconds_count",] == 7
    assert samples["expertcast_http_request_seconds_sum",] == 17.25
    assert samples["expertcast_time_to_first_token_seconds_bucket", "+Inf"] == 4
