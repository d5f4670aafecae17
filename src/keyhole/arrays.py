"""One numerics for every array library: namespace look-up, dtype facts, conversion at the border."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from importlib import import_module
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import array_api_compat
import numpy as np
import numpy.typing as npt
from scipy.linalg import get_lapack_funcs

from keyhole.errors import UsageError

# An array of whichever library the oracle speaks. Static types cannot say more than that yet.
Array = Any
# NumPy arrays: what is worked out beside the oracle.
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

# Rounding errors of an inner product of n terms behave like a random walk: one standard deviation is about
# half an eps of |x|·|y| whatever n. Eight of them hold for every entry of the largest matrix one can recover.
ROUNDING_DEVIATIONS = 8.0

# What is worked out in between for matrices of more numbers than this is made for some rows at a time.
BLOCK_NUMBERS = 2**24

# Normal numbers that a device makes for the host at a time, 8 MiB of them.
DRAWN_AT_ONCE = 2**20

_NAMESPACES: dict[type, Any] = {}  # the look-up takes longer than many an operation on small arrays


# Spacing, smallest normal and largest number of float32.
FLOAT32, SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-23, 2.0**-126, 2.0**127 * (2 - 2.0**-23)


def namespace(array: Array) -> Any:
    """The array-API namespace of an array; TypeError when it is none."""
    kind = type(array)
    if kind not in _NAMESPACES:
        _NAMESPACES[kind] = array_api_compat.array_namespace(array)
    return _NAMESPACES[kind]


def to_numpy(array: Array) -> npt.NDArray[Any]:
    """A NumPy copy or view of an array of any library and device."""
    if isinstance(array, np.ndarray):
        return array
    if array_api_compat.is_torch_array(array):
        plain = array.detach().cpu()
        return np.asarray((plain.float() if str(plain.dtype) == "torch.bfloat16" else plain).numpy())  # NumPy has none
    if array_api_compat.is_cupy_array(array):
        return np.asarray(array.get())
    return np.asarray(array)


def like(array: Array, tokens: Array) -> Array:
    """An array in the library, dtype and device of `tokens`: itself where it is there already."""
    xp = namespace(tokens)
    if namespace(array) is xp and array.dtype == tokens.dtype:
        return array if array.device == tokens.device else array.to(tokens.device)
    return xp.asarray(to_numpy(array), dtype=tokens.dtype, device=tokens.device)


def copy_of(array: Array) -> Array:
    """A copy in memory of its own, without gradients; what is no array is returned as it is."""
    if array_api_compat.is_torch_array(array):
        return array.detach().clone()
    return namespace(array).asarray(array, copy=True) if array_api_compat.is_array_api_obj(array) else array


def floats(array: Array) -> Floats:
    """An array of any library and device as float64 numbers of NumPy, copied only where that must be."""
    return np.asarray(to_numpy(array), dtype=np.float64)


def numbers(*scalars: Array) -> list[float]:
    """Arrays of no dimension as numbers of Python; a device is waited for once."""
    if isinstance(scalars[0], np.ndarray | np.generic):
        return [float(each) for each in scalars]
    found: list[float] = to_numpy(namespace(scalars[0]).stack(list(scalars))).tolist()
    return found


def row_blocks(rows: int, width: int) -> list[slice]:
    """Slices of rows of a large matrix, small enough for what is made of them not to count; one of a smaller matrix."""
    each = max(1, BLOCK_NUMBERS // max(width, 1))
    return [slice(start, min(start + each, rows)) for start in range(0, rows, each)]


def times(rows: Floats, matrix: Array) -> Floats:  # (..., m), (..., m, n) -> (..., n)
    """A product with a matrix of any library and device, as numbers of NumPy."""
    return floats(like(rows, matrix) @ matrix)


def row_norms(array: Array) -> Array:  # (..., n) -> (...)
    """Norms along the last axis; in NumPy several times as fast as its own."""
    if isinstance(array, np.ndarray):
        return np.sqrt(np.vecdot(array, array))
    return namespace(array).linalg.vector_norm(array, axis=-1)


def median(array: Array, axes: tuple[int, ...] | None = None) -> Floats:
    """The median of all numbers, or along some axes, as numbers of NumPy."""
    if isinstance(array, np.ndarray):
        return np.asarray(np.median(array, axis=axes))
    xp = namespace(array)
    along = tuple(range(array.ndim)) if axes is None else axes
    kept = tuple(axis for axis in range(array.ndim) if axis not in along)
    flat = xp.reshape(xp.permute_dims(array, kept + along), (*(array.shape[axis] for axis in kept), -1))
    ordered, middle = xp.sort(flat, axis=-1), flat.shape[-1] // 2
    return floats(ordered[..., middle] + ordered[..., (flat.shape[-1] - 1) // 2]) / 2


def is_real(array: Array) -> bool:
    """Whether an array holds real numbers: booleans, integers or floating-point numbers."""
    return _is_real(namespace(array), array.dtype)


@cache
def _is_real(xp: Any, dtype: Any) -> bool:
    try:
        return bool(xp.isdtype(dtype, ("bool", "integral", "real floating")))
    except TypeError:  # a dtype the array API does not know
        return False


def gather_into(room: Array, table: Array, index: Array) -> None:  # (n, width), (m, width), (n,)
    """Write table[index] to `room` in one pass, which the array API has no word for."""
    if isinstance(room, np.ndarray):
        np.take(table, index, axis=0, out=room, mode="clip")
    elif array_api_compat.is_torch_array(room):
        namespace(room).index_select(table, 0, index, out=room)
    else:
        room[...] = namespace(room).take(table, index, axis=0)


def lu_factor(matrix: Array) -> tuple[Array, Integers] | None:  # (m, n), m ≥ n -> (m, n), (m,)
    """L (below the diagonal) and U of the rows in an order that pivoting chose, and that order; None where not known.

    The array API has no word for it. What is singular ends in pivots of zero.
    """
    if isinstance(matrix, np.ndarray):
        getrf: Any = get_lapack_funcs("getrf", (matrix,))
        packed, swaps, _ = getrf(matrix)
    elif array_api_compat.is_torch_array(matrix):
        packed, swaps, _ = namespace(matrix).linalg.lu_factor_ex(matrix)
        swaps = to_numpy(swaps) - 1  # as LAPACK has them, from one
    else:
        return None
    order = list(range(matrix.shape[0]))
    for place, other in enumerate(swaps.tolist()):
        order[place], order[other] = order[other], order[place]
    return packed, np.array(order)


# How libraries call it, or say it, that an array does not fit into memory.
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "_ArrayMemoryError")
OUT_OF_MEMORY_WORDS = ("out of memory", "ALLOC_FAILED", "Failed to allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of any library says that an array did not fit into memory."""
    return type(error).__name__ in OUT_OF_MEMORY or any(word in str(error) for word in OUT_OF_MEMORY_WORDS)


