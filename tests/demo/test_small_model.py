"""The small CogVideoX of the demo: layouts of published models, equal bytes from equal seeds, and no leftovers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shared_models
import torch
from comfyui_onediff_guard.demo.small_model import Variant, build_cogvideox
from comfyui_onediff_guard.pipelines.models.folder import family_of, inspect
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel


@pytest.mark.parametrize(
    ("variant", "name", "channels", "positions_learned"),
    [
        ("2b", "CogVideoX-2B", 16, False),
        ("5b", "CogVideoX-5B", 16, False),
        ("1.5", "CogVideoX-1.5-5B", 16, False),
        ("5b-i2v", "CogVideoX-5B-I2V", 32, True),
        ("1.5-i2v", "CogVideoX-1.5-5B-I2V", 32, False),
    ],
)
def test_each_variant_has_layout_of_published_model(
    variant: Variant, name: str, channels: int, positions_learned: bool
) -> None:
    folder = shared_models.built(build_cogvideox, variant=variant, look="noise", overflow="none")
    found = inspect(folder, family_of(folder))
    assert found.variant.name == name
    transformer = CogVideoXTransformer3DModel.from_pretrained(folder / "transformer")
    assert (transformer.config.in_channels, transformer.config.out_channels) == (channels, 16)
    assert ("patch_embed.pos_embedding" in transformer.state_dict()) == positions_learned
    assert (transformer.config.ofs_embed_dim is not None) == (variant == "1.5-i2v")


@pytest.mark.parametrize("options", [{"look": "flow", "overflow": "stream"}, {"variant": "1.5-i2v"}])
def test_two_builds_with_same_seed_are_byte_equal(tmp_path: Path, options: dict[str, Any]) -> None:
    state = torch.get_rng_state()
    first, second, other = (build_cogvideox(tmp_path / str(n), **options, seed=n // 2) for n in range(3))
    assert torch.equal(torch.get_rng_state(), state), "the random state is unchanged"
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in files)
    weights = [file for file in files if file.suffix == ".safetensors"]
    random_weights = "look" not in options  # a flow model has computed weights
    assert not random_weights or all((first / file).read_bytes() != (other / file).read_bytes() for file in weights)


def test_failed_build_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(*_args: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CogVideoXPipeline, "save_pretrained", disk_full)
    with pytest.raises(OSError, match="No space left"):
        build_cogvideox(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_rejected_and_kept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match="Choose another place"):
        build_cogvideox(tmp_path / "model")
    assert (tmp_path / "model" / "mine.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "3b"}, "Choose one of 2b, 5b, 1.5"),
        ({"head_dim": 20}, "multiple of 16"),
        ({"look": "flow", "variant": "5b"}, "needs variant '2b'"),
    ],
)
def test_invalid_arguments_are_rejected_with_reason(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_cogvideox(tmp_path / "model", **options)
    assert list(tmp_path.iterdir()) == []
