"""Which attention kernel a run takes, and what its report says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import attention, backends
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions
from comfyui_onediff_guard.pipelines.models.recognised import family_of
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.attention import KERNELS, Attended, AttentionCall, KernelChoice, Timing
from comfyui_onediff_guard.precision.policy import Component, Precision
from comfyui_onediff_guard.precision.report import RunReport
from comfyui_onediff_guard.trust.atomic_files import LIMIT_VARIABLE
from kernel_clock import timed_as
from overflows import fails_in_half
from small_runs import prompts, start_of
from torch.profiler import profile

OPERATORS = {
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "math": "aten::_scaled_dot_product_attention_math",
}
MODELS = ("2b", "1.5-i2v", "cogview3", "cogview4", "svd", "wan")
Size = tuple[int, int, int]  # width, height, frames
SIZES: dict[str, Size] = {"2b": (64, 48, 9), "1.5-i2v": (64, 48, 13), "svd": (64, 64, 2), "wan": (64, 48, 9)}


def opened(folder: Any, how: CompileOptions, precision: str = "bf16") -> PipelineHandle:
    options: dict[str, Any] = {"offload": "none", "placement": PlainPlacement()}
    handle = load(folder, family_of(folder), precision=Precision(precision), backend="eager", **options)
    return replace(handle, compile_options=how)


def run(handle: PipelineHandle, size: Size) -> tuple[RunReport, set[str]]:
    width, height, frames = size
    settings = SampleSettings(width, height, 2, 0, frames, 2.0)
    with torch.inference_mode():
        positive, negative = prompts(handle)  # its text encoder attends too
        with profile() as profiled:
            _, report = sample(handle, positive, negative, settings, **start_of(handle, width, height))
    ran = {event.key for event in profiled.key_averages()}
    return report, {name for name, operator in OPERATORS.items() if operator in ran}


@pytest.mark.parametrize("model", MODELS)
def test_every_family_can_be_measured(model_folder: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "math", replace(KERNELS["math"], timed=True))  # a CPU has no other choice
    timed_as(monkeypatch, auto=1.0)
    made, measure = [], attention.measure
    monkeypatch.setattr(attention, "measure", lambda *given: made.append(measure(*given)) or made[-1])
    handle = opened(model_folder(model), CompileOptions(attention="measured"))
    handle.store.attention.clear()
    report, _ = run(handle, SIZES.get(model, (64, 64, 1)))
    assert report.backend_reason.endswith("attention: PyTorch's own choice, measured the fastest here")
    assert made
    for choice in made:
        assert choice.timings and all(timing.seconds > 0 for timing in choice.timings.values()), choice


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has "math" to choose beside its one fast kernel."""
    monkeypatch.setitem(KERNELS, "math", replace(KERNELS["math"], timed=True))


