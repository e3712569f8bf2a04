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
import end_to_end
import entrants
import harness
import kernel_times
import lora
import pytest
import stages
import table
import torch
from budget import Budget
from comfyui_onediff_guard.pipelines.compile import backends as compiling
from cpu_bf16 import cpu_multiplies_bf16  # noqa: F401 - a fixture for all tests here
from denoisers import MODELS
from entrants import (
    AGAIN,
    AUTOTUNED,
    BY_BLOCK,
    EAGER,
    GROUP,
    GROUPS,
    IN_BF16,
    ISLAND,
    LAST,
    LAYERS,
    MEASURED_SUMS,
    OURS,
    OURS_EAGER,
    PLAIN,
    PROJECTING,
    RERUN,
    SUMS,
    WHOLE,
)
from harness import Limits
from subject import Subject

CPU = torch.device("cpu")
LIMITS = Limits(rounds=2, seconds=600)
HEAD = {"machine": "M", "torch": "2", "diffusers": "0", "date": "today"}
_IDLE = {"driver": "1.2.3", "sm_mhz": 200.0, "sm_mhz_max": 1980.0, "memory_mhz": 2600.0, "memory_mhz_max": 2619.0}
_IDLE |= {"power_watts": None, "power_watts_limit": 700.0, "celsius": 30.0}
CARD = {"before": _IDLE, "after": _IDLE | {"sm_mhz": 1700.0, "power_watts": 650.0}}


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


def run(stage: str, name: str = "cogvideox-2b", budget: Budget | None = None, **options: Any) -> Any:
    made = stages.subject_of(stage, name, "tiny", CPU)
    return stages.run(stage, made, LIMITS.rounds, budget or Budget(LIMITS.seconds), **options)


def test_graphs_of_a_changed_lora_are_counted(tmp_path: Path) -> None:
    with torch.inference_mode():
        rows = dict(lora.changes(stages.subject_of("steps", "cogvideox-2b", "tiny", CPU), "inductor", tmp_path))
    made = [row["graphs"] for row in rows.values()]
    assert made == [1, 1, 0, 0, 0, 1, 0], "the first, and one for each rank"
    assert all(row["first"] > 0 and row["later"] > 0 for row in rows.values())


def test_steps_are_timed_side_by_side() -> None:
    made = run("steps")
    rows = made["rows"]
    assert list(rows) == list(GROUPS["steps"])
    for backend in ("oneflow", "nexfort"):
        assert "CUDA devices" in rows[f"ours, {backend}"]["error"], "a row, and the others went on"
    timed = {row: found for row, found in rows.items() if "error" not in found}
    assert set(timed) == set(rows) - {"ours, oneflow", "ours, nexfort"}
    assert rows[OURS]["off_fp32"] == rows[OURS + PROJECTING]["off_fp32"], "the same, computed once"
    assert all(found["seconds"] > 0 and found["peak_bytes"] > 0 for found in timed.values())
    assert all(0 < found["off_fp32"] < 0.02 for found in timed.values())
    assert rows[AGAIN]["off_fp32"] == rows[EAGER]["off_fp32"] == rows[OURS_EAGER]["off_fp32"]
    assert {"speed", "speed_over_whole", "speed_over_blocks"} <= rows[OURS].keys()
    assert made["rounds"] == 2 and made["strict_fp32"]["stream_peak"] < 100
    assert rows[OURS]["reruns"] == 0 and rows[OURS]["backend"] == "inductor"
    island = rows[ISLAND]
    assert island["reruns"] == 1 and island["islands"] == ["transformer_blocks.1"]
    json.dumps(made)


def test_fp16_is_wide_and_plain_where_the_family_has_a_stream() -> None:
    rows = run("fp16")["rows"]
    assert rows[OURS]["wide"] and rows[OURS]["reruns"] == 0
    assert "wide" not in rows[PLAIN] and all(0 < found["off_fp32"] < 0.002 for found in rows.values())
    assert rows.keys() >= {EAGER + SUMS, BY_BLOCK + SUMS, OURS + SUMS, OURS + MEASURED_SUMS}
    assert PLAIN not in entrants.entrants("fp16", MODELS["svd-xt"])


def test_a_stream_that_fp16_cannot_hold() -> None:
    made = run("stream")
    rows = made["rows"]
    assert made["dtype"] == "fp16" and 2.5e5 < made["strict_fp32"]["stream_peak"] < 1e6
    assert rows[EAGER]["off_fp32"] == stages.NOT_FINITE
    for name in (OURS, OURS_EAGER):
        assert rows[name]["wide"] and rows[name]["reruns"] == 0 and rows[name]["off_fp32"] < 0.002
    assert 0.003 < rows[IN_BF16]["off_fp32"] < 0.02
    json.dumps(made, allow_nan=False)


def test_a_stream_that_blocks_clip_is_finite_and_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {name: GROUPS["stream"][name] for name in (EAGER, OURS_EAGER)}
    monkeypatch.setitem(GROUPS, "stream", some)
    rows = run("stream", "cogview3-plus")["rows"]
    assert rows[EAGER]["off_fp32"] > 20 * rows[OURS_EAGER]["off_fp32"] > 0


def test_autotuned_ones_stand_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda module, *, mode=None, **_: asked.append(mode) or module)
    rows = run("autotune")["rows"]
    assert {name + AUTOTUNED for name in (WHOLE, BY_BLOCK, OURS)} <= rows.keys()
    assert all(0 < found["off_fp32"] < 0.02 for found in rows.values())
    tuned, blocks = contestants.TUNED, 2
    assert asked.count(tuned) == blocks + blocks + 1 and asked.count("default") == blocks


