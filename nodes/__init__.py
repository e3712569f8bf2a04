"""The node catalogue."""

from __future__ import annotations

from .compile import OneDiffCompile
from .decode import DecodeLatents
from .encode import EncodePrompt
from .guard import NaNGuard
from .load import LoadCogVideoX, LoadCogView3Plus, LoadCogView4, LoadStableVideoDiffusion
from .lora import LoadLoRA
from .native import NaNGuardModel, NaNGuardVAE, NumericsProbeModel
from .probe import NumericsProbe
from .report import PrecisionReport
from .sample import SampleCogVideoX, SampleCogVideoXFromImage, SampleCogVideoXFromVideo
from .sample_image import SampleCogView
from .sample_svd import SampleStableVideoDiffusion
from .warm_up import WarmUp

NODE_CLASS_MAPPINGS: dict[str, type] = {
    "OneDiffGuardLoadCogVideoX": LoadCogVideoX,
    "OneDiffGuardEncodePrompt": EncodePrompt,
    "OneDiffGuardNaNGuard": NaNGuard,
    "OneDiffGuardSampleCogVideoX": SampleCogVideoX,
    "OneDiffGuardDecodeLatents": DecodeLatents,
    "OneDiffGuardPrecisionReport": PrecisionReport,
    "OneDiffGuardSampleCogVideoXFromImage": SampleCogVideoXFromImage,
    "OneDiffGuardSampleCogVideoXFromVideo": SampleCogVideoXFromVideo,
    "OneDiffGuardLoadCogView3Plus": LoadCogView3Plus,
    "OneDiffGuardLoadCogView4": LoadCogView4,
    "OneDiffGuardSampleCogView": SampleCogView,
    "OneDiffGuardLoadStableVideoDiffusion": LoadStableVideoDiffusion,
    "OneDiffGuardSampleStableVideoDiffusion": SampleStableVideoDiffusion,
    "OneDiffGuardLoadLoRA": LoadLoRA,
    "OneDiffGuardNumericsProbe": NumericsProbe,
    "OneDiffGuardNaNGuardModel": NaNGuardModel,
    "OneDiffGuardNaNGuardVAE": NaNGuardVAE,
    "OneDiffGuardNumericsProbeModel": NumericsProbeModel,
    "OneDiffGuardCompile": OneDiffCompile,
    "OneDiffGuardWarmUp": WarmUp,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "OneDiffGuardLoadCogVideoX": "Load CogVideoX",
    "OneDiffGuardEncodePrompt": "Encode Prompt",
    "OneDiffGuardNaNGuard": "NaN Guard",
    "OneDiffGuardSampleCogVideoX": "Sample CogVideoX",
    "OneDiffGuardDecodeLatents": "Decode Latents",
    "OneDiffGuardPrecisionReport": "Precision Report",
    "OneDiffGuardSampleCogVideoXFromImage": "Sample CogVideoX from Image",
    "OneDiffGuardSampleCogVideoXFromVideo": "Sample CogVideoX from Video",
    "OneDiffGuardLoadCogView3Plus": "Load CogView3-Plus",
    "OneDiffGuardLoadCogView4": "Load CogView4",
    "OneDiffGuardSampleCogView": "Sample CogView",
    "OneDiffGuardLoadStableVideoDiffusion": "Load Stable Video Diffusion",
    "OneDiffGuardSampleStableVideoDiffusion": "Sample Stable Video Diffusion",
    "OneDiffGuardLoadLoRA": "Load LoRA",
    "OneDiffGuardNumericsProbe": "Numerics Probe",
    "OneDiffGuardNaNGuardModel": "NaN Guard (MODEL)",
    "OneDiffGuardNaNGuardVAE": "NaN Guard (VAE)",
    "OneDiffGuardNumericsProbeModel": "Numerics Probe (MODEL)",
    "OneDiffGuardCompile": "OneDiff Compile",
    "OneDiffGuardWarmUp": "Warm Up",
}
