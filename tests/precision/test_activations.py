"""What a call takes beside its weights, counted on tensors without values."""

from __future__ import annotations

import pytest
import torch
from comfyui_onediff_guard.precision.activations import META, counting, on_meta
from comfyui_onediff_guard.precision.kernels import Kernels
from comfyui_onediff_guard.precision.learned_scales import LearnedProducts
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from denoisers import MODELS, build, step
from torch import nn
from torch.nn import functional as F

ROW = 4 * 64  # bytes of a row of 64 in float32
UNFUSED = Kernels(attention=lambda *_, **__: "no fused attention")
PUBLISHED = {  # model → GB that a step takes in half and in fp32, as the review counted it at full size
    "cogvideox-5b": (2.6, 5.1),
    "svd-xt": (8.3, 16.6),
}


def most(call, *given, **options) -> int:
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
        (lambda x: ((x + 1) * 2) * 3, 2),  # the first is let go
        (lambda x: x.view(64, -1).transpose(0, 1), 0),
        (lambda x: x.add_(1), 0),
        (lambda x: (x + 1).mul_(2), 1),
        (lambda x: torch.cat([x, x]), 2),
        (lambda x: [x + 1 for _ in range(5)], 5),
    ],
)
def test_what_is_held_at_once(call, expected: int) -> None:
    assert most(call, rows(10)) == expected * 10 * ROW


def test_weights_are_not_counted_and_nothing_of_the_module_changes() -> None:
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.BatchNorm1d(64), nn.Linear(64, 256))
    module[4].weight = module[0].weight
    before, called = dict(module.named_parameters()), []
    module[0].register_forward_hook(lambda *_: called.append(1))
    shell = on_meta(module)
    assert all(p.is_meta for p in shell.parameters()) and not any(p.is_meta for p in module.parameters())
    assert all(dict(module.named_parameters())[name] is weight for name, weight in before.items())
    assert shell[4].weight is shell[0].weight, "tied weights stay tied"
    assert shell[3].running_mean.is_meta and not module[3].running_mean.is_meta, "and buffers come along"
    assert most(shell[:3], rows(10)) == 10 * ROW * 8  # the wide activation before and after GELU
    assert not called, "who watches the module is not told of what is only counted"


def test_attention_writes_scores_only_where_it_is_not_fused() -> None:
    heads = torch.empty(1, 4, 1024, 64, device=META)

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x)

    assert most(attend, heads) == heads.nbytes
    assert most(attend, heads, kernels=UNFUSED) >= heads.nbytes + 4 * 1024 * 1024 * 4


def test_calls_that_no_kernel_takes_are_counted_apart_and_said_once() -> None:
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


def test_what_a_convolution_unfolds_is_counted_while_it_runs() -> None:
    half = nn.Conv3d(8, 16, 3, padding=1, device=META, dtype=torch.float16)
    pointwise, flat = nn.Conv3d(8, 16, 1, device=META), nn.Conv2d(8, 16, 3, device=META)
    video = torch.empty(2, 8, 5, 6, 7, device=META)
    unfolding = Kernels(conv3d=lambda dtype: "no cuDNN" if dtype is torch.float16 else "")
    made = 2 * 16 * 5 * 6 * 7 * 2
    columns = 8 * 27 * 5 * 6 * 7 * 2  # of one sample at a time
    assert most(half, video.half()) == made
    assert most(half, video.half(), kernels=unfolding) == made + columns
    for other in (half.float(), pointwise, flat):
        given = video[:, :, 0] if other is flat else video
        assert most(other, given, kernels=unfolding) == most(other, given)
    half, given = half.half(), video.half()
    with counting(unfolding) as memory:
        call = memory.each_shape_once(half)
        kept = call(given), call(given)
    assert [*memory.lacks] == ["no cuDNN"] and memory.most == 2 * made + columns and kept


def test_a_call_of_each_shape_is_made_once_and_counts_each_time() -> None:
    made = []

    def network(x):
        made.append(len(x))
        return (x + 1) * 2

    def loop(call):
        return torch.cat([call(rows(n)) for n in (10, 10, 4, 10)])

    with counting() as memory:
        kept = loop(memory.each_shape_once(network))
    assert made == [10, 4] and kept.shape == (34, 64)
    assert memory.most == most(loop, network)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_denoiser_takes_what_was_counted_of_it(name: str) -> None:
    for dtype, expected in zip((torch.float16, torch.float32), PUBLISHED[name], strict=True):
        model, size = MODELS[name], MODELS[name].sizes["full"]
        module = build(model, size, META, dtype)
        call = step(model, module.config, size, META, dtype)
        assert most(lambda: module(**call)) / 1e9 == pytest.approx(expected, rel=0.15)  # noqa: B023


def test_what_is_scaled_or_rerun_takes_more() -> None:
    model, size = MODELS["cogvideox-2b"], MODELS["cogvideox-2b"].sizes["tiny"]
    module = build(model, size, META, torch.float16)
    call = step(model, module.config, size, META, torch.float16)
    plain, rerun = most(lambda: module(**call)), most(lambda: run_in_fp32(module, **call))
    first_step = most(lambda: LearnedProducts().run(module, **call))
    assert plain < first_step <= 1.01 * rerun