class ArrayTable:
    """Base of dataclasses whose fields are arrays of as many rows, or tables of them; empty ones are left out."""

    def take(self, index: Array | slice) -> Self:
        """Some rows."""
        return type(self)(*(_rows(getattr(self, each.name), index) for each in fields(self)))  # type: ignore[arg-type]

    @classmethod
    def concat(cls, *parts: Self) -> Self:
        """The rows of all parts, one after the other; of a single part itself."""
        if len(parts) == 1:
            return parts[0]
        columns = ([getattr(part, each.name) for part in parts] for each in fields(cls))  # type: ignore[arg-type]
        return cls(*(_joined(column) for column in columns))


def _rows(column: Any, index: Array | slice) -> Any:
    if isinstance(column, ArrayTable):
        return column.take(index)
    if column.shape[0] == 0:
        return column
    plain = isinstance(column, np.ndarray) or isinstance(index, slice)
    return column[index] if plain else namespace(column).take(column, index, axis=0)


def _joined(columns: list[Any]) -> Any:
    first = columns[0]
    return type(first).concat(*columns) if isinstance(first, ArrayTable) else namespace(first).concat(columns)


@dataclass(frozen=True)
class Space:
    """Where arrays live: library, floating dtype and device. Everything a method makes is made here."""

    xp: Any
    dtype: Any
    device: Any
    coarse: float = 0.0  # spacing of answers that are rounded to fewer digits than the dtype has

    @classmethod
    def of(cls, example: Array) -> Space:
        """The space of an example array, which must be a real floating-point one."""
        if not array_api_compat.is_array_api_obj(example):
            raise UsageError(f"`like` must be an example array, not {type(example).__name__}")
        xp = namespace(example)
        if not xp.isdtype(example.dtype, "real floating"):
            raise UsageError(f"`like` must be a real floating-point array, not {example.dtype}")
        return cls(xp, example.dtype, array_api_compat.device(example))

    def __reduce__(self) -> tuple[Any, ...]:
        """A module cannot travel: its name does."""
        return _space_of, (self.xp.__name__, self.dtype, self.device, self.coarse)

    @cached_property
    def spacing(self) -> float:
        """Distance from one to the next larger number of the dtype."""
        return float(self.xp.finfo(self.dtype).eps)

    @cached_property
    def eps(self) -> float:
        """Relative spacing of answers: that of the dtype, or a coarser one."""
        return max(self.spacing, self.coarse)

    @property
    def rounding(self) -> float:
        """Relative error of one inner product, over the product of the two norms."""
        return ROUNDING_DEVIATIONS * self.eps / 2

    @cached_property
    def tiny(self) -> float:
        """The smallest normal number: below it, relative accuracy is lost."""
        own = float(self.xp.finfo(self.dtype).smallest_normal)
        return max(own, SMALLEST_FLOAT32) if self.coarse >= FLOAT32 else own

    @cached_property
    def huge(self) -> float:
        """The largest number; of answers with few digits that of float32, in which they may have been computed."""
        own = float(self.xp.finfo(self.dtype).max)
        return min(own, LARGEST_FLOAT32) if self.coarse >= FLOAT32 else own

    @cached_property
    def on_cpu(self) -> bool:
        """Whether arrays live in main memory."""
        return "cpu" in str(self.device)

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether the device works on while the host goes on: to look at a number is to wait for all that came before.

        Other libraries than PyTorch may too, but the clock of theirs is not read here.
        """
        return not self.on_cpu and array_api_compat.is_torch_namespace(self.xp)

    @property
    def in_tf32(self) -> bool:
        """Whether PyTorch was told to make products of float32 with the 11 binary digits of TF32 on this device."""
        if self.on_cpu or not array_api_compat.is_torch_namespace(self.xp) or "float32" not in str(self.dtype):
            return False
        products = import_module("torch").backends.cuda.matmul
        said = getattr(products, "fp32_precision", None)  # since PyTorch 2.9
        return bool(products.allow_tf32 if said is None else said == "tf32")

    def free_bytes(self) -> int | None:
        """Memory of the device that is free, that of arrays that are gone included; None where that is not known."""
        if "cuda" not in str(self.device) or not array_api_compat.is_torch_namespace(self.xp):
            return None
        cuda = self.xp.cuda
        kept = cuda.memory_reserved(self.device) - cuda.memory_allocated(self.device)
        return int(cuda.mem_get_info(self.device)[0] + kept)

    @cached_property
    def _is_numpy(self) -> bool:
        return array_api_compat.is_numpy_namespace(self.xp)

    @cached_property
    def itemsize(self) -> int:
        """Bytes per number."""
        return int(to_numpy(self.zeros(1)).itemsize)

    @cached_property
    def label(self) -> str:
        """A short stable name, e.g. `numpy float64 cpu`."""
        library = self.xp.__name__.rsplit(".", 1)[-1]
        return f"{library} {str(self.dtype).rsplit('.', 1)[-1].strip(chr(39) + '<>')} {self.device}"

    def asarray(self, values: Any) -> Array:
        """`values` as a floating array of this space."""
        if type(values) is np.ndarray and values.dtype == self.dtype and self._is_numpy:
            return values  # what the rest would come to, in a tenth of the time
        if array_api_compat.is_torch_array(values):
            values = values.detach()
        if array_api_compat.is_array_api_obj(values) and namespace(values) is not self.xp:
            values = to_numpy(values)
        return self.xp.asarray(values, dtype=self.dtype, device=self.device)

    def indices(self, values: Any) -> Array:
        """`values` as an integer array of this space."""
        if self._is_numpy:
            return np.asarray(values, dtype=np.int64)
        return self.xp.asarray(values, dtype=self.xp.int64, device=self.device)

    def zeros(self, *shape: int) -> Array:
        """An array of zeros."""
        return self.xp.zeros(shape, dtype=self.dtype, device=self.device)

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        """An array filled with one value."""
        return self.xp.full(shape, value, dtype=self.dtype, device=self.device)

    def eye(self, size: int) -> Array:
        """The identity matrix."""
        return self.xp.eye(size, dtype=self.dtype, device=self.device)

    def normal(self, rng: np.random.Generator, *shape: int) -> Array:
        """Standard normal numbers, the same for every library and device."""
        return self.asarray(rng.standard_normal(shape))


def _space_of(library: str, *others: Any) -> Space:
    return Space(import_module(library), *others)


class Stopwatch:
    """Adds up the seconds spent inside `with stopwatch:`, by the clock of the device where that runs ahead."""

    def __init__(self, space: Space) -> None:
        self._cuda = space.xp.cuda if space.runs_ahead and "cuda" in str(space.device) else None
        self._device = space.device
        self._seconds, self._began = 0.0, 0.0
        self._spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> Self:
        if self._cuda is None:
            self._began = perf_counter()
        else:
            self._spans.append((self._mark(), None))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cuda is None:
            self._seconds += perf_counter() - self._began
        else:
            self._spans[-1] = (self._spans[-1][0], self._mark())

    def _mark(self) -> Any:
        assert self._cuda is not None
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def read(self) -> float:
        """The seconds so far; it waits for the device."""
        for begin, end in self._spans:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        self._spans = []
        return self._seconds


def host_normals(space: Space, rng: np.random.Generator) -> Callable[[tuple[int, ...]], Floats]:
    """What draws standard normal numbers for the host: `rng`, or a device that makes many faster, and others."""
    if not space.runs_ahead:
        return rng.standard_normal
    xp = space.xp
    generator = xp.Generator(device=space.device).manual_seed(int(rng.integers(2**62)))
    left = np.empty(0)

    def draw(shape: tuple[int, ...]) -> Floats:
        nonlocal left
        size = math.prod(shape)
        if left.size < size:  # many at a time: a device is waited for whenever numbers come from it
            many = max(size, DRAWN_AT_ONCE)
            left = floats(xp.randn(many, dtype=xp.float64, device=space.device, generator=generator))
        drawn, left = left[:size].reshape(shape), left[size:]
        return drawn

    return draw


def numpy_space() -> Space:
    """NumPy float64: where everything lives unless an oracle says otherwise."""
    return Space.of(np.zeros(1))
