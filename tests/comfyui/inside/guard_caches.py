"""NaN Guard (native) on networks that keep state between calls: a rerun restores the state before the failed call."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from guard_beside import lora_of_a_prompt, lora_on
from in_comfyui import difference, error_of, guarded, module, same, texts, wrapped
from native_layouts import IMAGE_LAYOUTS, WAN, Layout
from native_models import SUPPORTED, in_fp32, make_model, prompts, sample, with_fp32_twin
from probe import facts, probed

TEXT_TO_VIDEO, CAUSAL, ANIMATE = (
    Layout(name, WAN | {"image_model": "wan2.1"} | more, (1, 16, 3, 8, 8), "blocks.0.ffn.0", cfg=cfg)
    for name, more, cfg in [
        ("WAN21_T2V", {"model_type": "t2v"}, 4.0),
        ("WAN21_CausalAR_T2V", {"model_type": "t2v", "causal_ar": True}, 1.0),
        ("WAN_Animate2", {"model_type": "animate2", "in_dim": 36}, 1.0),
    ]
)
HIDREAM, QWEN, SENSENOVA = (
    replace(IMAGE_LAYOUTS[name], cfg=1.0) for name in ("hidream_o1", "qwen_image21", "sensenova")
)


def needs(layout: Layout) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not hasattr(SUPPORTED, layout.config), reason=f"this ComfyUI has no {layout.config}")


WITH_PROMPT_CACHE = [
    pytest.param(layout, marks=needs(layout), id=layout.config) for layout in (HIDREAM, QWEN, SENSENOVA)
]
two_steps = partial(sample, steps=2)


@needs(CAUSAL)
@pytest.mark.parametrize(("hot", "fails", "reruns"), [(False, (), 0), (False, (1, 2, 4), 2), (True, (), 9)])
def test_later_frames_attend_to_recomputed_earlier_frames(hot: bool, fails: tuple[int, ...], reruns: int) -> None:
    """fails: indices of the model's half-precision calls whose result is made infinite."""
    model, calls = make_model(CAUSAL, hot=hot), list[int]()

    def spoil(_network: torch.nn.Module, _given: Any, result: torch.Tensor) -> torch.Tensor:
        if result.dtype == torch.float32:
            return result
        calls.append(1)
        return result * float("inf") if len(calls) - 1 in fails else result

    model.model.diffusion_model.register_forward_hook(spoil)
    made = frame_by_frame(guarded(model))
    assert (f", {reruns} of 9 calls recomputed in fp32." if reruns else ", all fine.") in texts[-1]
    if not reruns:
        assert torch.equal(made, frame_by_frame(make_model(CAUSAL)))
    # keys and values of earlier frames are kept in fp16, as in a healthy run
    assert difference(made, frame_by_frame(in_fp32(model))) <= 2e-3


def frame_by_frame(patcher: Any) -> torch.Tensor:
    noise = torch.randn(CAUSAL.latents, generator=torch.Generator().manual_seed(5))
    sampler = import_module("comfy.samplers").ksampler("ar_video", {"num_frame_per_block": 1})
    given = (patcher, noise, CAUSAL.cfg, sampler, torch.tensor([1.0, 0.6, 0.0]), *prompts(CAUSAL), noise * 0)
    with torch.inference_mode():
        return import_module("comfy.sample").sample_custom(*given, disable_pbar=True, seed=1)


@needs(HIDREAM)
@pytest.mark.parametrize("hot", [False, True])
def test_prompt_cache_of_failed_call_is_not_reused(hot: bool) -> None:
    """HiDream-O1 keeps the prompt's keys and values on the network, for later steps and later runs."""
    model = make_model(HIDREAM, hot=hot)
    expected = sample(in_fp32(model) if hot else make_model(HIDREAM))
    behind = guarded(model)
    for _ in range(2):
        made = sample(behind)
        assert f"3 steps, {'3 recomputed in fp32' if hot else 'all fine'}." in texts[-1]
        assert difference(made, expected) <= 1e-5 if hot else torch.equal(made, expected)
    assert len(model.model.diffusion_model._kv_cache_entries) == (0 if hot else 1)


