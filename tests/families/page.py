"""docs/families.md from the models themselves: `python -m tests.families.page` writes it."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from expertcast.data import inspection
from expertcast.data.inspection import ModelReport
from expertcast.data.models import meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.messages import ExpertcastError
from tests.families.table import FAMILIES, REFUSED, WORKING_CLASSES, tiny_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"

_TEXT = """# Families

transformers {version} has {all} families with a Mixture-of-Experts implementation that expertcast can find. {working}
of them are supported. For each, `tests/families/test_all_families.py` takes a tiny random model (hidden size 32, 8
experts, bf16) and checks that

- the offloaded model generates the logits of the resident model bit for bit from 5 slots, with and without forecasts;
- the routing rule, applied to the router's own logits, gives the router's ids and weights bit for bit, in prefill and
  decode steps;
- traces can be collected, and their skeleton (norms and routers only) routes as the model does;
- forecasts can be executed, resident and offloaded;
- the configuration alone (`expertcast inspect MODEL`) gives the same description as the model.

The other {refused} are refused, with the reasons below. The test fails if transformers adds a family that is not in
`tests/families/table.py`. The code names no family: it reads everything from one forward of two tokens.

A family that is not in this table is checked when it runs. Each router must reproduce its own ids and weights from
its own logits, for artificial inputs and for the first real inputs. If a router fails, its layer gets no forecasts
and follows its own router in every mode, with one warning; `collect` refuses the model.

FP8 weights (Qwen3-FP8, DeepSeek-V3; scales of blocks or tensors) and MXFP4 weights (gpt-oss) are dequantised while
loading, with the bits of transformers, or stay in an expert store as shipped (`tests/runtime/test_shipped.py`). If
the edge of a matrix cuts a block of FP8, expertcast uses the block size of the configuration; transformers refuses
such a file or assumes smaller blocks. GPTQ, AWQ, compressed-tensors and bitsandbytes are dequantised too
(`tests/runtime/test_packed.py`), and so are GGUF files of families that transformers maps completely
(`tests/runtime/test_gguf.py`); transformers finds no experts in GGUF files of gpt-oss, so these are refused.
`inspect`, `load_offloaded` and `generate` refuse other quantised forms by name.

Columns: *reads* is the input of the router. *default vectors* replace experts that have not run (`quasi_hidden`,
`estimator`). If the output of the experts is not added to the residual stream directly, the default vector is the
mean step to the next MoE layer, and forecasts are less accurate; the bits of the output are not affected. The last
column describes the tiny configuration; `expertcast inspect` shows the factors of a checkpoint. `python -m
tests.families.page` writes this page.

| family | class | reads | default vectors |
|---|---|---|---|
{rows}

## Refused

`generate` and `load_offloaded` refuse these families. For two of them `expertcast.offload` works bit for bit on
another class that was loaded with transformers.

| family | reason |
|---|---|
{reasons}
"""


def describe(model: PreTrainedModel, name: str) -> ModelReport:
    """Describe a model as `inspect` describes one that it opens."""
    try:
        return inspection.describe(model, name, None, find_moe_layers(model))
    except ExpertcastError as error:
        return ModelReport(model=name, architecture=type(model).__name__, supported=False, reason=str(error))


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
            rows.append(f"| `{family}` | {said.architecture} | {said.router_reads} | {said.default_vectors} |")
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
