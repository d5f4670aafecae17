"""Any PyTorch module as an oracle."""

from __future__ import annotations

import copy
import hashlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from keyhole.arrays import Array, Space
from keyhole.errors import KeyholeError, UsageError
from keyhole.noise import Noise
from keyhole.optional import extra
from keyhole.oracles.base import Oracle
from keyhole.oracles.positions import Observed, Positions, observe, place_of
from keyhole.queries import Signature, digest

FLOATS = ("float64", "float32", "float16", "bfloat16")


class TorchOracle(Oracle):
    """A module from tokens (batch, length, width) to outputs, at every position or one row per sequence.

    `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` are taken as they are, and their width is known; of other
    modules say `width`. `positions` is where the output is read: "last", "all", or the number of a position, to which
    the last token of every query is then moved. `dtype` and `device` are those of the module's parameters unless
    given; where they differ a copy is made, and the module itself is never changed. `batch_first=False` means
    a module that wants (length, batch, width); left out, it is found out. `call` asks a module that cannot be called
    with tokens alone: `call=lambda module, tokens: module(tokens, mask=None)[0]`. `answers="labels"`: it
    returns whole numbers that are labels, e.g. by `call=lambda module, tokens: module(tokens).argmax(-1)`.

    A module in train mode is refused, because dropout would answer differently each time. A few random sequences
    are asked at once, to see what the module answers; they are no queries.
    """

    def __init__(
        self,
        module: Any,
        width: int | None = None,
        *,
        positions: Positions = "last",
        dtype: Any = None,
        device: Any = None,
        batch_first: bool | None = None,
        call: Callable[[Any, Array], Array] | None = None,
        max_norm: float | None = None,
        max_length: int | None = None,
        noise: Noise | str | None = None,
        batch_limit: int | None = None,
        answers: Literal["numbers", "labels"] = "numbers",
        name: str | None = None,
    ) -> None:
        torch = self._torch = extra("torch", "torch", type(self).__name__)
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        self._who = f"the module {type(module).__name__}"
        _refuse_training(module, self._who)
        place = place_of(positions)
        self._dtype = _dtype(torch, dtype, module)
        where = _device(torch, device, module, self._who)
        width = _width(torch, module, self._who) if width is None else width
        if call is None and isinstance(module, torch.nn.MultiheadAttention):
            call = _self_attention
        _check_call(module, call, self._who)
        self._call = call or (lambda module, tokens: module(tokens))
        self.module = _move(module, self._dtype, where)
        coarse = self._dtype.itemsize < 4  # libraries solve nothing in it: methods work in float32, and know its digits
        space = Space.of(torch.zeros(1, dtype=torch.float32 if coarse else self._dtype, device=where))
        if coarse:
            space = replace(space, coarse=float(torch.finfo(self._dtype).eps))
        observed: Literal["last", "all"] = "all" if place is None else "last"
        self.signature = Signature(width, space, max_norm, max_length, observed, Noise.of(noise), batch_limit, answers)
        self.batch_first, self._observed = self._find_order(positions, batch_first)
        suffix = "" if place in (None, -1) else f" at position {place}"
        if call not in (None, _self_attention):
            suffix += f" by {getattr(call, '__qualname__', type(call).__qualname__)}"
        self.name = name or f"{identity(self.module)}{suffix}"

    def answer(self, tokens: Array) -> Array:
        """Ask the module, in eval mode and without gradients."""
        _refuse_training(self.module, self._who)
        question = self._observed.question(self.signature.space.asarray(tokens))
        return self._observed.answer(self._outputs(question, self.batch_first))

    def _outputs(self, tokens: Array, batch_first: bool) -> Any:
        """What the module returns for tokens (batch, length, width), its batch in front."""
        tokens = tokens.to(self._dtype).contiguous()  # layers such as GPT-2's take no slices of a tensor
        with self._torch.no_grad():
            outputs = self._call(self.module, tokens if batch_first else tokens.transpose(0, 1))
        each = (tokens.shape[1], tokens.shape[0])  # rows of outputs per token; those per sequence are in order already
        if not batch_first and isinstance(outputs, self._torch.Tensor) and tuple(outputs.shape[:2]) == each:
            outputs = outputs.transpose(0, 1)
        return outputs

    def _find_order(self, positions: Positions, batch_first: bool | None) -> tuple[bool, Observed]:
        """Whether the batch comes first, and where outputs are read: the first order that makes sense."""
        likely = _says_batch_first(self.module) if batch_first is None else batch_first
        troubles: list[KeyholeError] = []
        for order in (likely, not likely) if batch_first is None else (batch_first,):
            try:
                outputs = partial(self._outputs, batch_first=order)
                return order, observe(positions, outputs, self.signature, self._who)
            except KeyholeError as error:
                troubles.append(error)
        raise troubles[0]


