"""A simulated second device in main memory that PyTorch treats as a CUDA card. Call `install()` first.

Tensors report `cuda:0` and cannot be mixed with the CPU's. Each kernel is the CPU's, so results are bit-equal to a CPU
run. Errors that a card would hide are reported: `hazards()` names accesses that no stream, event or wait orders, and
memory that was freed or changed while a stream used it; the extension's `counts()` has kernels, bytes and host waits.
It cannot be uninstalled from a process.
"""

from __future__ import annotations

import collections
import functools
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from .build import extension, why_not

__all__ = ["hazards", "install", "runtime", "why_not"]
card: Any = None  # the extension


def install(
    *,
    capability: tuple[int, int] = (8, 6),
    memory: int = 24 << 30,
    name: str = "Second device",
    apple_gpu: bool = False,
) -> Any:
    """Install a card of that capability and memory in bytes. Returns the extension.

    apple_gpu: without float64, streams and page-locked memory, like an Apple GPU under PyTorch.

    Raises RuntimeError if it cannot be built; `why_not` returns the reason without raising.
    """
    global card
    if why := why_not():
        raise RuntimeError(why)
    card = extension()
    card.set_total(memory)
    card.set_capability(10 * capability[0] + capability[1])
    card.set_without_kernel(_without_kernel())
    card.set_has_float64(not apple_gpu)
    for module, functions in _functions(capability, name).items():
        functions |= dict.fromkeys(_NOT_APPLES & functions.keys(), _Refused) if apple_gpu else {}
        for function, value in functions.items():
            setattr(module, function, value)
    torch.version.cuda = "12.8"  # pyright: ignore[reportPrivateImportUsage]
    torch.UntypedStorage.clone = _clone
    if not apple_gpu:
        _LIBRARY.impl("mm.dtype", _float32_product, "CPU")
    torch.empty(1).pin_memory()  # PyTorch handles memory of a device only after its first use
    return card


def hazards() -> dict[str, int]:
    """Descriptions of unordered accesses, with their counts, after a synchronize."""
    torch.cuda.synchronize()
    return card.hazards()


def _functions(capability: tuple[int, int], name: str) -> dict[Any, dict[str, Any]]:
    """By module: replacements for the functions that only a CUDA build has."""
    total, used, most = card.total, card.used, card.most_used
    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=total(), multi_processor_count=82,
        gcnArchName="", warp_size=32, max_threads_per_multi_processor=1536, regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=101376, L2_cache_size=6 << 20, is_integrated=0,
    )  # fmt: skip
    memory = {
        "memory_allocated": _of_any_device(used),
        "max_memory_allocated": _of_any_device(most),
        "memory_reserved": _of_any_device(used),
        "max_memory_reserved": _of_any_device(most),
        "reset_peak_memory_stats": _of_any_device(card.reset_most_used),
        "mem_get_info": lambda device=None: (total() - used(), total()),
        "memory_stats": _memory_stats,
        "empty_cache": lambda: None,
    }
    cuda = memory | {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "_initialized": True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: name,
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "is_bf16_supported": lambda *_, including_emulation=True, **__: including_emulation or capability >= (8, 0),
        "can_device_access_peer": lambda *_: False,
        "ipc_collect": lambda: None,
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "Stream": Stream,
        "Event": Event,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "set_stream": torch.accelerator.set_stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=0, device_type=1),
        "is_current_stream_capturing": lambda: False,
        "cudart": lambda: runtime,
        "check_error": lambda _error: None,
        "manual_seed": card.seed,
        "manual_seed_all": card.seed,
        "get_rng_state": lambda device=0: card.random_state(),
        "set_rng_state": lambda new_state, device=0: card.set_random_state(new_state),
        "get_rng_state_all": lambda: [card.random_state()],
        "set_rng_state_all": lambda new_states: card.set_random_state(new_states[0]),
        "get_allocator_backend": lambda: "native",
    }
    inside = {
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_init": lambda: None,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda device: None,
        "_cuda_exchangeDevice": lambda device: 0,
        "_cuda_maybeExchangeDevice": lambda device: 0,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_emptyCache": lambda: None,
        "_cuda_getArchFlags": lambda: f"sm_{capability[0]}{capability[1]}",
        "_cuda_synchronize": torch.accelerator.synchronize,
        "_cuda_lock_mutex": lambda: None,
        "_cuda_unlock_mutex": lambda: None,
        "_cuda_getCurrentRawStream": lambda device: torch.accelerator.current_stream().stream_id,
    }
    return {
        torch.cuda: cuda,
        torch.cuda.memory: memory,
        torch._C: inside,
        torch.backends.cuda: {"is_built": lambda: True},
        torch.accelerator: {"empty_cache": lambda: None, "empty_host_cache": lambda: None}
        | {each: memory[each] for each in memory if hasattr(torch.accelerator, each)},
    }


