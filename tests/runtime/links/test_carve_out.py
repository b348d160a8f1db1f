"""Multiprocessors left to copies: torch's setting holds where experts run beside copies, and nowhere else."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from expertcast.runtime import offload
from expertcast.runtime.engine.kernels import has_persistent_grouped_mm
from expertcast.runtime.experimental.kernel_link import CarveOut, HostCopier, KernelLink
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.blocks import Blocks
from tests.runtime.links.simulated_device import SimulatedDevice

LAYOUT = BlockLayout(fields=(Field(name="w", shape=(64,), dtype=torch.float32, offset=0),), block_bytes=256)


def _now() -> int | None:
    return torch._C._get_sm_carveout_experimental()


def test_it_holds_while_entered_and_the_larger_one_wins() -> None:
    small, large = CarveOut(8), CarveOut(16)
    assert _now() is None
    with large:
        with small, large:
            assert _now() == 16
        assert _now() == 16
    with small:
        assert _now() == 8
        with large:
            assert _now() == 16
        assert _now() == 8
    assert _now() is None


def test_an_error_inside_leaves_what_was_set_before() -> None:
    torch._C._set_sm_carveout_experimental(4)
    try:
        with pytest.raises(RuntimeError, match="inside"), CarveOut(16):
            raise RuntimeError("inside")
        assert _now() == 4
    finally:
        torch._C._set_sm_carveout_experimental(None)


@pytest.mark.parametrize("reason", ["nothing copies", "a torch without it", "cuBLASLt preferred"])
def test_nothing_is_set_where_it_would_do_harm(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "a torch without it":
        monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    if reason == "cuBLASLt preferred":
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: torch._C._BlasBackend.Cublaslt)
    with CarveOut(0 if reason == "nothing copies" else 16):
        assert _now() is None


def test_who_has_the_persistent_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_persistent_grouped_mm(torch.zeros(1, dtype=torch.bfloat16))
    for capability, dtype, has in (
        ((9, 0), torch.bfloat16, True), ((10, 0), torch.bfloat16, True), ((8, 0), torch.bfloat16, False),
        ((12, 0), torch.bfloat16, False), ((9, 0), torch.float16, False),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, found=capability: found)
        weight = cast(Any, type("Weight", (), {"device": torch.device("cuda", 0), "dtype": dtype}))
        assert has_persistent_grouped_mm(weight) is has


def test_a_link_leaves_as_many_as_its_copies_take(monkeypatch: pytest.MonkeyPatch) -> None:
    store, pool = Blocks(LAYOUT, 4, torch.Generator()), SlotPool(LAYOUT, 2, torch.device("cpu"))
    link = KernelLink()
    link.attach(store, pool)
    assert link.carve_out.multiprocessors == 0
    monkeypatch.setattr(HostCopier, "programs", 7)
    link.attach(store, pool)
    assert link.carve_out.multiprocessors == 7


class _Link(KernelLink):
    """Streams are simulated; copies, which are made at once, are said to take 16 multiprocessors."""

    def _device_of(self, pool: SlotPool) -> CudaDevice | None:
        return cast(CudaDevice, SimulatedDevice())

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        self.carve_out = CarveOut(16)


class _Spy:
    """Runs the kernel, and notes what is set meanwhile."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.seen: list[int | None] = []

    def run(self, *args: Any) -> torch.Tensor:
        self.seen.append(_now())
        return cast(torch.Tensor, self._kernel.run(*args))

    def run_pairs(self, *args: Any) -> torch.Tensor:
        self.seen.append(_now())
        return cast(torch.Tensor, self._kernel.run_pairs(*args))


@pytest.mark.parametrize(
    ("ids", "predictor", "expected"),
    [([3], "next_norm", [16, 16, 16, None]), ([3], None, [None] * 4), (list(range(3, 40)), None, None)],
)
def test_experts_beside_copies_leave_them_room(
    ids: list[int], predictor: str | None, expected: list[int | None] | None
) -> None:
    """A forecast's copies run beside, of which the last layer has none, or the next chunk's; misses are waited for."""
    model = tiny_model("qwen3_moe")
    outside: set[int | None] = set()
    with offload(model, link=_Link(), slots=5, predictor=predictor) as offloaded:
        spy = _Spy(offloaded._engine._kernel)
        offloaded._engine._kernel = cast(Any, spy)
        for layer in offloaded.view:
            layer.router.register_forward_pre_hook(lambda *_: outside.add(_now()))
        offloaded(torch.tensor([ids]))
    if expected is None:
        assert len(spy.seen) > 4, "some layers ran in chunks"
        assert set(spy.seen) == {16}
    else:
        assert spy.seen == expected
    assert outside == {None}
    assert _now() is None


def test_an_interrupted_forward_leaves_nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with offload(tiny_model("qwen3_moe"), link=_Link(), slots=5, predictor="next_norm") as offloaded:
        kernel = offloaded._engine._kernel
        seen = []

        def fail(*_args: object) -> None:
            seen.append(_now())
            raise KeyboardInterrupt

        monkeypatch.setattr(kernel, "run", fail)
        with pytest.raises(KeyboardInterrupt):
            offloaded(torch.tensor([[3]]))
    assert seen == [16]
    assert _now() is None
