"""Run by torchrun in tests: two ranks collect together, then read the traces and a running model together.

Arguments: folder for everything written; settings of the collection as JSON. Each rank writes which tokens it saw.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from expertcast.data.collect import collect
from expertcast.data.models import load_tokenizer
from expertcast.data.online import OnlineTraces
from expertcast.data.processes import training_share
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceSource
from tests.families.models import tiny_model

TOKENS_PER_BATCH = 128


def seen(source: TraceSource) -> dict[str, Any]:
    """A rank reads its share of the train split."""
    batches = list(source.batches("train", TOKENS_PER_BATCH, shuffle=True, share=training_share()))
    return {
        "seen": [each for b in batches for each in zip(b.document_T.tolist(), b.position_T.tolist(), strict=True)],
        "defaults": source.defaults.expert_LED.sum(-1).tolist(),
        "count": source.defaults.count_LE.tolist(),
    }


if __name__ == "__main__":
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    given = tiny_model("qwen2_moe"), load_tokenizer("reference"), load_documents("reference")[:200]
    result = {"traces": seen(collect(*given, folder / "traces", **settings))}
    del settings["shard_bytes"]
    result["online"] = seen(OnlineTraces(*given, buffer_tokens=512, **settings))
    (folder / f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(result))
