"""LoRA on real diffusers denoisers: as diffusers itself computes it, in a shell that shares the weights."""

from __future__ import annotations

import copy
import functools
import json
import pickle

import diffusers
import pytest
import torch
from comfyui_onediff_guard.pipelines import lora
from comfyui_onediff_guard.pipelines.compile import BackendChoice, compiled
from comfyui_onediff_guard.pipelines.errors import BadLora
from comfyui_onediff_guard.pipelines.families import COGVIDEOX, COGVIEW3PLUS, COGVIEW4, SVD
from comfyui_onediff_guard.pipelines.folder import inspect
from comfyui_onediff_guard.pipelines.lora import Lora, check_lora, skeleton, with_loras
from comfyui_onediff_guard.precision.folding import fold
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tiers import drawn
from torch._dynamo.utils import counters

# peft's, at each adapter after the first that diffusers loads
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:Adapter 'default'")
COMMON = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3, "time_embed_dim": 32}
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.2"]


@functools.cache
def video_model(**config):
    """(CogVideoX denoiser, one call's arguments)"""
    config |= {"max_text_seq_length": 6, "sample_height": 8, "sample_width": 12, "sample_frames": 9}
    inputs, angles = {}, torch.linspace(0, 3, 3 * 4 * 6 * 16).reshape(-1, 16)
    if config.get("use_rotary_positional_embeddings"):
        inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
    return made(diffusers.CogVideoXTransformer3DModel, config, (2, 3, 16, 8, 12), inputs)


@functools.cache
def picture_model():
    """(CogView4 denoiser, one call's arguments)"""
    pixels = torch.tensor([[64.0, 96.0]] * 2)
    inputs = {"original_size": pixels, "target_size": pixels, "crop_coords": torch.zeros(2, 2)}
    config = {"condition_dim": 8, "pos_embed_max_size": 8}
    return made(diffusers.CogView4Transformer2DModel, config, (2, 16, 8, 12), inputs)


def made(cls, config, latents, inputs):
    torch.manual_seed(0)
    inputs |= {"hidden_states": torch.randn(latents), "encoder_hidden_states": torch.randn(2, 6, 24)}
    inputs |= {"timestep": torch.tensor([700, 700]), "return_dict": False}
    return cls(**COMMON, **config, text_embed_dim=24).eval().requires_grad_(False), inputs


ROTARY = {"use_rotary_positional_embeddings": True}
MODELS = {
    "CogVideoX-2B": (video_model, COGVIDEOX, diffusers.CogVideoXPipeline),
    "CogVideoX-5B": (lambda: video_model(**ROTARY), COGVIDEOX, diffusers.CogVideoXPipeline),
    "CogView4": (picture_model, COGVIEW4, diffusers.CogView4Pipeline),
}
denoiser, call = video_model()
INDUCTOR = BackendChoice("inductor", "asked for")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(denoiser, seed=…, metadata=…, **config of peft) → a LoRA file as diffusers' training scripts save it"""
    folder = tmp_path_factory.mktemp("loras")

    @functools.cache
    def lora(model=denoiser, seed=1, metadata=False, targets=tuple(TARGETS), **config):
        student = copy.deepcopy(model)
        torch.manual_seed(seed)
        config = {"r": 4, "lora_alpha": 4, "init_lora_weights": False, "target_modules": list(targets)} | config
        student.add_adapter(LoraConfig(**config))
        name = f"number{len(list(folder.iterdir()))}.safetensors"
        settings = student.peft_config["default"].to_dict() if metadata else None
        diffusers.CogVideoXPipeline.save_lora_weights(  # CogView4's does the same
            folder,
            transformer_lora_layers=get_peft_model_state_dict(student),
            weight_name=name,
            transformer_lora_adapter_metadata=settings,
        )
        return folder / name

    return lora


def by_diffusers(model, pipeline, paths, scales, call=call):
    """The output of diffusers' own pipe.load_lora_weights and pipe.set_adapters."""
    model = copy.deepcopy(model)
    parts = {"tokenizer": None, "text_encoder": None, "vae": None, "scheduler": diffusers.CogVideoXDDIMScheduler()}
    pipe = pipeline(transformer=model, **parts)
    for path in paths:
        pipe.load_lora_weights(path.parent, weight_name=path.name, adapter_name=path.stem)
    pipe.set_adapters([path.stem for path in paths], scales)
    return model.eval()(**call)[0]  # diffusers leaves a LoRA's dropout on


