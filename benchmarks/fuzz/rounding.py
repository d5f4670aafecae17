"""Members whose answers are rounded more than once, or not to the nearest: float32 inside, digits cut off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.fuzz.boxes import Box, Kinds, Random, decades, one_of
from benchmarks.fuzz.maps import Floats, Map
from benchmarks.fuzz.members import boxed, draw_head
from benchmarks.fuzz.noisy import HOSTS, bfloat16, cast, declared_or_not, typical, unscaled

ROUNDING = Kinds("member")
LONGEST = 1e3  # tokens over natural ones where a float32 box says so: far beyond, its answers overflow


def _in_float32(box: Box, after: Map) -> Box:
    """A forward pass of float32 that takes float64 tokens and says so nowhere, its answers changed after it."""
    params = cast(box.params, np.float32)
    wide = boxed(cast(params, np.float64), box.width, box.scalar, box.size, box.limit)
    forward = params.map()

    def answer(tokens: Floats) -> Floats:
        answers = after(forward(tokens.astype(np.float32)))
        return answers[:, 0] if box.scalar else answers

    return replace(wide, answer=answer, error=2.0**-20 * typical(wide))


def _bounded(rng: Random, box: Box) -> Box:
    """Half of them say how long tokens may be."""
    return replace(box, max_norm=LONGEST * box.size * box.width**0.5 if rng.integers(2) else None)


def in_float32_only(rng: Random, box: Box) -> Box:
    return _bounded(rng, _in_float32(box, lambda x: x.astype(float)))


def twice_to_dtype(name: str, rounding: Map, error: float) -> Callable[[Random, Box], Box]:
    def wrap(rng: Random, box: Box) -> Box:
        inner = _in_float32(box, lambda x: rounding(x.astype(float)))
        short = replace(inner, error=error * typical(inner), noise=declared_or_not(rng, name))
        if name == "float16":
            return replace(short, max_norm=30 * box.size * box.width**0.5)
        return _bounded(rng, short)

    return wrap


def twice_to_decimals(rng: Random, box: Box) -> Box:
    decimals = int(np.round(-np.log10(typical(box) * decades(rng, -7, -2))))
    inner = _in_float32(box, lambda x: np.round(x.astype(float) * 10.0**decimals) / 10.0**decimals)
    return _bounded(rng, replace(inner, error=0.5 * 10.0**-decimals, noise=declared_or_not(rng, f"rounded:{decimals}")))


def many_decimals(rng: Random, box: Box) -> Box:
    """So many that float64 numbers hardly show them."""
    decimals = int(np.round(-np.log10(typical(box) * decades(rng, -12, -9))))
    change: Map = lambda x: np.round(x * 10.0**decimals) / 10.0**decimals  # noqa: E731
    return _bounded(rng, _changed(box, change, 0.5 * 10.0**-decimals, declared_or_not(rng, f"rounded:{decimals}")))


def _changed(box: Box, change: Map, error: float, noise: str) -> Box:
    def answer(tokens: Floats) -> Floats:
        answers = change(box.truth(tokens))
        return answers[:, 0] if box.scalar else answers

    return replace(box, answer=answer, error=error, noise=noise)


def cut_off(cut: Map) -> Callable[[Random, Box], Box]:
    """Digits cut off, of which the truth knows nothing."""

    def wrap(rng: Random, box: Box) -> Box:
        unit = float(10.0 ** np.round(np.log10(typical(box) * decades(rng, -7, -2))))
        noise = str(one_of(rng, (f"bounded:{unit!r}", "", "", "measure")))
        return _bounded(rng, _changed(box, lambda x: cut(x / unit) * unit, unit, noise))

    return wrap


FORMS: dict[str, Callable[[Random, Box], Box]] = {
    "float32 inside": in_float32_only,
    "float32, then bfloat16": twice_to_dtype("bfloat16", bfloat16, 2.0**-8),
    "float32, then float16": twice_to_dtype("float16", lambda x: x.astype(np.float16).astype(float), 2.0**-11),
    "float32, then decimals": twice_to_decimals,
    "many decimals": many_decimals,
    "floor": cut_off(np.floor),
    "towards zero": cut_off(np.trunc),
}


def _add_forms() -> None:
    hosts = dict(HOSTS, **{"one head, output bias": (lambda rng: draw_head(rng, output_bias=True), "")})
    del hosts["smooth net"]
    for host, (draw, limit) in hosts.items():
        for form, wrap in FORMS.items():

            def drawn(rng: Random, draw=draw, wrap=wrap, limit=limit) -> Box:
                return wrap(rng, replace(box := unscaled(rng, draw), limit=box.limit or limit))

            ROUNDING.add(f"{host}, rounded twice or cut", form, drawn)


_add_forms()
