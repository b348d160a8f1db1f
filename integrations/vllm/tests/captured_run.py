"""A vLLM engine whose decode steps run as if captured in CUDA graphs: options on standard input, tokens and counters on
standard output.

Operations that a capture forbids raise. Padding rows with other routing follow the requests' rows, as in a batch
smaller than its graph. Only copies and vLLM's kernel for experts run as usual on a CPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from one_run import ENGINE, QUIET, RESULT
from torch import Tensor
from torch.overrides import TorchFunctionMode

PADDING = 3
CAPTURING = [
    "expertcast_vllm.offload.capturing", "expertcast.runtime.experimental.device_engine.capturing",
    "expertcast_vllm.observer.capturing", "expertcast.runtime.engine.speculation.capturing",
    "expertcast.runtime.engine.traced.capturing",
]  # fmt: skip


class NoHost(TorchFunctionMode):
    """Raises on operations that bring a tensor's value to the host, or whose shape depends on one."""

    FORBIDDEN = frozenset(
        {
            "item", "tolist", "numpy", "cpu", "nonzero", "unique", "masked_select", "equal", "allclose", "__bool__",
            "__int__", "__float__", "__index__", "is_nonzero", "argwhere", "bincount",
        }
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        name = getattr(func, "__name__", "")
        if name in self.FORBIDDEN:
            raise RuntimeError(f"{name} needs the host")
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, Tensor) and part.dtype == torch.bool for part in index):
                raise RuntimeError("a mask needs the host")
        return func(*args, **(kwargs or {}))


def plainly(function: Any) -> Any:
    """Return the function without this check."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return called


@contextmanager
def as_if_captured(counts: dict[str, int]) -> Iterator[None]:
    """Run this process's decode steps as if captured."""
    from expertcast_vllm import offload as module
    from expertcast_vllm.method import GatheringKernel
    from expertcast_vllm.offload import WorkerOffload
    from vllm.forward_context import get_forward_context

    from expertcast.runtime.experimental.kernel_link import HostCopier

    route, run, step_of = WorkerOffload.routed, WorkerOffload.run, module.running_step

    @contextmanager
    def padded(rows: int) -> Iterator[NoHost]:
        step, context = step_of(), get_forward_context()
        assert step is not None
        step = type(step)(tokens=rows + PADDING, requests=rows + PADDING, decodes=True)
        mask = torch.arange(rows + PADDING) >= rows
        with ExitStack() as stack:
            for name in CAPTURING:
                stack.enter_context(patch(name, lambda: True))
            stack.enter_context(patch.object(module, "running_step", lambda: step))
            stack.enter_context(patch.object(context, "is_padding", mask))
            yield stack.enter_context(NoHost())

    def routed(self: Any, index: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if not step_of().decodes:
            return route(self, index, hidden, logits, weights, ids)
        rows, experts = len(ids), logits.shape[1]
        other = torch.arange(PADDING * ids.shape[1]).view(PADDING, -1) % experts
        more = (
            more_rows(hidden), more_rows(logits), more_rows(weights), torch.cat([ids, other.to(ids.dtype)])
        )  # fmt: skip
        residual = self.observer and self.observer._residual
        with padded(rows) as watch:
            if residual is not None:
                self.observer._residual = more_rows(residual)
            asked = route(self, index, *more)
            if residual is not None:
                self.observer._residual = residual
        counts["functions"] += watch.seen
        assert torch.equal(asked[:rows], ids)
        assert torch.equal(asked[rows:], ids[:1].expand(PADDING, -1))
        return asked[:rows]

    def computed(self: Any, index: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if not step_of().decodes:
            return run(self, index, hidden, ids, weights)
        rows = len(ids)
        more = more_rows(hidden), torch.cat([ids, ids[:1].expand(PADDING, -1)]), more_rows(weights)
        with padded(rows):
            output = run(self, index, *more)
        counts["layers"] += 1
        return output[:rows]

    with (
        patch.object(WorkerOffload, "routed", routed),
        patch.object(WorkerOffload, "run", computed),
        patch.object(GatheringKernel, "run", plainly(GatheringKernel.run)),
        patch.object(HostCopier, "copy", plainly(HostCopier.copy)),
    ):
        yield


def more_rows(tensor: Tensor) -> Tensor:
    """Append padding rows of meaningless values."""
    return torch.cat([tensor, torch.full_like(tensor[:1], 0.5).expand(PADDING, -1)])


def main() -> None:
    """Generate once normally and once as if captured."""
    asked = json.load(sys.stdin)
    os.environ.update({**QUIET, **asked["environment"]})
    from vllm import LLM, SamplingParams

    engine = LLM(asked["model"], **{**ENGINE, **asked["engine"]})
    sampling, counts = SamplingParams(temperature=0, max_tokens=asked["tokens"]), {"functions": 0, "layers": 0}

    def generated() -> dict[str, Any]:
        worker = engine.llm_engine.model_executor.driver_worker.worker  # type: ignore[attr-defined]
        offload = next(iter(worker.model_runner.model.modules())).modules()
        offload = next(each.offload for each in offload if hasattr(each, "offload"))
        offload.link.residency.clear()
        offload.warmed_up()
        tokens = [list(output.outputs[0].token_ids) for output in engine.generate(asked["prompts"], sampling)]
        return {"tokens": tokens, "counters": engine.collective_rpc("expertcast_statistics")[0]}

    given = {"plain": generated()}
    with as_if_captured(counts):
        given["captured"] = generated()
    print("\n" + RESULT + json.dumps({**given, **counts}))


if __name__ == "__main__":
    main()
