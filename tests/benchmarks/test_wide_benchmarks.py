"""everything_wide.py and wide_bytes.py at toy size, and that bytes are counted right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import everything_wide
import pytest
import torch
import wide_bytes
from comfyui_onediff_guard.precision.upcast import run_in
from networks import NETWORKS
from torch import nn
from torch.nn import functional as F
from traffic import AMAX, PRODUCTS, REST, SCALING, WEIGHTS, CountedProducts, Traffic

META = torch.device("meta")
PARAMETERS = {  # 10⁹, as published
    "cogvideox-2b": 1.69,
    "cogvideox-5b": 5.57,
    "cogview3-plus": 2.85,
    "cogview4": 6.37,
    "svd-xt": 1.52,
    "sdxl": 2.57,
    "flux": 11.90,
    "qwen-image": 20.43,
    "wan-14b": 14.29,
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def run(script: Any, *options: str) -> Any:
        monkeypatch.setattr(sys, "argv", [script.__name__, "--out", str(tmp_path), *options])
        script.main()
        (file,) = tmp_path.glob(f"{script.__name__}-*.json")
        return json.loads(file.read_text(encoding="utf-8"))

    return run


def test_every_layer_wide_is_timed_beside_plain_and_fp32(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(everything_wide, "--rounds", "2", "--blocks", "1", "--heads", "1", "--size", "deep")
    for found in made["networks"].values():
        assert all(seconds > 0 for seconds in found["median_seconds"].values())
        assert {"scaled / plain", "plain again / plain", "scaled / fp32 copy"} <= set(found["ratios"])
        errors = found["errors"]
        assert errors["fp32 copy, bf16"] == 0 and errors["fp32 rerun, bf16"] < 1e-5
        assert errors["scaled, bf16"] < errors["plain, bf16"] and errors["scaled, fp16"] < errors["scaled, bf16"] / 4
    assert made["host"]["cogvideox-2b"]["function_calls"] > 2000
    assert "µs a call more" in capsys.readouterr().out


def test_a_step_is_reckoned_on_paper(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(wide_bytes, "--networks", "cogvideox-2b", "svd-xt", "--size", "tiny")["networks"]
    tiers = made["cogvideox-2b"]["tiers"]
    assert wide_bytes.STREAM in tiers and wide_bytes.STREAM not in made["svd-xt"]["tiers"]
    plain, stream, wide = (
        tiers[name]["added_gigabytes"] for name in ("fp16 (plain)", "stream wide", "every layer wide")
    )
    assert plain == 0 < stream < wide <= tiers[wide_bytes.FROM_BF16]["added_gigabytes"]
    assert tiers["every layer wide"]["cards"]["T4"]["of_plain"] > 1
    assert "every layer wide" in capsys.readouterr().out


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_as_large_as_published(name: str) -> None:
    module = NETWORKS[name].make("full", META, torch.float16)
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(PARAMETERS[name], abs=0.006)


def counted(module: nn.Module, *given: torch.Tensor, wide: bool = False) -> Traffic:
    products = CountedProducts(torch.float16, Traffic())
    with torch.no_grad():
        for _ in range(2):  # the first reads weights for what they reach
            products.traffic = Traffic(module.parameters())
            with products.traffic.counting():
                _ = run_in(products, module, given, {}) if wide else module(*given)
    return products.traffic


def test_a_product_s_bytes() -> None:
    layer, x = nn.Linear(32, 8, bias=False, device=META, dtype=torch.float16), torch.empty(4, 32, device=META).half()
    traffic = counted(layer, x)
    assert dict(traffic.bytes) == {PRODUCTS: 2 * (4 * 32 + 32 * 8 + 4 * 8)}


def test_a_wide_product_s_bytes() -> None:
    layer, x = nn.Linear(32, 8, bias=False, device=META, dtype=torch.float16), torch.empty(400, 32, device=META)
    traffic = counted(layer, x, wide=True)
    assert traffic.calls == 1
    assert traffic.bytes[PRODUCTS] == 2 * (400 * 32 + 32 * 8 + 400 * 8)
    assert traffic.bytes[AMAX] == 4 * (400 * 32 + 400)
    rows = traffic.bytes[SCALING] - (4 + 2) * 400 * 32 - (2 + 4) * 400 * 8
    assert 0 < rows < 20 * 2 * 4 * 400, "what is left is as long as there are rows"
    assert not traffic.bytes[REST] and not traffic.bytes[WEIGHTS]


def test_weights_in_another_dtype_are_cast() -> None:
    layer, x = nn.Linear(32, 64, bias=False, device=META, dtype=torch.bfloat16), torch.empty(4, 32, device=META)
    assert counted(layer, x, wide=True).bytes[WEIGHTS] == pytest.approx((2 + 2) * 32 * 64, rel=0.01)


def test_attention_writes_no_scores_and_views_are_free() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x.transpose(0, 1).transpose(0, 1), value=x).view(-1)[1:]

    traffic = counted(Attention(), torch.empty(1, 1, 64, 16, device=META).half())
    assert dict(traffic.bytes) == {PRODUCTS: 4 * 2 * 64 * 16} and dict(traffic.kernels) == {PRODUCTS: 1}