def convert(module: Any, dtype: Any, device: Any) -> Any:
    """The module in another dtype or on another device: a copy, or itself where it is there already."""
    torch, who = extra("torch", "torch", "TorchOracle"), f"the module {type(module).__name__}"
    return _move(module, _dtype(torch, dtype, module), _device(torch, device, module, who))


def is_module(model: Any) -> bool:
    """Whether something is a PyTorch module, without importing PyTorch for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def identity(module: Any) -> str:
    """A name for a module: its class and a digest over all that it is made of."""
    whole = hashlib.sha256()
    for name, part in module.named_modules():
        plain = {key: _plain_text(value) for key, value in vars(part).items() if key[0] != "_" and key != "training"}
        known = sorted((key, text) for key, text in plain.items() if text is not None)
        whole.update(f"{name} {type(part).__qualname__} {known}\n".encode())
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        wide = tensor.detach().float() if tensor.dtype.itemsize == 2 and tensor.is_floating_point() else tensor
        whole.update(f"{name} {tensor.dtype}\n".encode() + digest(wide))
    return f"{type(module).__qualname__} {whole.hexdigest()[:16]}"


def _plain_text(value: Any) -> str | None:
    """An attribute that is a plain value or a function, as a text that is the same in every run."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        texts = [_plain_text(each) for each in value]
        return None if None in texts else repr(texts)
    return value.__qualname__ if inspect.isroutine(value) else None


def _self_attention(module: Any, tokens: Array) -> Any:
    return module(tokens, tokens, tokens, need_weights=False)[0]


def _check_call(module: Any, call: Any, who: str) -> None:
    """Refuse a module that cannot be called with tokens alone, unless it is said how."""
    if call is not None:
        if not callable(call):
            raise UsageError(f"call must be a function of module and tokens, not {type(call).__name__}")
        return
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # a compiled module may have no signature
        return
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.POSITIONAL_ONLY)]
    needed = [each.name for each in named[1:] if each.default is each.empty]
    needed += [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    if needed:
        raise UsageError(
            f"{who} wants {', '.join(needed)} besides tokens: say how to ask it, "
            f"e.g. call=lambda module, tokens: module(tokens, {needed[0]}=...)"
        )


def _refuse_training(module: Any, who: str) -> None:
    for name, part in module.named_modules():
        if part.training:
            where = f" (its part {name})" if name else ""
            raise UsageError(
                f"{who} is in train mode{where}, in which dropout and statistics change its answers: "
                "call module.eval() first"
            )


def _says_batch_first(module: Any) -> bool:
    """What the module says of itself; batch first where it says nothing."""
    said = [part.batch_first for part in module.modules() if isinstance(getattr(part, "batch_first", None), bool)]
    return said[0] if said else True


def _width(torch: Any, module: Any, who: str) -> int:
    """Numbers per token, of modules that say it."""
    if isinstance(module, torch.nn.MultiheadAttention):
        if not module.embed_dim == module.kdim == module.vdim:
            raise UsageError(f"{who} has keys or values of another width than queries: it is no self-attention")
        return int(module.embed_dim)
    if isinstance(module, torch.nn.TransformerEncoderLayer):
        return int(module.self_attn.embed_dim)
    if isinstance(module, torch.nn.TransformerEncoder) and len(module.layers):
        return _width(torch, module.layers[0], who)
    width = getattr(module, "width", None)
    if isinstance(width, int):
        return width
    raise UsageError(f"{who} does not say how many numbers a token has: give width=")


def _dtype(torch: Any, dtype: Any, module: Any) -> Any:
    """The dtype that was asked for, else that of the module's parameters, else float64."""
    if dtype is None:
        floats = [each.dtype for each in module.parameters() if each.is_floating_point()]
        floats += [each.dtype for each in module.buffers() if each.is_floating_point()]
        dtype = floats[0] if floats else torch.float64
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None) if dtype in FLOATS else dtype
    if dtype not in [getattr(torch, name) for name in FLOATS]:
        raise UsageError(f"dtype must be one of {', '.join(FLOATS)}, not {dtype!r}")
    return dtype


def _device(torch: Any, device: Any, module: Any, who: str) -> Any:
    """The device that was asked for, else that of the module's parameters, if it is there."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(each.device.type == "meta" for each in tensors):
        raise UsageError(f"{who} lives on the device meta, without weights: load them first")
    if device is None:
        return tensors[0].device if tensors else torch.device("cpu")
    try:
        where = torch.device(device)
        torch.zeros(1, device=where).cpu()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        here = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        reason = str(error).splitlines()[0]
        raise UsageError(f"there is no device {device!r} here ({reason}): use one of {', '.join(here)}") from error
    return torch.zeros(1, device=where).device


def _move(module: Any, dtype: Any, device: Any) -> Any:
    """The module, or a copy of it where dtype or device differ."""
    tensors = [*module.parameters(), *module.buffers()]
    same = all(each.device == device and (not each.is_floating_point() or each.dtype == dtype) for each in tensors)
    return module if same else copy.deepcopy(module).to(device=device, dtype=dtype)