def ours(paths, scales, model=denoiser, family=COGVIDEOX):
    return with_loras(model, [Lora(path, scale) for path, scale in zip(paths, scales, strict=True)], family)


@pytest.mark.parametrize("scale", [1.0, 0.25, -0.7, 3.0])
@pytest.mark.parametrize("name", MODELS)
def test_fp32_is_bit_equal_to_diffusers_and_to_the_fold(name, scale, trained):
    make, family, pipeline = MODELS[name]
    model, inputs = make()
    path = trained(model)
    shell = ours([path], [scale], model, family)
    found = shell(**inputs)[0]
    assert torch.equal(found, by_diffusers(model, pipeline, [path], [scale], inputs))
    assert not torch.equal(found, model(**inputs)[0])
    assert torch.equal(fold(shell, family.stream, 6)(**inputs)[0], found)


@settings(max_examples=drawn(8, 2), suppress_health_check=list(HealthCheck))
@given(scales=st.tuples(*[st.floats(-4, 4, width=32).filter(bool)] * 2), metadata=st.booleans())
def test_two_loras_each_have_their_own_scale(scales, metadata, trained):
    paths = [trained(metadata=metadata, r=3, lora_alpha=6), trained(seed=2, targets=("to_q", "ff.net.2"))]
    expected = by_diffusers(denoiser, diffusers.CogVideoXPipeline, paths, list(scales))
    assert torch.equal(ours(paths, scales)(**call)[0], expected)


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": 16},
        {"r": 8, "rank_pattern": {"to_q": 2, "transformer_blocks.1.attn1.to_v": 3}, "lora_alpha": 8},
        {"alpha_pattern": {"to_k": 1, "ff.net.2": 9}},
        {"use_rslora": True, "lora_alpha": 8},
        {"lora_bias": True},
        {"lora_dropout": 0.5},
        {"targets": ("patch_embed.proj", "proj_out", "norm1.linear", "ff.net.0.proj")},
    ],
    ids=lambda config: "-".join(config),
)
def test_what_a_files_header_says_of_scaling_is_honoured(config, trained):
    path = trained.__wrapped__(metadata=True, **config)  # dictionaries cannot be keys of its cache
    found = ours([path], [0.5])(**call)[0]
    assert torch.equal(found, by_diffusers(denoiser, diffusers.CogVideoXPipeline, [path], [0.5]))


def rewritten(path, tmp_path, rename, extra=None):
    return saved(tmp_path, {rename(key): tensor for key, tensor in load_file(path).items()} | (extra or {}))


def kohya(key):
    layer, _, half = key.removeprefix("transformer.").partition(".lora_")
    return f"lora_unet__{layer.replace('.', '_')}.lora_{'down' if half.startswith('A') else 'up'}.weight"


@pytest.mark.parametrize(
    "rename",
    [
        kohya,
        lambda key: key.removeprefix("transformer."),
        lambda key: key.replace("transformer.", "diffusion_model.", 1),
        lambda key: f"base_model.model.{key.removeprefix('transformer.')}",
        lambda key: key.replace("lora_A", "lora.down").replace("lora_B", "lora.up"),
    ],
    ids=["kohya", "bare", "comfyui", "peft", "old diffusers"],
)
def test_other_ways_of_naming_the_same_layers_are_read(rename, trained, tmp_path):
    path = trained()
    expected = ours([path], [0.5])(**call)[0]
    assert torch.equal(ours([rewritten(path, tmp_path, rename)], [0.5])(**call)[0], expected)


def test_of_two_names_that_fit_a_layer_the_first_is_taken_as_peft_does(trained):
    for pattern in ({"to_k": 1, "0.attn1.to_k": 9}, {"0.attn1.to_k": 9, "to_k": 1}):
        path = trained.__wrapped__(metadata=True, alpha_pattern=pattern)
        assert torch.equal(
            ours([path], [1.0])(**call)[0], by_diffusers(denoiser, diffusers.CogVideoXPipeline, [path], [1.0])
        )


