"""What the options of an :class:`OffloadConfig` say of transport: where experts lie, and by which link they come."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.messages import size_text
from expertcast.runtime.config import OffloadConfig, pool_bytes
from expertcast.runtime.experimental.kernel_link import KernelLink
from expertcast.runtime.links.base import InstantLink, Link
from expertcast.runtime.links.cuda import CudaLink, PacedCudaLink
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.links.disk_cuda import CudaDiskLink
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.policies import LRU, Fetch, Standard, TopK
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.layout import ExpertsForm
from expertcast.runtime.storage.reader import can_read_directly
from expertcast.runtime.storage.store import ExpertStore


def _only_on_host(config: OffloadConfig) -> str | None:
    """What the kernel link, which decides on the device, would leave out of these options; None: nothing."""
    policies = config.resolved_policies()
    chosen = (policies.eviction.cls, policies.prefetch.cls, policies.miss.cls, policies.routing.cls)
    plain = policies.scope == "global" and policies.pre_eviction.name == "none"
    if not plain or chosen != (LRU, TopK, Fetch, Standard):
        return "policies other than lru over all slots, top_k prefetches and every miss fetched"
    used = {
        "next_token": config.next_token is not None,
        "refit": config.refit > 0,
        "reach": config.reach not in (None, config.ahead),
        "forecasts='worth'": config.forecasts == "worth",
    }
    return next((name for name, given in used.items() if given), None)


def make_link(config: OffloadConfig, device: str) -> Link:
    """What `link`, `bandwidth` and `latency` stand for on a type of device.

    Raises:
        ExpertcastError: a link that the device or the other options rule out.
    """
    link, bandwidth, latency = config.link, config.bandwidth, config.latency
    only_on_host = _only_on_host(config)
    if only_on_host and (link == "kernel" or isinstance(link, KernelLink)):
        raise ExpertcastError(
            f"the kernel link decides on the device, without {only_on_host}: take link='cuda', or leave that out"
        )
    if config.pools and (device != "cpu" or link not in ("auto", "disk")):
        raise ExpertcastError(f"pools are kept by link 'disk' on the CPU, not by {link!r} on {device}: leave pools out")
    if isinstance(link, Link):
        return link
    if link == "auto":
        made = config.store if isinstance(config.store, ExpertStore) else None
        coded = config.resolved_codec() != "raw" or (made is not None and not made.addressable)
        timed = (bandwidth is not None or latency) and not coded
        on_disk = (config.store == "disk" or isinstance(made, DiskStore)) and can_read_directly()
        if on_disk and not timed:
            link = "disk"
        elif device == "cuda":
            link = "cuda"
        else:
            link = "emulated" if timed else "instant"
    if link == "emulated":
        if device != "cpu":
            raise ExpertcastError(f"the emulated link is for models on the CPU, this one is on {device}: use 'cuda'")
        return EmulatedLink(float("inf") if bandwidth is None else bandwidth, latency)
    if link == "disk" and not latency:
        if device == "cuda":
            return CudaDiskLink(bandwidth=bandwidth)
        return DiskLink(bandwidth=bandwidth, pools=pool_bytes(config.pools), passing=1 if config.on_demand else 2)
    if link == "cuda" and device != "cuda":
        raise ExpertcastError(f"link 'cuda' needs a model on CUDA, this one is on {device}: use 'emulated'")
    if bandwidth is not None or latency:
        if link != "cuda":
            raise ExpertcastError(
                "bandwidth and latency belong to the links emulated and cuda, bandwidth also to disk: "
                f"{link!r} takes none of them"
            )
        return PacedCudaLink(bandwidth, latency)
    kinds: dict[str, Callable[[], Link]] = {"cuda": CudaLink, "instant": InstantLink, "kernel": KernelLink}
    return kinds[link]()


def make_store(
    config: OffloadConfig, view: MoEView | ExpertsForm, device: torch.device, fingerprint: str | None = None
) -> ExpertStore:
    """What `store` and `store_folder` stand for.

    Args:
        config: the options.
        view: the model's MoE layers, or the form of its experts.
        device: where the model computes.
        fingerprint: of the checkpoint that the experts come from; see :class:`DiskStore`.

    Raises:
        ExpertcastError: the folder holds another file of the store's name.
    """
    if isinstance(config.store, ExpertStore):
        return config.store
    if config.store != "disk":
        return ExpertStore(view, device=device, pinned=device.type == "cuda")
    folder, codec = config.store_folder, config.resolved_codec()
    store = DiskStore(view, folder, codec=codec, device=device, fingerprint=fingerprint)
    if config.codec is None and codec == "raw" and folder is not None and not store.holds(0):
        size = size_text(store.nbytes)
        warnings.warn(
            f"{size} of experts are written to {str(folder)!r} by codec 'raw': a codec such as 'bitsplit' (--codec) "
            "writes less",
            stacklevel=3,
        )
    return store
