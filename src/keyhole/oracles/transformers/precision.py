"""Arithmetic that a model narrows to float32 inside, such as softmax, norms and rotary tables, and how it is widened.

Many models ask for float32 by name, whatever their weights are. Then a model in float64 answers with the digits of
float32. While `computed_in_full` lasts, whatever asks PyTorch for fewer digits than float64 gets float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Literal

from keyhole.errors import UsageError
from keyhole.optional import extra
from keyhole.oracles.transformers.own_run import USER

Precision = Literal["float64"] | None
# Answers that change by more than so many roundings of float64 were computed with fewer digits inside.
ROUNDINGS = 1e4
# Methods of tensors that are named by what they narrow to.
NARROWING = ("float", "half", "bfloat16")


def check_precision(precision: Any, dtype: Any) -> None:
    """UsageError for a precision that is not known, or that contradicts the dtype."""
    if precision not in (None, "float64"):
        raise UsageError(f"precision must be 'float64', or None for that of the model's own code, not {precision!r}")
    if precision is not None and dtype is not None and str(dtype).removeprefix("torch.") != precision:
        raise UsageError(f"precision='float64' asks a copy in float64, not in {dtype}: leave dtype out")


def computed_in(precision: Precision) -> AbstractContextManager[Any]:
    """As the model's own code computes, or in float64 throughout."""
    return nullcontext() if precision is None else computed_in_full()


def computed_in_full() -> AbstractContextManager[Any]:
    """Everything that asks PyTorch for float32 or less gets float64."""
    mode: AbstractContextManager[Any] = _widening()()
    return mode


def is_narrowed(answers: Any, in_full: Any) -> bool:
    """Whether answers in float64 have fewer digits than they would if all was computed in it."""
    torch = extra("torch", "transformers", USER)
    allowed = ROUNDINGS * torch.finfo(torch.float64).eps * float(in_full.abs().max())
    return not float((answers - in_full).abs().max()) <= allowed


@cache
def _widening() -> type[AbstractContextManager[Any]]:
    """The class of the mode, made once PyTorch is there."""
    torch = extra("torch", "transformers", USER)
    narrow = {torch.float32, torch.float16, torch.bfloat16}

    def wide(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in narrow else value

    class Widening(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(
            self, function: Any, _types: Any, args: Sequence[Any] = (), named: Mapping[str, Any] | None = None
        ) -> Any:
            if getattr(function, "__name__", "") in NARROWING and isinstance(args[0], torch.Tensor):
                return args[0].double()
            return function(*map(wide, args), **{name: wide(each) for name, each in (named or {}).items()})

    return Widening
