"""If a backend that 'auto' chose fails, at compiling or in a block's first call, all blocks use the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.host import Interrupted
from comfyui_onediff_guard.pipelines.compile import auto_compile
from comfyui_onediff_guard.pipelines.compile import backends as compiling
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, came_to, compiled
from comfyui_onediff_guard.pipelines.compile.block import Compiling, listening
from comfyui_onediff_guard.pipelines.errors import BackendUnavailable
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.weights import offload
from fake_comfy import InterruptProcessingException
from in_blocks import Denoiser
from onediff.infer_compiler.backends import registry
from small_runs import SMALL, opened, sampled
from waiting import HANG_SECONDS

AUTO = BackendChoice("oneflow", "auto: first choice", automatic=True)
NAMED = BackendChoice("oneflow", "as you chose")


class Block(torch.nn.Module):
    """Takes a tensor and returns another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 1


def denoiser() -> Denoiser:
    return Denoiser(Block() for _ in range(3))


def compile_blocks(network: torch.nn.Module, backend: BackendChoice = AUTO) -> Any:
    return compiled(network, ("blocks",), backend)


class Backend:
    """Stand-in for a backend in OneDiff's registry. at: number of the block whose first call fails; 0: compiling fails;
    None: each block's first call fails.

    before: called with the input of that block before it fails.
    """

    def __init__(
        self, error: BaseException | None = None, at: int | None = 2, before: Callable[[Any], Any] = lambda _: None
    ):
        self.calls = 0
        self.compiled = 0
        self.error, self._at, self._before = error, at, before

    def compile(self, module: torch.nn.Module, *, options: Any = None) -> Callable[..., Any]:
        self.compiled += 1
        number = self.compiled
        if self.error and self._at == 0:
            raise self.error

        def run(*given: Any) -> torch.Tensor:
            self.calls += 1
            if self.error and self._at in (number, None):
                self._before(given[-1])
                raise self.error
            return module(*given)

        return run


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, only_backends: Callable[..., None]) -> Callable[..., None]:
    """installed(oneflow=…, nexfort=…): the available backends. inductor is available only if it is named."""

    def install(**backends: Backend) -> None:
        only_backends(*backends)
        for name, backend in backends.items():
            monkeypatch.setitem(registry._BACKENDS, name, backend.compile)

    return install


def test_inductor_replaces_failing_oneflow(monkeypatch: pytest.MonkeyPatch, traced_alone: None) -> None:
    """The real one for OneFlow, which is not installed, made to look installed."""
    monkeypatch.setitem(compiling._PROBES, "oneflow", lambda _device: None)
    monkeypatch.delitem(registry._BACKENDS, "oneflow", raising=False)
    model, x = denoiser(), torch.randn(2, 4)
    made = compile_blocks(model)
    used = came_to(made, AUTO)
    assert used.name == "inductor" and used.automatic
    assert used.reason == "auto: oneflow failed (ModuleNotFoundError: No module named 'oneflow')"
    assert torch.equal(made(x), model(x))


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "error", [NotImplementedError("Transform failed"), RuntimeError(), TypeError("x"), KeyError("y")], ids=repr
)
def test_next_backend_runs_all_blocks_after_any_failure(
    installed: Callable[..., None], error: Exception, at: int
) -> None:
    first, second = Backend(error, at), Backend()
    installed(oneflow=first, nexfort=second)
    model, x = denoiser(), torch.randn(2, 4)
    before = [(weight, weight.clone()) for weight in model.parameters()]
    made = compile_blocks(model)
    assert torch.equal(made(x), model(x)), "including the failing step"
    assert second.compiled == 3 and came_to(made, AUTO).name == "nexfort"
    called = first.calls, second.calls
    assert torch.equal(made(x), model(x))
    assert (first.calls, second.calls) == (called[0], called[1] + 3)
    message = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
    assert came_to(made, AUTO).reason == f"auto: oneflow failed ({message})"
    after = list(model.parameters())
    assert all(weight is now and torch.equal(was, now) for (weight, was), now in zip(before, after, strict=True))


