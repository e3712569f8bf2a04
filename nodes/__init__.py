"""The node catalogue."""

from __future__ import annotations

from .decode import DecodeLatents
from .encode import EncodePrompt
from .guard import NaNGuard
from .load import LoadCogVideoX
from .report import PrecisionReport
from .sample import SampleCogVideoX

NODE_CLASS_MAPPINGS: dict[str, type] = {
    "OneDiffGuardLoadCogVideoX": LoadCogVideoX,
    "OneDiffGuardEncodePrompt": EncodePrompt,
    "OneDiffGuardNaNGuard": NaNGuard,
    "OneDiffGuardSampleCogVideoX": SampleCogVideoX,
    "OneDiffGuardDecodeLatents": DecodeLatents,
    "OneDiffGuardPrecisionReport": PrecisionReport,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "OneDiffGuardLoadCogVideoX": "Load CogVideoX",
    "OneDiffGuardEncodePrompt": "Encode Prompt",
    "OneDiffGuardNaNGuard": "NaN Guard",
    "OneDiffGuardSampleCogVideoX": "Sample CogVideoX",
    "OneDiffGuardDecodeLatents": "Decode Latents",
    "OneDiffGuardPrecisionReport": "Precision Report",
}
