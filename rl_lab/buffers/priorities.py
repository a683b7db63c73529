"""Numbers to draw places by, in proportion: a tree of sums on the host, one running sum on a device.

On the host a change touches one path of the tree and a draw walks one, whatever the number of places. A device would
have to launch a kernel for every level of it; there one running sum over all places is quicker, and needs no answer
from the device. Both find the same place for the same random number, up to rounding.
"""

from __future__ import annotations

import numpy as np
import torch


class SumTree:
    """Weights of `size` places, as leaves of a binary tree whose nodes are the sums of their two children.

    A node is always computed from its children, never changed by a difference: what the tree holds depends on the
    leaves alone, not on how they came about.
    """

    def __init__(self, size: int) -> None:
        self._leaves = 1 << max(0, (size - 1).bit_length())
        self._nodes = np.zeros(2 * self._leaves)  # node k has the children 2k and 2k+1; the root is node 1
        self.size = size

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    def get(self, places: np.ndarray) -> np.ndarray:
        """Weights (K,) of places (K,)."""
        return self._nodes[self._leaves + places]

    def set(self, places: np.ndarray, weights: np.ndarray) -> None:
        """Change weights, none below 0. Of equal places the last wins. places, weights: (K,)"""
        nodes = self._leaves + places
        self._nodes[nodes] = weights
        while len(nodes) and nodes[0] > 1:
            nodes = np.unique(nodes >> 1) if len(nodes) > 1 else nodes >> 1
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def set_all(self, weights: np.ndarray) -> None:
        """Change every weight at once. weights: (size,)"""
        self._nodes[self._leaves : self._leaves + self.size] = weights
        level = self._leaves
        while level > 1:
            children = self._nodes[level : 2 * level]
            level //= 2
            self._nodes[level : 2 * level] = children[0::2] + children[1::2]

    def find(self, numbers: np.ndarray) -> np.ndarray:
        """Places (K,) for numbers (K,) in [0, 1): each place takes a share of them in proportion to its weight."""
        left_over = numbers * self._nodes[1]
        nodes = np.ones(len(numbers), dtype=np.int64)
        while nodes[0] < self._leaves if len(nodes) else False:
            nodes = 2 * nodes
            left = self._nodes[nodes]
            # Rounding must not lead to a place without weight, so an empty right side is never entered.
            right = (left_over >= left) & (self._nodes[nodes + 1] > 0)
            left_over = np.where(right, left_over - left, left_over)
            nodes += right
        return nodes - self._leaves


class RunningSum:
    """Weights of `size` places in one tensor on a device, and one spare place behind them that is never drawn."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.weights = torch.zeros(size + 1, dtype=torch.float32, device=device)

    def find(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Places (K,) for numbers (K,) float64 in [0, 1), and their probabilities (K,); no host read."""
        sums = self.weights[:-1].cumsum(0, dtype=torch.float64)
        total = sums[-1]
        below = torch.nextafter(total, torch.zeros_like(total))
        places = torch.searchsorted(sums, torch.minimum(numbers * total, below), right=True)
        return places, self.weights[places].double() / total
