"""Memory peaks: correct for a stage and for a rerun inside it, although they share one counter."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from at_once import HANG_SECONDS
from comfyui_onediff_guard.precision import memory as peaks
from comfyui_onediff_guard.precision.memory import Memory, PeakMemory, extra_peak, peak_memory

CUDA = torch.device("cuda", 0)


class Allocator:
    """PyTorch's CUDA counters: the peak of the whole process since the last reset."""

    def __init__(self):
        self.now = self.peak = 0

    def use(self, n_bytes):
        self.now += n_bytes
        self.peak = max(self.peak, self.now)

    def use_once(self, n_bytes):
        self.use(n_bytes)
        self.use(-n_bytes)

    def reset(self, _device):
        self.peak = self.now


@pytest.fixture
def allocator(monkeypatch):
    made = Allocator()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: made.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: made.peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _device: 2 * made.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", made.reset)
    return made


def test_memory_used_before_or_after_is_not_counted(allocator):
    allocator.use(1000)
    allocator.use(-900)
    with peak_memory(CUDA) as peak:
        allocator.use_once(50)
    allocator.use(500)
    assert peak() == PeakMemory(150, 300), "later use is not counted"


@pytest.mark.parametrize("first", [700, 20])
def test_stage_and_nested_rerun_have_their_own_peaks(allocator, first):
    allocator.use(100)
    with peak_memory(torch.device("cuda")) as stage:
        allocator.use_once(first)  # before the rerun resets the counter
        with peak_memory(CUDA) as rerun:
            allocator.use_once(60)
        allocator.use_once(10)
    assert rerun() == PeakMemory(160, 320)
    assert stage() == PeakMemory(100 + max(first, 60), 2 * (100 + max(first, 60)))


def test_rerun_reports_memory_beyond_its_start(allocator):
    class OnCuda(torch.Tensor):
        is_cuda = True  # pyright: ignore[reportAssignmentType]
        device = CUDA  # pyright: ignore[reportAssignmentType]

    activations: Any = OnCuda([0.0])
    allocator.use(100)
    with peak_memory(CUDA) as stage, extra_peak(torch.nn.Linear(2, 2), [activations]) as extra:
        allocator.use_once(60)
    assert extra() == 60, "weights in main memory, computation on CUDA"
    assert stage() == PeakMemory(160, 320)


def test_failed_run_leaves_no_watch(allocator):
    with pytest.raises(KeyError), peak_memory(CUDA):
        raise KeyError
    assert not peaks._watches


def use_and_give_back(n_bytes):
    """Memory from the system itself: an allocator could reuse its own."""
    with mmap.mmap(-1, n_bytes) as region:
        region[:: mmap.PAGESIZE] = b"\1" * len(range(0, n_bytes, mmap.PAGESIZE))


def test_peak_memory_of_a_cpu_process():
    cpu = torch.device("cpu")
    if not peaks._start_anew(cpu):
        pytest.skip("this system does not count peaks")
    size = 64 * 2**20
    with peak_memory(cpu) as stage:
        before = peaks._peak(cpu).used
        use_and_give_back(size)
        with peak_memory(cpu) as rerun:
            use_and_give_back(size // 4)
    found, inner = stage(), rerun()
    assert found and inner and found.reserved is None
    assert 0.9 * size < found.used - before < 1.5 * size
    assert 0.9 * size / 4 < inner.used - before < 0.6 * size, "memory freed before the rerun is not counted"


def test_peak_is_none_where_the_system_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setattr(peaks, "_CLEAR", tmp_path / "missing" / "clear_refs")
    for device in ("cpu", "mps"):
        with peak_memory(torch.device(device)) as peak:
            assert peak() is None
    assert not peaks._watches


def test_overlapping_threads_get_peaks_of_their_own_time(allocator):
    inside, go_on = threading.Event(), threading.Event()

    def run():
        with peak_memory(CUDA) as peak:
            inside.set()
            go_on.wait(HANG_SECONDS)
        return peak()

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(run)
        inside.wait(HANG_SECONDS)
        allocator.use_once(70)
        with peak_memory(CUDA) as mine:
            go_on.set()
            assert found.result(HANG_SECONDS) == PeakMemory(70, 140)
    assert mine() == PeakMemory(0, 0)


def test_memory_as_text():
    cuda = Memory("cuda:0", PeakMemory(11_300_000_000, 12_000_000_000), 5_100_000_000)
    assert str(cuda) == "11.3 GB at its peak on cuda:0, 5.1 GB of it weights; 12.0 GB with what PyTorch keeps for later"
    assert (
        str(Memory("cpu", PeakMemory(912_000_000), 0)) == "912 MB at its peak of the process on cpu, 0 MB of it weights"
    )
