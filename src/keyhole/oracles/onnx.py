"""An ONNX model as an oracle, through onnxruntime. A graph of known operators: reading it runs no code of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from glob import escape
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from keyhole.arrays import Array, Space, to_numpy
from keyhole.errors import FileError, KeyholeError, UsageError, WrongShape
from keyhole.noise import Noise
from keyhole.optional import extra
from keyhole.oracles.base import Oracle
from keyhole.oracles.positions import TRIAL_LENGTHS, Positions, observe, place_of
from keyhole.oracles.subgraph import part_of
from keyhole.queries import Signature

DTYPES = {"tensor(double)": np.float64, "tensor(float)": np.float32, "tensor(float16)": np.float16}
REMEDY = (
    "If its batch or length is dynamic in name only, export it again, e.g. with torch.onnx.export(..., dynamo=True)"
)
DYNAMIC = "torch.onnx.export(..., dynamo=True, dynamic_shapes=({0: Dim('batch'), 1: Dim('length')},))"
# Methods ask two tokens at least; a length that 1 to 4 divide is enough for most.
LEAST, FIXED = 2, 12


class OnnxOracle(Oracle):
    """A model in an ONNX file, from tokens (batch, length, width) to outputs at every position or one row per sequence.

    Batch and length may be dynamic or fixed in the file. A fixed batch is filled up with zeros; these are no
    queries. A fixed length is the only one that the model can answer, so that methods, which ask single tokens
    too, fail unless `repeat=True`: then a sequence whose length divides it is asked with every token so many
    times in a row. That is the same query to attention without positions, and to nothing else. `max_length` is then as
    long as all lengths up to it divide the fixed one.

    `input` and `output` name the tensors where there are several, inner ones too: then only what lies between them is
    asked, which takes the package onnx. `width` is only needed where the file leaves it open. The dtype is the file's,
    float64, float32 or float16. `answers="labels"`: the output is whole numbers that are labels, such as those of
    ArgMax. `providers` is handed to onnxruntime, and is its CPU unless given.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        width: int | None = None,
        *,
        positions: Positions = "last",
        input: str | None = None,  # noqa: A002 - what the file calls it
        output: str | None = None,
        repeat: bool = False,
        max_norm: float | None = None,
        max_length: int | None = None,
        noise: Noise | str | None = None,
        batch_limit: int | None = None,
        answers: Literal["numbers", "labels"] = "numbers",
        providers: Sequence[Any] = ("CPUExecutionProvider",),
        name: str | None = None,
    ) -> None:
        place = place_of(positions)
        self._session = _open_session(path, providers, input, output)
        self._who = f"the ONNX model {Path(path).name}"
        tokens = _tokens(self._session.get_inputs(), input, self._who)
        self._input, self._dtype = tokens.name, DTYPES[tokens.type]
        self._output = _output(self._session.get_outputs(), output, self._who)
        batch, length, own = tokens.shape
        if isinstance(own, int) and width not in (None, own):
            raise UsageError(f"{self._who} takes tokens of width {own}, not {width}: leave width out")
        width = own if isinstance(own, int) else width
        if width is None:
            raise UsageError(f"{self._who} does not say how many numbers a token has: give width=")
        self._batch = batch if isinstance(batch, int) and batch > 0 else None
        self._length = length if isinstance(length, int) and length > 0 else None
        self._repeat = repeat
        space = Space.of(np.zeros(1, dtype=np.float32 if self._dtype is np.float16 else self._dtype))
        if self._dtype is np.float16:  # libraries solve nothing in it: methods work in float32, and know its digits
            space = replace(space, coarse=float(np.finfo(np.float16).eps))
        own_length = self._length if self._length is None or not repeat else _divisors(self._length, self._who)
        if repeat and own_length is not None and (max_length or 0) > own_length:
            raise UsageError(
                f"{self._who} takes sequences of {self._length} tokens, which only 1 to {own_length} make up when "
                f"repeated, not {max_length}: export it for {FIXED} tokens, which 1 to 4 divide, or with a dynamic "
                f"length, {DYNAMIC}"
            )
        max_length = min((each for each in (max_length, own_length) if each is not None), default=None)
        observed: Literal["last", "all"] = "all" if place is None else "last"
        self.signature = Signature(width, space, max_norm, max_length, observed, Noise.of(noise), batch_limit, answers)
        lengths = TRIAL_LENGTHS if self._length is None else (self._length,)
        trial = self.signature if self._length is None else self.signature.with_changes(max_length=self._length)
        self._observed = observe(positions, self._outputs, trial, self._who, lengths, REMEDY)
        suffix = "" if place in (None, -1) else f" at position {place}"
        suffix += f" from {self._input}" if input else ""
        suffix += f" to {self._output}" if output else ""
        self.name = name or f"onnx:sha256:{_digest(Path(path))}{suffix}{' repeating' if repeat else ''}"

    def answer(self, tokens: Array) -> Array:
        """Ask the model, in as many batches as it needs."""
        question = self._observed.question(to_numpy(tokens))
        if self._length is None or self._length == question.shape[1]:
            return self._observed.answer(self._outputs(question))
        times, rest = divmod(self._length, question.shape[1])
        if rest or not self._repeat:
            raise WrongShape(
                f"{self._who} takes sequences of {self._length} tokens and no others, not of {question.shape[1]}: "
                f"export it with a dynamic length, {DYNAMIC}"
                + ("" if self._repeat else f"; or, if it has no positions, for {FIXED} tokens, and say repeat=True")
            )
        outputs = self._outputs(np.repeat(question, times, axis=1))
        return self._observed.answer(outputs[:, times - 1 :: times, ...] if self._observed.everywhere else outputs)

    def close(self) -> None:
        """Let go of the model."""
        self._session = None

    def _outputs(self, tokens: Array) -> Array:
        """What the model returns for tokens (batch, length, width)."""
        count, step = tokens.shape[0], self._batch or max(1, tokens.shape[0])
        pieces = []
        for start in range(0, count, step):
            with np.errstate(over="ignore"):  # too long a token is infinity in float16, and is answered as such
                piece = np.ascontiguousarray(tokens[start : start + step], dtype=self._dtype)
            short = (self._batch or 0) - piece.shape[0]
            if short > 0:
                piece = np.concatenate([piece, np.zeros((short, *piece.shape[1:]), dtype=self._dtype)])
            [outputs] = self._session.run([self._output], {self._input: piece})
            kept = min(step, count - start)
            # Another number of rows than sequences is no answer; it is left as it is, to be seen.
            pieces.append(outputs[:kept] if outputs.ndim and outputs.shape[0] == piece.shape[0] else outputs)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _divisors(length: int, who: str) -> int:
    """The largest number such that all up to it divide a length; UsageError where that is one token."""
    most = next(count for count in range(1, length + 1) if length % (count + 1))
    if most < LEAST:
        raise UsageError(
            f"{who} takes sequences of {length} tokens, which no two tokens make up when repeated: export it for "
            f"{FIXED} tokens, which 1 to 4 divide, or with a dynamic length, {DYNAMIC}"
        )
    return most


