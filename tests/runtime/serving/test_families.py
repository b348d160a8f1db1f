"""Names and texts of metrics keep the rules of Prometheus."""

from __future__ import annotations

import re

from expertcast.runtime.serving import metrics as named


def test_names_and_texts_keep_prometheus_rules() -> None:
    shown = [described.shown for described in named.FAMILIES]
    assert len(shown) == len(set(shown))
    for described in named.FAMILIES:
        assert re.fullmatch(r"expertcast(_[a-z]+)+", described.shown)
        assert described.help.endswith(".")
        assert (described.kind == "counter") == described.shown.endswith("_total")
        assert not re.search(r"_(ms|kb|mb|milliseconds|count|sum|bucket|counter|gauge)(_|$)", described.shown)
        for unit in ("seconds", "bytes"):
            assert unit not in described.shown or re.search(rf"_{unit}(_total)?$", described.shown)
        for label in described.labels:
            assert re.fullmatch(r"[a-z]+", label)
            assert label not in {"le", "quantile", "job", "instance"}
