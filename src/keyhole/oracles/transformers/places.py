"""Where the attention of a model is, found by running the model once and watching what its modules are given.

A module is self-attention where it is called so, and where its linear maps read one sequence. Of its linear maps the
ones that read what the first one reads make queries, keys and values, and the last one makes the answer of its heads.
So no table of architectures is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from keyhole.errors import UsageError
from keyhole.optional import extra
from keyhole.oracles.transformers.own_run import USER, first, hidden_place, own_inputs, run, runnable

ATTENTION = re.compile("attention|attn", re.IGNORECASE)
NORM = re.compile("norm", re.IGNORECASE)
# Tokens of the run that is watched, and more of them in an encoder, so that attention to its sequence is told.
LENGTH, BEFORE = 7, 2
# How many modules a message lists.
LISTED = 6


@dataclass(frozen=True)
class Place:
    """Self-attention inside a model, and the layer around it."""

    name: str  # of the smallest module with all of attention, as the model's tensors begin
    module: Any
    layer: Any  # None where the model calls no module with attention and what belongs to it
    model: Any  # the model, or the part of one, that runs on inputs of its own
    width: int
    entries: tuple[Any, ...]  # linear maps that read the tokens
    exit: Any  # the linear map whose outputs are the answer of the heads
    behind: tuple[Any, ...]  # modules with weights in the layer, outside attention and norms
    after: Any = None  # where the layer ends with a norm: the first linear map behind attention


@dataclass(frozen=True, eq=False)
class _Event:
    """A call of a module."""

    name: str
    module: Any
    given: Any  # the vectors it was given; None where there were none
    answered: Any


def attention_in(model: Any) -> list[Place]:
    """All self-attention of a model in its own order, each once though it may be used several times."""
    found = []
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    for prefix, part in runnable(model):
        found += [_named(place, prefix) for place in _places(part)]
    return sorted(found, key=lambda place: order[place.name])


def place_in(model: Any, layer: int) -> Place:
    """The attention of a layer; UsageError says how many layers there are."""
    places = attention_in(model)
    if not places:
        raise UsageError(
            f"{type(model).__name__} has no self-attention that can be told from its run; it has {_has(model)}: ask "
            "one of these with TorchOracle(module, width=..., call=lambda module, tokens: ...)"
        )
    if isinstance(layer, bool) or not isinstance(layer, int) or not -len(places) <= layer < len(places):
        raise UsageError(
            f"{type(model).__name__} has no layer {layer!r}: its {len(places)} attention layers are counted from 0 to "
            f"{len(places) - 1} (layers that it shares count once)"
        )
    return places[layer]


def _has(model: Any) -> str:
    """The first module of each class of a model, those of PyTorch itself and lists left out, by their dotted names."""
    seen: dict[str, str] = {}
    for name, module in model.named_modules():
        if name and not type(module).__module__.startswith("torch."):
            seen.setdefault(type(module).__name__, name)
    return ", ".join(f"{name} ({kind})" for kind, name in list(seen.items())[:LISTED]) or "no modules of its own"


def _named(place: Place, prefix: str) -> Place:
    return place if not prefix else Place(**{**vars(place), "name": f"{prefix}.{place.name}"})


def _places(model: Any) -> Iterator[Place]:
    events = _watch(model)
    called = {event.name: event.module for event in events}
    attention = [name for name, module in called.items() if ATTENTION.search(type(module).__name__)]
    outermost = [name for name in attention if not any(name.startswith(f"{other}.") for other in attention)]
    own = {}
    for name in outermost:
        inside = [event for event in events if event.name.startswith(f"{name}.") and is_linear(event.module)]
        once: dict[str, _Event] = {}  # a second call may be of a table of positions, or of a layer that is shared
        for event in inside:
            once.setdefault(event.name, event)
        if once and not _crosses(name, list(once.values())):
            own[name] = list(once.values())
    for name, inside in own.items():
        yield _place(model, name, inside, events, list(own))


def _watch(model: Any) -> list[_Event]:
    """All calls of modules in one run, in the order in which they ended."""
    events: list[_Event] = []

    def seen(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], given: dict[str, Any], outputs: Any) -> None:
            where = hidden_place(args, given)
            vectors = None if where is None else given[where] if isinstance(where, str) else args[where]
            if is_linear(module):
                vectors = args[0] if args else next(iter(given.values()))
            events.append(_Event(name, module, vectors, first(outputs)))

        return hook

    def hooks() -> list[Any]:
        return [
            each.register_forward_hook(seen(name), with_kwargs=True) for name, each in model.named_modules() if name
        ]

    run(model, own_inputs(model, 1, LENGTH, before=BEFORE), hooks)
    return events


def is_linear(module: Any) -> bool:
    """Whether a module is a linear map, however it stores its matrix."""
    torch = extra("torch", "transformers", USER)
    weight = getattr(module, "weight", None)
    leaf = next(module.children(), None) is None
    return leaf and isinstance(weight, torch.Tensor) and weight.ndim == 2 and not isinstance(module, torch.nn.Embedding)


def _crosses(name: str, inside: list[_Event]) -> bool:
    """Whether attention reads another sequence than its own: of another length, or by its name."""
    lengths = {event.given.shape[1] for event in inside if _like(event, inside[0])}
    return len(lengths) > 1 or "cross" in name.lower() or "encoder_attn" in name


def _like(event: _Event, other: _Event) -> bool:
    """Whether a linear map reads vectors of the same batch and width."""
    one, two = tuple(event.given.shape), tuple(other.given.shape)
    return len(one) == len(two) == 3 and one[::2] == two[::2]


def _place(model: Any, name: str, inside: list[_Event], events: list[_Event], attention: list[str]) -> Place:
    read, last = inside[0].given, inside[-1]
    entries = [event for event in inside if _reads(event, read)]
    core = _common(entries[0].name, last.name)
    modules = dict(model.named_modules())
    around = _around(modules, name, attention)
    outside = [
        event for event in events if event.name.startswith(f"{around}.") and not f"{event.name}.".startswith(f"{name}.")
    ]
    behind = {event.name: event.module for event in outside if _has_own_weights(event.module)}
    whole = next((event for event in events if event.name == around), None)
    ends_normed = whole is not None and any(
        _is_norm(event.module) and event.answered.data_ptr() == whole.answered.data_ptr() for event in outside
    )
    following = [event for event in outside if is_linear(event.module) and events.index(event) > events.index(last)]
    return Place(
        name=core,
        module=modules[core],
        layer=None if whole is None else modules[around],
        model=model,
        width=int(read.shape[-1]),
        entries=tuple(event.module for event in entries),
        exit=last.module,
        behind=tuple(behind.values()),
        after=following[0].module if ends_normed and following else None,
    )


def _reads(event: _Event, vectors: Any) -> bool:
    return bool(event.given.data_ptr() == vectors.data_ptr() and event.given.shape == vectors.shape)


def _around(modules: dict[str, Any], name: str, attention: list[str]) -> str:
    """The layer: the largest entry of a list of modules with no other self-attention, else the module around."""
    torch = extra("torch", "transformers", USER)
    steps = name.split(".")
    for count in range(1, len(steps)):
        path, parent = ".".join(steps[:count]), ".".join(steps[: count - 1])
        alone = sum(f"{other}.".startswith(f"{path}.") for other in attention) == 1
        if alone and isinstance(modules[parent], torch.nn.ModuleList):
            return path
    return ".".join(steps[:-1])


def _common(one: str, other: str) -> str:
    """The path of the smallest module with both inside."""
    steps = takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))
    return ".".join(step for step, _ in steps)


def _has_own_weights(module: Any) -> bool:
    return not _is_norm(module) and next(module.parameters(recurse=False), None) is not None


def _is_norm(module: Any) -> bool:
    return bool(NORM.search(type(module).__name__))
