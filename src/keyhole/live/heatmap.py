"""Matrices as a page can draw them: few cells, one byte each."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from keyhole.arrays import Array, Floats, to_numpy

MOST_CELLS = 128  # along a side; of larger matrices a cell shows the largest entry of several
MOST_PICTURES = 16


def pictures(matrices: Mapping[str, Array]) -> list[dict[str, Any]]:
    """The first matrices, each with its size, its largest entry and its cells as signed bytes."""
    return [_picture(name, matrix) for name, matrix in list(matrices.items())[:MOST_PICTURES]]


def _picture(name: str, matrix: Array) -> dict[str, Any]:
    numbers = np.nan_to_num(np.atleast_2d(to_numpy(matrix).astype(np.float64)), posinf=0.0, neginf=0.0)
    cells = _pool(_pool(numbers).T).T if numbers.size else numbers
    largest = float(np.max(np.abs(cells), initial=0.0))
    steps = np.round(cells * (127 / largest)) if largest > 0 else cells
    return {
        "name": name,
        "shape": list(numbers.shape),
        "cells": list(cells.shape),
        "largest": largest,
        "data": base64.b64encode(steps.astype(np.int8).tobytes()).decode(),
    }


def _pool(numbers: Floats) -> Floats:  # (rows, columns) -> (fewer rows, columns)
    """Rows put together where they are many: of several entries the one that is largest in size."""
    rows = numbers.shape[0]
    if rows <= MOST_CELLS:
        return numbers
    starts = np.linspace(0, rows, MOST_CELLS, endpoint=False).astype(np.int64)
    high, low = np.maximum.reduceat(numbers, starts, axis=0), np.minimum.reduceat(numbers, starts, axis=0)
    return np.where(high >= -low, high, low)
