"""Group and sequential offload: the next block is copied while one computes, and no more are on the device."""

from __future__ import annotations

import mmap
from functools import partialmethod
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.weights.offload import BlockOffload, Offload
from diffusers.hooks.group_offloading import ModuleGroup
from second_device import runtime

CUDA = torch.device("cuda", 0)
WIDE, NAMES = 64, ["first", "second", "third", "fourth"]
BLOCK = 4 * (WIDE * WIDE + WIDE)  # bytes
REST = 4 * WIDE * WIDE
INPUT = 4 * WIDE  # bytes of the input and of each output


class Block(torch.nn.Linear):
    def __init__(self, name: str, fails: bool) -> None:
        super().__init__(WIDE, WIDE)
        self.name, self.fails = name, fails

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        LOG.append(f"compute {self.name}")
        if self.fails:
            raise KeyError(self.name)
        return super().forward(input)


class Blocks(torch.nn.Module):
    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.embed = torch.nn.Linear(WIDE, WIDE, bias=False)
        self.blocks = torch.nn.ModuleList(Block(name, name == fails) for name in NAMES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


LOG: list[str] = []


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Loads, computations and offloads, in the order of the host's calls."""
    LOG.clear()

    def logged(group: ModuleGroup, what: str, call: Any) -> None:
        (name,) = [name for name, first in PARAMETERS.items() if first in {*group.parameters}] or ["nothing"]
        LOG.append(f"{what} {name}")
        call(group)

    for what, method in (("bring", "onload_"), ("send", "offload_")):
        monkeypatch.setattr(ModuleGroup, method, partialmethod(logged, what, getattr(ModuleGroup, method)))
    return LOG


PARAMETERS: dict[str, Any] = {}


def made(offload: Offload, fails: str = "", once: bool = False) -> tuple[BlockOffload, torch.nn.Module, torch.Tensor]:
    """(weights, shallow copy of their module, output on the CPU)"""
    module = Blocks().requires_grad_(False)
    exact = module(torch.ones(1, WIDE))
    PARAMETERS["rest"] = module.embed.weight
    for block in module.blocks:
        PARAMETERS[block.name], block.fails = block.weight, block.name == fails
    weights = BlockOffload(module, offload, CUDA, once=once)
    LOG.clear()
    return weights, weights.shell(module), exact


def called(weights: BlockOffload, shell: torch.nn.Module, times: int = 1) -> torch.Tensor:
    x = torch.ones(1, WIDE).cuda()
    y = x
    for _ in range(times):
        with weights, torch.inference_mode():
            for _ in range(times):
                y = shell(x)
    return y.cpu()


def test_next_block_is_copied_while_one_computes(card: Any) -> None:
    weights, shell, exact = made(Offload.GROUP)
    assert torch.equal(called(weights, shell), exact)
    assert LOG == [
        "bring rest", "bring first", "compute first",
        "bring second", "send first", "compute second",
        "bring third", "send second", "compute third",
        "bring fourth", "send third", "compute fourth",
        "send fourth", "send rest",
    ]  # fmt: skip
    counts = card.counts()
    assert counts["waits: stream"] == 5 + 6, "diffusers before it loads each part, and each use of a loaded part"
    assert counts["waits: event"] == 2, "for the computation: before the third and fourth block"
    assert len(runtime.registered) == 5, "each block and the rest, once"
    assert weights.most_bytes == REST + 2 * BLOCK
    weights.release()


def test_sequential_loads_one_layer_at_a_time() -> None:
    weights, shell, exact = made(Offload.SEQUENTIAL)
    assert torch.equal(called(weights, shell), exact)
    layers = [line for line in LOG if line.partition(" ")[2] in NAMES]
    assert layers == [f"{what} {name}" for name in NAMES for what in ("bring", "compute", "send")]
    assert not runtime.most, "nothing stays page-locked"


@pytest.mark.parametrize(("offload", "loaded"), [(Offload.GROUP, 2), (Offload.SEQUENTIAL, 1)])
def test_loaded_parts_do_not_accumulate_on_a_slow_device(card: Any, offload: Offload, loaded: int) -> None:
    """Offloaded parts stay until the device has used them, here until the host waits. Both CFG halves run one after the
    other in each step."""
    weights, shell, _ = made(offload)
    for times in (1, 2):
        before = card.used()
        card.reset()
        called(weights, shell, times)
        most = card.most_used() - before - loaded * BLOCK - REST * (offload is Offload.GROUP)
        assert 0 < most <= 8 * INPUT
    weights.release()


def test_weights_used_once_are_not_page_locked() -> None:
    weights, shell, exact = made(Offload.GROUP, once=True)
    assert torch.equal(called(weights, shell), exact)
    assert not runtime.most and LOG.index("bring second") < LOG.index("send first")


@pytest.mark.parametrize("pages", [0, 10])
def test_blocks_are_copied_unpinned_without_lockable_memory(
    card: Any, caplog: pytest.LogCaptureFixture, pages: int
) -> None:
    runtime.limit = pages * mmap.PAGESIZE
    weights, shell, exact = made(Offload.GROUP)
    for _ in range(2):
        LOG.clear()
        assert torch.equal(called(weights, shell), exact), "CUDA's error is cleared"
        assert LOG.index("bring second") < LOG.index("send first")
    assert len(caplog.messages) == 1 and "cannot be page-locked" in caplog.messages[0]
    assert bool(runtime.most) == bool(pages) and not runtime.registered, "page locks are released"
    assert card.counts()["bytes page-locked as they came"] == 2 * (REST + 4 * BLOCK)


def test_failed_block_is_offloaded(card: Any) -> None:
    weights, shell, _ = made(Offload.GROUP, fails="second")
    before = card.used()
    with pytest.raises(KeyError, match="second"):
        called(weights, shell)
    torch.cuda.synchronize()
    assert card.used() == before and not weights._here
    weights.release()
