"""Dataset card of traces, by which `datasets.load_dataset` finds their rows on the Hugging Face hub."""

from __future__ import annotations

from huggingface_hub import DatasetCard, DatasetCardData

from expertcast.checkpoints.results import markdown_table
from expertcast.predictors.messages import Json

_SHARDS = "data-*.arrow"
TEMPLATE = """---
{{ card_data }}
---

# Routing traces of {{ model }}

Residual streams after attention, router logits, token ids and document ids of `{{ model }}` at each Mixture-of-Experts
layer, token by token. `expertcast` trains forecasts of expert routing on them.

    expertcast train {{ name }} --predictor estimator --out checkpoint
    expertcast eval {{ name }} --predictor checkpoint linear

```python
from datasets import load_dataset

from expertcast.data.traces import TraceDataset

rows = load_dataset("{{ name }}", split="train")  # one row per token; trace.json assigns documents to splits
traces = TraceDataset.open("{{ name }}")
```

{{ columns }}

{{ facts }}
"""
"""Jinja2 template."""


def traces_card(info: Json, name: str) -> str:
    """Render README.md from the contents of trace.json; its metadata tells `datasets` which files have the rows.

    Args:
        info: contents of trace.json.
        name: name of the traces in the card's commands.
    """
    model, splits = str(info["model"]), info["splits"]
    columns = [["column", "content"]]
    for column, note in info["columns"].items():
        columns.append([column, f"{note['dtype']}, {' x '.join(map(str, note['shape']))}"])
    facts = {
        "tokens": info["tokens"],
        "tokens of train, validation, test, split by document": ", ".join(map(str, splits.values())),
        "documents": len(info["documents"]),
        "MoE layers, experts, experts per token, hidden size": ", ".join(str(info["shape"][key]) for key in "LEKD"),
        "SHA-256 of the token ids": f"`{info['settings']['text']}`",
        "fingerprint of routers and norms": f"`{info['fingerprint']}`",
        "command": f"`{info['command']}`",
        "expertcast, git revision": ", ".join(filter(None, (info["expertcast_version"], info["git_revision"]))),
        "id": f"`{info['id']}`",
    }
    rows = [["", ""], *([key, str(value)] for key, value in facts.items())]
    card: str = DatasetCard.from_template(
        DatasetCardData(
            pretty_name=f"Routing traces of {model}",
            tags=["mixture-of-experts", "expert-prediction", "expertcast"],
            configs=[{"config_name": "default", "data_files": [{"split": "train", "path": _SHARDS}]}],
        ),
        template_str=TEMPLATE,
        model=model,
        name=name,
        columns=markdown_table(columns),
        facts=markdown_table(rows),
    ).content
    return card.rstrip() + "\n"
