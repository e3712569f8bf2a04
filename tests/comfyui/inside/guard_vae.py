"""NaN Guard (native) on ComfyUI's own small VAEs: SD1.5's layout and SVD's, whole and tiled."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_comfyui import difference, error_of, node, on, said
from native_models import HOT_DECODER, HOT_ENCODER, make_vae, vae_in_fp32

TILES = {"tile_x": 4, "tile_y": 4, "overlap": 1}
PIXEL_TILES = {"tile_x": 32, "tile_y": 32, "overlap": 8}


def latents(frames: int = 1) -> torch.Tensor:
    """Such that fp16 holds them: ComfyUI casts them before the VAE, guarded or not."""
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
def test_a_healthy_vae_is_the_same_to_the_bit(call: str, dtype: torch.dtype) -> None:
    vae = make_vae(dtype)
    plain, made = (run(CALLS[call], each) for each in (vae, guarded(vae)))
    assert plain.isfinite().all() and torch.equal(plain, made)
    (told,) = said  # whatever the number of tiles
    assert told.splitlines()[0].endswith(" fine.")


@pytest.mark.parametrize("call", CALLS)
def test_a_vae_that_overflows_is_broken_without_and_right_with_it(call: str) -> None:
    vae = make_vae(torch.float16, HOT_DECODER | HOT_ENCODER)
    assert torch.isnan(run(CALLS[call], vae)).all()
    made, exact = (run(CALLS[call], each) for each in (guarded(vae), vae_in_fp32(vae)))
    assert torch.equal(made, exact)
    part = call.split()[0]
    counts = re.search(r"(\d+) parts?, (\d+) recomputed in fp32", said[-1])
    assert counts and counts[1] == counts[2]
    assert (int(counts[1]) > 1) is ("tiled" in call)
    assert said[-1].startswith(f"VAE {part}r: AutoencoderKL computes in fp16")
    assert f"'{part}r.mid.block_1.conv1' reaches" in said[-1]
    in_bf16, protected = (run(CALLS[call], guarded(vae, precision=precision)) for precision in ("bf16", "fp16"))
    assert (protected - exact).norm() <= (in_bf16 - exact).norm() / 4
    assert "; overflow protection; " in said[-1] and said[-1].splitlines()[0].endswith(" fine.")


def test_svds_decoder_is_guarded_over_all_frames() -> None:
    vae = make_vae(torch.float16, HOT_DECODER, temporal=True)
    exact = vae_in_fp32(vae, temporal=True)
    plain, made, right = (run(lambda vae: vae.decode(latents(frames=3)), each) for each in (vae, guarded(vae), exact))
    assert torch.isnan(plain).all()
    assert torch.equal(made, right)


def test_one_bad_tile_costs_one_tile() -> None:
    """One tile of a picture leaves the range: the others stay in half precision."""
    vae, hot = make_vae(torch.float16), latents()
    hot[..., :2, :2] = 6e4
    plain, made, exact = (
        run(lambda vae: vae.decode_tiled(hot, **TILES), each) for each in (vae, guarded(vae), vae_in_fp32(vae))
    )
    assert torch.isnan(plain).any() and not torch.isnan(plain).all()
    assert difference(made, exact) <= 2e-2
    counts = re.search(r"(\d+) parts, (\d+) recomputed in fp32", said[-1])
    assert counts and 0 < int(counts[2]) < int(counts[1])


def test_the_vae_that_went_in_is_not_changed() -> None:
    vae = make_vae(torch.float16, HOT_DECODER)
    run(decode, vae)
    before = _state(vae)
    clone = guarded(vae)
    run(decode, clone)
    assert before == _state(vae)
    assert torch.isnan(run(decode, vae)).all()
    assert torch.isnan(run(decode, guarded(clone, on_failure="off"))).all()  # the last node counts
    assert _pointers(vae) == _pointers(clone)
    assert isinstance(clone, type(vae)) and isinstance(clone.first_stage_model, type(vae.first_stage_model))


def _mirrored(network: torch.nn.Module) -> None:
    """As packs for seamless pictures have it."""
    for layer in network.modules():
        if isinstance(layer, torch.nn.Conv2d) and layer.padding[0]:
            layer.padding_mode, layer._reversed_padding_repeated_twice = "reflect", [1, 1, 1, 1]  # pyright: ignore


def _whole_copy(vae: Any) -> Any:
    made = copy.deepcopy(vae)
    _mirrored(made.first_stage_model)
    return made


def _other_network(vae: Any) -> Any:
    made = copy.copy(vae)
    made.first_stage_model = copy.deepcopy(vae.first_stage_model).to(vae.device)  # the patcher loads its own alone
    _mirrored(made.first_stage_model)
    return made


def _network_of_the_patcher(vae: Any) -> Any:
    """As ComfyUI's Select VAE Device has it."""
    made = copy.copy(vae)
    made.patcher = vae.patcher.clone()
    made.first_stage_model = made.patcher.model
    made.output_device, made.process_output = torch.device("cpu"), torch.tanh
    return made


