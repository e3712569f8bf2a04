"""What ranks send each other comes back as it was, whatever the lengths and dtypes, and all agree on the worst."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.parallel.exchange import (
    collected,
    dealt,
    gathered,
    heads_of_all_tokens,
    share_of,
    shares,
    tokens_of_all_heads,
)
from comfyui_onediff_guard.pipelines.parallel.group import ALONE, ProcessGroup, process_group
from rank_runs import in_ranks

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = ((7, 5), (8, 4), (3, 1), (2, 4))  # tokens, heads; by three ranks: none, or some, have more than others

CHUNKS = ((25, 8), (4, 1), (9, 2), (2, 1), (6, 2))  # length, chunk
DEALT = ((9, 2, 4, 1, 2), (9, 2, 3, 1, 2), (9, 2, 3, 1, 2))  # rank by rank, how much of each


@pytest.mark.parametrize(("length", "size"), [(5, 3), (6, 3), (2, 4), (0, 2), (226, 7)])
def test_shares_are_as_even_as_can_be(length: int, size: int) -> None:
    found = shares(length, size)
    assert sum(found) == length and max(found) - min(found) <= 1 and found == sorted(found, reverse=True)


def there_and_back() -> list[tuple[bool, ...]]:
    """For each length and dtype: whether attention's way there gives all tokens of a share of heads, and the way back
    gives what was sent; and whether the whole is gathered."""
    ranks = process_group()
    found = []
    for tokens, heads in LENGTHS:
        for dtype in DTYPES:
            whole = torch.randn(3, 2, heads, tokens, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
            counts = shares(tokens, ranks.size)
            mine = share_of(whole, 3, ranks)
            there = heads_of_all_tokens(mine, counts, ranks)
            back = tokens_of_all_heads(there[0], counts, heads, ranks)
            again = gathered(mine, 3, tokens, ranks)
            found.append(
                (
                    torch.equal(there, share_of(whole, 2, ranks)),
                    torch.equal(back, mine[0]),
                    torch.equal(again, whole),
                    back.dtype is again.dtype is dtype,
                )
            )
    return found


def agreed() -> dict[str, Any]:
    rank = process_group().rank
    values = torch.tensor([float(rank), -float(rank) - 0.5, [1.0, torch.nan, 2.0][rank], [-torch.inf, 3.0, 4.0][rank]])
    made: list[int] = []
    return {
        "worst": process_group().all_reduce_absmax(values).tolist(),
        "first": process_group().broadcast_from_rank0(lambda: made.append(rank) or f"by {rank}"),
        "made": made,
    }


def shared_out() -> list[tuple[int, bool]]:
    """For each length and chunk: how much this rank has of it, and whether the whole comes of all ranks' parts."""
    ranks = process_group()
    found = []
    for length, chunk in CHUNKS:
        whole = torch.randn(length, 3, 2, generator=torch.Generator().manual_seed(length))
        mine = dealt(whole, chunk, ranks)
        found.append((len(mine), torch.equal(collected(mine, chunk, length, ranks), whole)))
    return found


def in_parts() -> dict[str, Any]:
    """What the ranks of a part of two agree on, and what is handed to all by the first one of each part."""
    ranks = process_group()
    part = ranks.part(2)
    values = torch.tensor([float(ranks.rank)])
    whole = torch.arange(10.0).view(1, 5, 2)
    return {
        "place": (part.rank, part.size, ranks.part(1).alone, ranks.part(4) is ranks, ranks.part(2) == part),
        "worst": part.all_reduce_absmax(values).item(),
        "every": [tensor.item() for tensor in ranks.all_gather(values)],
        "whole": torch.equal(gathered(share_of(whole, 1, part), 1, 5, part), whole),
        "most": (
            ranks.all_reduce_max(10**15 + ranks.rank),
            -ranks.all_reduce_max(-ranks.rank),
            part.all_reduce_max(ranks.rank),
        ),
    }


def everything() -> tuple[Any, Any, Any]:
    return there_and_back(), agreed(), shared_out()


def test_three_ranks() -> None:
    for number, (found, together, chunks) in enumerate(in_ranks(3, everything)):
        assert chunks == [(DEALT[number][case], True) for case in range(len(CHUNKS))]
        assert found == [(True,) * 4] * (len(LENGTHS) * len(DTYPES))
        one, half, broken, endless = together["worst"]
        assert (one, half) == (2.0, 2.5) and broken != broken and endless == float("inf")
        assert together["first"] == "by 0" and together["made"] == [0] * (number == 0)


def test_parts_of_four_ranks() -> None:
    for number, found in enumerate(in_ranks(4, in_parts)):
        assert found["place"] == (number % 2, 2, True, True, True)
        assert found["worst"] == [1.0, 1.0, 3.0, 3.0][number] and found["whole"]
        assert found["every"] == [0.0, 1.0, 2.0, 3.0]
        assert found["most"] == (10**15 + 3, 0, [1, 1, 3, 3][number])


def test_without_others_nothing_is_sent() -> None:
    values = torch.tensor([-1.0, torch.nan])
    assert (
        process_group() is ALONE
        and process_group().all_reduce_absmax(values) is values
        and process_group().broadcast_from_rank0(lambda: "made") == "made"
    )


def test_on_meta_the_shapes_are_right_and_nothing_is_sent() -> None:
    ranks, counts = ProcessGroup(1, 3), [3, 2, 2]
    there = heads_of_all_tokens(torch.empty(3, 2, 5, 2, 4, device="meta"), counts, ranks)
    assert there.shape == (3, 2, 2, 7, 4)
    assert tokens_of_all_heads(there[0], counts, 5, ranks).shape == (2, 5, 2, 4)
    assert gathered(torch.empty(2, 2, 4, device="meta"), 1, 7, ranks).shape == (2, 7, 4)
