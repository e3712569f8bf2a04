"""NaN Guard (native) on networks that remember earlier calls: a rerun starts from what the failed call found."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from guard_beside import lora_on
from in_comfyui import difference, error_of, guarded, module, said, same
from native_layouts import IMAGE_LAYOUTS, WAN, Layout
from native_models import LAYOUTS, SUPPORTED, in_fp32, make_model, sample
from probe import facts, probed

WRAPPERS = import_module("comfy.patcher_extension").WrappersMP
HOT = {"blocks.0.ffn.0.weight": 1e5}
CAUSAL = Layout(
    "WAN21_CausalAR_T2V",
    WAN | {"image_model": "wan2.1", "model_type": "t2v", "causal_ar": True},
    latents=(1, 16, 3, 8, 8),
    context=(1, 7, 32),
    hot=HOT,
    cfg=1.0,
)
ANIMATE = Layout(
    "WAN_Animate2",
    WAN | {"image_model": "wan2.1", "model_type": "animate2", "in_dim": 36},
    latents=(1, 16, 3, 8, 8),
    context=(1, 7, 32),
    hot=HOT,
    cfg=1.0,
)
TEXT_TO_VIDEO = Layout(
    "WAN21_T2V", WAN | {"image_model": "wan2.1", "model_type": "t2v"}, (1, 16, 3, 8, 8), (1, 7, 32), hot=HOT
)
HIDREAM, QWEN, SENSENOVA = (
    replace(IMAGE_LAYOUTS[name], cfg=1.0) for name in ("hidream_o1", "qwen_image21", "sensenova")
)


def needs(layout: Layout) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not hasattr(SUPPORTED, layout.config), reason=f"this ComfyUI has no {layout.config}")


REMEMBER = [pytest.param(layout, marks=needs(layout), id=layout.config) for layout in (HIDREAM, QWEN, SENSENOVA)]
TOKENS = {"text_input_ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11]])}
EULER = ("euler", {})


def sampled(
    patcher: Any, layout: Layout, sampler: tuple[str, Any], sigmas: list[float], **conditions: Any
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(layout.latents, generator=generator)
    text = torch.randn(layout.context, generator=generator).to(torch.bfloat16).float()  # the same in each precision
    prompt = [[text, conditions]]
    sampling = import_module("comfy.samplers").ksampler(*sampler), torch.tensor(sigmas)
    given = (*sampling, prompt, prompt, torch.zeros(layout.latents))
    with torch.inference_mode():
        return import_module("comfy.sample").sample_custom(
            patcher, noise, layout.cfg, *given, disable_pbar=True, seed=1
        )


@needs(CAUSAL)
@pytest.mark.parametrize(("hot", "fails", "reruns"), [(False, (), 0), (False, (1, 2, 4), 2), (True, (), 9)])
def test_frames_after_frames_attend_to_what_the_rerun_made_of_those_before(
    hot: bool, fails: tuple[int, ...], reruns: int
) -> None:
    """fails: of the model's calls in half precision, those that come out infinite."""
    how = ("ar_video", {"num_frame_per_block": 1}), [1.0, 0.6, 0.0]
    model = make_model(CAUSAL, hot=hot)
    calls: list[int] = []

    def spoil(_network: torch.nn.Module, _given: Any, result: torch.Tensor) -> torch.Tensor:
        if result.dtype == torch.float32:
            return result
        calls.append(1)
        return result * float("inf") if len(calls) - 1 in fails else result

    model.model.diffusion_model.register_forward_hook(spoil)
    made = sampled(guarded(model), CAUSAL, *how)
    assert (f", {reruns} of 9 calls recomputed in fp32." if reruns else ", all fine.") in said[-1]
    if not reruns:
        assert torch.equal(made, sampled(make_model(CAUSAL), CAUSAL, *how))
    # their keys and values are kept in fp16, as those of a healthy run are
    assert difference(made, sampled(in_fp32(model, CAUSAL), CAUSAL, *how)) <= 2e-3


@needs(HIDREAM)
@pytest.mark.parametrize("hot", [False, True])
def test_a_prompt_that_the_network_remembers_is_not_that_of_a_failed_call(hot: bool) -> None:
    """HiDream-O1 keeps the prompt's keys and values on itself: for later steps, and for later runs."""
    how = EULER, [1.0, 0.7, 0.4, 0.0]
    model = make_model(HIDREAM, hot=hot)
    expected = sampled(in_fp32(model, HIDREAM) if hot else make_model(HIDREAM), HIDREAM, *how, **TOKENS)
    behind = guarded(model)
    for _ in range(2):
        made = sampled(behind, HIDREAM, *how, **TOKENS)
        assert f"3 steps, {'3 recomputed in fp32' if hot else 'all fine'}." in said[-1]
        assert difference(made, expected) <= 1e-5 if hot else torch.equal(made, expected)
    assert len(model.model.diffusion_model._kv_cache_entries) == (0 if hot else 1)


