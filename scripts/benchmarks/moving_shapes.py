"""Videos of moving shapes, which the small models of `trained.py` learn: two shapes on a shaded ground."""

from __future__ import annotations

from dataclasses import dataclass

import torch

COLOURS = ((0.9, 0.2, 0.1), (0.1, 0.6, 0.9), (0.95, 0.8, 0.1), (0.2, 0.8, 0.3))


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes, one row each. All tensors are float32."""

    kinds: torch.Tensor  # [batch, 2]: shape, 0 for a disc and 1 for a square
    colours: torch.Tensor  # [batch, 2, 3], 0..1
    starts: torch.Tensor  # [batch, 2, 2]: x and y of the centre in the first frame, 0..1
    moves: torch.Tensor  # [batch, 2, 2]: movement over a whole video
    sizes: torch.Tensor  # [batch, 2]: radius, as a share of the side
    ground: torch.Tensor  # [batch, 3]

    @classmethod
    def drawn(cls, batch: int, generator: torch.Generator) -> Scenes:
        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(batch, *shape, generator=generator)

        palette = torch.tensor(COLOURS)
        picked = torch.randint(len(COLOURS), (batch, 2), generator=generator)
        turn = 2 * torch.pi * uniform(2)
        speed = 0.25 + 0.25 * uniform(2)
        return cls(
            kinds=torch.randint(2, (batch, 2), generator=generator).float(),
            colours=palette[picked],
            starts=0.25 + 0.5 * uniform(2, 2),
            moves=torch.stack([turn.cos(), turn.sin()], -1) * speed[..., None],
            sizes=0.14 + 0.1 * uniform(2),
            ground=0.2 + 0.4 * uniform(3),
        )

    def pictures(self, frames: int, height: int, width: int) -> torch.Tensor:
        """Return [batch, frames, 3, height, width], 0..1: each shape with soft edges, the second one in front."""
        y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
        time = torch.linspace(0, 1, frames)
        shade = 0.7 + 0.6 * y
        made = (self.ground[:, None, :, None, None] * shade).expand(-1, frames, -1, -1, -1)
        for n in range(2):
            at = self.starts[:, n, None] + self.moves[:, n, None] * time[:, None]  # [batch, frames, 2]
            at = 0.5 - (at.remainder(2) - 1).abs() + 0.5  # reflected at the edges
            dx, dy = x - at[..., 0, None, None], y - at[..., 1, None, None]
            round_, square = (dx**2 + dy**2).sqrt(), torch.maximum(dx.abs(), dy.abs())
            far = torch.where(self.kinds[:, n, None, None, None] > 0, square, round_)
            mask = torch.sigmoid((self.sizes[:, n, None, None, None] - far) * 1.5 * width)[:, :, None]
            made = made * (1 - mask) + self.colours[:, n, None, :, None, None] * mask
        return made.clamp(0, 1)

    def prompts(self, channels: int) -> torch.Tensor:
        """Return [batch, 3, channels]: a token for each shape and one for the ground."""
        tokens = torch.zeros(len(self.kinds), 3, channels)
        for n in range(2):
            said = [self.kinds[:, n, None], self.colours[:, n], 2 * self.moves[:, n], 4 * self.sizes[:, n, None]]
            told = torch.cat(said, -1)
            tokens[:, n, : told.shape[1]] = told
            tokens[:, n, -1 - n] = 1
        tokens[:, 2, :3], tokens[:, 2, -3] = self.ground, 1
        return tokens