def _set_on_network(vae: Any) -> Any:
    """As LTX's Decoder Noise has it."""
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
def test_what_another_node_makes_of_a_guarded_vae_counts(change: Callable[[Any], Any], inserted: bool) -> None:
    """Whatever it copies and changes, what is decoded is as without the guard, and guarded."""
    for of, reference in ((make_vae(torch.float16), None), (make_vae(torch.float16, HOT_DECODER), vae_in_fp32)):
        exact = run(decode, change(reference(of) if reference else copy.deepcopy(of)))
        plain = run(decode, of)
        made = run(decode, change(node("vae", of, inserted=inserted)))
        assert torch.equal(made, exact) and not torch.equal(made, plain)
        assert reference is None or inserted or "recomputed in fp32" in said[-1]


@pytest.mark.parametrize("change", CHANGES)
def test_a_guard_behind_such_a_node_replaces_the_one_before_it(change: Callable[[Any], Any]) -> None:
    vae = make_vae(torch.float16, HOT_DECODER)
    exact = run(decode, change(vae_in_fp32(vae)))
    before = guarded(vae, on_failure="stop")
    assert torch.equal(run(decode, guarded(change(before))), exact)
    (told,) = [line for line in said if " parts" in line or " part," in line][-1:]
    assert "recomputed in fp32" in told


class Wrapper(torch.nn.Module):
    """Hands on what it is asked for, as a compiled network does."""

    def __init__(self, network: torch.nn.Module):
        super().__init__()
        self.network = network

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "network" else getattr(self.network, name)


class Own(torch.nn.Module):
    """Has methods of its instance alone."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network
        self.decode, self.encode = network.decode, network.encode


NETWORKS: dict[str, Callable[[Any], Any]] = {
    "compiled": lambda network: torch.compile(network, backend="eager"),
    "handed on": Wrapper,
    "of its instance": Own,
}


@pytest.mark.parametrize("inserted", [False, True], ids=["wired", "every workflow"])
@pytest.mark.parametrize("before", [True, False], ids=["before the guard", "after it"])
@pytest.mark.parametrize("of", NETWORKS.values(), ids=NETWORKS)
def test_a_network_in_another_is_guarded(of: Callable[[Any], Any], before: bool, inserted: bool) -> None:
    vae = make_vae(torch.float16, HOT_DECODER)
    exact = run(decode, vae_in_fp32(vae))
    changed = vae if before else node("vae", vae, inserted=inserted)
    changed.first_stage_model = of(changed.first_stage_model)
    made = run(decode, node("vae", vae, inserted=inserted) if before else changed)
    assert difference(made, exact) < 1e-5


def test_what_is_set_on_the_vae_itself_later_is_its_own() -> None:
    """Another node of the workflow, on a branch without the guard, or on the guarded one and put back."""
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


def test_a_class_that_another_pack_derives_from_a_guarded_one_is_guarded_anew() -> None:
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


def test_what_the_policy_says_is_done() -> None:
    hot = make_vae(torch.float16, HOT_DECODER)
    stopped = error_of(lambda: run(decode, guarded(hot, on_failure="stop")))
    assert "vae decode, call 1" in stopped and "set to stop" in stopped
    assert torch.isnan(run(decode, guarded(hot, on_failure="off"))).all()
    step, whole = (run(CALLS["decode tiled"], guarded(hot, scope=scope)) for scope in ("step", "run"))
    assert torch.equal(step, whole)


def test_what_no_precision_helps_is_named() -> None:
    hot, broken, single = make_vae(torch.float16, HOT_DECODER), make_vae(torch.float16), make_vae(torch.float32)
    broken.first_stage_model.decoder.conv_in.weight[0, 0] = torch.nan
    assert "the weight 'decoder.conv_in.weight' holds" in error_of(lambda: run(decode, guarded(broken)))
    nan = torch.full((1, 4, 6, 6), torch.nan)
    for vae in (hot, single):
        error = error_of(lambda vae=vae: run(lambda vae: vae.decode(nan), guarded(vae)))
        assert "holds 144 NaN or infinite values already" in error
    replaced, empty = copy.copy(hot), copy.copy(hot)
    replaced.decode, empty.first_stage_model = hot.decode, None
    assert error_of(lambda: guarded(replaced)).startswith("BadInput: Another node has replaced this VAE's 'decode'")
    assert error_of(lambda: guarded(empty)).startswith("BadInput: There is no VAE in this checkpoint")


@pytest.mark.parametrize(("working", "dtype"), [([torch.float32], "fp32"), ([torch.bfloat16, torch.float32], "fp16")])
def test_auto_leaves_a_vae_in_fp32_that_comfyui_computes_in_nothing_less(working: list[Any], dtype: str) -> None:
    """As those for sound are. Others are in fp32 on some cards alone."""
    vae = make_vae(torch.float32)
    vae.working_dtypes = working
    plain = run(decode, vae)
    with on("sm75"):
        made = run(decode, guarded(vae, precision="auto"))
    assert dtype in said[-1].splitlines()[0]
    assert torch.equal(made, plain) is (dtype == "fp32")


@pytest.mark.parametrize("lacks", ["encode", "decode"])
def test_a_vae_with_methods_of_its_own_is_left_as_it_is_with_the_reason(
    lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    vae = make_vae(torch.float16)
    has = "decode" if lacks == "encode" else "encode"
    vae.first_stage_model = type("OctreeGaussianDecoder", (torch.nn.Module,), {has: lambda self, x: x})()
    assert guarded(vae) is vae
    assert "Not guarded: OctreeGaussianDecoder decodes by methods of its own" in caplog.text
