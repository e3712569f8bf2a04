"""Memory peaks: right for a stage and for a rerun inside it, although they share one counter."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from at_once import HANG_SECONDS
from comfyui_onediff_guard.precision import memory as peaks
from comfyui_onediff_guard.precision.memory import Memory, Peak, peak_memory

CUDA = torch.device("cuda", 0)


class Allocator:
    """CUDA's counters as PyTorch keeps them: a peak since the last reset, of the whole process."""

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
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: made.peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _device: 2 * made.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", made.reset)
    return made


def test_what_was_used_before_is_not_counted(allocator):
    allocator.use(1000)
    allocator.use(-900)
    with peak_memory(CUDA) as peak:
        allocator.use_once(50)
    allocator.use(500)
    assert peak() == Peak(150, 300), "nor is what came afterwards"


@pytest.mark.parametrize("first", [700, 20])
def test_a_stage_and_a_rerun_inside_it_both_know_their_own_peak(allocator, first):
    allocator.use(100)
    with peak_memory(torch.device("cuda")) as stage:
        allocator.use_once(first)  # before the rerun, which starts the counter anew
        with peak_memory(CUDA) as rerun:
            allocator.use_once(60)
        allocator.use_once(10)
    assert rerun() == Peak(160, 320)
    assert stage() == Peak(100 + max(first, 60), 2 * (100 + max(first, 60)))


def test_a_run_that_fails_leaves_nobody_watching(allocator):
    with pytest.raises(KeyError), peak_memory(CUDA):
        raise KeyError
    assert not peaks._watches


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_device_that_does_not_count_says_so(device):
    with peak_memory(torch.device(device)) as peak:
        assert peak() is None


def test_threads_that_overlap_are_told_what_was_reached_while_they_ran(allocator):
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
            assert found.result(HANG_SECONDS) == Peak(70, 140)
    assert mine() == Peak(0, 0)


def test_in_words():
    cuda = Memory("cuda:0", Peak(11_300_000_000, 12_000_000_000), 5_100_000_000)
    assert str(cuda) == "11.3 GB at its peak on cuda:0, 5.1 GB of it weights; 12.0 GB with what PyTorch keeps for later"