@pytest.mark.usefixtures("two_kernels")
def test_a_size_is_measured_once(model_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(attention, "measure", lambda calls, _device: measured.append(calls) or FASTER)
    handle = opened(model_folder("2b"), CompileOptions(attention="measured"))
    handle.store.attention.clear()
    for size in ((64, 48, 9), (96, 48, 9), (64, 48, 9)):
        report, kernels = run(handle, size)
        assert "attention: math, measured 2.00 times as fast" in report.backend_reason and "math" in kernels
    assert len(measured) == 2
    blocks = len(handle.store.module("transformer", "bf16").transformer_blocks)
    assert [sum(calls.values()) for calls in measured] == [blocks] * 2


FASTER = KernelChoice("math", {"auto": Timing(2.0, 0.1), "math": Timing(1.0, 0.1)})


def test_a_kernel_that_is_named_is_used_by_the_attempts_and_not_by_reruns(model_folder: Any) -> None:
    report, kernels = run(opened(model_folder("2b"), CompileOptions(attention="math")), SIZES["2b"])
    assert kernels == {"math"} and report.backend_reason == "as you chose: not compiled; attention: math"
    failing = opened(model_folder("2b"), CompileOptions(attention="flash"), "fp16")
    hook = failing.store.module("transformer", "fp16").proj_out.register_forward_hook(fails_in_half)
    report, _ = run(failing, SIZES["2b"])
    hook.remove()
    assert report.reruns == 1, "in fp32, by a kernel that takes it"


def test_auto_is_pytorchs_choice(model_folder: Any) -> None:
    report, kernels = run(opened(model_folder("2b"), CompileOptions(attention="")), SIZES["2b"])
    assert kernels == {"flash"} and "attention" not in report.backend_reason


@pytest.mark.usefixtures("two_kernels")
def test_backends_with_attention_of_their_own_are_not_measured(model_folder: Any) -> None:
    handle = opened(model_folder("2b"), CompileOptions(attention="measured"))
    handle = replace(handle, backend=BackendChoice("nexfort", "as you chose"))
    how, said = attention.with_attention(handle.stage(Component.DENOISER), "nexfort", {})
    assert how.attention == "" and said == "attention: not measured, nexfort has its own"


def test_where_one_kernel_is_on_offer_nothing_is_done_and_nothing_said(
    model_folder: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(attention, "calls_of", lambda *_: pytest.fail("looked for calls"))
    monkeypatch.setattr(attention, "measure", lambda *_: pytest.fail("measured"))
    found = []
    for how in (CompileOptions(), CompileOptions(attention="")):
        handle = replace(opened(model_folder("2b"), how), measured=tmp_path)
        assert handle.compile_options.attention == how.attention
        report, kernels = run(handle, SIZES["2b"])
        assert kernels == {"flash"} and "attention" not in report.backend_reason
        found.append(latents(handle))
    assert CompileOptions().attention == "measured" and torch.equal(*found)
    assert not [*tmp_path.iterdir()]


def latents(handle: PipelineHandle) -> torch.Tensor:
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample

    with torch.inference_mode():
        positive, negative = encode_prompts(handle, ["a kite", ""])[0]
        return sample(handle, positive, negative, SampleSettings(64, 48, 2, 1, frames=9, guidance_scale=3.0))[0]


class Machine:
    """One process after the other on one machine, each of which opens a model anew and makes a run."""

    def __init__(self, folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch):
        self._folder, self._kept, self.measured = folder, kept, 0
        self.found = FASTER
        monkeypatch.setattr(attention, "measure", self._measure)
        monkeypatch.setenv(LIMIT_VARIABLE, "1")

    def _measure(self, _calls: object, _device: object) -> KernelChoice:
        self.measured += 1
        return self.found

    def process(self, size: Size = SIZES["2b"], precision: str = "bf16") -> str:
        handle = replace(opened(self._folder, CompileOptions(), precision), measured=self._kept)
        handle.store.attention.clear()
        return run(handle, size)[0].backend_reason

    @property
    def file(self) -> Path:
        return self._kept / attention.FILE


@pytest.fixture
def machine(model_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_kernels: None) -> Machine:
    return Machine(model_folder("2b"), tmp_path / "kept", monkeypatch)


def test_a_choice_outlasts_the_process(machine: Machine) -> None:
    said = machine.process()
    machine.found = KernelChoice("", FASTER.timings)  # what it would come to now
    assert machine.process() == said and "attention: math, measured 2.00 times as fast" in said
    assert machine.measured == 1
    ((calls, choice),) = json.loads(machine.file.read_text())["choices"].items()
    assert calls.startswith("cpu, ") and choice["kernel"] == "math" and choice["said"] in said


def test_other_lengths_and_dtypes_are_measured_for_themselves(machine: Machine) -> None:
    for _ in range(2):
        machine.process()
        machine.process((96, 48, 9))
        machine.process(precision="fp32")
        assert machine.measured == 3
    assert len(json.loads(machine.file.read_text())["choices"]) == 3


def test_calls_are_told_apart_by_all_that_a_kernel_may_hang_on() -> None:
    call = AttentionCall((1, 2, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8), torch.bfloat16)
    others = [
        replace(call, query=(1, 4, 9, 8)),
        replace(call, query=(1, 2, 10, 8)),
        replace(call, key=(1, 2, 10, 8), value=(1, 2, 10, 8)),
        replace(call, query=(1, 2, 9, 16), key=(1, 2, 9, 16)),
        replace(call, dtype=torch.float16),
        replace(call, mask=((1, 1, 9, 9), torch.bool)),
        replace(call, causal=True),
        replace(call, scale=0.5),
    ]
    calls = [{call: 1}, {call: 2}, {}, *({other: 1} for other in others), {call: 1, others[0]: 1}]
    machine = attention.machine_facts(torch.device("cpu"), ARCHITECTURES["cpu"])
    assert {"device", "driver", "torch", "sageattention", "kernels", "rules", "cudnn"} <= machine.keys()
    assert len({attention._key(each, machine) for each in calls}) == len(calls)
    assert attention._key({call: 1, others[0]: 1}, machine) == attention._key({others[0]: 1, call: 1}, machine)


@pytest.mark.parametrize("what", ["driver", "sageattention"])
def test_another_machine_measures_for_itself(machine: Machine, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    facts = attention.machine_facts
    machine.process()
    monkeypatch.setattr(attention, "machine_facts", lambda *given: facts(*given) | {what: "9.9"})
    machine.process()
    assert machine.measured == 2 and len(json.loads(machine.file.read_text())["choices"]) == 2


BROKEN: list[Callable[[str], str]] = [
    lambda _: "{",
    lambda _: "[]",
    lambda text: text.replace('"kernel": "math"', '"kernel": "best"'),
    lambda text: text.replace('"said": "', '"said": ["').replace('"}}}', '"]}}}'),
    lambda text: text + " " * 2**20,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_is_ignored_with_a_message_and_written_anew(
    machine: Machine, broken: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    said = machine.process()
    whole = machine.file.read_text()
    machine.file.write_text(broken(whole))
    assert machine.file.read_text() != whole
    assert machine.process() == said and machine.measured == 2
    assert f"'{machine.file}' is left alone, and measured anew: " in caplog.text
    assert machine.file.read_text() == whole


def test_a_folder_that_cannot_be_written_to_fails_no_run(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine._kept.write_text("no folder")
    assert "attention: math" in machine.process() and "could not be kept" in caplog.text


def test_where_nothing_is_to_be_kept_nothing_is(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    assert "attention: math" in machine.process() and not machine._kept.exists()


def test_what_another_process_chose_meanwhile_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine.process()
    written = machine.file.read_bytes()
    machine.file.unlink()

    def slower(_calls: object, _device: object) -> KernelChoice:
        machine.file.write_bytes(written)
        return KernelChoice("", FASTER.timings)

    monkeypatch.setattr(attention, "measure", slower)
    assert machine.process() == first and machine.file.read_bytes() == written


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("no engine")])
def test_where_nothing_can_be_measured_pytorch_chooses_and_nothing_is_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object) -> KernelChoice:
        raise error

    monkeypatch.setattr(attention, "measure", fails)
    assert f"PyTorch's own choice, since nothing could be measured ({type(error).__name__})" in machine.process()
    assert not machine._kept.exists()


def test_choices_that_were_made_first_are_dropped_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CHOICES", 2)
    for width in (64, 80, 96):
        machine.process((width, 48, 9))
    assert len(json.loads(machine.file.read_text())["choices"]) == 2
    machine.process((96, 48, 9))
    assert machine.measured == 3
    machine.process((64, 48, 9))
    assert machine.measured == 4


def test_a_measured_kernel_is_compiled_into_blocks_and_known_for_compiled(
    model_folder: Any, monkeypatch: pytest.MonkeyPatch, two_kernels: None
) -> None:
    """The choice comes before the compiler, and is part of what tells compiled blocks apart."""
    made: list[torch.nn.Module] = []
    monkeypatch.setattr(backends, "_compile", lambda shown, *_: made.append(shown.block) or shown)
    monkeypatch.setattr(attention, "measure", lambda *_: FASTER)
    handle = opened(model_folder("2b"), CompileOptions(), "fp32")
    handle = replace(handle, backend=BackendChoice("inductor", "as you chose"))
    handle.store.attention.clear()
    handle.store.compiled.clear()
    try:
        report, kernels = run(handle, SIZES["2b"])
        assert "attention: math" in report.backend_reason and "math" in kernels
        assert made and all(isinstance(block, Attended) and block.kernel == "math" for block in made)
        assert {key[3].attention for key in handle.store.compiled} == {"math"}
        number = len(made)
        handle.store.attention.clear()
        monkeypatch.setattr(attention, "measure", lambda *_: KernelChoice("", FASTER.timings))
        run(handle, SIZES["2b"])
        assert len(made) == 2 * number and not any(isinstance(block, Attended) for block in made[number:])
    finally:
        handle.store.compiled.clear()