@pytest.mark.parametrize("at", [0, 2])
def test_failing_backend_chosen_by_name_raises(installed: Callable[..., None], at: int) -> None:
    second = Backend()
    installed(oneflow=Backend(NotImplementedError("no kernel"), at), nexfort=second)
    with pytest.raises(BackendUnavailable, match=r"^oneflow failed \(NotImplementedError: no kernel\)\. Choose "):
        compile_blocks(denoiser(), NAMED)(torch.randn(2, 4))
    assert second.compiled == 0


@pytest.mark.parametrize("at", [0, 2])
def test_blocks_run_uncompiled_with_reason_when_all_backends_fail(
    installed: Callable[..., None], caplog: pytest.LogCaptureFixture, at: int
) -> None:
    installed(**{name: Backend(RuntimeError(f"{name}'s"), at) for name in ("oneflow", "nexfort", "inductor")})
    model, x = denoiser(), torch.randn(2, 4)
    made = compile_blocks(model)
    for _ in range(3):
        assert torch.equal(made(x), model(x))
    used = came_to(made, AUTO)
    assert used.name == "eager"
    assert used.reason == (
        "auto: oneflow failed (RuntimeError: oneflow's); nexfort failed (RuntimeError: nexfort's); "
        "inductor failed (RuntimeError: inductor's)"
    )
    assert len([line for line in caplog.messages if "failed" in line]) == 3


def test_error_of_block_itself_is_raised_unchanged(installed: Callable[..., None]) -> None:
    class Refuses(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] != 4:
                raise ValueError("four channels")
            return super().forward(x)

    first, second = Backend(), Backend()
    installed(oneflow=first, nexfort=second)
    model = Denoiser([Refuses()])
    made = compile_blocks(model)
    with pytest.raises(ValueError, match="four channels") as raised:
        made(torch.randn(2, 5))
    assert raised.value.__cause__ is raised.value.__context__ is None
    assert came_to(made, AUTO) == AUTO and second.compiled == 0
    x = torch.randn(2, 4)
    assert torch.equal(made(x), model(x))


UNRELATED_ERRORS = (
    *(torch.OutOfMemoryError("1 GiB"), MemoryError()),
    *(InterruptProcessingException(), Interrupted(), KeyboardInterrupt()),
)


@pytest.mark.parametrize("error", UNRELATED_ERRORS, ids=repr)
@pytest.mark.parametrize("at", [0, 2])
def test_out_of_memory_and_interrupts_are_not_backend_failures(
    installed: Callable[..., None], error: BaseException, at: int
) -> None:
    second = Backend()
    installed(oneflow=Backend(error, at), nexfort=second)
    with pytest.raises(type(error)):
        compile_blocks(denoiser())(torch.randn(2, 4))
    assert second.compiled == 0


def test_interrupt_in_progress_callback_is_not_backend_failure(installed: Callable[..., None]) -> None:
    class Clicked(Exception):
        """An interrupt of any host."""

    installed(oneflow=Backend(), nexfort=Backend())
    made = compile_blocks(denoiser())
    with pytest.raises(Clicked), listening(Mock(side_effect=Clicked), lambda _: None):
        made(torch.randn(2, 4))
    assert came_to(made, AUTO) == AUTO


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inputs_that_failing_call_overwrote_are_restored(installed: Callable[..., None], mode: Any) -> None:
    def spoil(x: torch.Tensor) -> None:
        x.fill_(torch.nan)

    installed(oneflow=Backend(NotImplementedError(), at=1, before=spoil))
    model = denoiser()
    with mode():
        x = torch.randn(2, 4)
        expected, given = model(x), x.clone()
        assert torch.equal(compile_blocks(model)(x), expected)
    assert torch.equal(x, given)


def test_expanded_inputs_with_nan_run_on_next_backend(installed: Callable[..., None]) -> None:
    installed(oneflow=Backend(NotImplementedError(), at=1))
    model = denoiser()
    x = torch.tensor([[torch.nan], [1.0]]).expand(2, 4)
    found = compile_blocks(model)(x)
    assert torch.equal(found.isnan(), model(x).isnan()) and torch.equal(found[1], model(x)[1])


