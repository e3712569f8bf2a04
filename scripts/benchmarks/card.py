"""A card's driver, clocks and power, read from nvidia-smi."""

from __future__ import annotations

import subprocess

import torch

DRIVER = "driver_version"
FIELDS = {  # nvidia-smi's name → ours
    DRIVER: "driver",
    "clocks.sm": "sm_mhz",
    "clocks.max.sm": "sm_mhz_max",
    "clocks.mem": "memory_mhz",
    "clocks.max.mem": "memory_mhz_max",
    "power.draw": "power_watts",
    "power.limit": "power_watts_limit",
    "temperature.gpu": "celsius",
}
State = dict[str, float | str | None]


def state(device: torch.device) -> State | None:
    """Return the card's current state; None if there is no card or no nvidia-smi."""
    if device.type != "cuda":
        return None
    query = f"--query-gpu=uuid,{','.join(FIELDS)}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse(asked.stdout, str(getattr(torch.cuda.get_device_properties(device), "uuid", "")))


def parse(answer: str, uuid: str) -> State | None:
    """Parse the line of one card, or the only line; missing values are None."""
    lines = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
    lines = [line for line in lines if len(line) == len(FIELDS) + 1]
    found = next((line for line in lines if uuid and line[0].endswith(uuid)), lines[0] if len(lines) == 1 else None)
    if found is None:
        return None
    return {ours: _value(name, cell) for (name, ours), cell in zip(FIELDS.items(), found[1:], strict=True)}


def _value(name: str, cell: str) -> float | str | None:
    try:
        return cell if name == DRIVER else float(cell)
    except ValueError:  # [N/A], [Not Supported]
        return None
