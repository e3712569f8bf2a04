"""Measure the host memory that loading a component takes, divided by the checkpoint's bytes.

    python scripts/benchmarks/load.py [--out scripts/benchmarks/results] [--folder DIR]

Each component is written to a temporary folder (1 GB or more of random weights, in the published files' layout), and
loaded through the store in a separate process. Two peaks are measured, each minus the value after the imports:

- anonymous: memory that only the process holds, sampled by its parent. The system cannot reclaim it.
- resident: VmHWM. It includes pages of the mapped checkpoint, which the system frees when memory is needed.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measure import head, new_parser, opened, write_json

LIMIT = 1.1
SECONDS_BETWEEN_SAMPLES = 0.002


@dataclass(frozen=True)
class Case:
    component: str
    stored: str
    plan: str
    model: str  # the folder or file of the model

    @property
    def name(self) -> str:
        return f"{self.model}, {self.component}: stored {self.stored}, plan {self.plan}"


CASES = (
    Case("transformer", "bf16", "bf16", "CogVideoX folder"),
    Case("transformer", "fp32", "bf16", "CogVideoX folder"),
    Case("transformer", "fp32", "fp16", "CogVideoX folder"),
    Case("text_encoder", "bf16", "bf16", "CogVideoX folder"),
    Case("text_encoder", "fp32", "fp16", "CogVideoX folder"),
    Case("unet", "fp16", "fp16", "SVD file"),
    Case("unet", "fp32", "fp16", "SVD file"),
)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="folder in which checkpoints are made and removed again")
    parser.add_argument("--load", nargs=3, metavar=("MODEL", "COMPONENT", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(Path(args.load[0]), *args.load[1:])))
        return
    measured = {}
    for case in CASES:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measured[case.name] = measure(make(case, Path(folder)), case)
        figures = [f"{name} {value}" for name, value in measured[case.name].items() if name.endswith("/ checkpoint")]
        print(f"{case.name:58}", ", ".join(figures), flush=True)
    ratios = {name: figures["anonymous / checkpoint"] for name, figures in measured.items()}
    result = head("load", torch.device("cpu")) | {
        "limit": LIMIT,
        "largest anonymous / checkpoint": max(ratios.values()),
        "cases": measured,
    }
    print(f"written to {write_json(result, args.out, 'cpu')}")
    if over := {name: ratio for name, ratio in ratios.items() if ratio > LIMIT}:
        sys.exit(f"beyond {LIMIT} × the checkpoint's bytes: {over}")


def measure(model: Path, case: Case) -> dict[str, Any]:
    """Load it in a separate process, and sample its memory."""
    command = [sys.executable, __file__, "--load", str(model), case.component, case.plan]
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, stdout=output)
        anonymous = 0
        while child.poll() is None:
            anonymous = max(anonymous, status(child.pid).get("RssAnon", 0))
            time.sleep(SECONDS_BETWEEN_SAMPLES)
        if child.returncode:
            raise SystemExit(f"{case.name}: loading failed with {child.returncode}")
        output.seek(0)
        told = json.loads(output.read().splitlines()[-1])
    stored = told["checkpoint"]
    return {
        "anonymous / checkpoint": round((anonymous - told["anonymous before"]) / stored, 3),
        "resident / checkpoint": round(told["resident"] / stored, 3),
        "weights / checkpoint": round(told["weights"] / stored, 3),
        "checkpoint bytes": stored,
        "seconds": round(told["seconds"], 2),
        "dtypes": told["dtypes"],
    }


def load(model: Path, component: str, dtype: str) -> dict[str, Any]:
    """Load a component and measure it; runs in the watched process."""
    import diffusers
    import transformers

    _ = diffusers.CogVideoXTransformer3DModel, transformers.T5EncoderModel, diffusers.UNetSpatioTemporalConditionModel
    handle = opened(model, dtype)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    before, started = status(), time.perf_counter()
    module = handle.store.module(component, dtype)
    seconds, after = time.perf_counter() - started, status()
    sizes: dict[str, int] = {}
    for parameter in module.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + parameter.nbytes
    return {
        "checkpoint": handle.store.model.weights[component].n_bytes,
        "anonymous before": before["RssAnon"],
        "resident": after["VmHWM"] - before["VmRSS"],
        "weights": sum(sizes.values()),
        "dtypes": sizes,
        "seconds": seconds,
    }


def status(process: int | str = "self") -> dict[str, int]:
    """Return /proc/PID/status, in bytes; empty once the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if words[-1] == "kB"}


def make(case: Case, folder: Path) -> Path:
    """Write the case's model; all components but the measured one are small."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.stored]
    torch.manual_seed(0)
    return svd_file(folder, dtype) if case.component == "unet" else cogvideox(folder, case.component, dtype)


def cogvideox(folder: Path, component: str, dtype: torch.dtype) -> Path:
    """Write a small folder with one large component: the 2B's width in 10 of its 30 blocks, or T5-XXL's in 4 of 24,
    with the small tokenizer's rows."""
    from comfyui_onediff_guard.demo.small_model import build_cogvideox
    from diffusers import CogVideoXTransformer3DModel
    from transformers import T5Config, T5EncoderModel

    model = build_cogvideox(folder / "model")
    small = json.loads((model / component / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        if component == "transformer":
            large: Any = CogVideoXTransformer3DModel(num_layers=10)
        else:
            sizes = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 4}
            large = T5EncoderModel(T5Config(**small | sizes))
    torch.nn.Module.to(large, dtype)
    large.to_empty(device="cpu")
    for tensor in large.state_dict().values():
        tensor.normal_(std=0.02)
    for file in (model / component).iterdir():
        file.unlink()
    large.save_pretrained(model / component, max_shard_size="400MB")
    return model


def svd_file(folder: Path, dtype: torch.dtype) -> Path:
    """Write ComfyUI's single file, with a UNet of the published depth and 3/5 of its width."""
    from safetensors.torch import save_file

    layout = Path(__file__).resolve().parents[2] / "tests" / "support" / "svd_layout.py"
    svd = SimpleNamespace(**runpy.run_path(str(layout)))
    shapes = svd.shapes(svd.Layout(channels=(192, 384, 768, 768), attends=(True, True, True, False), blocks=2))
    save_file({key: torch.randn(shape).to(dtype) for key, shape in shapes.items()}, folder / "svd.safetensors")
    return folder / "svd.safetensors"


if __name__ == "__main__":
    main()
