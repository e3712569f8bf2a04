"""The exchanges between ranks: tokens for heads and back (Ulysses attention, arXiv 2309.14509), and whole results.

Every rank computes all ranks' shares from the whole length, so lengths are not sent, and need not be divisible. On
"meta", where memory is estimated, nothing is sent, and only the shapes are right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed

from .group import ProcessGroup


def shares(length: int, size: int) -> list[int]:
    """Return each rank's share of a length: as even as possible, the first ranks get one more. 5 by 3: 2, 2, 1."""
    least, more = divmod(length, size)
    return [least + (rank < more) for rank in range(size)]


def share_of(tensor: torch.Tensor, dim: int, ranks: ProcessGroup) -> torch.Tensor:
    """Return this rank's share of a tensor that all ranks have; a view."""
    parts = shares(tensor.shape[dim], ranks.size)
    return tensor.narrow(dim, sum(parts[: ranks.rank]), parts[ranks.rank])


def gathered(part: torch.Tensor, dim: int, length: int, ranks: ProcessGroup) -> torch.Tensor:
    """Return the whole tensor, from every rank's share. length: of the whole in `dim`."""
    parts = shares(length, ranks.size)
    whole = torch.Size((*part.shape[:dim], length, *part.shape[dim + 1 :]))
    if part.is_meta:
        return part.new_empty(whole)
    even = part.movedim(dim, 0).contiguous()  # gloo gathers only parts of equal length
    if len(even) < parts[0]:
        even = torch.cat([even, even.new_zeros(1, *even.shape[1:])])
    kept = [piece[:part_length] for piece, part_length in zip(ranks.all_gather(even), parts, strict=True)]
    return torch.cat(kept).movedim(0, dim).contiguous()


def heads_of_all_tokens(qkv: torch.Tensor, tokens: Sequence[int], ranks: ProcessGroup) -> torch.Tensor:
    """Exchange tokens for heads: return this rank's share of the heads, with all tokens.

    qkv: [3, batch, heads, this rank's tokens, channels]. tokens: number of tokens of each rank.
    Returns [3, batch, this rank's heads, all tokens, channels], with the tokens in the order of the ranks.
    """
    three, batch, all_heads, _, channels = qkv.shape
    heads = shares(all_heads, ranks.size)
    mine = heads[ranks.rank]
    sent = [part.reshape(-1) for part in qkv.split(heads, 2)]
    came = _swapped(sent, [three * batch * mine * count * channels for count in tokens], ranks)
    parts = [part.view(three, batch, mine, count, channels) for part, count in zip(came, tokens, strict=True)]
    return torch.cat(parts, 3)


def tokens_of_all_heads(made: torch.Tensor, tokens: Sequence[int], heads: int, ranks: ProcessGroup) -> torch.Tensor:
    """Exchange heads for tokens: return this rank's tokens, with all heads.

    made: [batch, this rank's heads, all tokens, channels]. tokens: of each rank. heads: of all ranks together.
    Returns [batch, heads, this rank's tokens, channels].
    """
    batch, _, _, channels = made.shape
    mine = tokens[ranks.rank]
    sent = [part.reshape(-1) for part in made.split(list(tokens), 2)]
    counts = shares(heads, ranks.size)
    came = _swapped(sent, [batch * count * mine * channels for count in counts], ranks)
    parts = [part.view(batch, count, mine, channels) for part, count in zip(came, counts, strict=True)]
    return torch.cat(parts, 1)


def dealt(whole: torch.Tensor, chunk: int, ranks: ProcessGroup) -> torch.Tensor:
    """Return this rank's chunks of a tensor that all ranks have, dealt out in turn. If the last round has too few
    chunks, the remaining ranks get the last chunk, so that all have equally many.

    chunk: length of a chunk in the first dimension.
    """
    chunks = whole.split(chunk)
    rounds = -(-len(chunks) // ranks.size)
    return torch.cat([chunks[min(turn * ranks.size + ranks.rank, len(chunks) - 1)] for turn in range(rounds)])


def collected(mine: torch.Tensor, chunk: int, length: int, ranks: ProcessGroup) -> torch.Tensor:
    """Return the whole result, from each rank's results for its `dealt` chunks. length: of the first dimension."""
    rounds = -(-length // (chunk * ranks.size))
    even = mine.new_zeros(rounds * chunk, *mine.shape[1:])
    even[: len(mine)] = mine
    every = torch.stack(ranks.all_gather(even)).unflatten(1, (rounds, chunk))
    return every.transpose(0, 1).flatten(0, 2)[:length]


def _swapped(sent: Sequence[torch.Tensor], sizes: Sequence[int], ranks: ProcessGroup) -> Sequence[torch.Tensor]:
    """Send one flat tensor to each rank, and return one from each. sizes: numbers of elements to receive."""
    flat = torch.cat(list(sent))
    came = flat.new_empty(sum(sizes))
    if not flat.is_meta:
        distributed.all_to_all_single(came, flat, list(sizes), [part.numel() for part in sent], ranks.group)
    return came.split(list(sizes))
