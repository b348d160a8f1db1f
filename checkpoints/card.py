"""The model card of a predictor checkpoint: the hub's metadata, how it is used, how good it is, where it comes from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from expertcast.checkpoints.hub import HubName
from expertcast.checkpoints.results import (
    RECALL,
    ladder_table,
    layer_table,
    ledger_table,
    link_table,
    markdown_table,
    timely_metrics,
    tokens_table,
)
from expertcast.predictors.messages import Json

# Parts of the card; a table without rows is left out.


def scored(metrics: Json) -> str:
    """What the table of recall is of."""
    size = f"{metrics['tokens']:,} tokens" if "tokens" in metrics else "tokens"
    by = "target layer" if RECALL in metrics else "distance"
    return (
        f"Share of a token's experts that are among as many forecast ones (recall@k), on {size} of documents that\n"
        f"nothing was learned or chosen from, by {by}, beside forecasts that need no training."
    )


def recall_part(name: str, metrics: Json) -> str:
    """Recall by target layer and predictor, this one first, or by token ahead."""
    scores = {**metrics.get(RECALL, {}), **metrics.get("baselines", {})}
    if name not in scores:
        return tokens_table(metrics.get("tokens_ahead", {}), (RECALL,)).markdown()
    table = layer_table({**metrics, RECALL: scores}, names=[name, *(other for other in scores if other != name)])
    return replace(table, headings=["layer", *table.headings[1:]]).markdown(turned=True)


def training_rows(config: Json, metrics: Json) -> list[list[str]]:
    training, data = config.get("training", {}), metrics.get("data", {})
    given = {
        "command": f"`{config['command']}`",
        "tokens learned from": training.get("tokens"),
        "seconds": training.get("seconds") and f"{training['seconds']:.1f}",
        "seed": training.get("seed"),
        "processes": training.get("ranks"),
        "text": data.get("command") and f"`{data['command']}`",
        "SHA-256 of the text, as tokens": data.get("text") and f"`{data['text']}`",
        "documents": data.get("documents"),
        "tokens of train, validation, test": data.get("splits") and ", ".join(map(str, data["splits"].values())),
        "traces": metrics.get("traces") and f"`{metrics['traces']}`",
        "default vectors from": _elsewhere(training.get("default_vectors_from")),
        "expertcast, git revision": f"{config['expertcast_version']}, {config['git_revision']}",
        "versions": ", ".join(f"{name} {version}" for name, version in config["versions"].items()),
    }
    return [["trained", ""], *([key, str(value)] for key, value in given.items() if value is not None)]


def _elsewhere(note: object) -> str | None:
    """Where default vectors come from that are not of the traces."""
    return f"`{note.get('given')}`, digest `{note.get('digest')}`" if isinstance(note, dict) else None


def model_rows(config: Json) -> list[list[str]]:
    shape = config["shape"]
    return [
        ["made for", ""],
        ["model", f"`{config['model_id']}`"],
        ["MoE layers, experts, experts per token, hidden size", ", ".join(str(shape[key]) for key in "LEKD")],
        ["reads", str(config["tap_point"])],
        ["fingerprint of routers and norms", f"`{config['fingerprint']}`"],
    ]


BYTES = "timely_bytes"
BUNDLED = "reference"
"""The model that expertcast brings; it has no repository."""
BUNDLED_LICENSE = "apache-2.0"

TEMPLATE = """---
{{ card_data }}
---

# {{ predictor }} for {{ model_id }}

Forecasts which experts of the Mixture-of-Experts model `{{ model_id }}` are needed {{ ahead }} ahead, for
`expertcast`: experts that do not fit the GPU are brought in before they are needed.

```python
import expertcast
{{ loading }}
with expertcast.offload(model, {{ keyword }}="{{ where }}") as offloaded:
    inputs = tokenizer("It is a truth universally acknowledged", return_tensors="pt").to(model.device)
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=16)[0]))
    print(offloaded.stats.as_dict()["hit_rate"])
```

    expertcast generate {{ model_id }} --prompt "It is a truth" --{{ keyword.replace("_", "-") }} {{ where }}

{% if recall %}## Recall

{{ scored }}

{{ recall }}

