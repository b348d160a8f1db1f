"""What kind of memory the machine has, as its driver sees it, and how fast host memory can be page-locked."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from typing import Any

import torch

from expertcast.data.memory import available_memory
from expertcast.runtime.storage.host_memory import HostMemory, PageLock

# CUdevice_attribute of the driver API, "Data types used by CUDA driver" in NVIDIA's documentation
ATTRIBUTES = {
    "multiprocessors": 16,
    "copy_engines": 40,
    "concurrent_managed_access": 89,
    "pageable_memory_access": 88,
    "pageable_memory_access_uses_host_page_tables": 100,
    "host_pointer_usable_for_registered_memory": 91,
    "host_register_supported": 99,
    "host_native_atomics": 86,
    "integrated": 18,
}
POINTER_MEMORY_TYPE, POINTER_DEVICE_ADDRESS = 2, 3
"""CU_POINTER_ATTRIBUTE_MEMORY_TYPE and _DEVICE_POINTER."""
BYTES, SMALL_BYTES = 1 << 30, 1 << 26
SMI_FIELDS = "driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,clocks.sm,clocks.mem"


def memory(device: torch.device) -> dict[str, Any]:
    """Attributes of the driver, what it says of pointers, and page-locking; on the CPU host memory only."""
    found: dict[str, Any] = {"available_bytes": available_memory(), **page_locking(device)}
    if device.type == "cuda":
        attributes = device_attributes(device)
        found |= {"attributes": attributes, "pageable_memory": pageable(attributes), "pointers": pointers(device)}
        found["nvidia_smi"] = smi()
    return found


def page_locking(device: torch.device) -> dict[str, float | bool]:
    """Seconds per 1e9 bytes; fresh memory's pages are made by what comes first to them."""
    size = BYTES if device.type == "cuda" else SMALL_BYTES
    per_gb = 1e9 / size
    start = time.perf_counter()
    fresh = HostMemory(size)
    fresh.bytes.fill_(1)
    found: dict[str, float | bool] = {"write_fresh_s_per_gb": (time.perf_counter() - start) * per_gb}
    start = time.perf_counter()
    fresh.bytes.fill_(2)
    found["write_again_s_per_gb"] = (time.perf_counter() - start) * per_gb
    if device.type != "cuda":
        return found
    fresh.release()
    lock = PageLock()
    start = time.perf_counter()
    locked = HostMemory(size, lock)
    found |= {"page_locked": locked.pinned, "page_lock_fresh_s_per_gb": (time.perf_counter() - start) * per_gb}
    start = time.perf_counter()
    locked.release()
    found["page_unlock_s_per_gb"] = (time.perf_counter() - start) * per_gb
    plain = torch.ones(size, dtype=torch.uint8)
    start = time.perf_counter()
    plain.pin_memory()
    found["pin_memory_copy_s_per_gb"] = (time.perf_counter() - start) * per_gb
    return found


def device_attributes(device: torch.device) -> dict[str, int | None]:
    """By name; None where the driver does not know one."""
    torch.cuda.init()
    driver, found = ctypes.CDLL("libcuda.so.1"), dict[str, int | None]()
    for name, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        status = driver.cuDeviceGetAttribute(ctypes.byref(value), number, device.index or 0)
        found[name] = None if status else value.value
    return found


def pageable(attributes: dict[str, int | None]) -> str:
    """How kernels reach memory that is not page-locked."""
    if not attributes["pageable_memory_access"]:
        return "not at all"
    host_tables = attributes["pageable_memory_access_uses_host_page_tables"]
    return "by the host's page tables (ATS)" if host_tables else "by the kernel's migration (HMM)"


def pointers(device: torch.device) -> dict[str, dict[str, int | None]]:
    """What the driver says of a pageable and of a page-locked address: its kind of memory, and whether the device has
    an address for it."""
    torch.zeros(1, device=device)  # the context that the calls need
    driver = ctypes.CDLL("libcuda.so.1")
    kept = {"pageable": torch.ones(1 << 20), "page_locked": torch.ones(1 << 20, pin_memory=True)}
    found: dict[str, dict[str, int | None]] = {}
    for name, tensor in kept.items():
        address = ctypes.c_uint64(tensor.data_ptr())
        kind, there = ctypes.c_uint(), ctypes.c_uint64()
        no_kind = driver.cuPointerGetAttribute(ctypes.byref(kind), POINTER_MEMORY_TYPE, address)
        no_address = driver.cuPointerGetAttribute(ctypes.byref(there), POINTER_DEVICE_ADDRESS, address)
        found[name] = {
            "memory_type": None if no_kind else kind.value,
            "memory_type_status": no_kind,
            "device_address_status": no_address,
            "same_address": None if no_address else int(there.value == tensor.data_ptr()),
        }
    return found


def smi() -> dict[str, str] | None:
    """Driver, link and clocks as the machine is; None where the tool is missing."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return dict(zip(SMI_FIELDS.split(","), run.stdout.splitlines()[0].split(", "), strict=False))
