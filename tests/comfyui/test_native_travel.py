"""A prompt or latents of this pack that are wired into another model's nodes: told so, and nothing is left behind."""

from __future__ import annotations

import native
import pytest
import torch


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_travel_cases", tmp_path_factory.mktemp("native_travel"), leg=leg)


@pytest.mark.parametrize("way", ["ksampler", "guarded"])
def test_a_prompt_says_which_sampler_it_is_for(ran: native.Ran, way: str) -> None:
    said = ran[f"prompt/{way}"]
    assert "This CONDITIONING [1, 226, 4096] was encoded for CogVideoX-2B" in said, said
    assert "Wire it into Sample CogVideoX" in said


@pytest.mark.parametrize("way", ["decode", "guarded"])
def test_latents_say_which_node_decodes_them(ran: native.Ran, way: str) -> None:
    said = ran[f"latents/{way}"]
    assert "These latents [1, 16, 3, 6, 6] are CogVideoX-2B's" in said and "Decode Latents" in said, said


@pytest.mark.parametrize("what", ["prompt", "latents"])
def test_where_they_fit_nothing_is_in_the_way(ran: native.Ran, what: str) -> None:
    assert torch.equal(ran[f"{what}/right"], ran[f"{what}/next"])
