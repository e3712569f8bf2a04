"""Two small families of ComfyUI after 0.33, made of ComfyUI's own layers, that keep state like the originals.

Qwen-Image 2.1 keeps a prompt's keys and values in a plain object on its network, for one sampling run. Its BaseModel
clears them when ComfyUI sets `current_patcher`, at the start and end of a run. SenseNova U1.5 makes its keys and values
when ComfyUI prepares conditions, with other layers than those of every step.

Only ComfyUI's interpreter imports this module, after its options have been read.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

BASE: Any = import_module("comfy.model_base")
CONDS: Any = import_module("comfy.conds")
EXTENSION: Any = import_module("comfy.patcher_extension")
LAYERS: Any = import_module("comfy.ldm.flux.layers")
OPS: Any = import_module("comfy.ops")
adaln: Any = import_module("comfy.quant_ops").ck.adaln
attention: Any = import_module("comfy.ldm.modules.attention").optimized_attention
rotated: Any = import_module("comfy.ldm.flux.math").apply_rope1
TIME = 32


class Network(torch.nn.Module):
    """The interface that ComfyUI needs of a network."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor, timesteps: Any, context: Any = None, *, transformer_options: Any, **more: Any):
        wrappers = EXTENSION.get_all_wrappers(EXTENSION.WrappersMP.DIFFUSION_MODEL, transformer_options)
        executor = EXTENSION.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, timesteps, context, transformer_options, **more)


def positions(first: Any, count: int) -> torch.Tensor:
    """Return positions of a row's tokens, from `first` on."""
    return (first[:, None] + torch.arange(count)[None])[..., None].float()


# --- Qwen-Image 2.1 ---------------------------------------------------------------------------------------------------


