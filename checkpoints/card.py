"""The model card of a predictor checkpoint."""

from __future__ import annotations

import json

from expertcast.predictors.plain import Json

TEMPLATE = """---
library_name: expertcast
tags: [mixture-of-experts, expert-prediction, expertcast, {predictor}]
{base_model}---

# {predictor} for {model_id}

Forecasts which experts `{model_id}` routes to {ahead} ahead.

| | |
|---|---|
| predictor | {predictor} |
| model | {model_id} |
| MoE layers, experts, experts per token, hidden size | {L}, {E}, {K}, {D} |
| reads | {tap_point} |
| fingerprint of routers and norms | `{fingerprint}` |
| made by | `{command}` |
| expertcast, git revision | {expertcast_version}, {git_revision} |
{recall}
```python
from expertcast.checkpoints.store import load_predictor
from expertcast.data.discovery import find_moe_layers

predictor = load_predictor("FOLDER", find_moe_layers(model))
```

Config:

```json
{predictor_config}
```
"""


def model_card(config: Json, metrics: Json) -> str:
    """README.md from the contents of config.json and metrics.json."""
    ahead = ", ".join(map(str, config["predictor_config"].get("ahead", [1])))
    model_id = str(config["model_id"])
    # the hub refuses cards whose base model is a path
    is_hub_id = model_id.count("/") == 1 and not model_id.startswith((".", "/", "~"))
    return TEMPLATE.format(
        **{key: value for key, value in config.items() if key not in ("predictor_config", "shape", "model_id")},
        **config["shape"],
        model_id=model_id,
        base_model=f"base_model: {model_id}\n" if is_hub_id else "",
        ahead=f"{ahead} MoE layers" if ahead else f"1 to {config['predictor_config']['tokens']} tokens",
        recall=_recall(metrics, str(config["predictor"])),
        predictor_config=json.dumps(config["predictor_config"], indent=2),
    )


def _recall(metrics: Json, name: str) -> str:
    values = metrics.get("recall_at_k", {}).get(name)
    if not values:
        return ""
    layers = ", ".join(f"{value:.3f}" for value in values["per_layer"])
    rows = [("recall@k, mean", f"{values['mean']:.3f}"), ("recall@k per layer", layers)]
    for metric, results in metrics.items():
        if metric.startswith("timely@") and not metric.endswith("_chained") and name in results:
            rows.append((metric.replace("timely@", "timely recall, "), f"{results[name]['mean']:.3f}"))
    error = metrics.get("calibration", {}).get(name, {})
    if "before" in error:
        rows.append(("calibration error (before)", f"{error['ece']:.4f} ({error['before']['ece']:.4f})"))
    costs = metrics.get("ledger", {}).get(name, {})
    rows += [(key.replace("_", " "), f"{value:,.5g}") for key, value in costs.items() if value is not None]
    return "".join(f"| {key} | {value} |\n" for key, value in rows)
