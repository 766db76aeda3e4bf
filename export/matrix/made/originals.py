"""Networks with weights that no other one has by chance, what they answer, and their files.

Knows torch. Knows nothing of what export makes of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

from convoy.export.matrix.made import networks
from convoy.export.sources.torch_child.random_weights import draw

NETWORKS = "nets.py"
# uint8 `images` [n, H, W, C], and the float32 `answers` [n, outputs] of the network itself.
TRUTH = "truth.safetensors"
_IMAGES = 8
# Height, width and channels.
Shape = tuple[int, int, int]
USUAL: Shape = (32, 32, 3)


def trained(factory: str, shape: Shape = USUAL) -> nn.Module:
    """The network that `factory` gives, in evaluation mode, with weights under which no output is constant."""
    torch.manual_seed(11)
    network: nn.Module = getattr(networks, factory)()
    network.float().eval()
    height, width, channels = shape
    images = torch.rand(16, channels, height, width)
    with torch.no_grad():
        network(images)  # what is lazy takes its shapes from them
    draw(network, lambda: network(images))
    return network


def write_networks(folder: Path) -> None:
    """The file of the factories, `NETWORKS`."""
    shutil.copyfile(networks.__file__, folder / NETWORKS)


def write_truth(network: nn.Module, folder: Path, shape: Shape = USUAL, mean: float = 0, std: float = 1) -> None:
    """`TRUTH`: what the network answers to images of which it sees `(pixel / 255 - mean) / std`."""
    pixels = np.random.default_rng(1).integers(0, 256, (_IMAGES, *shape), dtype=np.uint8)
    images = torch.from_numpy((pixels.astype(np.float32) / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
    with torch.inference_mode():
        answers = network(images)
    save_file({"images": pixels, "answers": answers.numpy().astype(np.float32)}, folder / TRUTH)


def write_weights(factory: str, folder: Path, shape: Shape = USUAL, mean: float = 0, std: float = 1) -> None:
    """`<factory>.pth`, the file of the factories, and the truth."""
    network = trained(factory, shape)
    write_networks(folder)
    torch.save(network.state_dict(), folder / f"{factory}.pth")
    write_truth(network, folder, shape, mean, std)


def write_reduced_weights(factory: str, folder: Path) -> None:
    """The same for a network of `plain`'s layers that converts itself; its weights are what becomes of them then."""
    network = trained("plain")
    network.to(next(getattr(networks, factory)().parameters()).dtype)
    write_networks(folder)
    torch.save(network.state_dict(), folder / f"{factory}.pth")
    write_truth(network.float(), folder)


def write_program(path: Path) -> None:
    """A program of torch.export for batches of 1 to 64, and the truth beside it."""
    network = trained("residual")
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(network, (torch.rand(2, 3, 32, 32),), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
    write_truth(network, path.parent)