class PrefixCache:
    """One slot for each prompt. Each call reads through two buffers, which it overwrites."""

    def __init__(self, device: torch.device):
        self.store_device, self.slots, self.slot = device, list[dict[str, Any]](), dict[str, Any]()
        self._staging: dict[Any, list[torch.Tensor]] = {}

    def select(self, key: torch.Tensor) -> None:
        found = [slot for slot in self.slots if torch.equal(slot["key"], key.to(self.store_device))]
        self.slot = found[0] if found else {"key": key.clone().to(self.store_device), "blocks": {}}
        self.slots = [*(slot for slot in self.slots if slot is not self.slot), self.slot]

    def filled(self, blocks: int) -> bool:
        return len(self.slot["blocks"]) == blocks

    def put(self, block: int, made: torch.Tensor) -> None:
        self.slot["blocks"][block] = made.to(self.store_device, copy=True)

    def take(self, block: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        kept = self.slot["blocks"][block]
        key = tuple(kept.shape), dtype
        if key not in self._staging:
            self._staging[key] = [torch.empty(kept.shape, dtype=dtype, device=device) for _ in range(2)]
        return self._staging[key][block % 2].copy_(kept)

    def free(self) -> None:
        self.slots, self.slot, self._staging = [], {}, {}


class QwenBlock(torch.nn.Module):
    def __init__(self, dim: int, heads: int, ops: Any, **how: Any):
        super().__init__()
        self.heads = heads
        self.norm1 = ops.LayerNorm(dim, elementwise_affine=False, **how)
        self.norm2 = ops.LayerNorm(dim, elementwise_affine=False, **how)
        self.to_q, self.to_k, self.to_v, self.to_out = (ops.Linear(dim, dim, bias=False, **how) for _ in range(4))
        self.norm_q, self.norm_k = (ops.RMSNorm(dim // heads, **how) for _ in range(2))
        self.gate_up = ops.Linear(dim, 6 * dim, bias=False, **how)
        self.out = ops.Linear(3 * dim, dim, bias=False, **how)

    def forward(self, x: torch.Tensor, modulation: Any, attend: Any) -> torch.Tensor:
        scale1, gate1, scale2, gate2 = modulation
        given = _modulated(self.norm1, x, scale1)
        q, k, v = (to(given).unflatten(-1, (self.heads, -1)) for to in (self.to_q, self.to_k, self.to_v))
        x.addcmul_(self.to_out(attend(self.norm_q(q), self.norm_k(k), v)), gate1)
        fed = self.gate_up(_modulated(self.norm2, x, scale2))
        x.addcmul_(OPS.linear_input_act(self.out, fed, "swiglu"), gate2)
        return x.clip(-65504, 65504) if x.dtype is torch.float16 else x


def _modulated(norm: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return adaln(x, scale, torch.zeros_like(scale[:1]), norm.eps)


class QwenImage21Network(Network):
    def __init__(
        self, *, in_channels: int, dim: int, num_layers: int, heads: int, context_dim: int, operations: Any, **how: Any
    ):
        super().__init__(how["dtype"])
        ops: Any = operations
        self.img_in = ops.Linear(in_channels, dim, bias=False, **how)
        self.txt_norm = ops.RMSNorm(context_dim, **how)
        self.txt_in = ops.Linear(context_dim, dim, bias=False, **how)
        self.time_in = ops.Linear(TIME, dim, **how)
        self.modulation = ops.Linear(dim, 4 * dim, bias=False, **how)
        self.transformer_blocks = torch.nn.ModuleList(QwenBlock(dim, heads, ops, **how) for _ in range(num_layers))
        self.norm_out = ops.LayerNorm(dim, elementwise_affine=False, **how)
        self.proj_out = ops.Linear(dim, in_channels, bias=False, **how)
        self.heads, self.prefix_cache, self.prefix_cache_enabled = heads, None, False

    def reset_prefix_cache(self, enabled: bool) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.free()
        self.prefix_cache, self.prefix_cache_enabled = None, enabled

    def _cache(self, x: torch.Tensor, context: torch.Tensor) -> PrefixCache:
        cache = self.prefix_cache or PrefixCache(x.device)
        if self.prefix_cache_enabled:
            self.prefix_cache = cache
        shape = torch.tensor([context.shape[1], *x.shape[-2:]], dtype=torch.float32, device=x.device)
        cache.select(torch.cat([shape.expand(len(context), -1), context.float().flatten(1)], 1))
        return cache

    def _forward(self, x: torch.Tensor, timesteps: Any, context: Any, transformer_options: Any, **_: Any):
        prefix, target = self.txt_in(self.txt_norm(context)), self.img_in(x.flatten(2).mT)
        times = torch.cat([timesteps, timesteps.new_zeros(1)])  # a prompt's time is 0, so it is equal in all steps
        time = self.time_in(LAYERS.timestep_embedding(times, TIME).to(x.dtype))
        rows = self.modulation(functional.silu(time)).unsqueeze(1).chunk(4, -1)
        scale1, gate1, scale2, gate2 = rows[0], rows[1].tanh(), rows[2], rows[3].tanh()
        cache = self._cache(x, context)
        filled = cache.filled(len(self.transformer_blocks))
        for index, block in enumerate(self.transformer_blocks):

            def keep(q: Any, k: Any, v: Any, index: int = index) -> torch.Tensor:
                cache.put(index, torch.stack([k, v], 1))
                mask = torch.full((q.shape[1], k.shape[1]), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
                return self._attention(q, k, v, transformer_options, mask=mask)

            def read(q: Any, k: Any, v: Any, index: int = index) -> torch.Tensor:
                before_k, before_v = cache.take(index, x.device, q.dtype).unbind(1)
                k, v = torch.cat([before_k, k], 1), torch.cat([before_v, v], 1)
                return self._attention(q, k, v, transformer_options)

            transformer_options["block_index"] = index
            if not filled:
                prefix = block(prefix, [row[-1:] for row in (scale1, gate1, scale2, gate2)], keep)
            target = block(target, [row[:-1] for row in (scale1, gate1, scale2, gate2)], read)
        return self.proj_out(_modulated(self.norm_out, target, scale1[:-1])).mT.reshape(x.shape)

    def _attention(self, q: Any, k: Any, v: Any, options: Any, **more: Any) -> torch.Tensor:
        q, k, v = (each.flatten(2) for each in (q, k, v))
        return attention(q, k, v, self.heads, transformer_options=options, **more)


class QwenImage21(BASE.BaseModel):
    def __init__(self, config: Any, device: Any = None):
        super().__init__(config, BASE.ModelType.FLUX, device=device, unet_model=QwenImage21Network)

    @property
    def current_patcher(self) -> Any:
        return self._current_patcher

    @current_patcher.setter
    def current_patcher(self, patcher: Any) -> None:
        self._current_patcher = patcher
        if (network := getattr(self, "diffusion_model", None)) is not None:
            network.current_patcher = patcher
            network.reset_prefix_cache(patcher is not None and not patcher.hook_patches)


# --- SenseNova U1.5 ---------------------------------------------------------------------------------------------------


class SenseNovaLayer(torch.nn.Module):
    """A layer for prompts, or for pictures."""

    def __init__(self, dim: int, heads: int, ops: Any, **how: Any):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (ops.RMSNorm(dim, **how) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (ops.Linear(dim, dim, bias=False, **how) for _ in range(4))
        self.gate_proj, self.up_proj = (ops.Linear(dim, 3 * dim, bias=False, **how) for _ in range(2))
        self.down_proj = ops.Linear(3 * dim, dim, bias=False, **how)

    def forward(self, x: torch.Tensor, rotations: Any, before: Any, mask: Any, options: Any) -> Any:
        given = self.norm1(x)
        q, k, v = (to(given).unflatten(-1, (self.heads, -1)) for to in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        q, k = rotated(q, rotations), rotated(k, rotations)
        if before is not None:
            k, v = torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)
        x = x + self.o_proj(attention(q, k, v, self.heads, mask=mask, skip_reshape=True, transformer_options=options))
        fed = self.norm2(x)
        return x + self.down_proj(functional.silu(self.gate_proj(fed)) * self.up_proj(fed)), k, v


class SenseNovaNetwork(Network):
    def __init__(self, *, dim: int, num_layers: int, heads: int, tokens: int, operations: Any, **how: Any):
        super().__init__(how["dtype"])
        ops: Any = operations
        self.embed_tokens = ops.Embedding(tokens, dim, **how)
        self.vision = ops.Conv2d(3, dim, 2, 2, **how)
        self.time_in = ops.Linear(TIME, dim, **how)
        self.text_layers, self.layers = (
            torch.nn.ModuleList(SenseNovaLayer(dim, heads, ops, **how) for _ in range(num_layers)) for _ in range(2)
        )
        self.norm = ops.RMSNorm(dim, **how)
        self.fm_head = ops.Conv2d(dim, 12, 1, **how)
        self.rope = LAYERS.EmbedND(dim=dim // heads, theta=10000, axes_dim=[dim // heads])

    def preprocess_prefix(self, text_input_ids: torch.Tensor, transformer_options: Any = None) -> tuple[Any, ...]:
        prefix, (rows, length) = self.embed_tokens(text_input_ids), text_input_ids.shape
        mask = torch.full((length, length), -torch.inf, dtype=prefix.dtype, device=prefix.device).triu(1)
        rotations = self.rope(positions(torch.zeros(rows), length).to(prefix.device))
        keys, values = [], []
        for layer in self.text_layers:
            prefix, key, value = layer(prefix, rotations, None, mask, transformer_options or {})
            keys.append(key)
            values.append(value)
        return keys, values, torch.full((rows,), length, dtype=torch.long, device=prefix.device)

    def _forward(
        self,
        x: torch.Tensor,
        timesteps: Any,
        context: Any,
        transformer_options: Any,
        text_input_ids: Any = None,
        prefix_keys: Any = None,
        prefix_values: Any = None,
        prefix_time: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        if prefix_keys is None:
            made = self.preprocess_prefix(text_input_ids, transformer_options)
            prefix_keys, prefix_values, prefix_time = made
        made = self.vision(x)
        shape, made = made.shape, made.flatten(2).mT
        made = made + self.time_in(LAYERS.timestep_embedding(timesteps, TIME).to(made.dtype))[:, None]
        rotations = self.rope(positions(prefix_time.cpu(), made.shape[1]).to(x.device))
        for index, (layer, *before) in enumerate(zip(self.layers, prefix_keys, prefix_values, strict=True)):
            transformer_options["block_index"] = index
            made, _, _ = layer(made, rotations, before, None, transformer_options)
        made = self.fm_head(self.norm(made).mT.reshape(shape))
        return functional.pixel_shuffle(made, 2)


class SharedRegular(CONDS.CONDRegular):
    """One condition for all rows of a batch."""

    def process_cond(self, batch_size: int, **_: Any) -> Any:
        return self._copy_with(self.cond)


class SharedList(CONDS.CONDList):
    process_cond = SharedRegular.process_cond


class SenseNovaU15(BASE.BaseModel):
    def __init__(self, config: Any, device: Any = None):
        super().__init__(config, BASE.ModelType.FLOW, device=device, unet_model=SenseNovaNetwork)

    def extra_conds(self, **given: Any) -> dict[str, Any]:
        made, ids = super().extra_conds(**given), given["text_input_ids"]
        if given.get("hooks") is not None:  # hooks may patch layers during a run
            return made | {"text_input_ids": SharedRegular(ids)}
        keys, values, time = self.diffusion_model.preprocess_prefix(ids.to(given["device"]))
        kept = {"prefix_keys": SharedList(keys), "prefix_values": SharedList(values)}
        return made | kept | {"prefix_time": SharedRegular(time)}


# --- as ComfyUI finds them --------------------------------------------------------------------------------------------


def config(name: str, model: type, channels: int) -> type:
    """Make a family's class for comfy.supported_models."""
    latents = type("Latents", (import_module("comfy.latent_formats").LatentFormat,), {"latent_channels": channels})
    own = {"unet_extra_config": {}, "sampling_settings": {"shift": 1.0, "multiplier": 1000.0}, "latent_format": latents}
    own["get_model"] = lambda self, *_, device=None: model(self, device)
    return type(name, (import_module("comfy.supported_models_base").BASE,), own)


SmallQwenImage21 = config("SmallQwenImage21", QwenImage21, 16)
SmallSenseNovaU15 = config("SmallSenseNovaU15", SenseNovaU15, 3)
