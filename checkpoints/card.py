"""Model card of a predictor checkpoint: hub metadata, usage, recall and provenance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.hub import HubName
from expertcast.checkpoints.results import RECALL, layer_table
from expertcast.predictors.messages import Json

# Parts of the card; tables without rows are left out


def scored(metrics: Json) -> str:
    """Caption of the recall table."""
    size = f"{metrics['tokens']:,} tokens" if "tokens" in metrics else "tokens"
    return (
        f"Share of a token's K experts that are among the K forecast experts (recall@k), on {size} of documents that\n"
        f"were used neither for training nor for selection, by target layer, with forecasts that need no training."
    )


def recall_part(name: str, metrics: Json) -> str:
    """Return a table of recall by target layer and predictor, this one first."""
    scores = {**metrics.get(RECALL, {}), **metrics.get("baselines", {})}
    if name not in scores:
        return ""
    table = layer_table({**metrics, RECALL: scores}, names=[name, *(other for other in scores if other != name)])
    return replace(table, headings=["layer", *table.headings[1:]]).markdown(turned=True)


BUNDLED_LICENSE = "apache-2.0"

TEMPLATE = """---
{{ card_data }}
---

# {{ predictor }} for {{ model_id }}

Forecasts which experts of the Mixture-of-Experts model `{{ model_id }}` are needed {{ ahead }} ahead. `expertcast`
uses the forecasts to copy experts to the GPU before they are needed.

```python
import expertcast
{{ loading }}
with expertcast.offload(model, predictor="{{ where }}") as offloaded:
    inputs = tokenizer("It is a truth universally acknowledged", return_tensors="pt").to(model.device)
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=16)[0]))
    print(offloaded.stats.as_dict()["hit_rate"])
```

    expertcast generate {{ model_id }} --prompt "It is a truth" --predictor {{ where }}

{% if recall %}## Recall

{{ scored }}

{{ recall }}

{% endif %}## Training

Other metrics and costs: `metrics.json`.

```json
{{ config }}
```
"""
"""Jinja2 template."""


def model_card(config: Json, metrics: Json, where: str) -> str:
    """Render README.md.

    Args:
        config: contents of config.json.
        metrics: contents of metrics.json.
        where: folder of the checkpoint, for the card's commands.
    """
    name, model_id = str(config["predictor"]), str(config["model_id"])
    distances = ", ".join(map(str, config["predictor_config"].get("ahead", [1])))
    shown = {key: value for key, value in config.items() if key not in ("calibration", "member_calibration", "files")}
    card: str = ModelCard.from_template(
        _metadata(config),
        template_str=TEMPLATE,
        predictor=name,
        model_id=model_id,
        ahead=f"{distances} MoE layer{'s' * (distances != '1')}",
        loading=_loading(model_id),
        where=where,
        scored=scored(metrics),
        recall=recall_part(name, metrics),
        config=json.dumps({**shown, "data": metrics.get("data", {})}, indent=2),
    ).content
    return card.rstrip() + "\n"


def _metadata(config: Json) -> ModelCardData:
    """Return the card's YAML header; the hub lists the card under `base_model`."""
    name, model_id = str(config["predictor"]), str(config["model_id"])
    # the hub rejects cards whose base model is a path
    is_hub_id = HubName.of(model_id) is not None and not Path(model_id).exists()
    return ModelCardData(
        license=BUNDLED_LICENSE if model_id == REFERENCE else None,
        library_name="expertcast",
        base_model=model_id if is_hub_id else None,
        tags=["mixture-of-experts", "expert-prediction", "expertcast", name],
    )


def _loading(model_id: str) -> str:
    """Return Python lines that load `model` and `tokenizer`."""
    if model_id == REFERENCE:
        return (
            "from expertcast.data.models import load_model, load_tokenizer\n\n"
            f'model, tokenizer = load_model("{model_id}"), load_tokenizer("{model_id}")'
        )
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{model_id}")\n'
        f'model = AutoModelForCausalLM.from_pretrained("{model_id}", dtype="auto")'
    )
