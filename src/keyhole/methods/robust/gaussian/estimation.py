"""Fits to noisy answers to pairs ±x beside a last token: parameters and their errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import numpy as np
from scipy.special import ndtri

from keyhole.arrays import Floats, Space
from keyhole.families import SingleHead
from keyhole.methods.base import Estimate, Unrecoverable, target_details
from keyhole.methods.robust.gaussian.likelihood import Frame, HeadFit, HeadPoint, PairQueries, fit
from keyhole.numerics.cramer_rao import universal_floor
from keyhole.numerics.svd import singular_values, svd
from keyhole.queries import Signature
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position",
    "errors of answers are independent and normal, of the declared standard deviation",
)

# Beyond this, a response is no more than a sign.
LARGEST_RESPONSE_SHARE = 0.9
# How often, in how many recoveries, any entry at all may lie outside its radius.
MISSES = 1e-9
# Squared residuals may exceed what is expected by this many standard deviations.
MISFIT_DEVIATIONS = 6.0
# Singular values below this fraction of the largest are rounding errors.
ROUNDED_OFF = 1e-14
# What keeps the covariance of nearly equal pairs invertible, relative to its diagonal.
JITTER = 1e-9


@final
class Estimation:
    """Answers so far, the tables of tokens that were asked, and the fits to them."""

    noise: float  # standard deviation of an answer, the rounding of the oracle included
    many: bool  # whether answers are rows of outputs
    scalar: bool  # whether there is but one of them
    biased: bool  # whether an output bias shows
    rows: Floats  # (rows, width) unit vectors x
    looks: Floats  # (rows, outputs) the combination of outputs that each is looked at along
    columns: Floats  # (columns, width) directions of last tokens
    null_logits: Floats  # (width,) logits of the first rows beside a zero token

    def __init__(self, signature: Signature, copies: int, rank: int | None, pass_size: int) -> None:
        self.rank = None if rank is None or rank >= signature.width else rank  # of the score matrix, where it is known
        self.pass_size = pass_size  # pairs of a pass
        self.signature, self.width, self.max_norm = signature, signature.width, signature.norm_limit
        room = (signature.max_length or math.inf) - 1
        self.copies = int(min(2 * copies, room - room % 2 if room > 1 else 1)) if room < math.inf else 2 * copies
        self.asked = 0
        self.value_repeats = 0
        self.answers: Floats = np.zeros(0)
        self.parts: list[PairQueries] = []
        self.fitted: HeadFit | None = None
        self.score_bias = False
        self.parts_of_first_pass = 0
        free = self.rank or self.width
        self.counting_bound = free * (2 * self.width - free) + self.width  # numbers that determine score and value

    def value(self, biased: bool) -> Floats:  # (width, outputs)
        """The value as the one-token queries have it."""
        bias = self.answers[0] if biased else np.zeros_like(self.answers[0])
        return np.asarray((self.answers[1:] - bias) / self.max_norm)

    def null_score_bias(self) -> Floats:  # (width,)
        """The score bias as the null column has it."""
        return np.asarray(np.linalg.inv(self.max_norm * self.rows[: self.width]) @ self.null_logits)

    def pair_values(self) -> Floats:  # (rows,)
        """The value of each pair in the combination of outputs it is read in."""
        return np.asarray(np.sum((self.rows @ self.value(self.biased)) * self.looks, axis=1))

    def axes(self) -> Floats:  # (biases, outputs)
        """Orthonormal combinations of the outputs that pairs are read in: never more than there are pairs."""
        _, sizes, right = svd(self.looks)
        # However rarely an output is looked at, its bias may be large.
        return np.asarray(right[sizes > sizes[0] * ROUNDED_OFF])

    def without_bias(self, pairs: PairQueries) -> Floats:  # (n,)
        """Answers less the output bias, where one shows."""
        return np.asarray(pairs.answer - (self.looks @ self.answers[0])[pairs.row] * self.biased)

    def pair_logits(self, pairs: PairQueries) -> Floats:  # (n,)
        """Logits of pairs one by one, as if a last token were worth nothing and had none."""
        response = self.without_bias(pairs) / (self.max_norm * self.pair_values()[pairs.row])
        if self.copies == 1:  # [x; g]: a share between nothing and all
            share = np.clip(response, 0.5 - LARGEST_RESPONSE_SHARE / 2, 0.5 + LARGEST_RESPONSE_SHARE / 2)
            return np.asarray(np.log(share / (1 - share)))
        response = np.clip(response * (1 + 1 / self.copies), -LARGEST_RESPONSE_SHARE, LARGEST_RESPONSE_SHARE)
        minus = np.maximum(pairs.minus, 0.5)  # none at all where a query was about the last token alone
        return np.asarray(np.arctanh(response) - np.log(pairs.plus / minus) / 2)

    def frame(self, *, wide: bool) -> Frame:
        """What is fixed in a fit; the wide one has biases even where none shows."""
        biased = wide or self.biased
        value = self.value(biased)
        # Fitted is the value itself, or, of several outputs, what each pair is worth along those it is looked at.
        tokens, looks = (np.eye(self.width), np.ones((self.width, 1))) if self.scalar else (self.rows, self.looks)
        known, same = np.sum((tokens @ value) * looks, axis=1), looks @ looks.T
        sure, sums = self.noise**2 / self.value_repeats, np.sum(tokens, axis=1)
        covariance = (tokens @ tokens.T) * same / self.max_norm**2
        covariance = covariance + JITTER * np.diag(np.diag(covariance))
        bias_map = np.zeros((self.rows.shape[0], 0))
        if biased:  # the error of the zero token's answer is in every value
            axes = self.axes()
            bias_map = self.looks @ axes.T
            covariance = covariance + np.outer(sums, sums) * same / self.max_norm**2
            cross = -sums[:, None] * (looks @ axes.T) / self.max_norm
            covariance = np.block([[covariance, cross], [cross.T, np.eye(axes.shape[0])]])
            known = np.concatenate([known, axes @ self.answers[0]])
        return Frame(
            rows=self.rows,
            columns=self.columns,
            max_norm=self.max_norm,
            noise=self.noise,
            row_map=self.rows if self.scalar else np.eye(self.rows.shape[0]),
            last_values=(0.0 if self.scalar else 1.0) * (self.columns @ value @ self.looks.T),
            last_map=self.columns if self.scalar else np.zeros((self.columns.shape[0], self.rows.shape[0])),
            bias_map=bias_map,
            known=known,
            covariance=sure * covariance,
            score_bias=wide or self.score_bias,
        )

    def fit(self, start_at: Callable[[Frame], HeadPoint]) -> None:
        """Fit all parameters to all answers, the first time from a point near enough to the best fit."""
        frame, pairs = self.frame(wide=False), PairQueries.concat(*self.parts)
        start = start_at(frame) if self.fitted is None else replace(self.fitted.point, shared=frame.known)
        self.parts_of_first_pass = self.parts_of_first_pass or len(self.parts)
        self.fitted = self._fit(frame, start, pairs)

    def _fit(self, frame: Frame, start: HeadPoint, pairs: PairQueries) -> HeadFit:
        try:
            return fit(frame, start, pairs, self.rank)
        except np.linalg.LinAlgError as error:
            raise Unrecoverable(Outcome.SATURATED, "the answers do not determine the score matrix") from error

    def best(self) -> HeadFit:
        """The fit to all that was asked before the last pass."""
        assert self.fitted is not None  # every use is behind the first fit
        return self.fitted

    def passes(self) -> float:
        """Passes so far."""
        return (sum(float(np.sum(part.repeats)) for part in self.parts) - self.width) / self.pass_size

    def standard_error(self) -> float:
        """Root mean square of the standard errors of score entries."""
        return float(np.sqrt(np.mean(self.best().score_variance)))

    def partial(self) -> SingleHead | None:
        """The head by the forms so far, missing ones taken for zero; None before there are any."""
        if self.fitted is not None:
            return self._head(self.frame(wide=False), self.fitted)
        if not any(np.any(part.norm) for part in self.parts):
            return None
        pairs = PairQueries.concat(*self.parts)
        pairs = pairs.take((pairs.norm != 0) & (pairs.row < self.width) & (pairs.column < self.width))
        beside = self.null_score_bias()
        logits = self.pair_logits(pairs) - self.max_norm * (self.rows @ beside)[pairs.row]
        matrix = np.zeros((self.width, self.width))
        matrix[pairs.row, pairs.column] = logits / (self.max_norm * pairs.norm)
        score = np.linalg.inv(self.rows[: self.width]) @ matrix @ self.columns[: self.width]
        return self._in_shape(score, self.value(self.biased), beside, self.answers[0] * self.biased)

    def estimate(self, target_error: float | None) -> Estimate[SingleHead]:
        """Parameters, standard errors and radii."""
        frame, pairs, narrow = self.frame(wide=False), PairQueries.concat(*self.parts), self.best()
        self._check_misfit(pairs, narrow)
        # Radii allow for biases that did not show: they are those of a fit that has them, and reach as far as that is.
        broad = self.frame(wide=True)
        wide = self._fit(broad, replace(narrow.point, shared=broad.known), pairs)
        params = self._head(frame, narrow)
        errors = self._errors(frame, narrow)
        other, others = self._head(broad, wide), self._errors(broad, wide)
        deviations = -float(ndtri(MISSES / 2 / (self.width * (self.width + self.answers.shape[1] + 2))))
        heads = zip(*(head.arrays().values() for head in (params, other, others)), strict=True)
        radius = SingleHead(*(deviations * error + np.abs(theirs - mine) for mine, theirs, error in heads))
        if not self.score_bias:
            params, errors = replace(params, score_bias=None), replace(errors, score_bias=None)
        if not self.biased:
            params, errors = replace(params, output_bias=None), replace(errors, output_bias=None)
        space = self.signature.space
        return Estimate(
            params=_on_device(space, params),
            radius=_on_device(space, radius),
            standard_error=_on_device(space, errors),
            counting_bound=self.counting_bound + self.width * self.score_bias + self.biased,
            assumptions=ASSUMPTIONS
            + (() if self.rank is None else (f"the score matrix has rank {self.rank} at most",)),
            details=self._details(target_error),
        )

    def _head(self, frame: Frame, fitted: HeadFit) -> SingleHead:
        """The fit as parameters, with all biases."""
        point, biased = fitted.point, bool(frame.bias_map.shape[1])
        value = self.value(biased)
        bias = self.answers[0] if biased else np.zeros_like(self.answers[0])
        if self.scalar:
            value = point.shared[: self.width, None]
            bias = frame.bias_map[0] * point.shared[self.width :] if biased else bias
        return self._in_shape(point.score, value, point.score_bias, bias)

    def _errors(self, frame: Frame, fitted: HeadFit) -> SingleHead:
        """Standard errors of all parameters."""
        own, biased = self.noise / math.sqrt(self.value_repeats), bool(frame.bias_map.shape[1])
        value = np.full(self.answers[1:].shape, own / self.max_norm * (math.sqrt(2) if biased else 1.0))
        bias = np.full(self.answers[0].shape, own if biased else 0.0)
        if self.scalar:
            shared = np.sqrt(np.diag(fitted.shared_covariance))
            value, bias = shared[: self.width, None], shared[self.width :] if biased else bias
        return self._in_shape(np.sqrt(fitted.score_variance), value, np.sqrt(fitted.score_bias_variance), bias)

    def _in_shape(self, score: Floats, value: Floats, score_bias: Floats, bias: Floats) -> SingleHead:
        """As the oracle's answers are shaped: one number, or a row of outputs."""
        return SingleHead(score, value if self.many else value[:, 0], score_bias, bias if self.many else bias[0])

    def _check_misfit(self, pairs: PairQueries, fitted: HeadFit) -> None:
        """End where answers scatter more than their noise explains."""
        parameters = self.counting_bound - self.width + self.width * self.score_bias
        freedom = pairs.answer.size - parameters
        most = freedom + MISFIT_DEVIATIONS * math.sqrt(2 * max(freedom, 1)) + MISFIT_DEVIATIONS**2
        if fitted.misfit > most:
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                f"answers scatter {math.sqrt(fitted.misfit / max(freedom, 1)):.2g} times as much around the best fit "
                f"as the declared noise of {self.noise:.2g}: the box is no single head, errs more than declared, or "
                "its logits are too large for a fit to be found (lower max_norm)",
            )

    def _details(self, target_error: float | None) -> dict[str, Any]:
        error = self.standard_error()
        score = self.best().point.score
        noise_level = 2 * math.sqrt(self.width) * error  # of the largest singular value of noise alone
        details = {
            "standard_error": error,
            "passes": round(self.passes(), 3),
            "copies": max(1, self.copies // 2),
            "score_bias": self.score_bias,
            "output_bias": self.biased,
            "rank_above_noise": int(np.sum(singular_values(score) > noise_level)),
        }
        if not self.many and self.rank is None:  # the floor is that of a matrix of any rank
            norm = float(np.linalg.norm(self.value(self.biased)))
            floor = universal_floor(self.width, norm, self.max_norm, self.noise, self.asked)
            details |= {"floor": floor, "over_floor": error / floor}
        return details | target_details(target_error, error)


def _on_device(space: Space, head: SingleHead) -> SingleHead:
    """A head in the oracle's library, dtype and device."""
    return SingleHead(**{name: space.asarray(array) for name, array in head.arrays().items()})
