"""ComfyUI's flags about memory and precision: the pack has a row for each one in ComfyUI's own parser."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import legs
from comfyui_onediff_guard.comfyui_host.flags import ROWS

_SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv.pop(1))
import comfy.cli_args as cli
parser = getattr(cli, "parser", None) or cli.create_parser()
flags = {}
for action in parser._actions:
    for choice in (" " + each.value for each in action.type) if action.dest == "fast" else ("",):
        flags[max(action.option_strings, key=len) + choice] = action.help or ""
print(json.dumps(flags))
"""
_ABOUT = re.compile(  # flags about memory, precision or kernels
    r"vram|\bram\b|memory|mmap|disk|vae|unet|clip|text.enc|[bf]p?\d|precision|attention|upcast|xformers|offload|unload|optimi[sz]"
    r"|cache|non.blocking|channels|determinis|cuda.(graphs|malloc)|directml|triton|--cpu|--fast",
    re.IGNORECASE,
)
IRRELEVANT = {
    "--cuda-malloc",  # ComfyUI sets it by itself, so a user's setting is not visible
    "--database-url",  # its help mentions memory
    # no effect on the pack, or handled by ComfyUI or PyTorch for the whole process
    *("--normalvram", "--cpu", "--directml", "--force-non-blocking", "--high-ram", "--disable-mmap"),
    *("--mmap-torch-files", "--disable-cuda-malloc", "--fp16-intermediates", "--enable-triton-backend"),
    *("--disable-triton-backend", "--use-pytorch-cross-attention", "--deterministic", "--fast autotune"),
    *("--disable-cuda-graphs", "--disable-ipex-optimize"),
}


def test_every_memory_and_precision_flag_has_row(any_leg: legs.Leg, tmp_path: Path) -> None:
    command = [str(any_leg.python), "-c", _SCRIPT, str(any_leg.checkout.resolve())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    flags: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    known = {name for row in ROWS for name in row.names}
    missing = {name: what for name, what in flags.items() if _ABOUT.search(f"{name} {what}") and name not in known}
    assert {name: what for name, what in missing.items() if name not in IRRELEVANT} == {}
    assert len(known & flags.keys()) > 20, "the parser's flags were found"
