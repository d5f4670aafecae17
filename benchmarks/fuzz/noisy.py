"""Members behind coarse arithmetic: float32, float16 and bfloat16, decimals, truncation, noise; norms and lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace

import numpy as np

from benchmarks.fuzz.boxes import Box, Kinds, Random, decades, one_of
from benchmarks.fuzz.maps import Floats, Heads, Layer, Map, Net
from benchmarks.fuzz.members import (
    boxed,
    draw_head,
    draw_heads,
    draw_layer_box,
    draw_net_box,
    draw_square_head,
    with_residual,
)

NOISY = Kinds("member")


def bfloat16(x: Floats) -> Floats:
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 2.0**8) / 2.0**8, exponent)


def typical(box: Box) -> float:
    """The size of answers to natural tokens."""
    tokens = box.size * np.random.default_rng(0).standard_normal((64, 4, box.width))
    return float(np.sqrt(np.mean(box.truth(tokens) ** 2))) or 1.0


def _shaped(box: Box, change: Map) -> Callable[[Floats], Floats]:
    def answer(tokens: Floats) -> Floats:
        answers = change(box.truth(tokens))
        return answers[:, 0] if box.scalar else answers

    return answer


def behind_gaussian(rng: Random, box: Box) -> Box:
    error = typical(box) * decades(rng, -9, -2)
    own = np.random.default_rng(rng.integers(2**62))
    answer = _shaped(box, lambda answers: answers + error * own.standard_normal(answers.shape))
    return replace(box, answer=answer, error=5 * error, noise=declared_or_not(rng, f"gaussian:{error!r}"))


def behind_bounded(rng: Random, box: Box) -> Box:
    """Errors that depend on the answer alone, so that the box repeats itself."""
    error = typical(box) * decades(rng, -9, -2)
    answer = _shaped(box, lambda answers: answers + error * np.sin(1e3 * answers / error))
    return replace(box, answer=answer, error=error, noise=declared_or_not(rng, f"bounded:{error!r}"))


def behind_decimals(rng: Random, box: Box) -> Box:
    decimals = int(np.round(-np.log10(typical(box) * decades(rng, -9, -2))))
    unit = 10.0**-decimals
    answer = _shaped(box, lambda answers: np.round(answers / unit) * unit)
    return replace(box, answer=answer, error=unit / 2, noise=declared_or_not(rng, f"rounded:{decimals}"))


def behind_floor(rng: Random, box: Box) -> Box:
    """Truncation. Where it is not declared nobody can tell it from rounding an answer that is half a unit smaller."""
    unit = float(10.0 ** np.round(np.log10(typical(box) * decades(rng, -9, -2))))
    noise = declared_or_not(rng, f"bounded:{unit!r}")
    answer = _shaped(box, lambda answers: np.floor(answers / unit) * unit)
    lower = box if noise.startswith("bounded") else replace(box, **_lowered(box, unit / 2))
    return replace(lower, answer=answer, error=unit, noise=noise)


def _lowered(box: Box, by: float) -> dict[str, object]:
    params = box.params
    if isinstance(params, Layer):
        params = replace(params, net=replace(params.net, constant=params.net.constant - by))
    elif params is not None:
        params = replace(params, constant=params.constant - by)
    return {"params": params, "truth": params.map()}


def behind_dtype(name: str, rounding: Map, error: float) -> Callable[[Random, Box], Box]:
    def wrap(rng: Random, box: Box) -> Box:
        return replace(box, answer=_shaped(box, rounding), error=error * typical(box), noise=declared_or_not(rng, name))

    return wrap


def in_float32(rng: Random, box: Box) -> Box:
    """Weights and arithmetic of float32."""
    params = cast(box.params, np.float32)
    exact = cast(params, np.float64)
    forward = params.map()
    wide = boxed(exact, box.width, box.scalar, box.size, box.limit)

    def answer(tokens: Floats) -> Floats:
        answers = forward(tokens.astype(np.float32))
        return answers[:, 0] if box.scalar else answers

    return replace(wide, answer=answer, float32=True, error=2.0**-20 * typical(wide))


def cast(params: object, dtype: type) -> object:
    """The parameters with all arrays in this dtype."""
    if isinstance(params, np.ndarray):
        return params.astype(dtype)
    if isinstance(params, tuple):
        return tuple(cast(each, dtype) for each in params)
    if not is_dataclass(params):
        return params
    return replace(params, **{each.name: cast(getattr(params, each.name), dtype) for each in fields(params)})


def declared_or_not(rng: Random, noise: str) -> str:
    """Declared, to be measured, or not declared at all."""
    return str(one_of(rng, (noise, noise, "measure", "")))


def in_float16(rng: Random, box: Box) -> Box:
    """Tokens must be kept so short that answers do not overflow."""
    wrap = behind_dtype("float16", lambda x: x.astype(np.float16).astype(float), 2.0**-11)
    return replace(wrap(rng, box), max_norm=30 * box.size * box.width**0.5)


FORMS: dict[str, Callable[[Random, Box], Box]] = {
    "float32": in_float32,
    "answers in float32": behind_dtype("float32", lambda x: x.astype(np.float32).astype(float), 2.0**-24),
    "float16": in_float16,
    "bfloat16": behind_dtype("bfloat16", bfloat16, 2.0**-8),
    "decimals": behind_decimals,
    "truncation": behind_floor,
    "normal errors": behind_gaussian,
    "bounded errors": behind_bounded,
}


def unscaled(rng: Random, draw: Callable[[Random], Box]) -> Box:
    """A box whose answers to natural tokens have a size from 1e-2 to 1e2: float16 has room for these."""
    box = draw(rng)
    factor = decades(rng, -2, 2) / typical(box)
    params = box.params
    if isinstance(params, Heads) and not params.residual:
        heads = tuple(replace(head, value=factor * head.value) for head in params.heads)
        params = replace(params, heads=heads, constant=factor * params.constant)
    elif isinstance(params, Net):
        params = _louder(params, factor)
    elif isinstance(params, Layer):
        params = replace(params, net=_louder(params.net, factor))
    return boxed(params, box.width, box.scalar, box.size, box.limit)


def _louder(net: Net, factor: float) -> Net:
    return replace(net, outer=factor * net.outer, constant=factor * net.constant, skip=factor * net.skip)


def small_heads(rng: Random) -> Box:
    return draw_heads(rng, False, most_width=6)


HOSTS: dict[str, tuple[Callable[[Random], Box], str]] = {
    "one head": (draw_head, ""),
    "one head, biases": (lambda rng: draw_head(rng, score_bias=True, output_bias=True), "biases behind noise"),
    "heads": (small_heads, "several heads behind noise"),
    "residual": (lambda rng: with_residual(draw_square_head(rng)), "a residual behind noise"),
    "ReLU net": (lambda rng: draw_net_box(rng, most=6), "nets behind noise"),
    "smooth net": (lambda rng: draw_net_box(rng, "gelu", most=4), "smooth nets are read from exact answers"),
    "one layer": (
        lambda rng: draw_layer_box(rng, residual=bool(rng.integers(2))),
        "layers are read from exact answers",
    ),
}


def _add_noisy() -> None:
    for host, (draw, limit) in HOSTS.items():
        for form, wrap in FORMS.items():

            def drawn(rng: Random, draw=draw, wrap=wrap, limit=limit) -> Box:
                return wrap(rng, replace(box := unscaled(rng, draw), limit=box.limit or limit))

            NOISY.add(f"{host}, coarse", form, drawn, every=32 if host == "smooth net" else 1)


_add_noisy()


# --- short tokens, short sequences ----------------------------------------------------------------------------------


def with_max_norm(rng: Random, box: Box, limit: str) -> Box:
    norm = box.size * box.width**0.5 * decades(rng, -1, 1.5)
    if isinstance(box.params, Net | Layer) and not _bends(box, norm):
        limit = limit or "nothing bends within the norms allowed"
    return replace(box, max_norm=norm, limit=box.limit or limit)


def _bends(box: Box, norm: float) -> bool:
    """Whether second differences show anything but an affine map for tokens of at most this norm."""
    rng = np.random.default_rng(0)
    tokens, step = rng.standard_normal((2, 1000, 3, box.width))
    tokens, step = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (tokens, step))
    tokens = 0.5 * norm * rng.random((1000, 1, 1)) * tokens
    low, middle, high = (box.truth(tokens + times * 0.4 * norm * step) for times in (-1, 0, 1))
    return float(np.max(np.abs(low - 2 * middle + high))) > 1e-6 * float(np.max(np.abs(high - low)) + 1e-300)


def with_max_length(rng: Random, box: Box) -> Box:
    length = int(rng.integers(2, 9))
    limit = box.limit
    if isinstance(box.params, Heads) and len(box.params.heads) > 1 and length <= 3:
        limit = limit or "sequences of two or three tokens"
    return replace(box, max_length=length, limit=limit)


def _add_bounds() -> None:
    hosts: dict[str, tuple[Callable[[Random], Box], str]] = {
        "one head": (draw_head, ""),
        "heads": (small_heads, ""),
        "heads, one number": (
            lambda rng: draw_heads(rng, True, most_width=6),
            "heads behind one number, norms bounded",
        ),
        "residual": (lambda rng: with_residual(draw_square_head(rng)), ""),
        "ReLU net": (lambda rng: draw_net_box(rng, most=8), ""),
        "smooth net": (lambda rng: draw_net_box(rng, "silu", most=4), "smooth nets, norms bounded"),
        "one layer": (lambda rng: draw_layer_box(rng, residual=False), ""),
        "one layer, residual": (lambda rng: draw_layer_box(rng, residual=True), "a residual, norms bounded"),
    }
    for host, (draw, limit) in hosts.items():

        def short(rng: Random, draw=draw, limit=limit) -> Box:
            return with_max_norm(rng, draw(rng), limit)

        NOISY.add("max_norm", host, short)
        NOISY.add("max_length", host, lambda rng, draw=draw: with_max_length(rng, draw(rng)))


_add_bounds()
