"""Run by torchrun in tests: two ranks collect together, then train together on the traces and online.

Arguments: folder for everything written; settings of the collection as JSON. Each rank writes which tokens it
trained on, and the weights it ended with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from expertcast.data.batch import TraceBatch
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.online import OnlineTraces
from expertcast.data.processes import training_share
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceSource

TOKENS_PER_BATCH = 128


class Probe(lightning.LightningModule):  # type: ignore[misc]
    """Learns router 1's logits from layer 0's residual; remembers which tokens it saw."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(hidden, experts)
        self.seen: list[tuple[int, int]] = []
        self.validated = 0

    def training_step(self, batch: TraceBatch, _index: int) -> Tensor:
        self.seen += zip(batch.document_T.tolist(), batch.position_T.tolist(), strict=True)
        return nn.functional.mse_loss(self.linear(batch.residual_TLD[:, 0].float()), batch.logits_TLE[:, 1].float())

    def validation_step(self, batch: TraceBatch, _index: int) -> None:
        self.validated += len(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Batches(IterableDataset[TraceBatch]):
    """A split of a source; a rank trains on its share of the train split and validates on all of the other."""

    def __init__(self, source: TraceSource, split: str) -> None:
        self.source, self.split = source, split

    def __iter__(self) -> Iterator[TraceBatch]:
        training = self.split == "train"  # the share is known once Lightning has made the process group
        return self.source.batches(
            self.split, TOKENS_PER_BATCH, shuffle=training, share=training_share() if training else None
        )


def train(source: TraceSource) -> dict[str, Any]:
    shape = source.view.shape
    probe = Probe(shape.hidden, shape.experts)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(probe, *(DataLoader(Batches(source, split), batch_size=None) for split in ("train", "validation")))
    return {
        "seen": probe.seen,
        "steps": trainer.global_step,
        "validated": probe.validated,
        "weight": probe.linear.weight.detach().flatten().tolist(),
        "defaults": source.defaults.expert_LED.sum(-1).tolist(),
        "count": source.defaults.count_LE.tolist(),
    }


def main() -> None:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    model, tokenizer, documents = load_model("reference"), load_tokenizer("reference"), load_documents("reference")
    traces = collect(model, tokenizer, documents, folder / "traces", **settings)
    result = {"traces": train(traces)}
    del settings["shard_bytes"]
    online = OnlineTraces(model, tokenizer, documents, buffer_tokens=512, **settings)
    result["online"] = train(online)
    rank = torch.distributed.get_rank()
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