@pytest.mark.parametrize("name", ["(a+)+$", "(.*)*to_k|x", ".*", "to_k|to_v", "no_layer", "^", "", "k" * 5000])
def test_an_alpha_for_what_is_no_layer_is_refused_and_never_run_as_a_pattern(name, trained, tmp_path):
    """peft runs each as a regular expression on each layer's name: one of these takes minutes there."""
    file = header(trained(), tmp_path, r=4, lora_alpha=4, alpha_pattern={name: 1.0})
    with pytest.raises(BadLora, match=r"its header has an alpha for '.*', which is no layer of this model"):
        check_lora(file, COGVIDEOX, denoiser)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora_alpha": 1e300}, "lora_alpha is 1e.300: input should be less than or equal to 1000000"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"lora_alpha": 1, "alpha_pattern": {"to_k": "9"}}, "alpha_pattern.to_k is 9: input should be a valid number"),
        ({"lora_alpha": 1, "alpha_pattern": ["to_k"]}, "alpha_pattern is .*input should be an object"),
        ({"use_rslora": "yes"}, "use_rslora is yes: input should be a valid boolean"),
        ({"init_lora_weights": {"a": 1}}, "init_lora_weights"),
        ({"init_lora_weights": "<b>pissa"}, "weights changed by '<b>pissa'"),
    ],
)
def test_settings_of_other_kinds_or_beyond_bounds_are_refused(settings, said, trained, tmp_path):
    with pytest.raises(BadLora, match=said):
        check_lora(header(trained(), tmp_path, r=4, **settings), COGVIDEOX, denoiser)


def test_alphas_in_a_file_are_honoured_layer_by_layer(trained, tmp_path):
    path = trained()
    layers = sorted({key[len("transformer.") : key.index(".lora_")] for key in load_file(path)})
    alphas = {layer: 2.0 + index for index, layer in enumerate(layers[:-1])}  # the last has none: alpha = rank
    extra = {f"lora_unet__{layer.replace('.', '_')}.alpha": torch.tensor(alpha) for layer, alpha in alphas.items()}
    shell = ours([rewritten(path, tmp_path, kohya, extra)], [3.0])
    scaling = {layer: shell.get_submodule(layer).scaling["lora_0"] for layer in layers}
    assert scaling == {layer: 3 * alphas.get(layer, 4.0) / 4 for layer in layers}


def test_no_lora_and_scale_0_are_the_denoiser_itself(trained):
    assert with_loras(denoiser, [], COGVIDEOX) is denoiser
    assert ours([trained(), trained(seed=2)], [0.0, -0.0]) is denoiser
    one, same = ours([trained(), trained(seed=2)], [0.0, 0.5]), ours([trained(seed=2)], [0.5])
    assert torch.equal(one(**call)[0], same(**call)[0])


def test_a_scale_that_is_no_number_is_refused(tmp_path):
    for scale in (float("nan"), float("inf")):
        with pytest.raises(BadLora, match=rf"is {scale}, and must be a finite number"):
            Lora(tmp_path, scale)


def test_the_original_is_not_touched(trained):
    def state():
        return {name: (id(m), type(m), {*m.__dict__}, [*m._modules]) for name, m in denoiser.named_modules()}

    paths = [trained(), trained(seed=2)]
    before, weights = state(), copy.deepcopy(denoiser.state_dict())
    expected, random = denoiser(**call)[0], torch.get_rng_state()
    shell = ours(paths, [1.0, 2.0])
    assert torch.equal(torch.get_rng_state(), random), "a seed set by the user still holds"
    shell(**call)
    assert state() == before and list(denoiser.state_dict()) == list(weights)
    assert all(torch.equal(weights[name], tensor) for name, tensor in denoiser.state_dict().items())
    assert not hasattr(denoiser, "peft_config") and not denoiser._hf_peft_config_loaded
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in denoiser.modules())
    assert torch.equal(denoiser(**call)[0], expected)


