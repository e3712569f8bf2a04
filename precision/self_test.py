"""Results of a self-test: in words, and as a file that later runs on the same card read."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ..trust import foreign
from ..trust.atomic_files import write_whole
from ..trust.foreign import Foreign, Unreadable
from ..trust.plain import for_json
from .arch import COMPILED, Architecture, detect
from .machine import driver, platform_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Verdict = Literal["right", "wrong", "not run"]
Concern = Literal["fp16", "bf16", "fp32", "compiled code", ""]
_DAY = r"\d{4}-\d\d-\d\d"
_MAX_BYTES = 2**20


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    name: str
    verdict: Verdict
    error: float | None = None  # relative to float64, as a share of the norm; None: not measured
    bound: float | None = None
    note: str = ""
    concern: Concern = ""  # what 'auto' avoids if the check fails


@dataclass(frozen=True)
class SelfTestReport:
    """The results for one device."""

    device: str
    architecture: Architecture
    machine: Mapping[str, str]  # card, driver, versions
    date: str  # local date: "2026-11-30"
    lines: tuple[CheckResult, ...]
    seconds: Mapping[str, float]  # name → median of one call

    @property
    def wrong(self) -> tuple[CheckResult, ...]:
        return tuple(line for line in self.lines if line.verdict == "wrong")

    @property
    def key(self) -> str:
        """The file name of the card, driver and PyTorch that it is valid for."""
        return _key(self.architecture.name, self.machine)

    def as_dict(self) -> dict[str, Any]:
        return for_json(asdict(self))

    def in_words(self) -> str:
        about = ", ".join(f"{name} {value}" for name, value in self.machine.items() if value and name != "device")
        lines = [f"Self-test of {self.machine['device']} ({self.device}), {self.date}", f"  {about}"]
        lines += [f"  {_in_words(line)}" for line in self.lines]
        lines += [f"  {name}: {seconds * 1000:.3g} ms" for name, seconds in self.seconds.items()]
        ran = sum(line.verdict != "not run" for line in self.lines)
        if not self.wrong:
            return "\n".join([*lines, f"Result: OK. All {ran} checks that ran are right."])
        left = [f"'{concern}'" for concern in _failed(self.lines) if concern != COMPILED]
        left += ["a compiler"] if COMPILED in _failed(self.lines) else []
        then = f" Precision and backend 'auto' do not choose {' or '.join(left)} here." if left else ""
        return "\n".join([*lines, f"Result: {len(self.wrong)} of {ran} checks are WRONG on this card.{then}"])


def _in_words(line: CheckResult) -> str:
    verdict = {"right": "right  ", "wrong": "WRONG  ", "not run": "not run"}[line.verdict]
    error = "" if line.error is None else f"error {line.error:.1e}, limit {line.bound:.1e}"
    return f"{verdict}  {line.name:<48} {line.note or error}".rstrip()


def machine_of(device: torch.device, architecture: Architecture) -> dict[str, str]:
    """Return the card, the driver and the versions that a self-test is valid for."""
    facts = {key: str(value) for key, value in asdict(platform_of(device, architecture.name)).items()}
    return {**facts, "driver": "" if device.type == "cpu" else driver()}


def keep(result: SelfTestReport, file: Path) -> Path:
    """Write the report as JSON, atomically. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(file, json.dumps(result.as_dict(), indent=2, allow_nan=False).encode())


def verified_architecture(device: torch.device, folder: Path | None) -> Architecture:
    """Return a device's architecture, with the failures of a self-test of this card, driver and PyTorch, if the folder
    holds one. A file that cannot be read counts as none, and is named in the log."""
    architecture = detect(device)
    if folder is None or not any(folder.glob(f"{architecture.name}-*.json")):
        return architecture
    file = folder / f"{_key(architecture.name, machine_of(device, architecture))}.json"
    try:
        kept = foreign.fitting(_Kept, foreign.read(file, limit=_MAX_BYTES))
    except FileNotFoundError:
        return architecture
    except (OSError, Unreadable) as error:
        logger.warning("the self-test in %s is ignored: %s", file, error)
        return architecture
    return replace(architecture, tested=kept.date, failed=_failed(kept.lines))


class _KeptLine(Foreign):
    verdict: Verdict
    concern: Concern = ""


class _Kept(Foreign):
    """The part of a report that later runs need."""

    date: Annotated[str, Field(pattern=f"^{_DAY}$")]
    lines: Annotated[list[_KeptLine], Field(max_length=1000)]


def _failed(lines: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line.concern for line in lines if line.verdict == "wrong" and line.concern))


def _key(architecture: str, machine: Mapping[str, str]) -> str:
    facts = hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()[:12]
    return f"{architecture}-{facts}"
