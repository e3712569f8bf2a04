"""Which tests run when: `make check`, `make test`, `make test-all`.

Whoever calls pytest runs all that they name; `--tier` leaves out what a tier has no time for. Every name here has to
fit a test, else collecting says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from legs_table import leg_of

TIERS = ("check", "test", "all")
VARIABLE = "ONEDIFF_GUARD_TIER"  # for drawn cases, which ask when they are imported

# Reads, decides and computes on tensors by itself: loads no pipeline, compiles nothing, starts no ComfyUI.
CHECK = (
    "tests/headless/batch/test_affinity.py",
    "tests/headless/batch/test_batch_jobs.py",
    "tests/headless/batch/test_course.py",
    "tests/headless/batch/test_outputs.py",
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
    "tests/test_legs.py",
    "tests/test_package.py",
    "tests/trust/",
    "tests/workflows/",
)

# Left to `make test-all`, with all that runs in a checkout of ComfyUI: what takes minutes by itself.
FULL = (
    "tests/benchmarks/test_compile_benchmarks.py",
    "tests/comfyui/test_batch_on_servers.py",
    "tests/comfyui/test_hundred_prompts.py",
    "tests/faults/test_lying_servers.py",
    "tests/headless/batch/test_batch_faults.py",
    "tests/headless/batch/test_joining_machines.py",
    "tests/headless/batch/test_ray_is_closed.py",
    "tests/headless/batch/test_two_machines.py",
)


def drawn(all_: int, test: int) -> int:
    """How many examples hypothesis draws: in `make test-all`, and in the smaller tiers."""
    return all_ if os.environ.get(VARIABLE, "all") == "all" else test


def left_out(tier: str, node_ids: Iterable[str]) -> set[str]:
    """The node ids that a tier does not run."""
    if tier == "all":
        return set()
    if tier == "check":
        return {name for name in node_ids if not name.startswith(CHECK)}
    return {name for name in node_ids if name.startswith(FULL) or leg_of(name) not in ("", "a")}


def unfitting(node_ids: Iterable[str]) -> set[str]:
    """Names of this file that no test has."""
    names = tuple(node_ids)
    return {rule for rule in (*CHECK, *FULL) if not any(name.startswith(rule) for name in names)}
