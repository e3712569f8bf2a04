"""NaN Guard (native) on small VAEs of ComfyUI's own, in the layouts of SD1.5 and SVD, whole and tiled."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_comfyui import difference, error_of, node, on, texts
from native_models import HOT_DECODER, HOT_ENCODER, make_vae, vae_in_fp32

TILES = {"tile_x": 4, "tile_y": 4, "overlap": 1}
PIXEL_TILES = {"tile_x": 32, "tile_y": 32, "overlap": 8}


def latents(frames: int = 1) -> torch.Tensor:
    """Return latents with fp16 values: ComfyUI casts them before the VAE, guarded or not."""
    return torch.randn((frames, 4, 6, 6), generator=torch.Generator().manual_seed(3)).half().float()


def pixels() -> torch.Tensor:
    return torch.randint(257, (1, 48, 48, 3), generator=torch.Generator().manual_seed(4)) / 256


CALLS: dict[str, Callable[[Any], torch.Tensor]] = {
    "decode": lambda vae: vae.decode(latents()),
    "decode tiled": lambda vae: vae.decode_tiled(latents(), **TILES),
    "encode": lambda vae: vae.encode(pixels()),
    "encode tiled": lambda vae: vae.encode_tiled(pixels(), **PIXEL_TILES),
}
decode = CALLS["decode"]


def guarded(vae: Any, **policy: Any) -> Any:
    return node("vae", vae, **policy)


@torch.inference_mode()
def run(call: Callable[[Any], torch.Tensor], vae: Any) -> torch.Tensor:
    return call(vae)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS)
def test_healthy_vae_is_bit_equal_with_guard(call: str, dtype: torch.dtype) -> None:
    vae = make_vae(dtype)
    plain, made = (run(CALLS[call], each) for each in (vae, guarded(vae)))
    assert plain.isfinite().all() and torch.equal(plain, made)
    (report,) = texts  # one report for any number of tiles
    assert report.splitlines()[0].endswith(" fine.")


@pytest.mark.parametrize("call", CALLS)
def test_overflowing_vae_is_recomputed_bit_equal_to_fp32(call: str) -> None:
    vae = make_vae(torch.float16, HOT_DECODER | HOT_ENCODER)
    assert torch.isnan(run(CALLS[call], vae)).all()
    made, exact = (run(CALLS[call], each) for each in (guarded(vae), vae_in_fp32(vae)))
    assert torch.equal(made, exact)
    part = call.split()[0]
    counts = re.search(r"(\d+) parts?, (\d+) recomputed in fp32", texts[-1])
    assert counts and counts[1] == counts[2]
    assert (int(counts[1]) > 1) is ("tiled" in call)
    assert texts[-1].startswith(f"VAE {part}r: AutoencoderKL runs in fp16")
    assert f"'{part}r.mid.block_1.conv1' reaches" in texts[-1]
    in_bf16, protected = (run(CALLS[call], guarded(vae, precision=precision)) for precision in ("bf16", "fp16"))
    assert (protected - exact).norm() <= (in_bf16 - exact).norm() / 4
    assert "; overflow protection; " in texts[-1] and texts[-1].splitlines()[0].endswith(" fine.")


def test_svd_decoder_is_recomputed_bit_equal_to_fp32() -> None:
    vae = make_vae(torch.float16, HOT_DECODER, temporal=True)
    exact = vae_in_fp32(vae, temporal=True)
    plain, made, right = (run(lambda vae: vae.decode(latents(frames=3)), each) for each in (vae, guarded(vae), exact))
    assert torch.isnan(plain).all()
    assert torch.equal(made, right)


def test_only_some_tiles_are_recomputed_for_one_overflow() -> None:
    """One tile of a picture overflows: the others stay in half precision."""
    vae, hot = make_vae(torch.float16), latents()
    hot[..., :2, :2] = 6e4
    plain, made, exact = (
        run(lambda vae: vae.decode_tiled(hot, **TILES), each) for each in (vae, guarded(vae), vae_in_fp32(vae))
    )
    assert torch.isnan(plain).any() and not torch.isnan(plain).all()
    assert difference(made, exact) <= 2e-2
    counts = re.search(r"(\d+) parts, (\d+) recomputed in fp32", texts[-1])
    assert counts and 0 < int(counts[2]) < int(counts[1])


def test_input_vae_is_not_changed() -> None:
    vae = make_vae(torch.float16, HOT_DECODER)
    run(decode, vae)
    before = _state(vae)
    clone = guarded(vae)
    run(decode, clone)
    assert before == _state(vae)
    assert torch.isnan(run(decode, vae)).all()
    assert torch.isnan(run(decode, guarded(clone, on_failure="off"))).all()  # the last guard decides
    assert _pointers(vae) == _pointers(clone)
    assert isinstance(clone, type(vae)) and isinstance(clone.first_stage_model, type(vae.first_stage_model))


def _mirrored(network: torch.nn.Module) -> None:
    """Set mirrored padding, as packs for seamless pictures do."""
    for layer in network.modules():
        if isinstance(layer, torch.nn.Conv2d) and layer.padding[0]:
            layer.padding_mode, layer._reversed_padding_repeated_twice = "reflect", [1, 1, 1, 1]  # pyright: ignore


def _whole_copy(vae: Any) -> Any:
    made = copy.deepcopy(vae)
    _mirrored(made.first_stage_model)
    return made


def _other_network(vae: Any) -> Any:
    made = copy.copy(vae)
    made.first_stage_model = copy.deepcopy(vae.first_stage_model).to(
        vae.device
    )  # the patcher only loads its own network
    _mirrored(made.first_stage_model)
    return made


def _network_of_the_patcher(vae: Any) -> Any:
    """Copy as ComfyUI's Select VAE Device does."""
    made = copy.copy(vae)
    made.patcher = vae.patcher.clone()
    made.first_stage_model = made.patcher.model
    made.output_device, made.process_output = torch.device("cpu"), torch.tanh
    return made


