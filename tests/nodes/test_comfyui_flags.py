"""ComfyUI's command-line flags: which are read, what they change, and what reports say of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from as_comfyui import GRAPHS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.comfyui_host.flags import HONOURED, MAPPED, NO_EFFECT, ROWS
from comfyui_onediff_guard.nodes.report import with_surroundings
from comfyui_onediff_guard.pipelines.insight.diagnosis import WIDTH, diagnose_pipeline


class Fast(Enum):
    ACCUMULATION = "fp16_accumulation"
    AUTOTUNE = "autotune"


def parser() -> argparse.ArgumentParser:
    """A few of ComfyUI's arguments, as ComfyUI defines them."""
    made = argparse.ArgumentParser()
    for name in (
        *("lowvram", "novram", "highvram", "gpu-only"),
        *("fp32-vae", "force-channels-last", "force-fp16", "fp16-unet"),
    ):
        made.add_argument(f"--{name}", action="store_true")
    made.add_argument("--reserve-vram", type=float)
    made.add_argument("--vram-headroom", type=float, default=0)
    made.add_argument("--async-offload", nargs="?", const=2, type=int)
    made.add_argument("--cache-ram", nargs="*", type=float, default=[])
    made.add_argument("--fast", nargs="*", type=Fast)
    made.add_argument("--port", type=int, default=8188)
    return made


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """start("--lowvram"): as if this process were a ComfyUI that was started with it."""

    def start(*flags: str, keeps_parser: bool = True) -> None:
        args = parser().parse_args(flags)
        args.fast = set(args.fast or ())
        args.fp16_unet |= args.force_fp16
        cli = SimpleNamespace(args=args, **({"parser": parser()} if keeps_parser else {}))
        monkeypatch.setitem(sys.modules, "comfy.cli_args", cli)
        monkeypatch.setitem(sys.modules, "folder_paths", sys.modules.get("folder_paths") or ModuleType("folder_paths"))

    return start


def given_flags() -> list[str]:
    return [flag.given for flag in host.flags()]


@pytest.mark.parametrize("keeps_parser", [True, False])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", []),
        ("--port 8189", []),
        ("--fp32-vae --reserve-vram 2.5 --lowvram", ["--reserve-vram 2.5", "--lowvram", "--fp32-vae"]),
        ("--async-offload", ["--async-offload 2"]),
        ("--cache-ram 4 8", ["--cache-ram 4 8"]),
        ("--fast fp16_accumulation autotune", ["--fast fp16_accumulation"]),
        ("--vram-headroom 0", []),
        ("--force-fp16", ["--force-fp16"]),  # which sets what --fp16-unet sets
        ("--fp16-unet", ["--fp16-unet"]),
    ],
)
def test_only_given_known_flags_are_listed(
    start: Callable[..., None], flags: str, expected: list[str], keeps_parser: bool
) -> None:
    start(*flags.split(), keeps_parser=keeps_parser)
    assert given_flags() == expected


def test_reserve_vram_0_is_listed_as_given(start: Callable[..., None]) -> None:
    start("--reserve-vram", "0")
    assert given_flags() == ["--reserve-vram 0"]


@pytest.mark.parametrize(
    ("flag", "offload"),
    [
        *((["--lowvram"], "group"), (["--novram"], "sequential")),
        *((["--highvram"], "none"), (["--gpu-only"], "none"), ([], ""), (["--reserve-vram", "2"], "")),
    ],
)
def test_memory_flags_choose_offload(start: Callable[..., None], comfyui: Any, flag: list[str], offload: str) -> None:
    start(*flag)
    assert host.memory_wish() == offload
    assert host.placement().wish == offload


def test_force_channels_last_sets_layout(start: Callable[..., None], comfyui: Any) -> None:
    for flags, expected in (([], False), (["--force-channels-last"], True)):
        start(*flags)
        assert host.placement().channels_last == expected


def test_process_without_comfyui_has_no_flags(start: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    start("--lowvram")
    monkeypatch.delitem(sys.modules, "folder_paths")
    assert (host.flags(), host.memory_wish(), host.placement().wish) == ((), "", "")


@pytest.fixture
def loaded(comfyui: Any, model_folder: Callable[..., Path]) -> Callable[[], Any]:
    """loaded(): the pipeline that Load Pipeline returns."""
    return lambda: GRAPHS["2b"].load(model_folder("2b"))


def test_report_says_what_each_flag_does(start: Callable[..., None], loaded: Callable[[], Any]) -> None:
    start("--lowvram", "--reserve-vram", "2", "--fp32-vae", "--fast", "fp16_accumulation")
    shown = with_surroundings(diagnose_pipeline(loaded()))
    text, fields = shown.text(), shown.as_dict()
    assert {flag["given"]: flag["effect"] for flag in fields["comfyui"]["flags"]} == {
        "--reserve-vram 2": HONOURED,
        "--lowvram": MAPPED,
        "--fp32-vae": NO_EFFECT,
        "--fast fp16_accumulation": HONOURED,
    }
    assert "no effect: choose precision 'fp32' at Decode Latents" in text
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("on", [False, True])
def test_report_names_comfy_compiler_only_if_it_is_on(
    start: Callable[..., None], loaded: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    """In ComfyUI 0.35 and newer."""
    start()
    plain = with_surroundings(diagnose_pipeline(loaded())).text()
    assert "Comfy Compiler" not in plain and "flags" not in plain
    prefetch = SimpleNamespace(malloc_graph_enabled=lambda _device: on)
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", prefetch)
    shown = with_surroundings(diagnose_pipeline(loaded()))
    assert ("Comfy Compiler: on; steps of ComfyUI's own models" in shown.text()) == on
    assert shown.as_dict()["comfyui"]["plans_memory"] == on and max(map(len, shown.text().splitlines())) <= WIDTH


def test_no_flag_is_listed_twice_in_table() -> None:
    names = [name for row in ROWS for name in row.names]
    assert len(names) == len(set(names))


def test_memory_page_has_table_of_flags(root: Path) -> None:
    """docs/memory.md, in the order of the table."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in row.names)} | {row.effect} | {row.here} | {row.native} |" for row in ROWS
    ]
    written = (root / "docs" / "memory.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in written if line.startswith("| `--")] == [row.replace("|  |", "| |") for row in rows]
