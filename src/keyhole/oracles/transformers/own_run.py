"""A model run by its own code on inputs of its own kind, with hooks that see what passes between its modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from keyhole.errors import UsageError
from keyhole.optional import extra

USER = "TransformersOracle"
# Numbers of tokens are drawn from here on: smaller ones name padding, beginning and end.
FIRST_ID = 5
# Samples of sound that make a token are no more than this.
SAMPLES = 2000
# Ways to compute attention that are there on every device.
EVERYWHERE = ("eager", "sdpa")


class Reached(Exception):
    """Raised by a hook that has seen enough."""


def own_inputs(model: Any, batch: int, length: int, *, before: int = 0, seed: int = 0) -> dict[str, Any]:
    """Random inputs of a model: token numbers, pixels or sound, as it wants them.

    An encoder with a decoder behind it gets sequences longer by `before`, so that the two can be told apart.
    """
    torch = extra("torch", "transformers", USER)
    draw = torch.Generator().manual_seed(seed)
    parameter = next(model.parameters())
    kind, wanted, config = getattr(model, "main_input_name", None), _arguments(model), model.config

    def numbers(count: int) -> Any:
        most = int(model.get_input_embeddings().weight.shape[0])
        drawn = torch.randint(min(FIRST_ID, most - 1), most, (batch, count), generator=draw)
        return drawn.to(parameter.device)

    def floats(*shape: int) -> Any:
        return torch.randn(batch, *shape, generator=draw, dtype=torch.float64).to(parameter)

    paired = bool(getattr(config, "is_encoder_decoder", False)) and "decoder_input_ids" in wanted
    given: dict[str, Any] = {}
    if kind == "input_ids":
        given["input_ids"] = numbers(length + before * paired)
    elif kind == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        given["pixel_values"] = floats(getattr(config, "num_channels", 3), height, width)
    elif kind == "input_features":
        given["input_features"] = floats(config.num_mel_bins, 2 * config.max_source_positions)
    elif kind == "input_values" and callable(getattr(model, "_get_feat_extract_output_lengths", None)):
        told = model._get_feat_extract_output_lengths(torch.arange(SAMPLES * length))  # tokens by samples of sound
        given["input_values"] = floats(int(torch.nonzero(told == length)[0]))
    else:
        raise UsageError(f"{type(model).__name__} takes {kind}, of which Keyhole can make no examples")
    if paired:
        given["decoder_input_ids"] = numbers(length)
    if "use_cache" in wanted:
        given["use_cache"] = False
    return given


def run(model: Any, inputs: dict[str, Any], hooks: Callable[[], list[Any]]) -> None:
    """Run a model with hooks, which may end the run by `Reached`."""
    torch = extra("torch", "transformers", USER)
    with hooked(hooks), torch.no_grad(), exactly_computed(model), suppress(Reached):
        model(**inputs)


@contextmanager
def hooked(hooks: Callable[[], list[Any]]) -> Iterator[None]:
    """Hooks for as long as the block runs."""
    handles = hooks()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def exactly_computed(model: Any) -> Iterator[None]:
    """Experts computed one by one: the grouped product that models prefer knows no float64."""
    snapshot = getattr(model, "get_experts_implementation", None)
    before = None if snapshot is None else snapshot()
    if before is None or not any(each not in (None, "eager") for each in before.values()):
        yield
        return
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def runnable(model: Any) -> Iterator[tuple[str, Any]]:
    """The models inside a model, the largest first, that can be run on inputs of their own: (name, model)."""
    done: list[str] = []
    troubles: list[str] = []
    for name, module in model.named_modules():
        inside = any(not each or name.startswith(f"{each}.") for each in done)
        if inside or not hasattr(module, "main_input_name") or not hasattr(module, "config"):
            continue
        try:
            run(module, own_inputs(module, 1, 3), list)
        except Exception as error:
            troubles.append(f"{type(module).__name__}: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
            continue
        done.append(name)
        yield name, module
    if not done:
        why = f" ({troubles[0]})" if troubles else ""
        raise UsageError(
            f"{type(model).__name__} is no transformers model that can be run{why}: {_remedy(model)}hand over one that "
            "is, or ask a module with TorchOracle(module, width=..., call=...)"
        )


def _remedy(model: Any) -> str:
    """What to do where attention is computed in a way that may not be there, such as flash attention on a CPU."""
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if chosen in (None, *EVERYWHERE):
        return ""
    return f"its attention is computed by {chosen!r}, so call model.set_attn_implementation('eager') first, or else "


def _arguments(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def first(outputs: Any) -> Any:
    """What a module answers: the first of several outputs."""
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


def hidden_place(args: tuple[Any, ...], given: dict[str, Any]) -> int | str | None:
    """Where among the arguments of a call the vectors (batch, length, width) are: a number or a name."""
    if is_hidden(given.get("hidden_states")):
        return "hidden_states"
    for number, each in enumerate(args):
        if is_hidden(each):
            return number
    return next((name for name, each in given.items() if is_hidden(each)), None)


def is_hidden(value: Any) -> bool:
    """Whether something is a tensor (batch, length, width) of floating-point numbers."""
    torch = extra("torch", "transformers", USER)
    return isinstance(value, torch.Tensor) and value.ndim == 3 and value.is_floating_point()
