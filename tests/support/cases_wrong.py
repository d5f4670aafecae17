"""Boxes that are no single head, or are not well: never certified."""

from __future__ import annotations

from typing import Any

import keyhole as kh
from keyhole.recovery import Outcome
from support import targets as t
from support.cases import CERTIFIED, Case, other

MISFITS = frozenset({Outcome.WRONG_FAMILY, Outcome.SATURATED, Outcome.INCONSISTENT, Outcome.TOO_NOISY})
BROKEN = frozenset({Outcome.ORACLE_FAILED})


# Errors too small to hide that a box is no head.
NOISES = (kh.Noise.gaussian(1e-6), kh.Noise.bounded(1e-6), kh.Noise.rounded(7), kh.Noise.dtype("float32"))


def wrong() -> list[Case]:
    """Boxes that are no single head, and boxes that misbehave: never certified."""
    misfits = [
        t.two_heads,
        t.faint_second_head,
        t.relu_net,
        t.hashed,
        t.positional,
        t.residual,
        t.mean_and_square,
        t.last_token_only,
        t.hard_attention,
        t.short_memory,
        t.two_vector_heads,
        t.faint_second_vector_head,
        t.heads_beside_each_other,
        t.one_output_apart,
        t.relu_on_top,
        t.relu_beside,
        t.tanh_on_top,
        t.skip_to_outputs,
        t.normed_tokens,
    ]
    everywhere = [
        t.placed_everywhere,
        t.near_everywhere,
        t.rotated_everywhere,
        t.two_heads_everywhere,
        t.relu_everywhere,
        t.skip_everywhere,
        t.window_everywhere,
    ]
    broken: dict[str, tuple[Any, str]] = {
        "nan_at_once": (t.nan_at_once, "nan"),
        "nan_later": (t.nan_later, "nan"),
        "inf_later": (t.inf_later, "inf"),
        "wrong_shape": (t.wrong_shape, "shape"),
        "one_number": (t.one_number, "shape"),
        "deep_shape": (t.deep_shape, "shape"),
        "changing_shape": (t.changing_shape, "must not change"),
        "a_list": (t.a_list, "list"),
        "nothing": (t.nothing, "none"),
        "raising": (t.raising, "cuda out of memory"),
    }
    return [
        *(Case(box.__name__, other(box), outcomes=MISFITS) for box in misfits),
        Case("never_twice_the_same", other(t.never_twice_the_same), outcomes=MISFITS),
        Case("all_noise", other(t.all_noise), outcomes=MISFITS),
        *(Case(name, other(box), outcomes=BROKEN, says=(word,)) for name, (box, word) in broken.items()),
        Case("relu_net-bounded", other(t.relu_net, max_norm=1.0), outcomes=MISFITS),
        Case("two_heads-bounded", other(t.two_heads, max_norm=1.0), outcomes=MISFITS),
        Case("residual-bounded", other(t.residual, max_norm=1.0), outcomes=MISFITS),
        Case("positional-wide", other(t.positional, width=48), outcomes=MISFITS),
        Case("two_heads-wide", other(t.two_heads, width=48), outcomes=MISFITS),
        Case("two_heads-width-2", other(t.two_heads, width=2), outcomes=MISFITS),
        *(Case(box.__name__, other(box, positions="all"), outcomes=MISFITS) for box in everywhere),
        *(
            Case(f"{box.__name__}-{name}", other(box, **signature), outcomes=MISFITS, options={"method": method})
            for box in (t.two_vector_heads, t.heads_beside_each_other, t.relu_on_top)
            for name, signature, method in (
                ("bounded", {"max_norm": 1.0}, "single-head"),
                ("low-rank", {}, "low-rank"),
                ("narrow", {"width": 3}, "single-head"),
            )
        ),
        *(
            Case(
                f"{box.__name__}-as-{method}",
                other(box),
                outcomes=frozenset(Outcome) - CERTIFIED,
                options={"method": method},
            )
            for box in (
                t.two_heads,
                t.hashed,
                t.positional,
                t.hard_attention,
                t.normed_tokens,
                t.mean_and_square,
                t.never_twice_the_same,
                t.nan_later,
                t.raising,
            )
            for method in ("relu-net", "one-layer")
        ),
        *(
            Case(
                f"{box.__name__}-behind-{noise.kind}",
                other(box, max_norm=1.0, noise=noise),
                outcomes=frozenset(Outcome) - CERTIFIED,
                options={"method": "robust"},
            )
            for box in (t.two_heads, t.relu_net, t.residual, t.positional, t.relu_on_top, t.hashed)
            for noise in NOISES
        ),
    ]


WRONG = wrong()
