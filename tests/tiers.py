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
    "tests/headless/test_dynamic_inputs.py",
    "tests/headless/test_files.py",
    "tests/headless/test_frames.py",
    "tests/headless/test_precisions.py",
    "tests/headless/test_subgraphs.py",
    "tests/headless/test_ui_format.py",
    "tests/headless/test_workflow_graph.py",
    "tests/pipelines/diagnosis/",
    "tests/pipelines/test_profiles.py",
    "tests/precision/",
    "tests/test_layers.py",
    "tests/test_package.py",
    "tests/trust/",
    "tests/workflows/",
)

# Left to `make test-all`: what needs leg (b), or takes minutes by itself.
FULL = (
    "tests/benchmarks/test_compile_benchmarks.py",
    "tests/comfyui/test_execution_of_comfyui.py",
    "tests/comfyui/test_hundred_prompts.py",
    "tests/comfyui/test_in_browser.py",
    "tests/comfyui/test_memory_in_comfyui.py",
    "tests/comfyui/test_native_model.py",
    "tests/comfyui/test_native_neighbours.py",
    "tests/comfyui/test_native_probe.py",
    "tests/comfyui/test_native_products.py",
    "tests/comfyui/test_native_vae.py",
    "tests/comfyui/test_native_workflows.py",
    "tests/comfyui/test_svd_single_file.py",
    "tests/comfyui/test_validation.py",
    "tests/faults/test_lying_servers.py",
    "tests/comfyui/test_worker_in_comfyui.py",
)
LEG_B = "[leg_b"  # a case of a test that runs on both


def drawn(all_: int, test: int) -> int:
    """How many examples hypothesis draws: in `make test-all`, and in the smaller tiers."""
    return all_ if os.environ.get(VARIABLE, "all") == "all" else test


def left_out(tier: str, node_ids: Iterable[str]) -> set[str]:
    """The node ids that a tier does not run."""
    if tier == "all":
        return set()
    if tier == "check":
        return {name for name in node_ids if not name.startswith(CHECK)}
    return {name for name in node_ids if name.startswith(FULL) or LEG_B in name}


def unfitting(node_ids: Iterable[str]) -> set[str]:
    """Names of this file that no test has."""
    names = tuple(node_ids)
    return {rule for rule in (*CHECK, *FULL) if not any(name.startswith(rule) for name in names)}
