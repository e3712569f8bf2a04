"""Which tests run when: `make check`, `make test`, `make test-all`.

Whoever calls pytest runs all that they name; `--tier` leaves out what a tier has no time for. Every name here has to
fit a test, else collecting says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

TIERS = ("check", "test", "all")
VARIABLE = "ONEDIFF_GUARD_TIER"  # for drawn cases, which ask when they are imported

# Reads, decides and computes on tensors by itself: loads no pipeline, compiles nothing, starts no ComfyUI.
CHECK = (
    "tests/headless/test_compare_picture.py",
    "tests/headless/test_core_nodes.py",
    "tests/headless/test_files.py",
    "tests/headless/test_frames.py",
    "tests/headless/test_precisions.py",
    "tests/headless/test_ui_format.py",
    "tests/headless/test_workflow_graph.py",
    "tests/pipelines/diagnosis/",
    "tests/pipelines/test_profiles.py",
    "tests/precision/",
    "tests/test_layers.py",
    "tests/test_package.py",
    "tests/workflows/",
)

# Left to `make test-all`: what a smaller test in `make test` shows as well, at more sizes, in more steps or on leg (b).
FULL = (
    "tests/benchmarks/test_compile_benchmarks.py",
    "tests/benchmarks/test_denoiser_steps.py::test_random_weights_stay_finite",
    "tests/cases/test_probe_applied.py::test_a_stream_that_is_clipped",
    "tests/comfyui/test_execution_of_comfyui.py",
    "tests/comfyui/test_hundred_prompts.py",
    "tests/comfyui/test_in_browser.py",
    "tests/comfyui/test_latents_in_comfyui.py",
    "tests/comfyui/test_native_model.py",
    "tests/comfyui/test_native_neighbours.py",
    "tests/comfyui/test_native_probe.py",
    "tests/comfyui/test_native_vae.py",
    "tests/comfyui/test_native_workflows.py",
    "tests/comfyui/test_svd_single_file.py",
    "tests/nodes/test_saved_latents.py::test_every_familys_latents_decode_in_another_process",
    "tests/pipelines/test_families.py::test_half_precision_is_near_fp32_with_the_same_seed",
    "tests/pipelines/test_offload.py::test_the_probe_measures_the_same",
)

# Of these, `make test` runs the named cases.
ONE_OF_MANY: dict[str, tuple[str, ...]] = {
    "tests/cases/test_probe_applied.py::test_a_stream_that_overflows": ("5b",),
    "tests/cases/test_through_nodes.py::test_case_1_stream": ("1.5", "cogview4"),
    "tests/cases/test_through_nodes.py::test_case_2_trained_in_bf16": ("5b",),
    "tests/cases/test_through_nodes.py::test_case_3_a_norm_that_refuses_mixed_dtypes": ("2b",),
    "tests/cases/test_through_nodes.py::test_case_3_weights_beyond_fp16": ("cogview3",),
    "tests/cases/test_through_nodes.py::test_case_4_svd_on_oneflow": ("sm70", "sm80"),
    "tests/pipelines/test_families.py::test_a_half_step_after_a_rerun_works_and_the_frames_are_right": ("svd",),
    "tests/pipelines/test_families.py::test_image_to_video_is_bit_equal_to_diffusers": ("5b-i2v",),
    "tests/pipelines/test_families.py::test_video_to_video_is_bit_equal_to_diffusers": ("2b",),
    "tests/pipelines/test_offload.py::test_an_attention_kernel_is_chosen_alike": ("group",),
    "tests/pipelines/test_offload.py::test_every_family_is_bit_equal_and_all_weights_are_back": (
        "2b-group",
        "cogview4-sequential",
        "svd-group",
    ),
    "tests/pipelines/test_offload.py::test_loras_come_with_their_layers": ("stream-group", "none-sequential"),
    "tests/pipelines/test_offload.py::test_what_is_learned_makes_islands": ("group-eager",),
    "tests/pipelines/test_warm_up.py::test_a_run_at_a_warm_size_compiles_nothing": ("2b-sizes0", "svd-sizes4"),
}
LEG_B = "[leg_b"


def drawn(all_: int, test: int) -> int:
    """How many examples hypothesis draws: in `make test-all`, and in the smaller tiers."""
    return all_ if os.environ.get(VARIABLE, "all") == "all" else test


def left_out(tier: str, node_ids: Iterable[str]) -> set[str]:
    """The node ids that a tier does not run."""
    if tier == "all":
        return set()
    if tier == "check":
        return {name for name in node_ids if not name.startswith(CHECK)}
    return {name for name in node_ids if name.startswith(FULL) or LEG_B in name or _is_another(name)}


def _is_another(name: str) -> bool:
    function, _, case = name.partition("[")
    return function in ONE_OF_MANY and case.removesuffix("]") not in ONE_OF_MANY[function]


def unfitting(node_ids: Iterable[str]) -> set[str]:
    """Names of this file that no test has."""
    names = set(node_ids)
    cases = {f"{function}[{case}]" for function, cases in ONE_OF_MANY.items() for case in cases}
    prefixes = {rule for rule in (*CHECK, *FULL) if not any(name.startswith(rule) for name in names)}
    return prefixes | (cases - names)