@pytest.mark.parametrize("layout", WITH_PROMPT_CACHE)
@pytest.mark.parametrize("way", ["fp16", "bf16", "learned", "given up", "another LoRA", "probe"])
def test_prompt_cache_is_not_shared_between_different_runs(way: str, layout: Layout) -> None:
    """The prompt's keys and values differ in plain fp16, in another precision, and with another LoRA."""
    model, fresh = (make_model(layout, hot=way in ("probe", "learned")) for _ in range(2))

    def run(patcher: Any) -> torch.Tensor:
        if way == "probe":
            return torch.tensor(facts(probed(patcher))["worst"][0]["reach"])
        model_to_run = lora_on(patcher) if way == "another LoRA" else patcher
        chosen = way if "16" in way else "fp16" if way == "given up" else "inherit"
        with guard_gives_up_at_call_2() if way == "given up" else nullcontext():
            return sample(guarded(model_to_run, precision=chosen))

    expected, plain = run(fresh), sample(model)
    assert torch.equal(run(model), expected)
    if way != "another LoRA":
        assert same(sample(fresh), plain)


@contextmanager
def guard_gives_up_at_call_2() -> Iterator[None]:
    """Make the guard give up at call 2, as if a function of ComfyUI were missing."""
    runs, calls = module("comfyui_host.runs"), itertools.count(1)
    own = runs.Run._call

    def call(run: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise module("comfyui_host.compat").NotInComfyUI("gone")
        return own(run, *args, **kwargs)

    with patch.object(runs.Run, "_call", call):
        yield


@needs(HIDREAM)
def test_two_models_sampling_together_start_with_empty_prompt_caches() -> None:
    """The second model is called under the first one's guard, and has no wrapper that prepares it."""
    nodes = import_module("comfy_extras.nodes_custom_sampler")
    if not hasattr(nodes, "Guider_DualModel"):
        pytest.skip("this ComfyUI samples with one model")
    main, other = (make_model(HIDREAM) for _ in range(2))
    before = two_steps(other)
    for entry in other.model.diffusion_model._kv_cache_entries:
        entry["kv"] = [tuple(each * torch.nan for each in pair) for pair in entry["kv"]]
    guider = nodes.Guider_DualModel(guarded(main, precision="fp16"), other)
    guider.set_conds(*prompts(HIDREAM))
    guider.set_cfg(3.0)
    noise = torch.randn(HIDREAM.latents, generator=torch.Generator().manual_seed(5))
    sampler, sigmas = import_module("comfy.samplers").ksampler("euler", {}), torch.tensor([1.0, 0.7, 0.0])
    with torch.inference_mode():
        made = guider.sample(noise, noise * 0, sampler, sigmas, disable_pbar=True, seed=1)
    assert made.isfinite().all() and "recomputed in fp32" not in texts[-1]
    for model in (main, other):
        assert len(model.model.diffusion_model._kv_cache_entries) == 0
    assert same(two_steps(other), before)


@needs(QWEN)
def test_prompt_cache_is_remade_when_guard_gives_up_during_run() -> None:
    """The guard computes Qwen-Image 2.1's prompt in bf16; the model computes in fp16."""
    model, made_prompt_keys = make_model(QWEN), list[bool]()
    block = model.model.diffusion_model.transformer_blocks[1]
    block.register_forward_hook(lambda _block, given, _: made_prompt_keys.append(given[0].shape[1] == QWEN.context[1]))
    with guard_gives_up_at_call_2():
        sample(guarded(model, precision="bf16"))
    assert made_prompt_keys == [True, False, True, False, False]


@pytest.mark.parametrize("layout", WITH_PROMPT_CACHE)
def test_guarded_run_after_black_run_is_near_fp32(layout: Layout) -> None:
    """Both runs have the same prompt, whose cached keys and values are NaN after the first run."""
    model = make_model(layout, hot=True)
    assert sample(model).isnan().any()
    assert difference(sample(guarded(model)), sample(in_fp32(model))) <= layout.rounds


@needs(SENSENOVA)
@pytest.mark.parametrize("trunk", [False, True])
@pytest.mark.parametrize("layer", ["k_proj", "v_proj", "down_proj"])
def test_overflowing_prefix_is_prepared_in_fp32(layer: str, trunk: bool) -> None:
    """trunk: layers that run in every step overflow too."""
    model = make_model(replace(SENSENOVA, hot=f"text_layers.0.{layer}"), hot=True)
    if trunk:
        model.model.diffusion_model.get_submodule(SENSENOVA.hot).weight.mul_(SENSENOVA.times)
    plain, exact, made = (two_steps(each) for each in (model, in_fp32(model), guarded(model)))
    assert not difference(plain, exact) <= 2e-2
    assert difference(made, exact) <= SENSENOVA.rounds
    assert "recomputed in fp32" in texts[-1]
    assert not trunk or "2 steps, 2 recomputed in fp32." in texts[-1]


@needs(SENSENOVA)
@pytest.mark.parametrize("layer", ["text_layers.0.v_proj", "layers.0.up_proj"])
def test_prefix_made_in_each_call_is_recomputed_in_rerun(layer: str) -> None:
    """SenseNova makes its prefix in each call if a hook may patch layers during a run."""
    layout = replace(SENSENOVA, hot=layer)
    hooks = lora_of_a_prompt("diffusion_model.layers.1.down_proj", inputs=192, strength=0.1)
    hot, twin = with_fp32_twin(layout, hot=True)
    plain, made, exact = (two_steps(each, hooks=hooks) for each in (hot, guarded(hot), twin))
    assert not difference(plain, exact) <= 2e-2 <= difference(two_steps(twin), exact)
    assert difference(made, exact) <= 1e-3  # the LoRA is in fp16
    assert "2 steps, 2 recomputed in fp32" in texts[-1]


def test_nan_kept_on_network_from_earlier_run_is_named() -> None:
    """A guard cannot tell another node's data on the network from a cache: it keeps the data and the error names it."""
    model = make_model(TEXT_TO_VIDEO, hot=True)
    prefix = Prefix.on(model)
    assert two_steps(model).isnan().any()
    kept = prefix.layers[0][0]
    error = error_of(lambda: two_steps(guarded(model)))
    assert "is NaN or infinite in fp32 too" in error
    assert "the model already held NaN before this call, in 'prefix.layers.0.0'" in error
    assert prefix.layers[0][0] is kept and kept.isnan().any()
    prefix.layers.clear()
    assert two_steps(guarded(model)).isfinite().all()


@needs(HIDREAM)
def test_stopped_run_leaves_no_prompt_cache() -> None:
    model = make_model(HIDREAM, hot=True)
    assert "set to 'stop'" in error_of(lambda: sample(guarded(model, on_failure="stop")))
    assert len(model.model.diffusion_model._kv_cache_entries) == 0


def with_poses(patcher: Any, steps: int = 2) -> torch.Tensor:
    poses = torch.randn((1, 16, 2, 8, 8), generator=torch.Generator().manual_seed(7))
    return sample(patcher, steps=steps, pose_video_latent=poses)


def with_a_cache(patcher: Any) -> Any:
    return import_module("comfy_extras.nodes_wan").WanAnimate2Cache.execute(patcher, "cpu").args[0]


@needs(ANIMATE)
@pytest.mark.parametrize(("scope", "held", "bound"), [("step", [0] * 6, 1e-5), ("learned", [0, 0, 0, 1, 1], 5e-3)])
def test_cache_of_poses_is_emptied_by_rerun(scope: str, held: list[int], bound: float) -> None:
    """Wan-Animate 2 caches the pose video's activations, by its latents in the dtype of the call. held: videos that the
    cache holds before each call; the last step runs twice, since the cache skips layers."""
    model, found = with_a_cache(make_model(ANIMATE, hot=True)), list[int]()
    cache = model.model_options["transformer_options"]["animate2_cache"]
    exact = with_poses(in_fp32(model), steps=3)
    model.model.diffusion_model.register_forward_pre_hook(lambda *_: found.append(len(cache.slots)))
    assert difference(with_poses(guarded(model, scope=scope), steps=3), exact) <= bound
    assert f"3 steps, {'1' if scope == 'learned' else '3'} recomputed in fp32" in texts[-1] and found == held


@needs(ANIMATE)
@pytest.mark.parametrize("hot", [False, True])
def test_memory_pinned_by_failed_call_is_unpinned(hot: bool) -> None:
    """ComfyUI unpins the cache's tensors at the end of a run. Tensors that were freed before would stay pinned."""
    pinned, begun = dict[int, torch.Tensor](), list[int]()

    def pin(tensor: torch.Tensor, **_: Any) -> bool:
        return pinned.setdefault(id(tensor), tensor) is tensor

    def unpin(tensor: torch.Tensor) -> bool:
        return pinned.pop(id(tensor)) is tensor

    model = with_a_cache(make_model(ANIMATE, hot=hot))
    model.model.diffusion_model.register_forward_pre_hook(lambda *_: begun.append(len(pinned)))
    with patch.multiple(import_module("comfy.model_management"), pin_memory=pin, unpin_memory=unpin):
        with_poses(guarded(model))
    cache = model.model_options["transformer_options"]["animate2_cache"]
    assert not cache.slots and not pinned and bool(begun[-1]) != hot


@pytest.mark.parametrize("where", ["outside", "on the network"])
def test_cached_tensors_are_not_copied_with_each_call(where: str) -> None:
    """Caches take gigabytes on the host: 2 GB for a prompt with a reference picture, 13 GB for 81 frames of poses."""
    cache, network = Prefix(torch.nn.Module()), torch.nn.Module()
    cache.layers[0] = [torch.zeros(4)]
    options = {"animate2_cache": cache} if where == "outside" else {}
    network.prefix_cache = cache if where == "on the network" else None
    memory = module("comfyui_host.model_calls").CallMemory(network, options, torch.float16)
    assert not any(part._tensors for part in (memory._beside, memory._within))
    memory.of_a_call({})
    cache.layers[1] = [cache.layers.pop(0)[0] * torch.nan]
    memory.forget()
    assert [*cache.layers] == [0] and cache.layers[0][0].isfinite().all()


class Prefix:
    """Keys and values that a network computes at its first call, like Qwen-Image 2.1's prefix cache."""

    __slots__ = ("layers", "network", "slots")

    def __init__(self, network: torch.nn.Module):
        self.layers: dict[int, list[torch.Tensor]] = {}
        self.slots: list[Any] = []
        self.network = network

    @classmethod
    def on(cls, patcher: Any) -> Prefix:
        network = patcher.model.diffusion_model
        network.prefix = cls(network)
        network.blocks[0].ffn.register_forward_hook(network.prefix.through)
        return network.prefix

    def through(self, _layer: torch.nn.Module, _given: Any, result: torch.Tensor) -> torch.Tensor:
        first = self.layers.setdefault(0, [result * 0 + 1])[0]
        return result + first.to(result.dtype)


def test_object_state_of_network_is_restored_after_failed_call() -> None:
    """Arguments that the network changes in place are restored too."""
    hot, exact = with_fp32_twin(TEXT_TO_VIDEO, hot=True)
    for patcher in (hot, exact):
        Prefix.on(patcher)
        block = patcher.model.diffusion_model.blocks[1]
        block.register_forward_pre_hook(lambda _block, given: (given[0].mul_(2), None)[1])
    made, expected = (two_steps(model) for model in (guarded(hot), exact))
    assert "2 steps, 2 recomputed in fp32" in texts[-1]
    assert difference(made, expected) <= 1e-5


@pytest.mark.parametrize(
    "how", [{}, {"scope": "learned"}, {"precision": "fp16"}, {"precision": "bf16"}, {"inserted": True}]
)
@pytest.mark.parametrize("hot", [False, True])
def test_tensors_kept_by_node_patch_have_dtype_of_unguarded_call(hot: bool, how: dict[str, Any]) -> None:
    """SDPose's node calls a layer of the network with its kept tensor after the run."""
    model = make_model("sd15", hot=hot)
    kept = marked = torch.ones(3)

    def keep(h: torch.Tensor, hsp: torch.Tensor, _options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal kept
        kept = h.clone()
        return h, hsp * marked.to(hsp.device, hsp.dtype)[0]

    model.set_model_output_block_patch(keep)
    sample(guarded(model, **how))
    assert kept.dtype is torch.float16 and kept.shape != (3,)
    assert marked.dtype is torch.float32, "tensors from before the run stay"


@pytest.mark.parametrize("how", [{}, {"scope": "learned"}, {"precision": "fp16"}])
@pytest.mark.parametrize(("hot", "times"), [(True, 1.0), (False, 1e5)])
def test_values_beyond_fp16_that_node_patch_keeps_stay_finite(hot: bool, times: float, how: dict[str, Any]) -> None:
    """A cache of blocks is an example. A hot text stream reaches 1.6e5."""

    def averaging(model: Any) -> Any:
        before: torch.Tensor | None = None

        def block(given: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
            nonlocal before
            made = more["original_block"](given)
            now = made["txt"].float() * times
            made["txt"] = (now if before is None else 0.5 * now + 0.5 * before.float()).div(times).to(made["txt"].dtype)
            before = now
            return made

        model.set_model_patch_replace(block, "dit", "double_block", 1)
        return model

    model, twin = with_fp32_twin("flux", hot=hot)
    assert difference(sample(guarded(averaging(model), **how)), sample(averaging(twin))) <= 5e-3


def _mixed(made: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    return made if before is None else made + 0.5 * before.to(made.dtype)


def in_a_closure() -> Any:
    kept: dict[str, torch.Tensor] = {}

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept["made"] = _mixed(executor(*args, **kwargs), kept.get("made"))
        return kept["made"]

    return wrapper


def in_a_variable() -> Any:
    kept: torch.Tensor | None = None

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal kept
        kept = _mixed(executor(*args, **kwargs), kept)
        return kept

    return wrapper


class Bank:
    kept: torch.Tensor | None = None

    def wrapper(self, executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.kept = _mixed(executor(*args, **kwargs), self.kept)
        return self.kept


def in_an_object() -> Any:
    return Bank().wrapper


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


def _by_a_pack(name: str) -> Any:
    """Return a function that loads another pack and returns its wrapper."""

    def load() -> Any:
        for module_name, text in (("cache_of_a_pack.state", "made = None"), ("cache_of_a_pack", A_PACK)):
            made: Any = ModuleType(module_name)
            made.__file__, made.mixed = "custom_nodes/cache_of_a_pack", _mixed
            made.state = sys.modules.get("cache_of_a_pack.state")
            sys.modules[module_name] = made
            exec(text, vars(made))
        return getattr(sys.modules["cache_of_a_pack"], name)

    return load


BY_A_PACK = map(_by_a_pack, ("in_a_global_variable", "in_another_modules_variable", "on_the_network"))


@pytest.mark.parametrize("how", [{}, {"scope": "learned"}, {"precision": "fp16"}, {"inserted": True}])
@pytest.mark.parametrize("cache", [in_a_closure, in_a_variable, in_an_object, *BY_A_PACK])
def test_state_of_other_packs_is_restored_after_failed_call(cache: Any, how: Any) -> None:
    """Step caches keep tensors in closures, variables, objects or the network. A failed call's values are undone."""
    run = partial(sample, steps=4)
    model, exact = with_fp32_twin("sd15", hot=True)
    without, right = run(exact), run(wrapped(exact, cache()))
    assert difference(without, right) > 5e-2
    assert difference(run(guarded(wrapped(model, cache()), **how)), right) <= 1e-2
