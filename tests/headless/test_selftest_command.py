"""`onediff-guard selftest`: output for people and for scripts, and invalid arguments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comfyui_onediff_guard.comfyui_host.host import SELFTEST_VARIABLE
from comfyui_onediff_guard.pipelines.selftest import checks as module
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.self_test import CheckResult, SelfTestReport

Console = Callable[..., tuple[int, str, str]]
NO_COMPILER = {"a compiled block"} if os.environ.get("ATEN_CPU_CAPABILITY") == "default" else set[str]()
REPORT = SelfTestReport(
    device="cuda:0",
    architecture=ARCHITECTURES["sm75"],
    machine={"device": "NVIDIA GeForce RTX 2080 Ti", "torch": "2.13.0+cu128", "driver": "610.2", "triton": ""},
    date="2026-11-30",
    lines=(
        CheckResult("matrix product in fp16", "right", 2e-4, 4.9e-4),
        CheckResult("attention in fp16", "wrong", 0.3, 4.9e-4, concern="fp16"),
        CheckResult("a compiled block", "not run", note="no compiler"),
    ),
    seconds={"4096×4096 product in fp16": 0.0021},
)


@pytest.fixture
def fake_selftest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """fake_selftest(report): make the self-test return this report."""
    monkeypatch.setenv(SELFTEST_VARIABLE, str(tmp_path / "kept"))
    return lambda result: monkeypatch.setattr(module, "selftest", lambda *_: result)


def test_selftest_runs_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, console: Console) -> None:
    monkeypatch.setenv(SELFTEST_VARIABLE, str(tmp_path))
    code, out, err = console("selftest", "--json")
    answer = json.loads(out, parse_constant=pytest.fail)
    (file,) = tmp_path.iterdir()
    assert (code, answer["status"], Path(answer["file"])) == (0, "done", file)
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert kept["lines"] == answer["lines"]
    of_cards = {"offload 'group'", "peak memory beyond the estimate"}
    assert {each["name"] for each in kept["lines"] if each["verdict"] != "right"} <= of_cards | NO_COMPILER
    assert "attention in bf16 …" in err.splitlines()


def test_wrong_result_is_printed_and_gives_exit_code_4(fake_selftest: Any, tmp_path: Path, console: Console) -> None:
    fake_selftest(REPORT)
    code, out, _ = console("selftest")
    assert code == 4
    for part in (
        "Self-test of NVIDIA GeForce RTX 2080 Ti (cuda:0), 2026-11-30",
        "torch 2.13.0+cu128, driver 610.2",
        "right    matrix product in fp16 ",
        "error 2.0e-04, limit 4.9e-04",
        "WRONG    attention in fp16 ",
        "not run  a compiled block ",
        "4096×4096 product in fp16: 2.1 ms",
        "Result: 1 of 2 checks are WRONG on this card. Precision and backend 'auto' do not choose 'fp16' here.",
        str(tmp_path / "kept" / f"{REPORT.key}.json"),
    ):
        assert part in out
    fake_selftest(replace(REPORT, lines=REPORT.lines[:1]))
    code, out, _ = console("selftest")
    assert code == 0 and "Result: OK. All 1 checks that ran are right." in out


def test_report_key_depends_on_card_driver_and_pytorch() -> None:
    names = {replace(REPORT, machine={**REPORT.machine, key: "other"}).key for key in REPORT.machine}
    assert len(names | {REPORT.key}) == 1 + len(REPORT.machine)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--device", "cuda:7"], 2, "--device cuda:7: PyTorch has no such device here"),
        (["--device", "card"], 2, "Found: cpu."),
        (["--out", "file/below.json"], 5, "Cannot write"),
    ],
)
def test_invalid_arguments_are_rejected(
    fake_selftest: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    console: Console,
    arguments: Any,
    code: int,
    message: str,
) -> None:
    fake_selftest(REPORT)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    found, _, err = console("selftest", *arguments)
    assert found == code and message in err


def test_broken_pytorch_gives_advice(monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, module.__name__, None)
    here = SimpleNamespace(torch_works=False, advice=["Install PyTorch again: there."])
    monkeypatch.setattr("comfyui_onediff_guard.headless.commands.selftest.look", lambda: here)
    code, _, err = console("selftest")
    assert code == 2 and "Install PyTorch again: there." in err
