"""Where a backend that 'auto' chose fails, at compiling or in a block's first call, all blocks go on with the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

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
from in_blocks import Denoiser
from onediff.infer_compiler.backends import registry
from small_runs import SMALL, opened, sampled
from waiting import HANG_SECONDS

AUTO = BackendChoice("oneflow", "auto: first choice", automatic=True)
NAMED = BackendChoice("oneflow", "as you chose")


class InterruptProcessingException(Exception):
    """As ComfyUI's was until 2026."""


class Block(torch.nn.Module):
    """Is given a tensor and hands on another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 1


def denoiser() -> Denoiser:
    return Denoiser(Block() for _ in range(3))


def shell(network: torch.nn.Module, backend: BackendChoice = AUTO) -> Any:
    return compiled(network, ("blocks",), backend)


class Backend:
    """In place of one in OneDiff's registry. at: number of the block whose first call fails; 0: it cannot compile.

    before: is called with its input before it fails.
    """

    def __init__(self, error: BaseException | None = None, at: int = 2, before: Callable[[Any], Any] = lambda _: None):
        self.calls = 0
        self.compiled = 0
        self._error, self._at, self._before = error, at, before

    def compile(self, module: torch.nn.Module, *, options: Any = None) -> Callable[..., Any]:
        self.compiled += 1
        number = self.compiled
        if self._error and not self._at:
            raise self._error

        def run(*given: Any) -> torch.Tensor:
            self.calls += 1
            if self._error and number == self._at:
                self._before(given[-1])
                raise self._error
            return module(*given)

        return run


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, only_backends: Callable[..., None]) -> Callable[..., None]:
    """installed(oneflow=…, nexfort=…): backends that are found here, beside no inductor unless it is named."""

    def install(**backends: Backend) -> None:
        only_backends(*backends)
        for name, backend in backends.items():
            monkeypatch.setitem(registry._BACKENDS, name, backend.compile)

    return install


def test_onediffs_own_backend_fails_and_inductor_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, traced_alone: None
) -> None:
    """That for OneFlow, which is not installed here, as if it were."""
    monkeypatch.setitem(compiling._PROBES, "oneflow", lambda _device: None)
    monkeypatch.delitem(registry._BACKENDS, "oneflow", raising=False)
    model, x = denoiser(), torch.randn(2, 4)
    made = shell(model)
    used = came_to(made, AUTO)
    assert used.name == "inductor" and used.automatic
    assert used.reason == "auto: oneflow failed (ModuleNotFoundError: No module named 'oneflow')"
    assert torch.equal(made(x), model(x))


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "error", [NotImplementedError("Transform failed"), RuntimeError(), TypeError("x"), KeyError("y")], ids=repr
)
def test_whatever_fails_the_next_one_runs_all_blocks(installed: Callable[..., None], error: Exception, at: int) -> None:
    first, second = Backend(error, at), Backend()
    installed(oneflow=first, nexfort=second)
    model, x = denoiser(), torch.randn(2, 4)
    before = [(weight, weight.clone()) for weight in model.parameters()]
    made = shell(model)
    assert torch.equal(made(x), model(x)), "the failing step too"
    assert second.compiled == 3 and came_to(made, AUTO).name == "nexfort"
    called = first.calls, second.calls
    assert torch.equal(made(x), model(x))
    assert (first.calls, second.calls) == (called[0], called[1] + 3)
    said = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
    assert came_to(made, AUTO).reason == f"auto: oneflow failed ({said})"
    after = list(model.parameters())
    assert all(weight is now and torch.equal(was, now) for (weight, was), now in zip(before, after, strict=True))


@pytest.mark.parametrize("at", [0, 2])
def test_one_that_was_asked_for_by_name_raises(installed: Callable[..., None], at: int) -> None:
    second = Backend()
    installed(oneflow=Backend(NotImplementedError("no kernel"), at), nexfort=second)
    with pytest.raises(BackendUnavailable, match=r"^oneflow failed \(NotImplementedError: no kernel\)\. Choose "):
        shell(denoiser(), NAMED)(torch.randn(2, 4))
    assert second.compiled == 0


@pytest.mark.parametrize("at", [0, 2])
def test_where_all_fail_it_runs_uncompiled_and_says_why(
    installed: Callable[..., None], caplog: pytest.LogCaptureFixture, at: int
) -> None:
    installed(**{name: Backend(RuntimeError(f"{name}'s"), at) for name in ("oneflow", "nexfort", "inductor")})
    model, x = denoiser(), torch.randn(2, 4)
    made = shell(model)
    for _ in range(3):
        assert torch.equal(made(x), model(x))
    used = came_to(made, AUTO)
    assert used.name == "eager"
    assert used.reason == (
        "auto: oneflow failed (RuntimeError: oneflow's); nexfort failed (RuntimeError: nexfort's); "
        "inductor failed (RuntimeError: inductor's)"
    )
    assert len([line for line in caplog.messages if "failed" in line]) == 3


def test_the_error_of_a_block_itself_shows_as_itself(installed: Callable[..., None]) -> None:
    class Refuses(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] != 4:
                raise ValueError("four channels")
            return super().forward(x)

    first, second = Backend(), Backend()
    installed(oneflow=first, nexfort=second)
    model = Denoiser([Refuses()])
    made = shell(model)
    with pytest.raises(ValueError, match="four channels") as raised:
        made(torch.randn(2, 5))
    assert raised.value.__cause__ is raised.value.__context__ is None
    assert came_to(made, AUTO) == AUTO and second.compiled == 0
    x = torch.randn(2, 4)
    assert torch.equal(made(x), model(x))


NOT_THE_BACKENDS = (
    *(torch.OutOfMemoryError("1 GiB"), MemoryError()),
    *(InterruptProcessingException(), Interrupted(), KeyboardInterrupt()),
)


@pytest.mark.parametrize("error", NOT_THE_BACKENDS, ids=repr)
@pytest.mark.parametrize("at", [0, 2])
def test_no_memory_and_an_interrupt_are_not_the_backends(
    installed: Callable[..., None], error: BaseException, at: int
) -> None:
    second = Backend()
    installed(oneflow=Backend(error, at), nexfort=second)
    with pytest.raises(type(error)):
        shell(denoiser())(torch.randn(2, 4))
    assert second.compiled == 0


def test_an_interrupt_while_progress_is_told_is_not_the_backends(installed: Callable[..., None]) -> None:
    class Clicked(Exception):
        """Of any host."""

    def interrupt(_text: str) -> None:
        raise Clicked

    installed(oneflow=Backend(), nexfort=Backend())
    made = shell(denoiser())
    with pytest.raises(Clicked), listening(interrupt, lambda _: None):
        made(torch.randn(2, 4))
    assert came_to(made, AUTO) == AUTO


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_failing_call_wrote_into_its_inputs_is_put_back(installed: Callable[..., None], mode: Any) -> None:
    def spoil(x: torch.Tensor) -> None:
        x.fill_(torch.nan)

    installed(oneflow=Backend(NotImplementedError(), at=1, before=spoil))
    model = denoiser()
    with mode():
        x = torch.randn(2, 4)
        expected, given = model(x), x.clone()
        assert torch.equal(shell(model)(x), expected)
    assert torch.equal(x, given)


def test_what_is_expanded_and_not_a_number_is_taken_too(installed: Callable[..., None]) -> None:
    installed(oneflow=Backend(NotImplementedError(), at=1))
    model = denoiser()
    x = torch.tensor([[torch.nan], [1.0]]).expand(2, 4)
    found = shell(model)(x)
    assert torch.equal(found.isnan(), model(x).isnan()) and torch.equal(found[1], model(x)[1])


def test_threads_that_fail_together_go_on_by_one(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are first called by one thread at a time: the second one waits with the backend that fails meanwhile."""
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
    made = shell(model)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: made(x), range(2)))
    assert all(torch.equal(one, model(x)) for one in found)
    used = came_to(made, AUTO)
    assert used.name == "nexfort" and used.reason == "auto: oneflow failed (NotImplementedError)"
    assert second.compiled == 3


