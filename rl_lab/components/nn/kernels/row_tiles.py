"""How kernels over rows of numbers, one norm each, share the rows. Imported on CUDA only."""

from __future__ import annotations

import triton


def row_tiles(rows: int, features: int) -> tuple[int, int, int]:
    """Padded width, rows a program handles at once, warps."""
    block = triton.next_power_of_2(features)
    group = 1 if rows <= 4096 else max(1, min(8, 2048 // block))  # few rows: spread them over the chip
    return block, group, 4 if block * group <= 2048 else 8
