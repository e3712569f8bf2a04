"""`onediff-guard`: exit codes, output for people and for scripts, errors without a traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.pipelines.errors import BadSize, DeviceGone, LibraryFailed

Console = Callable[..., tuple[int, str, str]]


def test_run_prints_files_and_summary(here: Path, console: Console) -> None:
    code, out, err = console("run", "workflow.json", "--set", "1.text=a fox")
    files = [str(Path("output", "pictures", f"noise_0000{n}_.png")) for n in (1, 2, 3)]
    assert (code, out.splitlines()) == (0, [*files, "1: 32 px, a fox"])
    assert err.splitlines() == ["node 1 (Some Noise)", "node 2 (SaveImage)"]


def test_json_option_prints_one_json_object(here: Path, console: Console) -> None:
    code, out, _ = console("run", "workflow.json", "--json", "--out", "elsewhere")
    answer = json.loads(out, parse_constant=pytest.fail)
    assert (code, answer["status"]) == (0, "done")
    assert all(Path(path).is_file() for path in answer["files"])
    assert answer["outputs"]["1"]["onediff_guard"] == [{"peak": "inf"}]


def test_unencodable_character_is_replaced(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    assert cli.main(["run", "workflow.json", "--set", "1.text=fp16 \u2192 fp32"]) == 0
    console.seek(0)
    assert "fp16 ? fp32" in console.read()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing.json"], 2, "Cannot read the workflow nothing.json"),
        (["workflow.json", "--set", "1.width=1"], 2, "must be at least 8"),
        (["workflow.json", "--server", "127.0.0.1:9"], 3, "No ComfyUI answers at http://127.0.0.1:9"),
        (["workflow.json", "--server", "127.0.0.1:9"], 3, "--comfyui DIR"),
        (["workflow.json", "--server", "127.0.0.1:9", "--models", "m"], 2, "--models does not work"),
        (["workflow.json", "--comfyui", "."], 2, "it has no main.py"),
        (["workflow.json", "--guard"], 2, "--guard works only with --server"),
        (["broken.json"], 4, "the GPU is on fire"),
        (["workflow.json", "--out", "workflow.json"], 5, "Cannot write"),
    ],
)
def test_failed_run_gives_exit_code_and_message(
    here: Path, workflow: dict[str, Any], console: Console, arguments: list[str], code: int, message: str
) -> None:
    broken = workflow | {"2": {"class_type": "Broken", "inputs": {"images": ["1", 0]}}}
    (here / "broken.json").write_text(json.dumps(broken))
    found, out, err = console("run", *arguments, "--json")
    answer = json.loads(out)
    assert (found, answer["status"], answer["exit_code"]) == (code, "error", code)
    assert message in answer["error"] and message in err and "Traceback" not in err
    assert "Traceback" in console("run", *arguments, "--verbose")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["fly"],
        *(["run", "w.json", "--timeout", seconds] for seconds in ("-1", "nan", "1e400", "1e300", "x")),
        ["run", "w", "--server", "a", "--comfyui", "b"],
        *(["compare", "workflow.json", "--precisions", precisions] for precisions in ("fp32", "", ",")),
        ["doctor", "--precision", "int4"],
        ["doctor", "--accumulation", "on"],
        ["doctor", "model"],
        ["doctor", "--vram", "12 GB"],
        ["doctor", "--vram", "12", "--size", "720"],
    ],
)
def test_invalid_usage_exits_with_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (LibraryFailed("transformers cannot be imported."), 4, "transformers cannot be imported."),
        (DeviceGone("cuda:0 stopped responding."), 4, "cuda:0 stopped responding."),
        (BadSize("0 x 0 is no size."), 2, "0 x 0 is no size."),
        (
            ImportError("No module named 'torch'"),
            4,
            "No module named 'torch'. `onediff-guard doctor` lists missing and broken packages, and says what to do.",
        ),
        (KeyError("x"), 4, "Unexpected KeyError: 'x'. Run with --verbose to see where."),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_exception_gives_exit_code_and_message(error: BaseException, code: int, message: str, capsys: Any) -> None:
    def main(_args: Any) -> cli.Answer:
        raise error

    command = cli.Subcommand("fly", "", lambda: SimpleNamespace(add_arguments=lambda _parser: None, main=main))
    assert cli.main(["fly"], [command]) == code
    assert capsys.readouterr().err.strip() == f"onediff-guard: {message}"


@pytest.mark.parametrize(("command", "option"), [("run", "--set"), ("doctor", "--arch")])
def test_help_imports_no_heavy_library(fresh_python: Callable[..., str], command: str, option: str) -> None:
    code = (
        "import sys; from comfyui_onediff_guard.headless.commands import cli\n"
        f"try: cli.main(['{command}', '--help'])\n"
        "except SystemExit: print(sorted({'torch', 'av', 'aiohttp', 'diffusers'} & set(sys.modules)))"
    )
    out = fresh_python(code)
    assert out.endswith("[]\n") and option in out
