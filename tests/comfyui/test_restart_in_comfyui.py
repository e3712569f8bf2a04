"""A restarted ComfyUI uses the compile cache of its first start, and reports it."""

from __future__ import annotations

import re
from pathlib import Path

import legs
import pytest
import shared_models
from runs import HEALTHY, SMALL, Ran, finish, start

pytestmark = pytest.mark.comfyui


def test_second_start_uses_compile_cache(
    any_leg: legs.Leg, small_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("ONEDIFF_GUARD_COMPILED_GB", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    base = tmp_path / "base"
    legs.install_pack(base / "custom_nodes")
    shared_models.copied(small_models / "diffusers" / HEALTHY, base / "models" / "diffusers" / HEALTHY)
    changes = {
        **SMALL,
        "OneDiffGuardLoadPipeline.model": HEALTHY,
        "OneDiffGuardLoadPipeline.backend": "inductor",
    }

    def sampled(process: int) -> tuple[int, int, str]:
        (tmp_path / str(process)).mkdir()
        with legs.started(any_leg, base) as server:
            ran: Ran = finish(start(server, any_leg.workflow, tmp_path / str(process), changes), server)
        assert ran.code == 0, ran.answer
        (report,) = (report for report in ran.reports() if report["graphs"] is not None)
        return report["graphs"], report["graphs_kept"], report["backend"]

    assert sampled(1) == (1, 0, "inductor")
    kept = [path.name for path in (base / "user" / "onediff_guard" / "compiled").iterdir()]
    assert [name for name in kept if not re.match("CogVideoX-2B-cpu(-no-bf16)?-fp32-", name)] == []
    ends = sorted(name.partition(".")[2] for name in kept)
    assert ends == ["compiled"]
    assert sampled(2) == (1, 1, "inductor")