def test_no_weight_is_copied_and_what_is_added_is_the_file_alone(trained):
    path = trained()
    with torch.inference_mode():  # as in ComfyUI
        shell = ours([path], [1.0])
    own = dict(denoiser.named_parameters())
    shared = {id(p): p.data_ptr() for p in shell.parameters() if any(p is q for q in own.values())}
    assert shared == {id(p): p.data_ptr() for p in own.values()}
    added = sum(p.numel() for p in shell.parameters() if id(p) not in shared)
    assert added == sum(tensor.numel() for tensor in load_file(path).values())
    assert not any(p.requires_grad or p.is_meta or p.is_inference() for p in shell.parameters())
    assert not any(module.training for module in shell.modules())


@pytest.mark.parametrize("target", [torch.float64, "meta"])
def test_weights_that_are_moved_or_cast_are_so_in_both(target, trained):
    model = copy.deepcopy(denoiser)
    shell = ours([trained(model)], [1.0], model)
    model.to(target)
    for name, weight in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        layer = shell.get_submodule(layer)
        assert getattr(getattr(layer, "base_layer", layer), kind) is weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_fp32_rerun_of_a_half_shell_is_the_float_shell(dtype, trained):
    half = copy.deepcopy(denoiser).to(dtype)
    shell = ours([trained(), trained(seed=2)], [0.8, -1.5], half)
    assert {p.dtype for p in shell.parameters()} == {dtype}
    inputs = call | {name: call[name].to(dtype) for name in ("hidden_states", "encoder_hidden_states")}
    floats = call | {name: inputs[name].float() for name in ("hidden_states", "encoder_hidden_states")}
    expected = copy.deepcopy(shell).float()(**floats)[0]
    assert torch.equal(run_in_fp32(shell, **inputs)[0], expected)
    assert shell(**inputs)[0].dtype == dtype
    folded = fold(shell, COGVIDEOX.stream, 3)
    assert torch.equal(run_in_fp32(folded, **inputs)[0], expected)


def test_every_scale_is_honoured_when_compiled_and_they_share_one_graph(trained):
    torch.compiler.reset()
    before, outputs = counters["stats"]["unique_graphs"], []
    for scale in (1.0, -0.5, 2.5, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 1.1):  # more than dynamo's limit on recompiles
        shell = ours([trained()], [scale])
        outputs.append(compiled(shell, COGVIDEOX.blocks, INDUCTOR)(**call)[0])
        torch.testing.assert_close(outputs[-1], shell(**call)[0], atol=1e-5, rtol=1e-5)
    assert min((a - b).abs().max() for i, a in enumerate(outputs) for b in outputs[:i]) > 1e-3
    assert counters["stats"]["unique_graphs"] - before == 1


def test_compiled_and_folded_and_unloaded(trained):
    shell = ours([trained()], [0.5])
    folded = compiled(fold(shell, COGVIDEOX.stream, 4), COGVIDEOX.blocks, INDUCTOR)
    torch.testing.assert_close(folded(**call)[0], shell(**call)[0], atol=1e-5, rtol=1e-5)
    plain = compiled(denoiser, COGVIDEOX.blocks, INDUCTOR)(**call)[0]
    torch.testing.assert_close(plain, denoiser(**call)[0], atol=1e-5, rtol=1e-5)


def test_a_whole_diffusers_run_is_bit_equal(model_folder, trained):
    pipe = diffusers.CogVideoXPipeline.from_pretrained(model_folder("5b"))
    pipe.set_progress_bar_config(disable=True)
    path = trained(pipe.transformer)

    def run():
        options = {"width": 64, "height": 48, "num_frames": 9, "num_inference_steps": 2, "output_type": "pt"}
        return pipe("a lighthouse", generator=torch.Generator().manual_seed(3), **options).frames

    original = pipe.transformer
    plain = run()
    pipe.transformer = with_loras(original, [Lora(path, 0.5)], COGVIDEOX)
    found = run()
    pipe.transformer = original  # unloaded
    assert torch.equal(run(), plain)
    pipe.load_lora_weights(path.parent, weight_name=path.name, adapter_name="theirs")
    pipe.set_adapters("theirs", 0.5)
    assert torch.equal(found, run())
    assert not torch.equal(found, plain)