def test_threads_that_fail_together_switch_backend_once(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First calls of blocks are serialised: the second thread waits with the backend that fails meanwhile."""
    inside, both, count_sizes = set[int](), threading.Event(), Compiling._count_sizes

    def counted(self: Compiling, index: int) -> None:
        inside.add(threading.get_ident())
        if len(inside) == 2:
            both.set()
        count_sizes(self, index)

    def wait_for_both(_: Any) -> None:
        assert both.wait(HANG_SECONDS)

    monkeypatch.setattr(Compiling, "_count_sizes", counted)
    second = Backend()
    installed(oneflow=Backend(NotImplementedError(), 1, wait_for_both), nexfort=second)
    model, x = denoiser(), torch.randn(2, 4)
    made = compile_blocks(model)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: made(x), range(2)))
    assert all(torch.equal(one, model(x)) for one in found)
    used = came_to(made, AUTO)
    assert used.name == "nexfort" and used.reason == "auto: oneflow failed (NotImplementedError)"
    assert second.compiled == 3


@pytest.mark.parametrize("kind", offload.Offload)
def test_backends_refused_for_offload_come_first_in_order(kind: offload.Offload) -> None:
    refused = offload._REFUSED[kind]
    assert refused == tuple(compiling._PROBES)[: len(refused)]


class PassThrough(Backend):
    """Runs blocks with any arguments uncompiled, unless it fails."""

    def compile(self, module: torch.nn.Module, *, options: Any = None) -> Callable[..., Any]:
        one = super().compile(torch.nn.Identity(), options=options)
        return lambda *args, **kwargs: (one(torch.zeros(1)), module(*args, **kwargs))[1]


def test_run_is_bit_equal_on_next_backend_and_report_names_it(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, working = PassThrough(NotImplementedError("Transform failed of CogVideoXBlock")), PassThrough()
    installed(oneflow=broken, nexfort=working)
    handle = replace(opened("2b"), backend=AUTO)
    monkeypatch.setattr(auto_compile, "COMPILE_SECONDS", 0.0)
    expected, _ = sampled(replace(handle, backend=BackendChoice("eager", "")), SMALL)
    handle.store.compiled.clear()
    for _ in range(2):
        latents, report = sampled(handle, SMALL)
        assert torch.equal(latents, expected)
        assert report.backend == "nexfort"
        assert report.backend_reason == "auto: oneflow failed (NotImplementedError: Transform failed of CogVideoXBlock)"
        assert f"backend: nexfort ({report.backend_reason})" in report.text()
    assert broken.calls == 2, "never again"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_failing_backend_chosen_by_name_ends_half_precision_run(installed: Callable[..., None], precision: str) -> None:
    """Recomputing in fp32 would not help."""
    installed(inductor=PassThrough(RuntimeError("no space left")))
    with pytest.raises(BackendUnavailable, match="no space left"):
        sampled(opened("2b", precision=precision, backend="inductor"), SMALL)


@pytest.mark.parametrize("named_first", [False, True])
def test_backend_chosen_by_name_ignores_fallback_of_auto(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, named_first: bool
) -> None:
    """In one process, on the same weights: a backend chosen by name raises its error, and runs once the cause is
    gone, even if 'auto' has given it up. 'auto' falls back even if the named backend worked before."""
    handle = opened("2b")
    handle.store.compiled.clear()
    monkeypatch.setattr(auto_compile, "COMPILE_SECONDS", 0.0)
    auto = replace(handle, backend=BackendChoice("inductor", "auto: first choice", automatic=True))
    named = replace(handle, backend=BackendChoice("inductor", "as you chose"))

    def ran_with(pipeline: PipelineHandle) -> str:
        return sampled(pipeline, SMALL, steps=1)[1].backend

    backend = PassThrough(at=None)
    installed(inductor=backend)
    if named_first:
        assert ran_with(named) == "inductor"
    backend.error = NotImplementedError("no compiler")
    assert ran_with(auto) == "eager"
    if not named_first:
        with pytest.raises(BackendUnavailable):
            ran_with(named)
    backend.error = None
    assert ran_with(named) == "inductor"
