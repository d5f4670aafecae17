"""All attention layers of a model, recovered one by one and put together again under the model's own names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from keyhole.arrays import Array
from keyhole.errors import FileError, RecoveryFailed, UsageError
from keyhole.executors.base import Shared, Workers
from keyhole.families import MultiHead
from keyhole.families.files import load_arrays, save_arrays
from keyhole.families.torch_layouts import weights_of
from keyhole.noise import Noise
from keyhole.oracles import TransformersOracle
from keyhole.oracles.positions import Positions
from keyhole.oracles.torch import convert
from keyhole.oracles.transformers.folder import open_model
from keyhole.oracles.transformers.places import attention_in
from keyhole.oracles.transformers.precision import Precision, check_precision
from keyhole.progress import InterruptCheck, Observer, steps_bar
from keyhole.recover import recover
from keyhole.recovery import Recovery

FAMILY = "attention-of-a-model"


@dataclass(frozen=True)
class ModelRecovery:
    """What was recovered of a model, layer by layer."""

    layers: Mapping[str, Recovery]  # by the name of the attention module in the model
    weights: Mapping[str, Array]  # tensors by the model's own names, of the layers that were certified
    left_out: Mapping[str, str] = field(default_factory=dict)  # certified, but without weights: why

    @property
    def certified(self) -> bool:
        """Whether every layer was recovered with a certificate."""
        return all(result.certified for result in self.layers.values())

    def arrays(self) -> dict[str, Array]:
        """The products of every certified head, and the weights: everything that a file holds."""
        products = {
            f"{name}.{part}": array
            for name, result in self.layers.items()
            if result.certified and result.params is not None
            for part, array in MultiHead.of(result.params).arrays().items()
        }
        return {**products, **self.weights}

    def save(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file: heads such as NAME.heads.0.score, and weights by the model's own names."""
        certified = {name: result.params for name, result in self.layers.items() if result.certified}
        words = {
            f"{name}.{part}": word
            for name, params in certified.items()
            if params is not None
            for part, word in MultiHead.of(params).words.items()
        }
        save_arrays(path, FAMILY, self.arrays(), {"layers": json.dumps(list(certified)), **words})

    def load_into(self, model: Any) -> None:
        """Give a model the weights that were found, in its own dtype and on its device."""
        load_weights(model, self.weights)


def load_weights(model: Any, weights: Mapping[str, Array]) -> None:
    """Write tensors into a PyTorch model by their names; those that it does not have are an error."""
    own = dict(model.named_parameters())
    unknown = [name for name in weights if name not in own]
    if unknown:
        raise UsageError(f"{type(model).__name__} has no {unknown[0]!r}: the weights belong to another model")
    for name, array in weights.items():
        if tuple(own[name].shape) != tuple(array.shape):
            raise UsageError(f"{name} has shape {tuple(own[name].shape)} in {type(model).__name__}, not {array.shape}")
    for name, array in weights.items():
        own[name].data.copy_(own[name].new_tensor(array))


def load_layers(path: str | PathLike[str]) -> tuple[dict[str, MultiHead], dict[str, Array]]:
    """What `ModelRecovery.save` wrote: heads by the names of their modules, and weights by the model's own."""
    family, arrays = load_arrays(path)
    if family != FAMILY:
        raise FileError(f"{path} holds a {family}, not the layers of a model")
    try:
        names = json.loads(str(arrays.pop("layers")))
        parts: dict[str, dict[str, Array]] = {name: {} for name in names}
        for name in list(arrays):
            products = (each for each in names if name.startswith(f"{each}.heads.") or name == f"{each}.output_bias")
            inner = next(products, None)
            if inner is not None:
                parts[inner][name[len(inner) + 1 :]] = arrays.pop(name)
        heads = {name: MultiHead.of_arrays(**found) for name, found in parts.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path} does not hold valid layers of a model: {error}") from error
    return heads, arrays


