"""How a target is written: which keys its kind has, and the text of a target with more of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from urllib.parse import quote

from keyhole.targets import datasets, demos
from keyhole.targets.models import HTTP_KEYS, ONNX_KEYS, REST_KEYS, TRANSFORMERS_KEYS

KEYS = {"onnx": ONNX_KEYS, "transformers": TRANSFORMERS_KEYS, "http": HTTP_KEYS, "https": HTTP_KEYS}
KEYS |= {"http+json": REST_KEYS, "https+json": REST_KEYS}
# As an option of any command this declares how answers err, so that what adds errors has another name there.
ADDED = "noise"


def keys_of(text: str) -> Collection[str]:
    """The keys that a target or data set of this kind takes; none where it takes none, or is none."""
    kind, _, rest = text.partition(":")
    family = rest.partition("?")[0]
    for known in (demos.DEMOS, datasets.DEMOS):
        if kind == "demo" and family in known:
            return {"add_noise" if key == ADDED else key for key in known[family][0]}
    return KEYS.get(kind, ())


def with_keys(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    """The same target with these keys besides: behind a ? those of a demo, behind a # those of a model."""
    mark = "?" if text.startswith("demo:") else "#"
    for key, value in pairs:
        joint = mark if mark not in text else "" if text.endswith((mark, "&")) else "&"
        text += f"{joint}{ADDED if key == 'add_noise' else key}={quote(value, safe='/:,')}"
    return text
