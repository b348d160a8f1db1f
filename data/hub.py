"""Upload trace datasets to the Hugging Face hub, where `datasets.load_dataset` can read them too.

:meth:`expertcast.data.traces.TraceDataset.open` accepts `user/repo` and `user/repo@revision`.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData

from expertcast.checkpoints.hub import CARD, HubName, push
from expertcast.checkpoints.results import markdown_table
from expertcast.data import trace_format as layout
from expertcast.data.trace_format import TRACES
from expertcast.data.traces import TraceDataset
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


def push_traces(
    folder: str | Path,
    name: HubName,
    *,
    private: bool = False,
    message: str | None = None,
    license: str | None = None,
) -> Json:
    """Upload traces to a dataset repository, after checking every file against its digest.

    Args:
        folder: folder of the traces.
        name: repository, created if missing; its revision is a branch.
        private: whether to create the repository as private.
        message: commit message.
        license: hub identifier of the licence of the traces, which contain the text as token ids.

    Returns:
        The result of :func:`expertcast.checkpoints.hub.push`, and the card's `license`.

    Raises:
        ExpertcastError: the traces are invalid, or the upload fails.
    """
    traces = TraceDataset.open(folder)
    traces.verify()
    content: dict[str, Path | bytes] = {
        path: traces.folder / path for path in (*traces.info["files"], *layout.FOR_DATASETS, layout.TRACE_FILE)
    }
    content[CARD] = traces_card(traces.info, str(name), license).encode()
    sent = push(
        name, TRACES, content, private=private, message=message,
        stale=lambda path: re.match(layout.SHARD_PATTERN, path) is not None,
    )  # fmt: skip
    return {**sent, "license": license}


def traces_card(info: Json, name: str, license: str | None = None) -> str:
    """Render README.md from the contents of trace.json; its metadata tells `datasets` which files have the rows.

    Args:
        info: contents of trace.json.
        name: name of the repository.
        license: hub identifier of the licence, such as cc-by-4.0.
    """
    model, splits = str(info["model"]), info["splits"]
    columns = [["column", "content"]]
    for column, note in info["columns"].items():
        if isinstance(note, str):
            columns.append([column, note])
        else:
            stored = f" ({note['stored_as']})" if "stored_as" in note else ""
            columns.append([column, f"{note['dtype']}{stored}, {' x '.join(map(str, note['shape']))}"])
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
            license=license,
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
