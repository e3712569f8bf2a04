"""Exchange between ranks: data comes back unchanged for all lengths and dtypes, and all ranks agree on reductions."""

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
from rank_runs import run_in_ranks

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = ((7, 5), (8, 4), (3, 1), (2, 4))  # (tokens, heads), divisible by three ranks or not

CHUNKS = ((25, 8), (4, 1), (9, 2), (2, 1), (6, 2))  # length, chunk
DEALT = ((9, 2, 4, 1, 2), (9, 2, 3, 1, 2), (9, 2, 3, 1, 2))  # rank by rank, how much of each


@pytest.mark.parametrize(("length", "size"), [(5, 3), (6, 3), (2, 4), (0, 2), (226, 7)])
def test_shares_differ_by_one_at_most(length: int, size: int) -> None:
    found = shares(length, size)
    assert sum(found) == length and max(found) - min(found) <= 1 and found == sorted(found, reverse=True)


def round_trip() -> list[tuple[bool, ...]]:
    """For each length and dtype: whether the exchange for attention gives all tokens of a share of heads, the reverse
    gives the original, and gathering gives the whole; and whether the dtype stays."""
    ranks = process_group()
    found = []
    for tokens, heads in LENGTHS:
        for dtype in DTYPES:
            whole = torch.randn(3, 2, heads, tokens, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
            counts = shares(tokens, ranks.size)
            mine = share_of(whole, 3, ranks)
            sent = heads_of_all_tokens(mine, counts, ranks)
            back = tokens_of_all_heads(sent[0], counts, heads, ranks)
            again = gathered(mine, 3, tokens, ranks)
            found.append(
                (
                    torch.equal(sent, share_of(whole, 2, ranks)),
                    torch.equal(back, mine[0]),
                    torch.equal(again, whole),
                    back.dtype is again.dtype is dtype,
                )
            )
    return found


def reduced() -> dict[str, Any]:
    rank = process_group().rank
    values = torch.tensor([float(rank), -float(rank) - 0.5, [1.0, torch.nan, 2.0][rank], [-torch.inf, 3.0, 4.0][rank]])
    made: list[int] = []
    return {
        "worst": process_group().all_reduce_absmax(values).tolist(),
        "first": process_group().broadcast_from_rank0(lambda: made.append(rank) or f"by {rank}"),
        "made": made,
    }


def dealt_chunks() -> list[tuple[int, bool]]:
    """For each length and chunk: the length on this rank, and whether the parts of all ranks give the whole."""
    ranks = process_group()
    found = []
    for length, chunk in CHUNKS:
        whole = torch.randn(length, 3, 2, generator=torch.Generator().manual_seed(length))
        mine = dealt(whole, chunk, ranks)
        found.append((len(mine), torch.equal(collected(mine, chunk, length, ranks), whole)))
    return found


def in_groups() -> dict[str, Any]:
    """Results of collectives in groups of two ranks, and in all four."""
    ranks = process_group()
    group = ranks.part(2)
    values = torch.tensor([float(ranks.rank)])
    whole = torch.arange(10.0).view(1, 5, 2)
    return {
        "place": (group.rank, group.size, ranks.part(1).alone, ranks.part(4) is ranks, ranks.part(2) == group),
        "worst": group.all_reduce_absmax(values).item(),
        "every": [tensor.item() for tensor in ranks.all_gather(values)],
        "whole": torch.equal(gathered(share_of(whole, 1, group), 1, 5, group), whole),
        "most": (
            ranks.all_reduce_max(10**15 + ranks.rank),
            -ranks.all_reduce_max(-ranks.rank),
            group.all_reduce_max(ranks.rank),
        ),
    }


def all_checks() -> tuple[Any, Any, Any]:
    return round_trip(), reduced(), dealt_chunks()


def test_exchange_and_reductions_over_three_ranks() -> None:
    for number, (found, together, chunks) in enumerate(run_in_ranks(3, all_checks)):
        assert chunks == [(DEALT[number][case], True) for case in range(len(CHUNKS))]
        assert found == [(True,) * 4] * (len(LENGTHS) * len(DTYPES))
        one, half, broken, endless = together["worst"]
        assert (one, half) == (2.0, 2.5) and broken != broken and endless == float("inf")
        assert together["first"] == "by 0" and together["made"] == [0] * (number == 0)


def test_collectives_in_groups_of_two_of_four_ranks() -> None:
    for number, found in enumerate(run_in_ranks(4, in_groups)):
        assert found["place"] == (number % 2, 2, True, True, True)
        assert found["worst"] == [1.0, 1.0, 3.0, 3.0][number] and found["whole"]
        assert found["every"] == [0.0, 1.0, 2.0, 3.0]
        assert found["most"] == (10**15 + 3, 0, [1, 1, 3, 3][number])


def test_single_process_sends_nothing() -> None:
    values = torch.tensor([-1.0, torch.nan])
    assert (
        process_group() is ALONE
        and process_group().all_reduce_absmax(values) is values
        and process_group().broadcast_from_rank0(lambda: "made") == "made"
    )


def test_exchange_on_meta_has_right_shapes_and_sends_nothing() -> None:
    ranks, counts = ProcessGroup(1, 3), [3, 2, 2]
    sent = heads_of_all_tokens(torch.empty(3, 2, 5, 2, 4, device="meta"), counts, ranks)
    assert sent.shape == (3, 2, 2, 7, 4)
    assert tokens_of_all_heads(sent[0], counts, 5, ranks).shape == (2, 5, 2, 4)
    assert gathered(torch.empty(2, 2, 4, device="meta"), 1, 7, ranks).shape == (2, 7, 4)
