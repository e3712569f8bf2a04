"""Every stage of gpu.py on a CPU, on tiny models, where dynamo traces and nothing is compiled behind it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attention
import contestants
import harness
import kernel_times
import pytest
import stages
import table
import torch
from comfyui_onediff_guard.pipelines.compile import backends as compiling
from contestants import AGAIN, EAGER, GROUPS, OURS, PLAIN, RERUN, WHOLE, Subject
from denoisers import MODELS

CPU = torch.device("cpu")
ISLAND = "ours, inductor: a learned island"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What dynamo traced runs as it is, and no matrix product is timed for seconds."""
    from onediff.infer_compiler.backends import registry

    compiling._register_inductor()
    compile_block = lambda module, *, options: torch.compile(module, backend="eager", **options)  # noqa: E731
    monkeypatch.setitem(registry._BACKENDS, "inductor", compile_block)
    monkeypatch.setattr(contestants, "COMPILER", "eager")
    monkeypatch.setattr(stages, "tflops", lambda *_: {"used": 1e-4, "measured": 1e-4, "source": "a test"})
    torch.compiler.reset()


def subject(name: str = "cogvideox-2b", dtype: str = "bf16") -> Subject:
    return Subject(name, MODELS[name], MODELS[name].sizes["tiny"], CPU, dtype)


def run(stage: str, name: str = "cogvideox-2b", **options: Any) -> Any:
    with torch.inference_mode():
        return stages.run(stage, subject(name, stages.DTYPES.get(stage, "bf16")), 2, **options)


def test_steps_are_timed_side_by_side() -> None:
    made = run("steps")
    rows = made["rows"]
    assert list(rows) == list(GROUPS["steps"])
    for backend in ("oneflow", "nexfort"):
        assert "CUDA devices" in rows[f"ours, {backend}"]["error"], "a row, and the others went on"
    timed = {row: found for row, found in rows.items() if "error" not in found}
    assert set(timed) == set(rows) - {"ours, oneflow", "ours, nexfort"}
    assert all(found["seconds"] > 0 and found["peak_bytes"] > 0 for found in timed.values())
    assert rows[OURS]["difference"] < 0.01 and rows[WHOLE]["difference"] < 0.01 and rows[AGAIN]["difference"] == 0
    assert rows[OURS]["reruns"] == 0 and rows[OURS]["backend"] == "inductor"
    island = rows[ISLAND]
    assert island["reruns"] == 1 and island["islands"] == ["transformer_blocks.1"]
    json.dumps(made)


def test_fp16_is_wide_and_plain_where_the_family_has_a_stream() -> None:
    rows = run("fp16")["rows"]
    assert rows[OURS]["wide"] and rows[OURS]["reruns"] == 0
    assert "wide" not in rows[PLAIN] and all(rows[name]["difference"] < 0.01 for name in (OURS, PLAIN))
    assert PLAIN not in contestants.entrants("fp16", subject("svd-xt", "fp16"))


@pytest.mark.parametrize("name", ["cogvideox-2b", "svd-xt"])
def test_every_step_of_a_rerun_is_one(name: str) -> None:
    rows = run("rerun", name)["rows"]
    assert rows[RERUN]["reruns"] == rows[RERUN]["steps"] > 4
    assert rows[OURS]["reruns"] == 0


@pytest.mark.parametrize("contestant", [WHOLE, OURS])
def test_the_first_step_compiles(contestant: str) -> None:
    torch._dynamo.utils.counters.clear()
    made = run("first", contestant=contestant)
    assert made["seconds"] > 0 and made["steady"] > 0 and made["graphs"] == 1


def test_attention_tells_what_each_kernel_does_with_the_model_s_shapes() -> None:
    entries = run("attention")
    assert [entry["dtype"] for entry in entries] == ["bf16", "fp16"]
    assert entries[0]["shape"] == (2, 2, 32 + 226, 32 + 226, 16) and entries[0]["calls"] == 2
    rows = entries[0]["rows"]
    assert rows["flash"]["max_error"] < 0.02 and rows["math"]["seconds"] > 0 and rows[attention.CHOICE]["seconds"] > 0
    assert "No viable backend" in rows["cudnn"]["error"]


def test_the_profile_tells_kinds_of_kernels() -> None:
    text = run("profile")
    assert all(f"## {name}\n" in text for name in (EAGER, WHOLE, OURS))
    assert "attention" in text and "matrix products, convolutions" in text


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix products, convolutions"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matrix products, convolutions"),
        ("triton_tem_fused_addmm_3", "matrix products, convolutions"),
        ("triton_red_fused__scaled_dot_product_flash_attention_native_layer_norm_2", kernel_times.NORMS),
        ("graph_0_cpp_fused_gelu_view_8", kernel_times.NORMS),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "not fused"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kernels_are_sorted_by_their_names(kernel: str, kind: str) -> None:
    assert kind in kernel_times.kind(kernel)


def test_a_contestant_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(_subject: Subject) -> Callable[[], Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB.\nand more")

    monkeypatch.setitem(GROUPS, "rerun", {OURS: contestants.ours("eager"), WHOLE: too_large})
    rows = run("rerun")["rows"]
    assert rows[WHOLE] == {"error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 80 GiB."}
    assert rows[OURS]["seconds"] > 0


def test_the_table_has_a_row_for_each(tmp_path: Path) -> None:
    steps = run("rerun")
    steps["rows"]["ours, oneflow"] = {"error": "not here"}
    compiling = {OURS: {"cold": {"seconds": 7.25, "graphs": 1}, "warm": {"error": "exit code 9"}}}
    result = {"machine": "M", "torch": "2", "diffusers": "0", "date": "today"}
    text = table.text(result | {"models": {"cogvideox-2b": {"steps": steps, "compile": compiling}}})
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("|")}
    assert "7.2 (1 graphs) | exit code 9" in lines[OURS]
    assert lines["ours, oneflow"].startswith("| ours, oneflow | not here |")
    assert len({line.count(" | ") for line in lines.values()}) == 1, "every row has every column"


def test_stages_come_into_one_file_as_they_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_child", lambda stage, *_: "a profile" if stage == "profile" else {"error": stage})
    for chosen in (["steps"], ["compile", "profile"]):
        args = SimpleNamespace(models=["cogvideox-2b"], stages=chosen, rounds=2, out=tmp_path)
        harness.measure("gpu", args, "tiny")
    (file,) = tmp_path.glob("*.json")
    (profile,) = tmp_path.glob("*.txt")
    found = json.loads(file.read_text())["models"]["cogvideox-2b"]
    assert found["steps"] == {"error": "steps"} and found["profile"] == profile.name
    assert found["compile"][WHOLE] == {"cold": {"error": "first"}, "warm": {"error": "first"}}


def test_a_stage_that_dies_says_why(tmp_path: Path) -> None:
    made = harness._child("steps", "cogvideox-2b", "huge", 2, tmp_path)
    assert made == {"error": "exit code 1: KeyError: 'huge'"}


def test_gpu_through_its_command(root: Path, tmp_path: Path) -> None:
    options = ["--small", "--models", "cogvideox-2b", "--stage", "attention", "--rounds", "4", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "gpu.py"), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("gpu-*.json")
    entries = json.loads(file.read_text())["models"]["cogvideox-2b"]["attention"]
    assert entries[0]["rows"]["flash"]["seconds"] > 0 and "| s a call | max error |" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA card")
def test_full_size_without_a_card_is_refused(root: Path) -> None:
    command = [sys.executable, str(root / "benchmarks" / "gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "No CUDA card" in done.stderr and "--small" in done.stderr
