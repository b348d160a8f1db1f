"""What all servers read, and what they are asked."""

from __future__ import annotations

from pathlib import Path

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.commands.output import say
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.plan import TextOptions
from expertcast.data.text import load_documents
from expertcast.training.fit import fit

PROMPT_WORDS, PROMPTS = 24, 16


def prepare(model: Path, checkpoint: Path, tokens: int) -> None:
    """The bundled model as files, and a linear predictor of it: what both servers' layers see is enough for it.

    Args:
        model: folder to write, the tokenizer too.
        checkpoint: folder to write.
        tokens: to fit the predictor on.
    """
    say(f"the model, and a predictor fitted on {tokens} tokens")
    tokenizer = load_tokenizer(REFERENCE)
    load_model(REFERENCE, dtype="fp32").save_pretrained(model)
    tokenizer.save_pretrained(model)
    loaded = load_model(str(model), dtype="fp32")
    options = TextOptions(tokens=tokens, early_rank=None)
    traces = collect(loaded, tokenizer, load_documents(REFERENCE), checkpoint.parent / "traces", options)
    save_predictor(fit("linear", traces).predictor, checkpoint, view=find_moe_layers(loaded))


def prompts() -> list[str]:
    """Beginnings of bundled documents."""
    documents = [document.text for document in load_documents(REFERENCE)]
    return [" ".join(text.split()[:PROMPT_WORDS]) for text in documents[:: len(documents) // PROMPTS]][:PROMPTS]
