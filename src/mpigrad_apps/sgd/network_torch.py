"""The network that reads digits, in PyTorch."""
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

__all__ = ["accuracy", "loss", "network"]


def network(seed: int) -> nn.Sequential:
    """Make two convolutions of 3 x 3 pixels with max pooling of 2 x 2, and two dense layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def loss(
    network: nn.Module,
    pictures: Float32[Tensor, "samples 1 8 8"],
    digits: Int64[Tensor, " samples"],
) -> Float32[Tensor, ""]:
    """Compute the mean cross entropy."""
    return nn.functional.cross_entropy(network(pictures), digits)


def accuracy(
    network: nn.Module,
    pictures: Float32[Tensor, "samples 1 8 8"],
    digits: Int64[Tensor, " samples"],
) -> Float32[Tensor, ""]:
    """Compute the fraction of digits that the network recognizes."""
    return (network(pictures).argmax(1) == digits).float().mean()