_NOT_APPLES = {"Stream", "Event", "stream", "StreamContext", "set_stream", "cudart"}


class _Refused:
    def __init__(self, *_: Any, **__: Any):
        raise RuntimeError("an Apple GPU has no streams and page-locks nothing")


def _of_any_device(figure: Callable[[], Any]) -> Callable[..., Any]:
    return lambda device=None: figure()


def _memory_stats(device: Any = None) -> dict[str, int]:
    del device
    found = collections.defaultdict[str, int](int)
    for kind in ("allocated", "active", "reserved", "requested"):
        found |= {f"{kind}_bytes.all.current": card.used(), f"{kind}_bytes.all.peak": card.most_used()}
    return found


class Stream(torch.Stream):
    def __new__(cls, _device: Any = None, priority: int = 0, **given: Any) -> Stream:
        del priority
        return super().__new__(cls, **(given or {"device": torch.device("cuda", 0)}))

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
        return super().__new__(cls, device=torch.device("cuda", 0), enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        super().record(stream or torch.accelerator.current_stream())

    def wait(self, stream: Any = None) -> None:
        super().wait(stream or torch.accelerator.current_stream())


class StreamContext:
    """Like torch.cuda.StreamContext, which `torch.cuda.stream` returns."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self._stream or self._before)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._before)


class _Error(int):
    success = 0


class Runtime:
    """CUDA's runtime functions for page-locked memory: whole pages, each locked once."""

    cudaError = _Error  # noqa: N815 - CUDA's names

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}  # address → bytes
        self.limit = float("inf")  # bytes that can be page-locked
        self.most = 0  # peak of page-locked bytes

    @property
    def page_locked(self) -> int:
        """Bytes, in whole pages."""
        return sum(len(_pages(*each)) for each in self.registered.items()) * mmap.PAGESIZE

    def cudaHostRegister(self, address: int, n_bytes: int, _flags: int) -> int:  # noqa: N802
        pages = _pages(address, n_bytes)
        if any(pages.start < other.stop and other.start < pages.stop for other in self._locked()):
            return self._fails(712)
        if self.page_locked + len(pages) * mmap.PAGESIZE > self.limit:
            return self._fails(2)
        self.registered[address] = n_bytes
        self.most = max(self.most, self.page_locked)
        card.pin(address, n_bytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if self.registered.pop(address, None) is None:
            return self._fails(713)
        card.unpin(address)
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return _ERRORS[error]

    def cudaMemGetInfo(self, _device: int) -> tuple[int, int]:  # noqa: N802
        return card.total() - card.used(), card.total()

    def _locked(self) -> list[range]:
        return [_pages(*each) for each in self.registered.items()]

    def _fails(self, error: int) -> int:
        card.set_error(_ERRORS[error])
        return error


def _pages(address: int, n_bytes: int) -> range:
    return range(address // mmap.PAGESIZE, (address + n_bytes - 1) // mmap.PAGESIZE + 1)


_ERRORS = {2: "out of memory", 712: "part or all of the requested memory range is already mapped",
           713: "pointer does not correspond to a registered memory region"}  # fmt: skip
runtime = Runtime()
_plain_clone = torch.UntypedStorage.clone
_LIBRARY = torch.library.Library("aten", "IMPL")  # its implementations live as long as this object


def _float32_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A product of half precision with float32 output, which only cuBLAS has. It rejects what cuBLAS rejects."""
    sums = torch.backends.cuda.matmul.allow_fp16_accumulation
    if dtype is not torch.float32 or a.dtype not in (torch.float16, torch.bfloat16) or a.dtype is not b.dtype or sums:
        raise RuntimeError(f"no product of {a.dtype} and {b.dtype} into {dtype}, fp16 accumulation {sums}")
    return a.float() @ b.float()


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Storage.clone for the device: the CPU wheel cannot create its storage."""
    if storage.device.type != "cuda":
        return _plain_clone(storage)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()


@functools.cache
def _without_kernel() -> set[str]:
    """Operations with a CPU kernel and without a CUDA kernel, from PyTorch's own table."""
    import torchgen
    import yaml

    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    functions = yaml.load(table.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    by_name = {each["func"].partition("(")[0]: each for each in functions}

    def keys(each: dict[str, Any]) -> set[str]:
        found = {key for keys in each.get("dispatch") or {} for key in re.split(r",\s*", keys)}
        return found | keys(by_name[each["structured_delegate"]]) if "structured_delegate" in each else found

    lacking = collections.defaultdict[str, list[bool]](list)
    for name, each in by_name.items():
        there = keys(each)
        composite = any(key.startswith("Composite") for key in there)
        lacking[name.partition(".")[0]].append("CPU" in there and "CUDA" not in there and not composite)
    return {f"aten::{name}" for name, all_lack in lacking.items() if all(all_lack)}
