"""What would run and why: on machines with all that can be wrong with one, for models with all that can be odd."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines import compile as compiling
from comfyui_onediff_guard.pipelines import machine
from comfyui_onediff_guard.pipelines.diagnosis import NOT_RUN, diagnose, diagnose_pipeline
from comfyui_onediff_guard.pipelines.errors import BadFolder
from comfyui_onediff_guard.precision import arch, policy
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH, SWITCHES, Accumulation
from comfyui_onediff_guard.precision.guard import GuardPolicy, OnFailure
from comfyui_onediff_guard.precision.learned import Learned
from comfyui_onediff_guard.precision.policy import VARIANTS, Component, Precision
from safetensors.torch import load_file, save_file

SM75, SM80 = arch.named("sm75"), arch.named("sm80")
LOADERS = {"CogVideoXPipeline": "Load CogVideoX"}
POSIX = pytest.mark.skipif(os.name == "nt", reason="the stand-in for nvidia-smi is a shell script")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No GPU, no driver, nothing exported, a PyTorch for the CPU, a compiler: whatever this is run on."""
    for name in (*SWITCHES, *machine._HIDING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(machine, "_NVIDIA_MODULE", tmp_path / "absent")
    monkeypatch.setattr(machine, "_AMD_MODULE", tmp_path / "absent")
    monkeypatch.setattr(compiling, "find_c_compiler", lambda: "c++")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """cards((7, 5), (9, 0)): a machine with GPUs of these capabilities."""

    def have(*capabilities: tuple[int, int], built: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Card {device.index}")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capabilities[getattr(d, "index", d)])
        properties = types.SimpleNamespace(total_memory=24 * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built))

    return have


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    def install(script: str) -> None:
        file = tmp_path / "bin" / "nvidia-smi"
        file.parent.mkdir()
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(file.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}/bin{os.pathsep}/usr/bin")

    return install


@pytest.fixture
def folder(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(model_folder("5b"), tmp_path / "model")


def edit_config(folder: Path, component: str, **changes: Any) -> None:
    file = folder / component / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def switch(diagnosis: Any, name: str) -> Any:
    return next(switch for switch in diagnosis.switches if switch.name == name)


def one_line(diagnosis: Any) -> str:
    """The text as if no line had been broken."""
    return " ".join(diagnosis.text().split())


# --- machines ---------------------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu() -> None:
    found = diagnose()
    assert found.here and found.architecture.name == "cpu"
    assert found.machine.gpus == () and found.machine.device == "cpu"
    assert found.machine.advice == (), "a PyTorch for the CPU, on a machine with nothing else, is no fault"
    assert "none that PyTorch can use" in found.text()
    assert "none found, neither NVIDIA's nor AMD's" in found.text()


def test_every_gpu_of_the_process_and_the_plan_for_the_first(cards: Callable[..., None]) -> None:
    cards((7, 0), (8, 0), built=("sm_70", "sm_80"))
    found = diagnose()
    assert (found.architecture.name, found.machine.device) == ("sm70", "cuda:0")
    assert "0: Card 0, sm70 (Volta), 24 GiB" in found.text()
    assert "1: Card 1, sm80 (Ampere), 24 GiB" in found.text()
    assert found.machine.built_for == "CUDA 12.8"
    assert not [note for note in found.notes if "Card" in note]
    attention = switch(found, ATTENTION_SWITCH)
    assert attention.value == "0" and "shared with another GPU" in attention.reason
    elsewhere = switch(diagnose(architecture=arch.named("sm70")), ATTENTION_SWITCH)
    assert elsewhere.value == "1", "another machine than this one"


def test_a_gpu_newer_than_the_table(cards: Callable[..., None]) -> None:
    cards((13, 0), built=("sm_90", "compute_120"))
    found = diagnose()
    assert found.architecture.name == "sm130" and not found.architecture.known
    assert "sm130 (not in the table, treated as sm121): little is known of it" in one_line(found)
    assert {plan.dtype for model in found.models for plan in model.plans} <= {"bf16", "fp16", "fp32"}
    assert all(plan.guarded for model in found.models for plan in model.plans if plan.half)
    assert switch(found, ATTENTION_SWITCH).value == "0"
    assert "no kernels" not in one_line(found), "compute_120 is compiled by the driver"


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((12, 0), ("sm_80", "sm_90"), False),
        ((12, 0), ("sm_90", "compute_90"), True),
        ((8, 9), ("sm_80", "sm_90"), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_90a",), True),
        ((6, 1), ("sm_75", "compute_120"), False),
        ((8, 0), (), True),  # nothing told
    ],
)
def test_a_pytorch_without_code_for_the_card(
    cards: Callable[..., None], capability: tuple[int, int], built: tuple[str, ...], runs: bool
) -> None:
    cards(capability, built=built)
    assert ("has no kernels for Card 0" in one_line(diagnose())) != runs


@POSIX
def test_a_driver_and_a_pytorch_that_is_built_for_the_cpu(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi("echo '550.54.14, NVIDIA L4'; echo '550.54.14, NVIDIA A100'; echo '550.54.14, NVIDIA L4'")
    found = diagnose()
    assert found.machine.driver == "NVIDIA 550.54.14 (2 × NVIDIA L4, NVIDIA A100)"
    (advice,) = found.machine.advice
    assert "built for the CPU alone, so the card is not used" in advice
    assert "Install a CUDA build: https://" in advice


@POSIX
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'Failed to initialize NVML: version mismatch'; exit 18", "nvidia-smi says: Failed to initialize NVML"),
        ("exit 9", "says: nothing, and ends with 9"),
        ("exec sleep 60", "did not answer within 0.2 s"),
    ],
    ids=["mismatch", "silent", "hangs"],
)  # fmt: skip
def test_an_nvidia_smi_that_does_not_work(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(machine, "_SECONDS", 0.2)
    nvidia_smi(script)
    assert said in diagnose().machine.driver


def test_the_kernel_module_tells_where_there_is_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = tmp_path / "version"
    module.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue Mar  5 22:42:15 UTC 2024\n")
    monkeypatch.setattr(machine, "_NVIDIA_MODULE", module)
    assert diagnose().machine.driver == "NVIDIA 535.161.08"
    monkeypatch.setattr(machine, "_NVIDIA_MODULE", tmp_path / "absent")
    monkeypatch.setattr(machine, "_AMD_MODULE", tmp_path)
    assert diagnose().machine.driver.startswith("AMD amdgpu NVRM")


def test_cards_that_pytorch_counts_and_cannot_use(cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cards((8, 0), (8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    found = diagnose()
    assert found.machine.gpus == () and "can use no GPU: it counts none" in one_line(found)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The NVIDIA driver on your system is too old\n(found version 11040)."),
        AssertionError("The NVIDIA driver on your system is too old (found version 11040)."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_driver_too_old_for_pytorch(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def init() -> None:
        raise error

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = diagnose()
    assert found.architecture.name == "cpu"
    (advice,) = found.machine.advice
    assert advice == (
        "PyTorch is built for CUDA 12.8, but can use no GPU: The NVIDIA driver on your system is too old "
        "(found version 11040).; CUDA_VISIBLE_DEVICES is ''"
    )


def test_cuda_that_breaks_at_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_arch_list", "init"):
        monkeypatch.setattr(torch.cuda, name, broken)
    found = diagnose()
    assert found.architecture.name == "cpu"
    assert "can use no GPU: CUDA error: unknown error" in one_line(found)


@pytest.mark.parametrize(
    ("version", "advised"),
    [("2.3.1+cu121", True), ("1.13.1", True), ("2.4.0", False), ("2.10.0.dev1+rocm7", False), ("home-made", False)],
)
def test_pytorch_2_4_or_newer_is_advised(monkeypatch: pytest.MonkeyPatch, version: str, advised: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    found = diagnose()
    assert bool(found.machine.advice) == advised
    assert version in found.text()
    if advised:
        assert f"PyTorch 2.4 or newer is advised, this is {version}" in one_line(found)
        assert "https://github.com/zai-org/CogVideo/issues/637" in one_line(found)


def test_versions_are_read_and_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"diffusers": "0.42.1", "transformers": "5.23.0", "nexfort": "0.1.dev330"}
    monkeypatch.setattr(machine, "version_of", versions.get)
    found = diagnose()
    assert "diffusers 0.42.1, transformers 5.23.0, nexfort 0.1.dev330" in one_line(found)
    assert "not installed: onediff, onediffx, oneflow" in one_line(found)
    assert [note for note in found.notes if note.startswith("not installed: onediff. In the pack's folder")]
    assert "nexfort" not in sys.modules


def test_a_pytorch_that_cannot_be_imported(fresh_python: Callable[..., str], folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    code = """
import json, sys
from pathlib import Path
from comfyui_onediff_guard.pipelines.diagnosis import diagnose
for model in (None, Path(sys.argv[1])):
    found = diagnose(model)
    found.text()
    print(json.dumps(found.as_dict(), allow_nan=False))
"""
    for line in fresh_python(code, str(folder), PYTHONPATH=str(broken.parent)).splitlines():
        told = json.loads(line)
        assert "libcudart.so.12" in told["notes"][0] and "Install it again" in told["notes"][0]
        assert told["switches"] == [] and "accumulation switches could not be read" in told["notes"][1]
        assert told["models"][0]["plans"]


# --- backends and switches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["c++", None])
def test_backends_are_those_of_auto(monkeypatch: pytest.MonkeyPatch, compiler: str | None) -> None:
    monkeypatch.setattr(compiling, "find_c_compiler", lambda: compiler)
    found = diagnose().backends
    assert [state.name for state in found.states] == list(compiling.BACKENDS[1:])
    assert found.chosen == compiling.choose_backend("auto", torch.device("cpu")).name
    assert {state.name for state in found.states if not state.found} == (
        {"oneflow", "nexfort"} if compiler else {"oneflow", "nexfort", "inductor"}
    )
    assert all(state.reason for state in found.states)


def test_what_is_not_compiled_is_said(cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cards((7, 5))
    monkeypatch.setitem(compiling._PROBES, "inductor", lambda device: None)
    assert "not compiled: inductor cannot compile bf16" in one_line(diagnose(precision=Precision.BF16))
    assert "not compiled: inductor" not in one_line(diagnose())
    elsewhere = diagnose(architecture=arch.named("sm70"), precision=Precision.BF16)
    assert "not compiled: inductor" not in one_line(elsewhere), "another machine has other backends"


@pytest.mark.parametrize("exported", ["maybe", "2", "-"])
def test_nonsense_in_an_exported_variable(monkeypatch: pytest.MonkeyPatch, exported: str) -> None:
    monkeypatch.setenv(ATTENTION_SWITCH, exported)
    found = diagnose(architecture=SM80)
    attention = switch(found, ATTENTION_SWITCH)
    assert (attention.value, attention.set_by) == (exported, "user")
    assert f"set by you: '{exported}' is neither true nor false" in one_line(found)
    assert all(plan.guarded for model in found.models for plan in model.plans if plan.half)
    assert os.environ[ATTENTION_SWITCH] == exported


def test_what_the_user_set_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXFORT_ENABLE_MATMUL_FP16_REDUCTION", "1")
    text = diagnose(architecture=SM80).text()
    assert (
        text.index("set by you") < text.index("NEXFORT_ENABLE_MATMUL_FP16_REDUCTION = 1") < text.index("set by onediff")
    )


def test_every_switch_and_who_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    found = diagnose(architecture=SM75)
    assert [s.name for s in found.switches] == list(SWITCHES)
    assert {s.set_by for s in found.switches} == {"onediff-guard", "default"}
    assert all(f"{s.name} = {s.value}" in found.text() for s in found.switches)
    fast = diagnose(architecture=SM75, accumulation=Accumulation.FAST)
    assert switch(fast, ATTENTION_SWITCH).value == "1"
    assert dict(os.environ) == before, "asking sets nothing"


# --- plans ------------------------------------------------------------------------------------------------------------


def test_all_variants_where_no_model_is_named() -> None:
    found = diagnose(architecture=SM75, loaders=LOADERS)
    assert [model.variant for model in found.models] == list(VARIANTS)
    for model in found.models:
        assert tuple(plan.component for plan in model.plans) == VARIANTS[model.variant].components
    text = found.text()
    assert re.search(r"CogVideoX-5B +fp16 +– +fp16 +fp16 folded +fp16\n", text)
    assert text.count("has no native bf16") == 1, "each reason once"
    assert "plans are for" in text and not found.here
    assert "no node loads these yet: CogVideoX image-to-video" in one_line(found)


def test_one_model_with_reasons_and_sources(folder: Path) -> None:
    found = diagnose(folder, SM75, loaders=LOADERS)
    (model,) = found.models
    assert (model.folder, model.variant) == ("model", "CogVideoX-5B")
    assert [plan.dtype for plan in model.plans] == ["fp16"] * 4
    text = one_line(found)
    for plan in model.plans:
        assert plan.reason in text and plan.guard_reason in text and plan.accumulation_reason in text
        assert plan.source in text and plan.accumulation_source in text
        assert plan.component is not Component.DENOISER or plan.fold_reason in text
    assert model.stored["transformer"].startswith("F32, ") and "transformer F32" in text
    assert "no node loads" not in text


def test_a_model_that_no_node_loads_yet_gets_its_plan(folder: Path) -> None:
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("CogVideoXPipeline", "CogVideoXImageToVideoPipeline"))
    assert "no node loads CogVideoX image-to-video yet" in one_line(diagnose(folder, loaders=LOADERS))


def test_a_checkpoint_in_two_dtypes(folder: Path) -> None:
    (file,) = (folder / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    save_file({n: t.half() if i % 2 else t.float() for i, (n, t) in enumerate(tensors.items())}, file)
    found = diagnose(folder, SM80)
    assert re.search(r"transformer is stored in several dtypes \(.*F16 \d+%.*\): loaded in one", one_line(found))
    assert {plan.dtype for plan in found.models[0].plans} == {"bf16"}


def test_a_config_with_unknown_fields(folder: Path) -> None:
    edit_config(folder, "transformer", made_up=1, another={"deep": None})
    edit_config(folder, "text_encoder", made_up=1)  # transformers takes whatever it is given
    assert re.search(
        r"transformer: config.json has fields that diffusers [\d.]+ ignores: another, made_up",
        one_line(diagnose(folder)),
    )


def test_a_diffusers_that_cannot_be_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    notes = [note for note in diagnose(folder).notes if "not compared with diffusers" in note]
    assert len(notes) == 1 and "import of diffusers halted" in notes[0]


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match="is not a diffusers-format folder"):
        diagnose(tmp_path)


def test_what_cannot_run_is_refused_in_words() -> None:
    before_14 = replace(arch.ARCHITECTURES["mps"], label="Apple GPU before macOS 14", bf16="none")
    found = diagnose(architecture=before_14, precision=Precision.BF16)
    assert all(not model.plans and model.refused for model in found.models)
    assert "refused: mps (Apple GPU before macOS 14) has no bf16, not even emulated" in one_line(found)


def test_rows_added_to_the_tables_show_up(monkeypatch: pytest.MonkeyPatch) -> None:
    card = replace(SM80, name="sm300", label="Made-up", half_accumulation="wrong")
    model = replace(VARIANTS["CogVideoX-5B"], name="CogVideoX-99B", needs_fp32={Component.VAE_DECODE: "it is shy"})
    monkeypatch.setitem(arch.ARCHITECTURES, card.name, card)
    monkeypatch.setitem(policy.VARIANTS, model.name, model)
    found = diagnose(architecture=arch.named("sm300"))
    assert found.models[-1].variant == "CogVideoX-99B"
    text = one_line(found)
    assert "CogVideoX-99B bf16 – bf16 bf16 fp32" in text
    assert "it is shy CogVideoX-99B: VAE decoder alone" in text
    assert "comes out NaN or black on sm300 (Made-up)" in text


# --- a pipeline on a wire ---------------------------------------------------------------------------------------------


def test_a_pipeline_is_told_as_it_is_set(folder: Path, open_pipeline: Callable[..., Any]) -> None:
    edit_config(folder, "vae", made_up=1)
    handle = replace(
        open_pipeline(folder, "fp16", "eager"),
        policy=GuardPolicy(OnFailure.STOP, strict=True),
        accumulation=Accumulation.FAST,
        architecture=SM80,
        beside=(SM80,),
    )
    found = diagnose_pipeline(handle)
    assert found.here and found.architecture == SM80
    assert (found.precision, found.accumulation) == (Precision.FP16, Accumulation.FAST)
    assert (found.on_failure, found.strict, found.backends.chosen) == ("stop", True, "eager")
    assert found.backends.reason == handle.backend.reason
    assert found.models[0].plans == tuple(handle.plan(component) for component in handle.store.model.variant.components)
    assert switch(found, ATTENTION_SWITCH).value == "1"
    assert "denoiser fp16 stop yes" in one_line(found)
    assert "plain fp32, not in TF32: strict is on" in one_line(found)
    assert "made_up" in one_line(found)
    assert handle.store.loaded() == {}, "no weight was read"

    other = diagnose_pipeline(handle, SM75)
    assert not other.here and other.architecture == SM75
    assert other.models[0].plans[0].reason.startswith("asked for fp16")


def test_what_was_found_while_it_ran_is_told_once(folder: Path, open_pipeline: Callable[..., Any]) -> None:
    edit_config(folder, "vae", made_up=1)
    handle = open_pipeline(folder)
    handle.store.module("vae", "fp32")
    handle.store.learned[handle.memory_key("fp16")] = Learned(5.1e5)
    notes = diagnose_pipeline(handle).notes
    assert len([note for note in notes if "made_up" in note]) == 1
    assert "the residual stream was measured: it peaks at 5.1e+05, and fp16 ends at 65504" in notes


def test_it_is_the_pipelines_device_and_its_neighbours(
    folder: Path, open_pipeline: Callable[..., Any], cards: Callable[..., None]
) -> None:
    handle = replace(open_pipeline(folder), architecture=arch.named("sm70"), beside=(SM75,))
    cards((12, 0))
    found = diagnose_pipeline(handle)
    assert (found.machine.device, found.machine.gpus[0].name) == ("cpu", "Card 0")
    assert "shared with another GPU" in switch(found, ATTENTION_SWITCH).reason


def test_a_guard_that_is_off_is_named(folder: Path, open_pipeline: Callable[..., Any]) -> None:
    handle = replace(open_pipeline(folder, "bf16"), policy=GuardPolicy(OnFailure.OFF))
    assert "The NaN Guard is off: steps are only watched" in diagnose_pipeline(handle).notes


# --- both forms -------------------------------------------------------------------------------------------------------


def everything(folder: Path) -> list[Any]:
    models = [diagnose(folder, SM75), diagnose(folder, SM80, precision=Precision.FP16_PLAIN)]
    return models + [diagnose(architecture=a, precision=p) for a in arch.ARCHITECTURES.values() for p in Precision]


def test_the_text_is_narrow_and_the_dict_is_json(folder: Path) -> None:
    for found in everything(folder):
        wide = [line for line in found.text().splitlines() if len(line) > 100 or line != line.rstrip()]
        assert not wide
        told = found.as_dict()
        assert json.loads(json.dumps(told, allow_nan=False)) == told, "no enum, tuple or key that JSON would change"
        assert told["models"][0]["variant"] in found.text()


def test_readme_says_what_was_never_run_too(root: Path) -> None:
    section = (
        (root / "README.md").read_text(encoding="utf-8").split("\n## What has not been run\n")[1].split("\n## ")[0]
    )
    assert [line.split(":")[0] for line in NOT_RUN] == re.findall(r"^- ([^:]+):", section, re.MULTILINE)
    assert all(line.split(":")[0] in one_line(diagnose()) for line in NOT_RUN)