@pytest.mark.parametrize("layout", REMEMBER)
@pytest.mark.parametrize("way", ["fp16", "bf16", "learned", "given up", "another LoRA", "probe"])
def test_a_run_neither_takes_over_nor_leaves_what_another_one_would_compute_otherwise(way: str, layout: Layout) -> None:
    """Of the prompt: in plain fp16, in another precision, with another LoRA."""
    how = layout, EULER, [1.0, 0.7, 0.4, 0.0]
    model, fresh = (make_model(layout, hot=way in ("probe", "learned")) for _ in range(2))
    tokens = {name: torch.ones(shape, dtype=torch.long) for name, shape in layout.ones.items()}  # the probe's

    def run(patcher: Any) -> torch.Tensor:
        if way == "probe":
            return torch.tensor(facts(probed(patcher, layout))["worst"][0]["reach"])
        with_it = lora_on(patcher) if way == "another LoRA" else patcher
        chosen = way if "16" in way else "fp16" if way == "given up" else "inherit"
        with giving_up_at_call_2() if way == "given up" else nullcontext():
            return sampled(guarded(with_it, precision=chosen), *how, **tokens)

    expected = run(fresh)
    plain = sampled(model, *how, **tokens)
    assert torch.equal(run(model), expected)
    if way != "another LoRA":
        assert same(sampled(fresh, *how, **tokens), plain)


