"""One forward of two tokens that shows how a model's MoE blocks are wired.

Experts are answered with their own input, so nothing of their weights is needed; a model on the meta device will do.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertcast.data.flow import Sum, Sums, minus
from expertcast.data.models import first_line
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import Adds

PROBE_EXPERTS = "expertcast_probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """Paths in a model of one MoE block, its router and its experts."""

    block: str
    router: str
    experts: str


@dataclass(slots=True)
class Probed:
    """What was seen around one MoE block; sums are those of :class:`Sums`."""

    norm: str = ""
    """Path of the module whose output is the block's input; empty where that is none's."""
    residual: Sum | None = None
    """What entered the norm."""
    normed: Sum | None = None
    router_input: Sum | None = None
    dims: int = 2
    """Of the router's input: [T, D] or [B, S, D]."""
    arguments: dict[str, object] = field(default_factory=dict)
    """What else the router was given, by its parameters' names."""
    output: object = None
    """What the router returned."""
    experts: int = -1
    """The atom that the experts' output is."""
    block: Sum | None = None
    layer: Sum | None = None
    """What the module around the block put out."""
    depends: bool = False
    """Whether the layer's output has the experts' output in it other than as a term of the sum."""

    def adds(self) -> Adds | None:
        """How the experts' output enters the residual stream; None: not as a term of it."""
        if self.layer is None or self.residual is None or self.block is None:
            return None
        added = minus(self.layer, self.residual)
        factor = added.get(self.experts)
        if factor is None or self.depends or any(atom in self.residual for atom in added):
            return None
        behind = factor / self.block.get(self.experts, factor)  # what the layer multiplies its block's output with
        alike = added.keys() == self.block.keys() and all(
            math.isclose(value, behind * self.block[atom]) for atom, value in added.items()
        )
        return Adds(factor=factor, beside=not alike)


def probe(model: PreTrainedModel, blocks: Sequence[BlockNames]) -> dict[str, Probed]:
    """What a forward of two tokens showed around each block, by the blocks' paths; the model is left as it was.

    Raises:
        ExpertcastError: the forward ends in an error.
    """
    device = next(model.parameters()).device
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)  # its embedding may be zero
    tokens = [token for token in (1, 2, 3) if token != padding][:2]
    ready = torch.zeros(1, 1, 2, 2, dtype=model.dtype, device=device)
    given: dict[str, object] = {"input_ids": torch.tensor([tokens], device=device), "use_cache": False}
    # with a ready 4-d mask transformers builds none of its own, which a meta model cannot do everywhere; layers other
    # than attention may not take one, and positions may be worked out from values
    positions = torch.arange(2, device=device)[None]
    attempts: list[dict[str, object]] = [
        {"attention_mask": ready},
        {},
        {"attention_mask": ready, "position_ids": positions},
    ]
    errors: list[Exception] = []
    for attempt in attempts:
        try:
            return _forward(model, blocks, {**given, **attempt})
        except Exception as error:  # whatever a model's own code does on inputs that it does not take
            errors.append(error)
    raise ExpertcastError(
        f"{type(model).__name__} is not supported: it does not run on two tokens of text "
        f"({type(errors[-1]).__name__}: {first_line(errors[-1])})"
    ) from errors[-1]


@contextmanager
def experts_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run the model's experts with another registered function, and put the old one back at the end."""
    before = model.get_experts_implementation()
    model.set_experts_implementation(name)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _probe_experts(experts: nn.Module, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    return hidden_TD.clone()


def _forward(model: PreTrainedModel, blocks: Sequence[BlockNames], given: Mapping[str, object]) -> dict[str, Probed]:
    ALL_EXPERTS_FUNCTIONS.register(PROBE_EXPERTS, _probe_experts)
    sums = Sums()
    seen = {names.block: Probed() for names in blocks}
    around: dict[str, list[Probed]] = {}
    for names in blocks:
        around.setdefault(names.block.rpartition(".")[0], []).append(seen[names.block])
    producers: dict[int, tuple[str, Tensor, Tensor]] = {}
    training = model.training
    with ExitStack() as stack:
        for names in blocks:
            stack.enter_context(_watched(model, names, seen[names.block], sums, producers))
        for name, module in model.named_modules():
            if name:

                def after(_module: nn.Module, args: tuple[object, ...], output: object, name: str = name) -> None:
                    first = output[0] if isinstance(output, tuple) and output else output
                    if not isinstance(first, Tensor):
                        return
                    for probed in around.get(name, ()):
                        probed.layer = sums.of(first)
                        others = [atom for atom in probed.layer if atom != probed.experts]
                        probed.depends = sums.depends(others, probed.experts)
                    if first is output and args and isinstance(args[0], Tensor):
                        producers[id(first)] = (name, args[0], first)

                stack.callback(module.register_forward_hook(after).remove)
        stack.enter_context(experts_implementation(model, PROBE_EXPERTS))
        stack.callback(model.train, training)
        model.eval()
        stack.enter_context(torch.no_grad())
        # on the meta device no value says where a mask is set: everywhere will do
        stack.enter_context(fx_config.patch(meta_nonzero_assume_all_nonzero=True))  # type: ignore[attr-defined]
        stack.enter_context(sums)
        model.base_model(**given)
    return seen


@contextmanager
def _watched(
    model: PreTrainedModel,
    names: BlockNames,
    probed: Probed,
    sums: Sums,
    producers: Mapping[int, tuple[str, Tensor, Tensor]],
) -> Iterator[None]:
    """Hooks on one block, its router and its experts.

    Args:
        model: has the modules.
        names: of them.
        probed: is filled in.
        sums: follows the forward.
        producers: by id of a tensor, the path of the module that put it out, its first input, and the tensor.
    """
    block, router, experts = (model.get_submodule(name) for name in (names.block, names.router, names.experts))

    def before_block(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if hidden is not None and id(hidden) in producers:
            probed.norm, residual, _ = producers[id(hidden)]
            probed.residual, probed.normed = sums.of(residual), sums.of(hidden)

    def after_router(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, object], output: object) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        hidden, *others = bound.items()
        assert isinstance(hidden[1], Tensor), f"{type(module).__name__} was not given a tensor first"
        probed.router_input, probed.dims = sums.of(hidden[1]), hidden[1].dim()
        probed.arguments, probed.output = dict(others), output

    def after_experts(_module: nn.Module, _args: object, output: Tensor) -> None:
        probed.experts = sums.mark(output)

    def after_block(_module: nn.Module, _args: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            probed.block = sums.of(first)

    with ExitStack() as stack:
        for handle in (
            block.register_forward_pre_hook(before_block, with_kwargs=True),
            router.register_forward_hook(after_router, with_kwargs=True),
            experts.register_forward_hook(after_experts),
            block.register_forward_hook(after_block),
        ):
            stack.callback(handle.remove)
        yield