def _set_on_network(vae: Any) -> Any:
    """Change the network as LTX's Decoder Noise does."""
    made = copy.copy(vae)
    made.first_stage_model.post_quant_conv = torch.nn.Sequential(made.first_stage_model.post_quant_conv, Negated())
    return made


def _replaced_on_network(vae: Any) -> Any:
    made = copy.copy(vae)
    network = made.first_stage_model = copy.copy(vae.first_stage_model)
    decode = network.decode
    network.decode = lambda z: decode(-z)
    return made


def _method_of_the_class(vae: Any) -> Any:
    made = copy.copy(vae)
    decode = vae.decode.__func__
    made.decode = lambda z: 1 - decode(made, z)
    return made


class Negated(torch.nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return -z


CHANGES = (_whole_copy, _other_network, _network_of_the_patcher, _set_on_network, _replaced_on_network)


@pytest.mark.parametrize("inserted", [False, True], ids=["wired", "every workflow"])
@pytest.mark.parametrize("change", [*CHANGES, _method_of_the_class])
def test_changes_of_later_nodes_to_guarded_vae_are_kept(change: Callable[[Any], Any], inserted: bool) -> None:
    """The decoded picture has the change, as without the guard, and is guarded."""
    for of, reference in ((make_vae(torch.float16), None), (make_vae(torch.float16, HOT_DECODER), vae_in_fp32)):
        exact = run(decode, change(reference(of) if reference else copy.deepcopy(of)))
        plain = run(decode, of)
        made = run(decode, change(node("vae", of, inserted=inserted)))
        assert torch.equal(made, exact) and not torch.equal(made, plain)
        assert reference is None or inserted or "recomputed in fp32" in texts[-1]


@pytest.mark.parametrize("change", CHANGES)
def test_guard_after_changed_vae_replaces_earlier_guard(change: Callable[[Any], Any]) -> None:
    vae = make_vae(torch.float16, HOT_DECODER)
    exact = run(decode, change(vae_in_fp32(vae)))
    before = guarded(vae, on_failure="stop")
    assert torch.equal(run(decode, guarded(change(before))), exact)
    (report,) = [line for line in texts if " parts" in line or " part," in line][-1:]
    assert "recomputed in fp32" in report


class Wrapper(torch.nn.Module):
    """Delegate attributes to the network, as a compiled network does."""

    def __init__(self, network: torch.nn.Module):
        super().__init__()
        self.network = network

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "network" else getattr(self.network, name)


class InstanceMethods(torch.nn.Module):
    """Have the methods only on the instance."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network
        self.decode, self.encode = network.decode, network.encode


NETWORKS: dict[str, Callable[[Any], Any]] = {
    "compiled": lambda network: torch.compile(network, backend="eager"),
    "delegating wrapper": Wrapper,
    "instance methods": InstanceMethods,
}


@pytest.mark.parametrize("inserted", [False, True], ids=["wired", "every workflow"])
@pytest.mark.parametrize("before", [True, False], ids=["before the guard", "after the guard"])
@pytest.mark.parametrize("of", NETWORKS.values(), ids=NETWORKS)
def test_wrapped_vae_network_is_recomputed_near_fp32(of: Callable[[Any], Any], before: bool, inserted: bool) -> None:
    vae = make_vae(torch.float16, HOT_DECODER)
    exact = run(decode, vae_in_fp32(vae))
    changed = vae if before else node("vae", vae, inserted=inserted)
    changed.first_stage_model = of(changed.first_stage_model)
    made = run(decode, node("vae", vae, inserted=inserted) if before else changed)
    assert difference(made, exact) < 1e-5


def test_later_changes_to_input_vae_do_not_reach_guarded_vae() -> None:
    """Another node changes the input VAE on an unguarded branch, or changes the guarded VAE and restores it."""
    vae = make_vae(torch.float16, HOT_DECODER)
    exact, made = run(decode, vae_in_fp32(vae)), guarded(vae)
    vae.first_stage_model.decode = lambda z: z
    assert torch.equal(run(decode, made), exact)
    del vae.first_stage_model.decode
    network = made.first_stage_model
    before, network.decode = network.decode, lambda z: z
    network.decode = before
    assert torch.equal(run(decode, made), exact)
    assert torch.isnan(run(decode, vae)).all()


def test_subclass_of_guarded_vae_is_guarded_again() -> None:
    vae = make_vae(torch.float16, HOT_DECODER)
    exact, made = run(decode, vae_in_fp32(vae)), guarded(vae, on_failure="stop")
    for each in (made, made.first_stage_model):
        each.__class__ = type("Theirs", (type(each),), {})
    assert torch.equal(run(decode, guarded(made)), exact)


def _pointers(vae: Any) -> list[int]:
    return [weight.data_ptr() for weight in vae.get_sd().values()]


def _state(vae: Any) -> list[Any]:
    layers = list(vae.first_stage_model.modules())
    hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in layers]
    return [sorted(vars(vae)), [sorted(vars(layer)) for layer in layers], hooks, _pointers(vae)]


def test_guard_follows_on_failure_and_scope() -> None:
    hot = make_vae(torch.float16, HOT_DECODER)
    stopped = error_of(lambda: run(decode, guarded(hot, on_failure="stop")))
    assert "vae decode, call 1" in stopped and "set to 'stop'" in stopped
    assert torch.isnan(run(decode, guarded(hot, on_failure="off"))).all()
    step, whole = (run(CALLS["decode tiled"], guarded(hot, scope=scope)) for scope in ("step", "run"))
    assert torch.equal(step, whole)


def test_broken_weight_latents_or_vae_is_named_in_error() -> None:
    hot, broken, single = make_vae(torch.float16, HOT_DECODER), make_vae(torch.float16), make_vae(torch.float32)
    broken.first_stage_model.decoder.conv_in.weight[0, 0] = torch.nan
    assert "the weight 'decoder.conv_in.weight' holds" in error_of(lambda: run(decode, guarded(broken)))
    nan = torch.full((1, 4, 6, 6), torch.nan)
    for vae in (hot, single):
        error = error_of(lambda vae=vae: run(lambda vae: vae.decode(nan), guarded(vae)))
        assert "holds 144 NaN or infinite values, made by the stage before it" in error
    replaced, empty = copy.copy(hot), copy.copy(hot)
    replaced.decode, empty.first_stage_model = hot.decode, None
    assert error_of(lambda: guarded(replaced)).startswith("BadInput: Another node has replaced this VAE's 'decode'")
    assert error_of(lambda: guarded(empty)).startswith("BadInput: This checkpoint has no VAE")


@pytest.mark.parametrize(("working", "dtype"), [([torch.float32], "fp32"), ([torch.bfloat16, torch.float32], "fp16")])
def test_auto_keeps_fp32_only_vae_in_fp32(working: list[Any], dtype: str) -> None:
    """VAEs for sound are always in fp32. Others are in fp32 only on some cards."""
    vae = make_vae(torch.float32)
    vae.working_dtypes = working
    plain = run(decode, vae)
    with on("sm75"):
        made = run(decode, guarded(vae, precision="auto"))
    assert dtype in texts[-1].splitlines()[0]
    assert torch.equal(made, plain) is (dtype == "fp32")


@pytest.mark.parametrize("missing", ["encode", "decode"])
def test_vae_with_own_methods_is_left_unguarded_with_reason(missing: str, caplog: pytest.LogCaptureFixture) -> None:
    vae = make_vae(torch.float16)
    has = "decode" if missing == "encode" else "encode"
    vae.first_stage_model = type("OctreeGaussianDecoder", (torch.nn.Module,), {has: lambda self, x: x})()
    assert guarded(vae) is vae
    assert "Not guarded: The NaN Guard does not support OctreeGaussianDecoder" in caplog.text