@contextmanager
def giving_up_at_call_2() -> Iterator[None]:
    """As where ComfyUI turns out to be another one than is known."""
    runs, calls = module("comfyui_host.runs"), itertools.count(1)
    own = runs.Run._call

    def call(run: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise module("comfyui_host.compat").NotInComfyUI("gone")
        return own(run, *args, **kwargs)

    with patch.object(runs.Run, "_call", call):
        yield


@needs(HIDREAM)
def test_each_of_two_models_that_sample_together_begins_anew() -> None:
    """The other one is called under the first one's guard, and prepared by no wrapper of it."""
    nodes = import_module("comfy_extras.nodes_custom_sampler")
    if not hasattr(nodes, "Guider_DualModel"):
        pytest.skip("this ComfyUI samples with one model")
    main, other = (make_model(HIDREAM) for _ in range(2))
    how = HIDREAM, EULER, [1.0, 0.7, 0.0]
    before = sampled(other, *how, **TOKENS)
    for entry in other.model.diffusion_model._kv_cache_entries:
        entry["kv"] = [tuple(each * torch.nan for each in pair) for pair in entry["kv"]]
    guider = nodes.Guider_DualModel(guarded(main, precision="fp16"), other)
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(HIDREAM.latents, generator=generator)
    prompt = [[torch.randn(HIDREAM.context, generator=generator), dict(TOKENS)]]
    guider.set_conds(prompt, prompt)
    guider.set_cfg(3.0)
    sampler = import_module("comfy.samplers").ksampler("euler", {})
    with torch.inference_mode():
        made = guider.sample(noise, noise * 0, sampler, torch.tensor(how[2]), disable_pbar=True, seed=1)
    assert made.isfinite().all() and "recomputed in fp32" not in said[-1]
    for model in (main, other):
        assert len(model.model.diffusion_model._kv_cache_entries) == 0
    assert same(sampled(other, *how, **TOKENS), before)


@needs(QWEN)
def test_the_rest_of_a_run_without_its_guard_reads_nothing_that_the_guard_made() -> None:
    """Of Qwen-Image 2.1's prompt: in bf16, of a model that computes in fp16."""
    model, made_keys = make_model(QWEN), list[bool]()
    block = model.model.diffusion_model.transformer_blocks[1]
    prompt = QWEN.context[1]
    block.register_forward_hook(lambda _block, given, _made: made_keys.append(given[0].shape[1] == prompt))
    with giving_up_at_call_2():
        sampled(guarded(model, precision="bf16"), QWEN, EULER, [1.0, 0.7, 0.4, 0.0])
    assert made_keys == [True, False, True, False, False]


@pytest.mark.parametrize("layout", REMEMBER)
def test_after_a_black_run_without_a_guard_a_guarded_one_is_right(layout: Layout) -> None:
    """Of the same prompt, whose keys and values are NaN by then."""
    how = layout, EULER, [1.0, 0.7, 0.4, 0.0]
    tokens = {name: torch.ones(shape, dtype=torch.long) for name, shape in layout.ones.items()}
    model = make_model(layout, hot=True)
    assert sampled(model, *how, **tokens).isnan().any()
    made = sampled(guarded(model), *how, **tokens)
    assert difference(made, sampled(in_fp32(model, layout), *how, **tokens)) <= layout.rounds


@needs(SENSENOVA)
@pytest.mark.parametrize("trunk", [False, True])
@pytest.mark.parametrize("weight", ["k_proj", "v_proj", "down_proj"])
def test_a_prefix_that_half_precision_does_not_hold_is_prepared_in_fp32(weight: str, trunk: bool) -> None:
    """trunk: the layers that every step calls overflow too."""
    layout = replace(SENSENOVA, hot={f"text_layers.0.{weight}.weight": 1e5})
    how = layout, EULER, [1.0, 0.6, 0.0]
    tokens = {"text_input_ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11]])}
    model = make_model(layout, hot=True)
    if trunk:
        model.model.diffusion_model.layers[0].up_proj.weight.mul_(1e5)
    plain, exact = (sampled(each, *how, **tokens) for each in (model, in_fp32(model, layout)))
    assert not difference(plain, exact) <= 2e-2
    assert difference(sampled(guarded(model), *how, **tokens), exact) <= layout.rounds
    assert "prepared again in fp32" in said[-1]
    assert not trunk or "2 steps, 2 recomputed in fp32." in said[-1]


@needs(SENSENOVA)
@pytest.mark.parametrize("weight", ["text_layers.0.v_proj", "layers.0.up_proj"])
def test_a_prefix_that_each_call_makes_is_the_reruns_in_a_rerun(weight: str) -> None:
    """SenseNova's, where a hook may patch layers in the midst of a run."""
    layout = replace(SENSENOVA, hot={f"{weight}.weight": 1e5})
    generator = torch.Generator().manual_seed(8)
    shapes = {"down": (4, 192), "up": (64, 4)}
    down, up = (torch.randn(shape, generator=generator) for shape in shapes.values())
    file = {
        f"diffusion_model.layers.1.down_proj.lora_{name}.weight": w for name, w in zip(shapes, (down, up), strict=True)
    }
    hooks = import_module("comfy.hooks").create_hook_lora(lora=file, strength_model=0.1, strength_clip=0.0)
    tokens = {"text_input_ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11]])}
    how = layout, EULER, [1.0, 0.6, 0.0]
    hot = make_model(layout, hot=True)
    twin = in_fp32(hot, layout)
    without, exact = (sampled(twin, *how, **tokens, **more) for more in ({}, {"hooks": hooks}))
    assert not difference(sampled(hot, *how, **tokens, hooks=hooks), exact) <= 2e-2 <= difference(without, exact)
    assert difference(sampled(guarded(hot), *how, **tokens, hooks=hooks), exact) <= 1e-3  # the LoRA is in fp16
    assert "2 steps, 2 recomputed in fp32" in said[-1]


def test_nan_that_a_network_keeps_where_nobody_has_it_forgotten_is_named() -> None:
    """A guard cannot tell what another node keeps there from a cache: it is left, and the run says where it is."""
    model = make_model(TEXT_TO_VIDEO, hot=True)
    network = model.model.diffusion_model
    network.prefix = Prefix(network)
    network.blocks[0].ffn.register_forward_hook(network.prefix.through)
    how = TEXT_TO_VIDEO, EULER, [1.0, 0.6, 0.0]
    assert sampled(model, *how).isnan().any()
    kept = network.prefix.layers[0][0]
    error = error_of(lambda: sampled(guarded(model), *how))
    assert "is NaN or infinite in fp32 too" in error
    assert "the model keeps NaN from before this call, in 'prefix.layers.0.0'" in error
    assert network.prefix.layers[0][0] is kept and kept.isnan().any()
    network.prefix.layers.clear()
    assert sampled(guarded(model), *how).isfinite().all()


@needs(HIDREAM)
def test_nothing_of_a_stopped_run_is_remembered() -> None:
    model = make_model(HIDREAM, hot=True)
    stopped = guarded(model, on_failure="stop")
    assert "set to stop" in error_of(lambda: sampled(stopped, HIDREAM, EULER, [1.0, 0.7, 0.0], **TOKENS))
    assert len(model.model.diffusion_model._kv_cache_entries) == 0


@needs(ANIMATE)
def test_a_cache_beside_the_network_is_filled_by_the_rerun() -> None:
    """Wan-Animate 2's: the pose video's activations, made at the first step."""
    how = EULER, [1.0, 0.6, 0.0]
    conditions = {"pose_video_latent": torch.randn((1, 16, 2, 8, 8), generator=torch.Generator().manual_seed(7))}
    model = make_model(ANIMATE, hot=True)
    exact = sampled(in_fp32(model, ANIMATE), ANIMATE, *how, **conditions)
    cached = import_module("comfy_extras.nodes_wan").WanAnimate2Cache.execute(model, "cpu").args[0]
    for patcher, bound in ((model, 1e-5), (cached, 2e-3)):  # it is kept in fp16
        assert difference(sampled(guarded(patcher), ANIMATE, *how, **conditions), exact) <= bound
        assert "2 steps, 2 recomputed in fp32" in said[-1]


@needs(ANIMATE)
@pytest.mark.parametrize("hot", [False, True])
def test_what_a_cache_had_pinned_for_a_call_that_does_not_count_is_given_back(hot: bool) -> None:
    """As ComfyUI does at a run's end with what it finds in the cache. What was freed before would stay registered."""
    conditions = {"pose_video_latent": torch.randn((1, 16, 2, 8, 8), generator=torch.Generator().manual_seed(7))}
    management, pinned = import_module("comfy.model_management"), dict[int, torch.Tensor]()

    def pin(tensor: torch.Tensor, **_: Any) -> bool:
        return pinned.setdefault(id(tensor), tensor) is tensor

    def unpin(tensor: torch.Tensor) -> bool:
        return pinned.pop(id(tensor)) is tensor

    model = (
        import_module("comfy_extras.nodes_wan").WanAnimate2Cache.execute(make_model(ANIMATE, hot=hot), "cpu").args[0]
    )
    cache = model.model_options["transformer_options"]["animate2_cache"]
    with patch.multiple(management, pin_memory=pin, unpin_memory=unpin):
        begun = list[int]()
        model.model.diffusion_model.register_forward_pre_hook(lambda *_: begun.append(len(pinned)))
        sampled(guarded(model), ANIMATE, EULER, [1.0, 0.6, 0.0], **conditions)
    assert not cache.slots and not pinned and bool(begun[-1]) != hot


@pytest.mark.parametrize("where", ["beside", "on the network"])
def test_what_a_cache_holds_is_not_copied_with_each_call(where: str) -> None:
    """Gigabytes, on the host: of a prompt with a reference picture 2 GB, of 81 frames of poses 13."""
    cache, network = Prefix(torch.nn.Module()), torch.nn.Module()
    cache.layers[0] = [torch.zeros(4)]
    options = {"animate2_cache": cache} if where == "beside" else {}
    network.prefix_cache = cache if where == "on the network" else None
    memory = module("comfyui_host.calls").CallMemory(network, options, torch.float16)
    assert not any(part._tensors for part in (memory._beside, memory._within))
    memory.of_a_call({})
    cache.layers[1] = [cache.layers.pop(0)[0] * torch.nan]
    memory.forget()
    assert [*cache.layers] == [0] and cache.layers[0][0].isfinite().all()


class Prefix:
    """Keys and values that a network computes at its first call, as Qwen-Image 2.1 keeps those of its prefix."""

    __slots__ = ("layers", "network", "slots")

    def __init__(self, network: torch.nn.Module):
        self.layers: dict[int, list[torch.Tensor]] = {}
        self.slots: list[Any] = []
        self.network = network

    def through(self, _layer: torch.nn.Module, _given: Any, result: torch.Tensor) -> torch.Tensor:
        first = self.layers.setdefault(0, [result * 0 + 1])[0]
        return result + first.to(result.dtype)


def test_what_a_network_keeps_in_an_object_is_not_that_of_a_failed_call() -> None:
    """And what it writes to its arguments is not either."""
    hot = make_model(TEXT_TO_VIDEO, hot=True)
    exact = in_fp32(hot, TEXT_TO_VIDEO)
    for network in (hot.model.diffusion_model, exact.model.diffusion_model):
        network.prefix = Prefix(network)
        network.blocks[0].ffn.register_forward_hook(network.prefix.through)
        network.blocks[1].register_forward_pre_hook(lambda _block, given: (given[0].mul_(2), None)[1])
    how = TEXT_TO_VIDEO, EULER, [1.0, 0.6, 0.0]
    made, expected = (sampled(model, *how) for model in (guarded(hot), exact))
    assert "2 steps, 2 recomputed in fp32" in said[-1]
    assert difference(made, expected) <= 1e-5


@pytest.mark.parametrize(
    "how", [{}, {"scope": "learned"}, {"precision": "fp16"}, {"precision": "bf16"}, {"inserted": True}]
)
@pytest.mark.parametrize("hot", [False, True])
def test_what_a_nodes_function_keeps_has_the_dtype_of_a_call_without_a_guard(hot: bool, how: dict[str, Any]) -> None:
    """SDPose's calls a layer of the network with it, once the run has ended."""
    layout = IMAGE_LAYOUTS["sd15"]
    model = make_model(layout, torch.float16, hot=hot)
    kept = marked = torch.ones(3)

    def keep(h: torch.Tensor, hsp: torch.Tensor, _options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal kept
        kept = h.clone()
        return h, hsp * marked.to(hsp.device, hsp.dtype)[0]

    model.set_model_output_block_patch(keep)
    sample(guarded(model, **how), layout)
    assert kept.dtype is torch.float16 and kept.shape != (3,)
    assert marked.dtype is torch.float32, "what it held before stays"


def _mixed(made: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    return made if before is None else made + 0.5 * before.to(made.dtype)


def _in_a_closure(patcher: Any) -> None:
    kept: dict[str, torch.Tensor] = {}

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept["made"] = made = _mixed(executor(*args, **kwargs), kept.get("made"))
        return made

    patcher.add_wrapper_with_key(WRAPPERS.DIFFUSION_MODEL, "cache", wrapper)


def _in_a_variable(patcher: Any) -> None:
    kept: torch.Tensor | None = None

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal kept
        kept = _mixed(executor(*args, **kwargs), kept)
        return kept

    patcher.add_wrapper_with_key(WRAPPERS.DIFFUSION_MODEL, "cache", wrapper)


class Bank:
    kept: torch.Tensor | None = None

    def wrapper(self, executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.kept = _mixed(executor(*args, **kwargs), self.kept)
        return self.kept


def _in_an_object(patcher: Any) -> None:
    patcher.add_wrapper_with_key(WRAPPERS.DIFFUSION_MODEL, "cache", Bank().wrapper)


A_PACK = """
import cache_of_a_pack.state

made_before = None

def in_a_global_variable(executor, *args, **kwargs):
    global made_before
    made_before = mixed(executor(*args, **kwargs), made_before)
    return made_before

def in_another_modules_variable(executor, *args, **kwargs):
    state = cache_of_a_pack.state
    state.made = mixed(executor(*args, **kwargs), state.made)
    return state.made

def on_the_network(executor, *args, **kwargs):
    network = executor.class_obj
    network.made_before = mixed(executor(*args, **kwargs), getattr(network, "made_before", None))
    return network.made_before
"""
ITS_STATE = "made = None"


def _by_a_pack(name: str) -> Any:
    """Puts in a wrapper of another pack, which was just loaded."""

    def put(patcher: Any) -> None:
        for module_name, text in (("cache_of_a_pack.state", ITS_STATE), ("cache_of_a_pack", A_PACK)):
            made: Any = ModuleType(module_name)
            made.__file__, made.mixed = "custom_nodes/cache_of_a_pack", _mixed
            made.state = sys.modules.get("cache_of_a_pack.state")
            sys.modules[module_name] = made
            exec(text, vars(made))
        wrapper = getattr(sys.modules["cache_of_a_pack"], name)
        patcher.add_wrapper_with_key(WRAPPERS.DIFFUSION_MODEL, "cache", wrapper)

    return put


BY_A_PACK = ("in_a_global_variable", "in_another_modules_variable", "on_the_network")


@pytest.mark.parametrize("how", [{}, {"scope": "learned"}, {"precision": "fp16"}, {"inserted": True}])
@pytest.mark.parametrize("put", [_in_a_closure, _in_a_variable, _in_an_object, *map(_by_a_pack, BY_A_PACK)])
def test_what_another_pack_keeps_from_step_to_step_is_what_the_call_that_counts_left(put: Any, how: Any) -> None:
    """As step caches do: in whatever a wrapper of theirs reaches, a failed call's values are put back."""
    layout, model = LAYOUTS["sd15"], make_model(LAYOUTS["sd15"], hot=True)
    exact = in_fp32(model, layout)
    without = sample(exact, layout, steps=4)
    put(exact)
    right = sample(exact, layout, steps=4)
    assert difference(without, right) > 5e-2
    put(model)
    assert difference(sample(guarded(model, **how), layout, steps=4), right) <= 1e-2
