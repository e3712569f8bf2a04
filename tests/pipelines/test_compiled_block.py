"""What a run hears while blocks are compiled, and how many sizes they are compiled for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions, compiled
from comfyui_onediff_guard.pipelines.compile.block import COMPILED_SIZES, graphs_compiled, listening
from in_blocks import Denoiser

pytestmark = pytest.mark.usefixtures("traced_alone")
BLOCKS = 4
LIMIT = f"inductor compiled for {COMPILED_SIZES} sizes, and no more"


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + x.shape[-1]


def denoiser() -> Denoiser:
    return Denoiser(Scaled() for _ in range(BLOCKS))


class Ears:
    def __init__(self) -> None:
        self.progress: list[str] = []
        self.notes: list[str] = []

    def call(self, module: torch.nn.Module, size: int) -> torch.Tensor:
        with torch.inference_mode(), listening(self.progressed, self.notes.append):
            return module(torch.ones(1, size))

    def progressed(self, text: str) -> None:
        self.progress.append(text.split(" · ")[0])  # what is left, in minutes, hangs on the clock


def shell(network: torch.nn.Module, *, dynamic: bool | None = None) -> torch.nn.Module:
    return compiled(network, ("blocks",), BackendChoice("inductor", ""), CompileOptions(dynamic))


def test_each_block_is_told_of_at_a_new_size_and_none_at_one_that_it_met() -> None:
    module, ears = shell(denoiser()), Ears()
    ears.call(module, 3)
    assert ears.progress == [f"inductor: compiling block {n} of {BLOCKS}" for n in range(1, BLOCKS + 1)]
    ears.call(module, 3)
    assert len(ears.progress) == BLOCKS
    ears.call(module, 4)
    assert len(ears.progress) == 2 * BLOCKS and not ears.notes
    module(torch.ones(1, 5))  # with nobody listening


def test_an_interrupt_while_compiling_leaves_nothing_behind() -> None:
    module, ears = shell(denoiser()), Ears()

    def interrupt(text: str) -> None:
        if "block 3" in text:
            raise KeyboardInterrupt(text)

    with pytest.raises(KeyboardInterrupt, match="block 3"), listening(interrupt, ears.notes.append):
        module(torch.ones(1, 3))
    assert torch.equal(ears.call(module, 3), denoiser()(torch.ones(1, 3)))
    assert ears.progress == [f"inductor: compiling block {n} of {BLOCKS}" for n in (3, 4)], "two were compiled already"


def test_after_so_many_sizes_new_ones_run_uncompiled_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    module, ears = shell(denoiser(), dynamic=False), Ears()
    for size in range(2, 2 + COMPILED_SIZES):
        before = graphs_compiled()
        ears.call(module, size)
        assert graphs_compiled() - before == 1 and not ears.notes, size
    before = graphs_compiled()
    with caplog.at_level(logging.WARNING, "comfyui_onediff_guard"):
        for size in (50, 51):
            assert torch.equal(ears.call(module, size), denoiser()(torch.ones(1, size)))
    assert len(ears.notes) == 2 * BLOCKS and set(ears.notes) == {ears.notes[0]} and LIMIT in ears.notes[0]
    assert len([message for message in caplog.messages if LIMIT in message]) == 1, "the log says it once"
    said = len(ears.progress)
    for size in range(2, 2 + COMPILED_SIZES):
        ears.call(module, size)
    assert graphs_compiled() == before and len(ears.notes) == 2 * BLOCKS and len(ears.progress) == said


def test_what_others_compile_meanwhile_is_not_counted() -> None:
    module, ears = shell(denoiser(), dynamic=True), Ears()
    for size in range(2, 12):
        ears.call(module, size)
        torch.compile(lambda x, k=size: x * k, backend="eager")(torch.ones(2))
    assert not ears.notes


@torch._dynamo.config.patch(recompile_limit=2)
def test_dynamos_own_limit_stands_outside_and_does_not_count_inside() -> None:
    """Blocks of several kinds that share their code, as in a UNet, have more graphs for it than dynamo would allow."""

    class Kind(torch.nn.Module):
        def __init__(self, number: int):
            super().__init__()
            self.number = number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.number

    module, ears = shell(Denoiser(map(Kind, range(5))), dynamic=False), Ears()
    before = graphs_compiled()
    ears.call(module, 2)
    assert graphs_compiled() - before == 5
    assert torch._dynamo.config.recompile_limit == 2


def slices(*shape: int) -> torch.Tensor:
    """A tensor whose strides are those of a larger one."""
    return torch.ones(shape[0], 2 * shape[1], *shape[2:])[:, : shape[1]]


@pytest.mark.parametrize(
    "given",
    [
        [torch.ones(2, 3, 4), slices(2, 3, 4)],
        [slices(2, 3, 4, 5), torch.ones(2, 3, 4, 5)],
        [torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)],
        [torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)],
    ],
    ids=["slices", "of four dimensions", "channels last", "channels last in 3D"],
)
def test_a_block_is_given_what_is_contiguous_in_some_format(given: list[torch.Tensor]) -> None:
    module, before = shell(denoiser()), graphs_compiled()
    for x in given:
        last = {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(x.ndim, [])
        dense = any(x.is_contiguous(memory_format=layout) for layout in (torch.contiguous_format, *last))
        expected = denoiser()(x if dense else x.contiguous())
        with torch.no_grad():
            made = module(x)
        assert torch.equal(made, expected) and made.stride() == expected.stride()
    assert graphs_compiled() - before == 1


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=-1)


@pytest.mark.parametrize("between", [(), (7,), (3, 5), (12,)])
def test_the_same_call_is_computed_by_the_same_graph_whatever_ran_meanwhile(
    monkeypatch: pytest.MonkeyPatch, between: tuple[int, ...]
) -> None:
    """As a UNet's blocks of one class are called at several sizes of one run: the first gets a graph of its own, and
    the second one for all sizes, which fits the first, too."""
    from onediff.infer_compiler.backends import registry

    graphs, ran = [], []

    def noting(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        number = len(graphs)
        graphs.append(graph)
        return lambda *args: (ran.append(number), graph.forward(*args))[1]

    def compiling(module: torch.nn.Module, *, options: Any = None) -> Any:
        return torch.compile(module, backend=noting, dynamic=options["dynamic"])

    monkeypatch.setitem(registry._BACKENDS, "inductor", compiling)
    torch._dynamo.reset()
    module, ears = shell(Denoiser([Scaled(), Doubled(), Scaled(), Doubled(), Scaled()])), Ears()
    made: list[list[int]] = []
    for size in (3, *between, 3, 3):
        ran.clear()
        ears.call(module, size)
        made.append([*ran])
    first, *_, later, last = made
    assert len(set(first)) > 2 and first == later == last
    torch._dynamo.reset()