def recover_model(
    model: Any,
    layers: Sequence[int] | None = None,
    method: str = "auto",
    budget: int | None = None,
    journal: str | PathLike[str] | None = None,
    seed: int = 0,
    throw: bool = True,
    *,
    positions: Positions = "last",
    dtype: Any = None,
    precision: Precision = None,
    device: Any = None,
    max_norm: float | None = None,
    noise: Noise | str | None = None,
    heldout: int | None = None,
    workers: int = 1,
    dask: str | None = None,
    executor: Executor | None = None,
    progress: bool | None = None,
    done: Callable[[str, Recovery], None] | None = None,
    **options: Any,
) -> ModelRecovery:
    """Recover the attention of a transformers model, given as such or as its folder, layer by layer.

    All layers unless some are named, each as an oracle of its own with a certificate of its own. `budget` is for
    one layer; `journal` is a folder, with a journal for every layer. Where a layer fails the others are still
    recovered; `throw` then raises `RecoveryFailed` with the first failure, and everything found as its `partial`.
    `done` is called after every layer. Layers are shared by `workers` processes of this machine, the Dask cluster at
    the address `dask`, or any `executor` of futures. `method="auto"` is `multi-head`, and where the model's config says
    that attention has other parts, `auto` of `recover`. Other arguments are those of `TransformersOracle` and
    `recover`.
    """
    check_precision(precision, dtype)
    others = Workers(workers, dask, executor)
    asked = {"positions": positions, "precision": precision, "max_norm": max_norm, "noise": noise}
    how = {"budget": budget, "seed": seed, "heldout": heldout, **options}
    whole_model = _Model(
        model, precision or dtype, device, method, None if journal is None else Path(journal), asked, how
    )
    numbers = list(range(len(attention_in(whole_model.module))) if layers is None else layers)
    numbers = numbers or [0]  # of a model without layers, the oracle says so
    found: dict[int, _Layer] = {}
    for place, layer in _recover_all(whole_model, numbers, others, progress):
        found[place] = layer
        if done is not None:
            done(layer.name, layer.result)
    of_layers = [found[place] for place in sorted(found)]
    results = {each.name: each.result for each in of_layers}
    weights = {name: array for each in of_layers for name, array in each.weights.items()}
    left_out = {each.name: each.left_out for each in of_layers if each.left_out is not None}
    whole = ModelRecovery(results, weights, left_out)
    failed = [result for result in results.values() if not result.certified]
    if throw and failed:
        failure = RecoveryFailed(failed[0])
        failure.partial = whole  # type: ignore[assignment]  # of several recoveries at once
        raise failure
    return whole


@dataclass(frozen=True)
class _Layer:
    """What was recovered of one layer."""

    name: str  # of its attention module
    result: Recovery
    weights: Mapping[str, Array]
    left_out: str | None  # why there are no weights


@dataclass(frozen=True)
class _Model:
    """A model, given as such or as its folder, and what is done with each of its layers; workers have copies."""

    given: Any
    dtype: Any
    device: Any
    method: str
    journals: Path | None
    asked: Mapping[str, Any]  # options of TransformersOracle
    how: Mapping[str, Any]  # options of recover

    @cached_property
    def module(self) -> Any:
        """The model itself, opened where it is needed."""
        return convert(open_model(self.given, "recover_model"), self.dtype, self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "module"}

    def recover(self, number: int, progress: bool | None, observer: Observer | None = None) -> _Layer:
        """One layer."""
        oracle = TransformersOracle(self.module, number, **self.asked)
        chosen = "multi-head" if self.method == "auto" and not oracle.hints else self.method
        name = oracle.place.name
        book = None if self.journals is None else _book(self.journals, name)
        shown: dict[str, Any] = {"progress": progress, "observer": observer}
        result = recover(oracle, chosen, journal=book, throw=False, **shown, **self.how)
        try:
            return _Layer(name, result, _weights(result, oracle), None)
        except UsageError as error:
            return _Layer(name, result, {}, str(error))


def _recover_all(
    model: _Model, numbers: Sequence[int], workers: Workers, progress: bool | None
) -> Iterator[tuple[int, _Layer]]:
    """(place, layer) as they end."""
    if not workers.several:
        yield from ((place, model.recover(number, progress)) for place, number in enumerate(numbers))
        return
    with workers.open() as crew, steps_bar(progress, "layers") as show:
        show(total=len(numbers))
        shared = Shared(model, "name its folder, which workers can open")
        for each in crew.results(_recover_layer, numbers, shared, ordered=False):
            show(advance=1)
            yield each


def _recover_layer(model: _Model, number: int) -> _Layer:
    """In a worker."""
    return model.recover(number, False, InterruptCheck())


def _weights(result: Recovery, oracle: TransformersOracle) -> dict[str, Array]:
    """Tensors by the model's names, of a layer that is certified; UsageError where heads do not go into its module."""
    if not result.certified or result.params is None:
        return {}
    found = weights_of(MultiHead.of(result.params), oracle.place.module)
    return {f"{oracle.place.name}.{part}": array for part, array in found.items()}


def _book(folder: Path, name: str) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {folder} for journals: {error.strerror}") from error
    return folder / f"{name}.db"