def test_a_file_is_checked_before_any_weight_is_loaded(model_folder, trained):
    folder = model_folder("5b")
    empty = skeleton(inspect(folder, COGVIDEOX))
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    check_lora(trained(diffusers.CogVideoXTransformer3DModel.from_pretrained(folder / "transformer")), COGVIDEOX, empty)
    with pytest.raises(BadLora, match="for another model"):
        check_lora(trained(), COGVIDEOX, empty)


def halves(layer, inputs=32, outputs=32, rank=2):
    return {f"{layer}.lora_A.weight": (rank, inputs), f"{layer}.lora_B.weight": (outputs, rank)}


BLOCK = "transformer.transformer_blocks.0"
FOREIGN = {
    "SD": ({"lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": (2, 8)}, "Stable Diffusion's or SDXL's"),
    "SDXL": ({"unet.up_blocks.0.attentions.0.proj_in.lora.down.weight": (2, 8)}, "Stable Diffusion's or SDXL's"),
    "Flux": (halves("transformer.single_transformer_blocks.0.attn.to_q"), "Flux's"),
    "Flux by kohya": ({"lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": (2, 8)}, "Flux's"),
    "Wan": (halves("diffusion_model.blocks.0.self_attn.q"), "Wan's"),
    "Wan by diffusers": (halves("transformer.blocks.0.attn1.to_q"), "Wan's"),
    "HunyuanVideo": (halves("transformer.double_blocks.0.img_attn_qkv"), "HunyuanVideo's"),
    "SD3": (halves(f"{BLOCK}.attn.to_q"), "Stable Diffusion 3's"),
    "LTX-Video": (halves(f"{BLOCK}.attn1.to_q") | halves(f"{BLOCK}.attn2.to_q"), "LTX-Video's"),
    "text encoder": (halves("text_encoder.encoder.block.0.layer.0.SelfAttention.q"), "a text encoder's"),
    "SAT": ({"transformer.layers.0.attention.query_key_value.matrix_A.0.lora": (2, 8)}, "CogVideoX's in SAT's format"),
    "deeper": (halves(f"{BLOCK}.attn1.to_q") | halves(BLOCK[:-1] + "41.attn1.to_q"), "block 42, and this model has 3"),
    "5B's width": (halves(f"{BLOCK}.attn1.to_q", 3072, 3072), "width of 3072 is that of CogVideoX-5B or 1.5-5B"),
    "2B's width": (halves(f"{BLOCK}.attn1.to_k", 1920, 1920), r"\[rank, 32\] fits. Its width of 1920 is that of Cog"),
    "output": (halves(f"{BLOCK}.ff.net.2", 128, 64), r"\[64, 2\], where \[32, rank\] fits"),
    "unknown": (
        halves("transformer.something"),
        "no place for 2 tensors, such as 'transformer.something.lora_A.weight'",
    ),
    "partly another's": (halves(f"{BLOCK}.attn1.to_q") | halves("text_encoder.q"), "no place for 2 tensors"),
    "a norm": (halves(f"{BLOCK}.norm1.norm"), "no place for 2 tensors"),
    "rank 0": (halves(f"{BLOCK}.attn1.to_q", rank=0), "fits"),
    "half": ({f"{BLOCK}.attn1.to_q.lora_A.weight": (2, 32)}, "lacks a half of 1 tensor"),
    "no LoRA": ({f"{BLOCK}.attn1.to_q.weight": (32, 32)}, "holds no LoRA, but 1 tensor"),
    "empty": ({}, "holds no LoRA, but nothing"),
    "DoRA": ({f"{BLOCK}.attn1.to_q.lora_magnitude_vector": (32,)}, "is a DoRA, LoKr or LoHa"),
    "LoKr": ({f"{BLOCK}.attn1.to_q.lokr_w1": (2, 2)}, "is a DoRA, LoKr or LoHa"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_another_models_lora_is_refused_by_its_keys(case, tmp_path):
    shapes, message = FOREIGN[case]
    path = saved(tmp_path, {key: torch.zeros(shape) for key, shape in shapes.items()})
    with pytest.raises(BadLora, match=rf"^'changed.safetensors' .*{message}"):
        with_loras(denoiser, [Lora(path, 0.0)], COGVIDEOX)


def changed(path, tmp_path, value=None, metadata=None):
    """The file with another first tensor, or another header."""
    tensors = load_file(path)
    first = next(iter(tensors))
    if value is not None:
        tensors[first] = torch.full_like(tensors[first], value)
    return saved(tmp_path, tensors, {"lora_adapter_metadata": metadata} if metadata else None)


def saved(tmp_path, tensors, metadata=None):
    save_file(tensors, tmp_path / "changed.safetensors", metadata=metadata)
    return tmp_path / "changed.safetensors"


def header(path, tmp_path, **settings):
    return changed(path, tmp_path, metadata=json.dumps({f"transformer.{key}": v for key, v in settings.items()}))


def written(path, content):
    path.write_bytes(content)
    return path


BROKEN = {
    "pickled": (lambda _, folder: written(folder / "lora.pt", pickle.dumps({})), "'lora.pt' is no safetensors file"),
    "truncated": (lambda path, folder: written(folder / "a.safetensors", path.read_bytes()[:-9]), "not whole. Downl"),
    "missing": (lambda _, folder: folder / "gone.safetensors", "gone.safetensors' is not there"),
    "NaN": (lambda *where: changed(*where, value=float("nan")), "is damaged: '.*' holds values that are not finite"),
    "PiSSA": (lambda *where: header(*where, r=4, init_lora_weights="pissa_niter_4"), "changed by 'pissa_niter_4'"),
    "DoRA": (lambda *where: header(*where, r=4, use_dora=True), "is a DoRA"),
    "alpha": (lambda *where: header(*where, r=4, lora_alpha="4"), "lora_alpha is 4: input should be a valid number"),
    "list": (lambda *where: changed(*where, metadata="[1]"), "where an object belongs"),
    "JSON": (lambda *where: changed(*where, metadata="{"), "cannot be read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_is_refused(case, trained, tmp_path):
    make, message = BROKEN[case]
    weights = copy.deepcopy(denoiser.state_dict())
    with pytest.raises(BadLora, match=message):
        with_loras(denoiser, [Lora(make(trained(), tmp_path))], COGVIDEOX)
    assert all(torch.equal(weights[name], tensor) for name, tensor in denoiser.state_dict().items())


@pytest.mark.parametrize("name", ["a.SAFETENSORS", "a.SafeTensors"])
def test_a_name_in_capitals_is_not_read_as_a_pickle(name, trained, tmp_path, monkeypatch):
    """diffusers tells the formats apart by the ending, as it is written."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("read as a pickle"))
    path = trained()
    file = written(tmp_path / name, path.read_bytes())
    assert torch.equal(ours([file], [0.5])(**call)[0], ours([path], [0.5])(**call)[0])


def test_a_file_that_is_damaged_after_the_check_is_refused(trained, tmp_path, monkeypatch):
    file = written(tmp_path / "a.safetensors", trained().read_bytes())
    loader = lora._loader
    monkeypatch.setattr(lora, "check_lora", lambda *_: None)
    monkeypatch.setattr(lora, "_loader", lambda family: written(file, file.read_bytes()[:-9]) and loader(family))
    with pytest.raises(BadLora, match=r"'a.safetensors' cannot be read .*Download it again"):
        lora.read_lora(file, COGVIDEOX, denoiser)


def test_a_value_beyond_fp16_is_refused_there_alone(trained, tmp_path):
    lora = Lora(changed(trained(), tmp_path, value=1e5))
    with_loras(denoiser, [lora], COGVIDEOX)
    with pytest.raises(BadLora, match=r"reaches 1e\+05, which does not fit torch.float16. Choose precision"):
        with_loras(copy.deepcopy(denoiser).half(), [lora], COGVIDEOX)


@pytest.mark.parametrize("family", [COGVIEW3PLUS, SVD], ids=lambda family: family.name)
def test_a_family_that_diffusers_has_no_lora_for_is_named(family, trained):
    with pytest.raises(BadLora, match=rf"has no LoRA for {family.name}"):
        check_lora(trained(), family, denoiser)
