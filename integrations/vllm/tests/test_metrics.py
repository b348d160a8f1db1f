"""A page for Prometheus of several workers' experts; a server's is in `test_server.py`."""

from expertcast_vllm.endpoint import Workers
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families


def test_workers_stand_side_by_side() -> None:
    page = '# TYPE a counter\n# HELP a Some.\na_total{layer="1"} 2.0\n'
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Workers([page, page.replace("2.0", "3.0")]))
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    assert {tuple(sorted(each.labels.items())): each.value for each in family.samples} == {
        (("layer", "1"), ("worker", "0")): 2,
        (("layer", "1"), ("worker", "1")): 3,
    }
