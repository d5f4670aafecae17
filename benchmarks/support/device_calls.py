"""Counts what a run asks of a device: kernels that are started, and times that the host waits for one.

No device is needed: calls of PyTorch are counted wherever the tensors are. An operation counts as one kernel, views as
none; reading a number, a truth value or an array on the host, and looking for places, count as a wait.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import TracebackType
from typing import Any, Self

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "cpu", "numpy", "__array__", "nonzero")
# What starts nothing: views, shapes, and memory that is not written to.
FREE = {
    *("view", "reshape", "expand", "permute", "transpose", "t", "slice", "select", "unsqueeze", "squeeze", "alias"),
    *("detach", "empty", "as_strided", "_unsafe_view", "split", "chunk", "unbind", "lift_fresh", "empty_like"),
    *("new_empty", "empty_strided", "_local_scalar_dense", "diagonal", "unfold"),
}
HERE, PLACES = "/src/keyhole/", 2


class _Functions(TorchFunctionMode):
    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in WAITS:
            self.waits[_where()] += 1
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, kernels: Counter[str]) -> None:
        super().__init__()
        self.kernels = kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in FREE:
            self.kernels[_where()] += 1
        return func(*args, **(kwargs or {}))


class DeviceCalls:
    """`with DeviceCalls() as calls:` counts kernels and waits by the line of the package that they come from.

    Waits alone are counted several times as fast.
    """

    def __init__(self, waits_alone: bool = False) -> None:
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        modes = (_Functions(self.waits), _Operations(self.kernels))
        self._modes = modes[:1] if waits_alone else modes

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)

    def text(self, most: int = 20) -> str:
        """The lines with the most of either."""
        lines = []
        for name, counted in (("waits", self.waits), ("kernels", self.kernels)):
            lines.append(f"{sum(counted.values())} {name}")
            lines += [f"{count:8d} {place}" for place, count in counted.most_common(most)]
        return "\n".join(lines)


def _where() -> str:
    """The innermost two lines of the package on the stack."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < PLACES:
        _, own, place = frame.f_code.co_filename.partition(HERE)
        if own:
            found.append(f"{place}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "caller"
