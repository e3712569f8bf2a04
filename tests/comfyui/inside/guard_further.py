"""NaN Guard (native) on further families, with the conditions that only they read: reruns in fp32, and the overflow
protection."""

from __future__ import annotations

import pytest
from further_image_layouts import FURTHER_IMAGE_LAYOUTS
from further_video_layouts import FURTHER_VIDEO_LAYOUTS
from guard_families import CARD, check_overflowing
from guard_scaled import HEATS, check_protected, hot
from native_models import SUPPORTED, with_fp32_twin
from native_table import Cells, figures, table

NEWEST = FURTHER_IMAGE_LAYOUTS if hasattr(SUPPORTED, "Krea2") else {}  # an older ComfyUI is too different for these
LAYOUTS = NEWEST | FURTHER_VIDEO_LAYOUTS
AS_PLAIN = {"stable_audio": 1.5, "instruct": 1.1}  # times plain fp16's error: later steps run most layers in plain fp16
RECOMPUTED = "overflowing, recomputed"
HEAD = """\
How far from fp32 the plain run is / the guard's with precision fp16, overflow protection / the guard's
with precision bf16. Last column: the plain run's distance → the guarded run's, which recomputes in fp32."""
cells = table("further", HEAD, [*HEATS, RECOMPUTED])
families = pytest.mark.parametrize("family", LAYOUTS)


@families
@pytest.mark.parametrize("heat", HEATS)
def test_protected_run_beats_bf16_without_rerun(cells: Cells, family: str, heat: str) -> None:
    errors = check_protected(LAYOUTS[family], heat, "fp16", as_plain=AS_PLAIN.get(family, 1.0))
    cells[family, heat] = figures(*errors, between=" / ")


@families
def test_overflowing_run_is_near_fp32_guarded(cells: Cells, family: str) -> None:
    layout = hot(LAYOUTS[family], HEATS[1])
    exact = CARD.type == "cpu" and layout.rounds == 1e-5
    errors, calls, reruns = check_overflowing(*with_fp32_twin(layout, hot=True), bound=0 if exact else layout.rounds)
    assert not errors[0] <= 2e-2 and reruns == calls > 0
    cells[family, RECOMPUTED] = figures(*errors)