def _open_session(path: str | PathLike[str], providers: Sequence[Any], tokens: str | None, answer: str | None) -> Any:
    runtime = extra("onnxruntime", "onnx", "OnnxOracle")
    if not Path(path).is_file():
        raise FileError(f"{path}: no such file")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # errors are raised, and need not be printed as well
    # Everything that leaves the operators as they are; onnxruntime 1.31 crashes on float16 attention with more.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    try:
        session = runtime.InferenceSession(str(path), options, providers=list(providers))
        own = [tokens in (None, *(each.name for each in session.get_inputs()))]
        own.append(answer in (None, *(each.name for each in session.get_outputs())))
        if all(own):
            return session
        return runtime.InferenceSession(part_of(Path(path), tokens, answer), options, providers=list(providers))
    except KeyholeError:
        raise
    except Exception as error:
        raise FileError(
            f"{path} is not an ONNX model that onnxruntime can run ({' '.join(str(error).split())[:300]}): "
            "export it again, e.g. with torch.onnx.export"
        ) from error


def _tokens(inputs: Sequence[Any], name: str | None, who: str) -> Any:
    """The input that takes tokens, which must be the only one."""
    listed = ", ".join(f"{each.name} {each.type} {each.shape}" for each in inputs)
    chosen = [each for each in inputs if name in (None, each.name)]
    if not chosen:
        raise UsageError(f"{who} has no input {name!r}; it has {listed or 'none'}")
    others = [each.name for each in inputs if each is not chosen[0]]
    tokens = chosen[0]
    if others:
        alike = all((each.type, each.shape) == (tokens.type, tokens.shape) for each in inputs)
        remedy = (
            "If all are the same tokens, as in self-attention, export a module that hands them on: "
            "forward(x) returning layer(x, x, x)[0]"
            if alike
            else "Export it with the others, such as a mask, as constants"
        )
        raise UsageError(f"{who} wants {', '.join(others)} besides tokens; its inputs: {listed}. {remedy}")
    if tokens.type not in DTYPES:
        raise UsageError(
            f"{who} takes {tokens.type}, not vectors of {', '.join(np.dtype(each).name for each in DTYPES.values())}: "
            "export the part behind the embedding"
        )
    if len(tokens.shape) != 3:
        raise WrongShape(f"{who} takes {tokens.shape}, not (batch, length, width): export it for batches of sequences")
    return tokens


def _output(outputs: Sequence[Any], name: str | None, who: str) -> str:
    names = [each.name for each in outputs]
    if name is None and len(names) > 1:
        raise UsageError(f"{who} has {len(names)} outputs: say which is the answer, output= one of {', '.join(names)}")
    if name is not None and name not in names:
        raise UsageError(f"{who} has no output {name!r}; it has {', '.join(names)}")
    return name or names[0]


def _digest(path: Path) -> str:
    """A digest of the file, and of the files beside it that large models keep their weights in."""
    whole = hashlib.sha256()
    beside = sorted(other for other in path.parent.glob(f"{escape(path.name)}*") if other.is_file() and other != path)
    for part in (path, *beside):
        whole.update(part.read_bytes())
    return whole.hexdigest()
