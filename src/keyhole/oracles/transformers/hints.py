"""What parts attention may have, by a model's config, its modules and what it gives them.

Nobody who asks a model from outside has these, and no certificate rests on them: they only say what is tried first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keyhole.arrays import Array, Floats, floats
from keyhole.oracles.transformers.places import Place
from keyhole.oracles.transformers.surroundings import LENGTHS, Surroundings

# What configs call a window, a cap of logits, and how many numbers of a key turn.
WINDOWS = ("sliding_window", "local_attention", "window_size", "attention_window")
CAPS = ("attn_logit_softcapping",)
BUCKETS = "relative_attention_num_buckets"  # of distances, each with an energy of its own
BASE = 10000.0
# What models call norms of queries and keys, and what they give to attention that slopes with distance.
NORM_OF_KEYS = re.compile(r"(^|[._])(q|k|query|key)_?(layer)?_?norm$", re.IGNORECASE)
SLOPES = ("alibi", "position_bias")
# Angles nearer than this are one, since pairs stand twice in most tables; answers nearer than this are the same.
SAME = 1e-6


def hints_of(
    place: Place, surroundings: Surroundings, answer: Callable[[Array], Array], *, block: bool = False
) -> tuple[Mapping[str, Any], ...]:
    """Options of a method for several heads; none where attention seems to be plain.

    Where the norm of a block is comes first: behind attention where the layer ends with one, else before it.
    """
    options: dict[str, Any] = {}
    config, module = place.model.config, place.module
    angles = _angles(place, surroundings)
    if any(NORM_OF_KEYS.search(name) for name, _ in module.named_modules()):
        options["form"] = "qk-norm" if angles is None else "qk-norm-rotary"
    elif angles is not None:
        options["form"] = "rotary"
    if angles is not None:
        options["frequencies"] = angles
    if any(_number(config, name) is not None for name in CAPS):
        options["link"] = "softcap"
    if any("sink" in name for name, _ in module.named_parameters()):
        options["normaliser"] = "sink"
    if _number(config, BUCKETS) is not None:
        options["position_bias"] = "table"
    elif _has_slopes(surroundings):
        options["position_bias"] = "alibi"
    window = _window(config)
    if window is not None and _hides(answer, window, place.width, surroundings.longest()):
        options["position_bias"] = "window"
    plain = (options,) if options else ()
    if not block:
        return plain
    return ({"place": "before" if place.after is None else "after", **options}, *plain)


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


def _window(config: Any) -> int | None:
    found = [number for name in WINDOWS if (number := _number(config, name)) is not None]
    return int(found[0]) if found else None


def _hides(answer: Callable[[Array], Array], window: int, width: int, longest: int | None) -> bool:
    """Whether the last of one token more than a window sees nothing of the first."""
    if longest is not None and window + 1 > longest:
        return False
    tokens = np.random.default_rng(0).standard_normal((2, window + 1, width))
    tokens[1, 1:] = tokens[0, 1:]
    one, two = floats(answer(tokens)).reshape(2, -1)
    return bool(np.max(np.abs(one - two)) <= SAME * np.max(np.abs(one)))


def _has_slopes(surroundings: Surroundings) -> bool:
    call = surroundings.of(1, LENGTHS[0])
    return any(call.given.get(name) is not None for name in SLOPES)


def _angles(place: Place, surroundings: Surroundings) -> Floats | None:  # (pairs,)
    """Angles per position of rotary tables that attention is given, or has; None where there are none."""
    call = surroundings.of(1, LENGTHS[1])
    given = [*call.args, *call.given.values()]
    tables = [each for each in given if isinstance(each, tuple) and len(each) == 2]
    for cosines, sines in tables:
        if getattr(cosines, "ndim", 0) < 2 or getattr(sines, "shape", None) != cosines.shape:
            continue
        turns = np.arctan2(floats(sines), floats(cosines)).reshape(-1, LENGTHS[1], cosines.shape[-1])[0]
        return _distinct((turns[1] - turns[0]) % (2 * np.pi))
    own = [each for name, each in place.module.named_buffers() if name.endswith("inv_freq")]
    if own:
        return _distinct(floats(own[0].detach()))
    turned = _number(place.model.config, "rotary_dim")
    return None if turned is None else BASE ** (-np.arange(int(turned) // 2) / (int(turned) // 2))


def _distinct(angles: Floats) -> Floats | None:
    """Each angle once, the largest first; those of tokens that do not turn are left out."""
    rising = np.sort(angles[(angles > 0) & (angles < np.pi)])
    if not rising.size:
        return None
    first = np.append(True, np.diff(rising) > SAME * rising[1:])
    return np.asarray(rising[first][::-1])