@pytest.mark.parametrize("kind", offload.Offload)
def test_what_follows_a_backend_that_works_with_an_offload_works_with_it(kind: offload.Offload) -> None:
    refused = offload._REFUSED[kind]
    assert refused == tuple(compiling._PROBES)[: len(refused)]


class Whole(Backend):
    """Runs blocks of any arguments as they are, where it does not fail."""

    def compile(self, module: torch.nn.Module, *, options: Any = None) -> Callable[..., Any]:
        one = super().compile(torch.nn.Identity(), options=options)
        return lambda *args, **kwargs: (one(torch.zeros(1)), module(*args, **kwargs))[1]


class Lacking(Backend):
    """As inductor, which compiles in a block's first call: whether that works may change."""

    lacks = False

    def compile(self, module: torch.nn.Module, *, options: Any = None) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.lacks:
                raise NotImplementedError("no compiler")
            return module(*args, **kwargs)

        return run


def test_a_run_is_right_and_its_report_names_the_backend_that_it_came_to(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, working = Whole(NotImplementedError("Transform failed of CogVideoXBlock")), Whole()
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
def test_one_that_was_asked_for_by_name_ends_a_run_in_half_precision(
    installed: Callable[..., None], precision: str
) -> None:
    """It is no reason for fp32."""
    installed(inductor=Whole(RuntimeError("no space left")))
    with pytest.raises(BackendUnavailable, match="no space left"):
        sampled(opened("2b", precision=precision, backend="inductor"), SMALL)


@pytest.mark.parametrize("named_first", [False, True])
def test_what_auto_came_to_is_no_answer_to_who_names_the_backend(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, named_first: bool
) -> None:
    """In one process, on the same weights: a backend that is asked for by name raises its error, and runs once the
    cause is gone, whatever 'auto' has given up; and a by-name request that works gives 'auto' nothing."""
    handle = opened("2b")
    handle.store.compiled.clear()
    monkeypatch.setattr(auto_compile, "COMPILE_SECONDS", 0.0)
    auto = replace(handle, backend=BackendChoice("inductor", "auto: first choice", automatic=True))
    named = replace(handle, backend=BackendChoice("inductor", "as you chose"))

    def ran_with(pipeline: PipelineHandle) -> str:
        return sampled(pipeline, SMALL, steps=1)[1].backend

    backend = Lacking()
    installed(inductor=backend)
    if named_first:
        assert ran_with(named) == "inductor"
    backend.lacks = True
    assert ran_with(auto) == "eager"
    if not named_first:
        with pytest.raises(BackendUnavailable):
            ran_with(named)
    backend.lacks = False
    assert ran_with(named) == "inductor"