{% endif %}{% if others %}{{ others }}

{% endif %}{% if ladder %}## Rungs

A run forecasts with the one that saves most time.

{{ ladder }}

{% endif %}## Training and costs

{{ training }}

```json
{{ config }}
```

{% if costs %}{{ costs }}

{% endif %}{{ made_for }}
"""
"""Rendered by jinja2."""


def model_card(config: Json, metrics: Json, where: str, license: str | None = None) -> str:
    """README.md from the contents of config.json and metrics.json.

    Args:
        config: the contents of config.json.
        metrics: those of metrics.json.
        where: what the card's commands name the checkpoint by: a folder, or `user/repo`.
        license: of the predictor, an identifier of the hub such as apache-2.0 or mit; the bundled model's own when not
            given, and none for predictors of other models.
    """
    name, model_id = str(config["predictor"]), str(config["model_id"])
    distances = ", ".join(map(str, config["predictor_config"].get("ahead", [1])))
    card: str = ModelCard.from_template(
        _metadata(config, metrics, where, license),
        template_str=TEMPLATE,
        predictor=name,
        model_id=model_id,
        ahead=f"{distances} MoE layer{'s' * (distances != '1')}"
        if distances
        else f"1 to {config['predictor_config']['tokens']} tokens",
        loading=_loading(model_id),
        keyword="predictor" if distances else "next_token",
        where=where,
        scored=scored(metrics),
        recall=recall_part(name, metrics),
        others=link_table(metrics).markdown(turned=True),
        ladder=ladder_table(config).markdown(),
        training=markdown_table(training_rows(config, metrics)),
        config=json.dumps(config["predictor_config"], indent=2),
        costs=ledger_table(metrics.get("ledger", {})).markdown(turned=True),
        made_for=markdown_table(model_rows(config)),
    ).content
    return card.rstrip() + "\n"


def _metadata(config: Json, metrics: Json, where: str, license: str | None) -> ModelCardData:
    """The card's YAML; the hub shows `model-index` beside it, and lists the card under `base_model`."""
    name, model_id = str(config["predictor"]), str(config["model_id"])
    # the hub refuses cards whose base model is a path
    is_hub_id = HubName.of(model_id) is not None and not Path(model_id).exists()
    results = _results(name, metrics)
    return ModelCardData(
        license=license or (BUNDLED_LICENSE if model_id == BUNDLED else None),
        library_name="expertcast",
        base_model=model_id if is_hub_id else None,
        tags=["mixture-of-experts", "expert-prediction", "expertcast", name],
        model_name=f"{name} for {model_id}" if results else None,
        eval_results=results or None,
    )


def _results(name: str, metrics: Json) -> list[EvalResult]:
    """The predictor's own means, over layers; of one that looks tokens ahead those of the next token."""
    data = metrics.get("data", {})
    shown = [metric for metric in (RECALL, "exact_set", *timely_metrics(metrics)) if not metric.startswith(BYTES)]
    found = {metric: (metrics.get(metric, {}).get(name) or {}).get("mean") for metric in shown}
    ahead = metrics.get("tokens_ahead", {}).get(name, {})
    found |= {metric: values["mean"][0] for metric, values in ahead.items()}
    return [
        EvalResult(
            task_type="expert-prediction",
            task_name="Expert prediction",
            dataset_type="expertcast-traces",
            dataset_name=f"{metrics['tokens']} held-out tokens",
            dataset_split=str(metrics.get("split", "test")),
            dataset_revision=data.get("text") or metrics.get("traces"),
            metric_type=metric,
            metric_name=metric.replace("@", " at ").replace("_", " "),
            metric_value=value,
        )
        for metric, value in found.items()
        if value is not None and "tokens" in metrics
    ]


def _loading(model_id: str) -> str:
    """Lines of Python that make `model` and `tokenizer`."""
    if model_id == BUNDLED:
        return (
            "from expertcast.data.models import load_model, load_tokenizer\n\n"
            f'model, tokenizer = load_model("{model_id}"), load_tokenizer("{model_id}")'
        )
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{model_id}")\n'
        f'model = AutoModelForCausalLM.from_pretrained("{model_id}", dtype="auto")'
    )
