"""Activation memory of a call: the estimate from meta tensors."""

from __future__ import annotations

import pytest
import torch
from comfyui_onediff_guard.precision.activation_estimate import META, counting, on_meta
from comfyui_onediff_guard.precision.kernels import Kernels
from comfyui_onediff_guard.precision.learned_scales import LearnedProducts
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from denoisers import MODELS, build, step
from torch import nn
from torch.nn import functional as F

ROW = 4 * 64  # bytes of a row of 64 in float32
UNFUSED = Kernels(attention=lambda *_, **__: "no fused attention")
PUBLISHED = {  # model → GB of a step in half and in fp32, as the review counted it at full size
    "cogvideox-5b": (2.6, 5.1),
    "svd-xt": (8.3, 16.6),
}


def peak_bytes(call, *given, **options) -> int:
    with counting(**options) as memory:
        kept = call(*given)
    del kept
    return memory.most


def rows(count: int) -> torch.Tensor:
    return torch.empty(count, 64, device=META)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x + 1, 1),
        (lambda x: (x + 1) * 2, 2),
        (lambda x: ((x + 1) * 2) * 3, 2),  # the first is freed
        (lambda x: x.view(64, -1).transpose(0, 1), 0),
        (lambda x: x.add_(1), 0),
        (lambda x: (x + 1).mul_(2), 1),
        (lambda x: torch.cat([x, x]), 2),
        (lambda x: [x + 1 for _ in range(5)], 5),
    ],
)
def test_peak_counts_tensors_alive_at_the_same_time(call, expected: int) -> None:
    assert peak_bytes(call, rows(10)) == expected * 10 * ROW


def test_weights_are_not_counted_and_module_is_unchanged() -> None:
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.BatchNorm1d(64), nn.Linear(64, 256))
    module[4].weight = module[0].weight
    before, called = dict(module.named_parameters()), []
    module[0].register_forward_hook(lambda *_: called.append(1))
    shell = on_meta(module)
    assert all(p.is_meta for p in shell.parameters()) and not any(p.is_meta for p in module.parameters())
    assert all(dict(module.named_parameters())[name] is weight for name, weight in before.items())
    assert shell[4].weight is shell[0].weight, "tied weights stay tied"
    assert shell[3].running_mean.is_meta and not module[3].running_mean.is_meta, "buffers are on meta too"
    assert peak_bytes(shell[:3], rows(10)) == 10 * ROW * 8  # the wide activation before and after GELU
    assert not called, "hooks of the module do not run during counting"


def test_attention_scores_are_counted_only_without_fused_kernel() -> None:
    heads = torch.empty(1, 4, 1024, 64, device=META)

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x)

    assert peak_bytes(attend, heads) == heads.nbytes
    assert peak_bytes(attend, heads, kernels=UNFUSED) >= heads.nbytes + 4 * 1024 * 1024 * 4


def test_unfused_attention_calls_are_counted_and_reported_once() -> None:
    def no_wide_heads(query, *_, **given):
        return f"no heads of {query.shape[-1]}" if query.shape[-1] > 64 and given == {"is_causal": True} else ""

    def attend(width):
        heads = torch.empty(1, 4, 512, width, device=META)
        return [F.scaled_dot_product_attention(heads, heads, heads, is_causal=True) for _ in range(2)]

    scores = 4 * 512 * 512 * 4
    with counting(Kernels(attention=no_wide_heads)) as memory:
        kept = attend(64)
        assert not memory.lacks and memory.most < scores
        kept = attend(128)
    assert [*memory.lacks] == ["no heads of 128"] and memory.most > scores and kept


def test_unfolded_columns_of_a_convolution_are_counted() -> None:
    half = nn.Conv3d(8, 16, 3, padding=1, device=META, dtype=torch.float16)
    pointwise, flat = nn.Conv3d(8, 16, 1, device=META), nn.Conv2d(8, 16, 3, device=META)
    video = torch.empty(2, 8, 5, 6, 7, device=META)
    unfolding = Kernels(conv3d=lambda dtype: "no cuDNN" if dtype is torch.float16 else "")
    made = 2 * 16 * 5 * 6 * 7 * 2
    columns = 8 * 27 * 5 * 6 * 7 * 2  # one sample at a time
    assert peak_bytes(half, video.half()) == made
    assert peak_bytes(half, video.half(), kernels=unfolding) == made + columns
    for other in (half.float(), pointwise, flat):
        given = video[:, :, 0] if other is flat else video
        assert peak_bytes(other, given, kernels=unfolding) == peak_bytes(other, given)
    half, given = half.half(), video.half()
    with counting(unfolding) as memory:
        call = memory.each_shape_once(half)
        kept = call(given), call(given)
    assert [*memory.lacks] == ["no cuDNN"] and memory.most == 2 * made + columns and kept


def test_each_shape_is_called_once_and_counted_every_time() -> None:
    made = []

    def network(x):
        made.append(len(x))
        return (x + 1) * 2

    def loop(call):
        return torch.cat([call(rows(n)) for n in (10, 10, 4, 10)])

    with counting() as memory:
        kept = loop(memory.each_shape_once(network))
    assert made == [10, 4] and kept.shape == (34, 64)
    assert memory.most == peak_bytes(loop, network)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_denoiser_memory_matches_recorded_figures(name: str) -> None:
    for dtype, expected in zip((torch.float16, torch.float32), PUBLISHED[name], strict=True):
        model, size = MODELS[name], MODELS[name].sizes["full"]
        module = build(model, size, META, dtype)
        call = step(model, module.config, size, META, dtype)
        assert peak_bytes(lambda: module(**call)) / 1e9 == pytest.approx(expected, rel=0.15)  # noqa: B023


def test_scaled_products_and_rerun_take_more_memory_than_plain() -> None:
    model, size = MODELS["cogvideox-2b"], MODELS["cogvideox-2b"].sizes["tiny"]
    module = build(model, size, META, torch.float16)
    call = step(model, module.config, size, META, torch.float16)
    plain, rerun = peak_bytes(lambda: module(**call)), peak_bytes(lambda: run_in_fp32(module, **call))
    first_step = peak_bytes(lambda: LearnedProducts().run(module, **call))
    assert plain < first_step <= 1.01 * rerun
