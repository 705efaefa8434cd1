"""Data-parallel training beside PyTorch's DDP over gloo and a loop of Allreduce over the layers.

    python bench/training.py [--parameters 1e6 25e6] [--rounds 15] [--json FILE] [--picture FILE]

A perceptron of equal layers, float32, 32 samples on each of 2 ranks, SGD with momentum. Each library
trains its own copy of the same model on the same samples, in one job; they take turns, so that a
drift of the machine meets all alike. Figures are medians over rounds of the slowest rank's time, and
of the rounds' ratios.

- step: forward, backward, the exchange of gradients and the update.
- communication: what a step takes beyond a step of the same model without messages.
- exchange: all gradients once, with nothing else to do.

Then the parameter server: updates per second with 1 server and 3 workers. `--picture` draws when
gradients of layers are ready and when buckets travel in one step.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve()
SAMPLES = 32  # of a rank
WIDTH = {1e6: (4, 512), 25e6: (6, 2048)}  # layers, width


def perceptron(layers: int, width: int) -> Any:
    """Layers of width x width; parameters are equal on all ranks."""
    import torch

    torch.manual_seed(0)
    parts: list[Any] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts[:-1])


def without_messages(model: Any, optimizer: Any, loss: Any) -> Callable[..., None]:
    def step(*batch: Any) -> None:
        optimizer.zero_grad()
        loss(model, *batch).backward()
        optimizer.step()

    return step
