"""docs/families.md from the models themselves: `python -m tests.families.page` writes it."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from expertcast.data.inspection import ModelReport, describe
from expertcast.data.models import meta_model
from expertcast.predictors.messages import ExpertcastError
from tests.families.table import FAMILIES, REFUSED, WORKING_CLASSES, tiny_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"

_TEXT = """# Families

transformers {version} decorates the experts of {all} model families. With each of {working} of them, as a tiny random
model (hidden size 32, 8 experts, bf16), `tests/families/test_all_families.py` checks that

- an offloaded model, with and without forecasts, generates the resident model's logits bit for bit from 5 slots;
- the router's own logits, sent through the routing rule as forecasts are, give its own ids and weights bit for bit, in
  prefill and in decode steps;
- traces are collected, and their skeleton (norms and routers alone, on disk) routes as the model does;
- forecasts are executed, resident and offloaded;
- the configuration alone (`expertcast inspect MODEL`) says the same as the model.

The other {refused} are refused, each with the line below. The test fails when transformers decorates a family that is
not in `tests/families/table.py`. No family is named in the code: everything is read from one forward of two tokens.

Models that nobody has tried are asked when they run: a layer's router must give its own ids and weights back from its
own logits, on made inputs and on the first real ones. Where it does not, its layer gets no forecast and follows its own
router in every mode, and one warning says so; `collect` refuses.

Weights in FP8 (Qwen3-FP8, DeepSeek-V3; in blocks or by tensors) and MXFP4 (gpt-oss) are dequantised while loading to
the bits of transformers' own dequantisation, or stay in an expert store as they are shipped
(`tests/runtime/test_shipped.py`). Where a block of FP8 is cut off at a matrix's edge, which transformers refuses or
takes for smaller blocks, the blocks are those of the configuration. GPTQ, AWQ, compressed-tensors and bitsandbytes
are dequantised too (`tests/runtime/test_packed.py`), and GGUF files of what transformers maps whole
(`tests/runtime/test_gguf.py`): of gpt-oss it finds no expert, so that file is refused. Of other quantised forms
`inspect`, `load_offloaded` and `generate` say the same: refused, by name.

Columns: *reads*: what the router is given. *default vectors*: what stands for experts that have not run
(`quasi_hidden`, `estimator`). Where their output does not come to the residual stream as a term of a sum, it is the
mean step to the next MoE layer, and forecasts are that much worse; bits are not concerned. The last two columns are of
the tiny configuration: a checkpoint's own factors are what `expertcast inspect` says. This page is written by
`python -m tests.families.page`.

| family | class | reads | default vectors | routing |
|---|---|---|---|---|
{rows}

## Refused

What `generate` and `load_offloaded` load of these families is refused. Of two of them another class, loaded with
transformers, is offloaded bit for bit by `expertcast.offload`.

| family | reason |
|---|---|
{reasons}
"""


def report(family: str) -> ModelReport | str:
    """Return the report of `inspect` for the family's tiny configuration, or a line if there is no model to load."""
    try:
        return describe(meta_model(tiny_config(family), torch.bfloat16), family)
    except ExpertcastError as error:
        return str(error)


def page() -> str:
    """The page's text."""
    rows, reasons = [], []
    for family in FAMILIES:
        said = report(family)
        if isinstance(said, str):
            reason = "no language model: transformers' AutoModelForCausalLM has none of it"
            reasons.append(f"| `{family}` | {reason}{_other_class(family)} |")
        elif not said.supported:
            reason = said.reason.partition(" is not supported: ")[2] or said.reason
            reasons.append(f"| `{family}` | {reason}{_other_class(family)} |")
        else:
            rows.append(
                f"| `{family}` | {said.architecture} | {said.router_reads} | {said.default_vectors} | "
                f"{said.routing_rule.rpartition(' (')[0]} |"
            )
    return _TEXT.format(
        version=".".join(transformers.__version__.split(".")[:2]),
        all=len(FAMILIES), working=len(FAMILIES) - len(REFUSED), refused=len(REFUSED),
        rows="\n".join(rows), reasons="\n".join(reasons),
    )  # fmt: skip


def _other_class(family: str) -> str:
    if family not in WORKING_CLASSES:
        return ""
    name, implementation = WORKING_CLASSES[family]
    given = f', loaded with `experts_implementation="{implementation}"`' if implementation else ""
    return f". `{name}` works{given}"


if __name__ == "__main__":
    PAGE.write_text(page())