def test_convolutions_in_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GROUPS, "layout", {name: GROUPS["layout"][name] for name in (EAGER, EAGER + LAST)})
    rows = run("layout", "svd-xt")["rows"]
    assert all(0 < found["off_fp32"] < 0.02 for found in rows.values())
    assert entrants.not_for("layout", MODELS["cogvideox-2b"]) and entrants.not_for("stream", MODELS["svd-xt"])


def test_offload_is_timed_beside_weights_that_stay() -> None:
    rows = run("offload")["rows"]
    in_parts = {name for name in rows if name.endswith((GROUP, LAYERS))}
    assert len(in_parts) == 5 and {name for name in rows if not rows[name]["weight_bytes"]} == in_parts
    eager = {name: found for name, found in rows.items() if "inductor" not in name}
    assert len({found["off_fp32"] for found in eager.values()}) == 1, "the same weights, the same step"
    assert all(found["speed"] > 0 and found["peak_bytes"] > 0 for found in rows.values())


def test_end_to_end_tells_parts_moves_and_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "STEPS", 2)
    some = {name: end_to_end.CONTESTANTS[name] for name in ("diffusers", OURS_EAGER)}
    some["channels-last"] = end_to_end.ours("eager", channels_last=True)
    monkeypatch.setattr(end_to_end, "CONTESTANTS", some)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    seen: list[int] = []
    made = run("end_to_end", keep=lambda made: seen.append(len(made["rows"])))
    assert seen == [1, 2, 3] and made["folder_bytes"] > 100_000
    for found in made["rows"].values():
        assert all(found["later"][part] > 0 for part in ("encode", "steps", "decode", "all"))
        assert found["first"]["open"] > 0 and found["finite"] and found["peak_bytes"] > 0 and found["rounds"] == 2
        assert set(found["moves"].values()) == {0}, "a CPU is no card"
    assert "| ours, eager |" in table.text({**HEAD, "models": {"cogvideox-2b": {"end_to_end": made}}})


def test_what_there_is_no_time_for_is_a_row() -> None:
    seconds = iter([0.0, *[100.0] * 1000])
    made = run("rerun", budget=Budget(120, clock=lambda: next(seconds)))
    assert [found["error"] for found in made["rows"].values()] == ["left out: 100 of the stage's 120 s were over"] * 2


@pytest.mark.parametrize("name", ["cogvideox-2b", "svd-xt"])
def test_every_step_of_a_rerun_is_one(name: str) -> None:
    rows = run("rerun", name)["rows"]
    assert rows[RERUN]["reruns"] == rows[RERUN]["steps"] > 4
    assert rows[OURS]["reruns"] == 0


@pytest.mark.parametrize("contestant", stages.CONTESTANTS)
def test_the_first_step_compiles(contestant: str) -> None:
    torch._dynamo.utils.counters.clear()
    made = run("first", contestant=contestant)
    strides = contestant == BY_BLOCK  # the first block is given slices of one tensor; ours, copies of them
    assert made["seconds"] > 0 and made["steady"] > 0 and made["graphs"] == 1 + strides


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
    text = table.text(
        {**HEAD, "models": {"cogvideox-2b": {"steps": steps, "compile": compiling, "card": {"steps": CARD}}}}
    )
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("|")}
    assert "7.2 (1 graphs) | exit code 9" in lines[OURS]
    assert lines["ours, oneflow"].startswith("| ours, oneflow | not here |")
    assert len({line.count(" | ") for line in lines.values()}) == 1, "every row has every column"
    assert "driver 1.2.3, SM 200 → 1700 of 1980 MHz" in text and "? → 650 of 700 W" in text


def test_stages_come_into_one_file_as_they_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def child(stage: str, *_: Any) -> dict[str, Any]:
        return {"made": "a profile" if stage == "profile" else {"error": stage}, "card": CARD}

    monkeypatch.setattr(harness, "_child", child)
    for chosen in (["steps"], ["compile", "profile", "layout"]):
        args = SimpleNamespace(models=["cogvideox-2b"], stages=chosen, out=tmp_path, **LIMITS._asdict())
        harness.measure("gpu", args, "tiny")
    (file,) = tmp_path.glob("*.json")
    (profile,) = tmp_path.glob("*.txt")
    found = json.loads(file.read_text())["models"]["cogvideox-2b"]
    assert found["steps"] == {"error": "steps"} and found["profile"] == profile.name
    assert found["compile"][WHOLE] == {"cold": {"error": "first"}, "warm": {"error": "first"}}
    assert found["card"] == dict.fromkeys(("steps", "compile", "profile"), CARD) and "layout" not in found


def test_a_stage_that_dies_says_why(tmp_path: Path) -> None:
    made = harness._child("steps", "cogvideox-2b", "huge", LIMITS, tmp_path)["made"]
    assert made == {"error": "exit code 1: KeyError: 'huge'"}


def test_what_a_stage_had_found_when_it_was_ended_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = harness._ended

    def too_long(command: list[str], environment: dict[str, str], _seconds: float) -> tuple[int, str]:
        found = {"made": {"rows": {OURS: {"seconds": 1.5}}}, "card": None}
        Path(command[command.index("--result") + 1]).write_text(json.dumps(found))
        return ended([sys.executable, "-c", "import time; time.sleep(600)"], environment, 0.1)

    monkeypatch.setattr(harness, "_ended", too_long)
    made = harness._child("steps", "cogvideox-2b", "tiny", LIMITS, tmp_path)["made"]
    assert made["rows"] == {OURS: {"seconds": 1.5}} and "exit code 124: TimeoutError" in made["error"]


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
