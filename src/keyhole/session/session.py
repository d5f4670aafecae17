"""Runs methods against oracles: batches, budget, journal, progress, and the border between the two.

Past this border no answer shares memory with the oracle, no arithmetic of a method takes longer than allowed, and one
that fails is an error of Keyhole's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import GEN_CLOSED, getgeneratorstate
from math import prod
from sys import getrefcount
from typing import Any

import array_api_compat
import numpy as np

from keyhole.arrays import Array, Stopwatch, copy_of, is_out_of_memory, to_numpy
from keyhole.errors import (
    BudgetExhausted,
    KeyholeError,
    OracleError,
    OutOfMemory,
    TimeExhausted,
    UsageError,
    WrongShape,
)
from keyhole.journal import Journal
from keyhole.methods import Steps
from keyhole.methods.arithmetic import ComputeLimit, check_arithmetic, check_seconds, default_limit
from keyhole.methods.base import Found
from keyhole.oracles import Oracle
from keyhole.progress import Observer, Silent, Watcher
from keyhole.queries import Measurements, Plan
from keyhole.session.gathering import Gathering, Slice
from keyhole.session.lanes import Lanes

# Tokens per batch where the oracle sets no limit: small enough for a CPU's cache, large enough for a GPU, and a part of
# its free memory that leaves room for what an oracle makes of them.
CPU_BATCH_BYTES = 2**21
GPU_BATCH_BYTES, GPU_BATCH_SHARE = 2**29, 32
# What getrefcount says of memory that only the session holds: the attribute and the argument of the call.
UNSHARED = 2


class Session:
    """Asks an oracle what methods want to know, within a budget, and keeps the answers."""

    def __init__(
        self,
        oracle: Oracle,
        *,
        budget: int | None = None,
        journal: Journal | None = None,
        observer: Observer | None = None,
        max_seconds: float | None = None,  # of arithmetic, the oracle's own time apart; a generous limit if None
        lanes: Lanes | None = None,  # where several batches are asked at a time
    ) -> None:
        self.oracle = oracle
        self.signature = oracle.signature
        if self.signature.space.in_tf32:
            raise UsageError(
                f"PyTorch makes products of float32 in TF32, with 11 of 24 binary digits, where {oracle.name!r} lives: "
                "call torch.set_float32_matmul_precision('highest') before"
            )
        self.budget = budget
        self.journal = journal
        self.observer = observer or Silent()
        self.watcher = observer if isinstance(observer, Watcher) else None
        self.stages: dict[tuple[int, str], int] = {}  # queries by attempt and stage
        self.new_queries = 0
        self.lanes = lanes
        self._attempt = 0  # which of several the last plan was for
        self._in_oracle = Stopwatch(self.signature.space)
        # Answers to plans that are asked together are looked at once where every look waits for a device, unless a
        # journal keeps each batch.
        self._checks_late = self.signature.space.runs_ahead and journal is None
        self._unchecked: list[Array] = []
        self._batch_bytes = self._affordable_bytes()
        self._memory: Array | None = None
        self._outputs: tuple[int, ...] | None = None  # shape of one answer, once one has come
        self._max_seconds = check_seconds(max_seconds)
        self.compute = ComputeLimit(self._allowed_seconds)

    @property
    def queries(self) -> int:
        """All queries used, from the journal too."""
        return sum(self.stages.values())

    @property
    def oracle_seconds(self) -> float:
        """Seconds that the oracle took to answer."""
        return self._in_oracle.read()

    @property
    def left(self) -> float:
        """Queries the budget still allows."""
        return np.inf if self.budget is None else self.budget - self.queries

    def run(self, steps: Steps[Found]) -> Found:
        """Drive a method to its end. What goes wrong is raised inside it, so that it can say what it had found."""
        steps = check_arithmetic(steps)
        reply: Any = None
        request: Plan | Sequence[Plan]
        error: KeyholeError | None = None
        try:
            while True:
                try:
                    request = self._step(steps, reply, error)
                    error = None
                    self.compute.check()
                    plans = [request] if isinstance(request, Plan) else request
                    replies = self.measure_all(plans)
                    reply = replies[0] if isinstance(request, Plan) else replies
                    request, plans, replies = (), [], []  # what made tokens is not held while the method works
                except (BudgetExhausted, OracleError, TimeExhausted) as ended:
                    if getgeneratorstate(steps) == GEN_CLOSED:  # what the method itself ends with
                        raise
                    error = ended
        except StopIteration as stop:
            found: Found = stop.value
            return found
        finally:
            self.compute.close()

    def _step(self, steps: Steps[Found], reply: Any, error: KeyholeError | None) -> Plan | Sequence[Plan]:
        # Saturated answers overflow and divide by zero; methods look for the inf and nan that come of it.
        with np.errstate(all="ignore"), self.compute:
            return steps.send(reply) if error is None else steps.throw(error)

    def _allowed_seconds(self) -> float:
        if self._max_seconds is not None:
            return self._max_seconds
        return default_limit(self.queries, self.signature.width, prod(self._outputs or ()))

    def measure_all(self, plans: Sequence[Plan]) -> list[Measurements]:
        """The answers to independent plans, several batches at a time where there are lanes."""
        if self.lanes is None:
            self._unchecked = []
            measured = [self._measure(plan) for plan in plans]
            if self._unchecked:  # one look at the answers to all plans
                self.oracle.check_finite(*self._unchecked)
                self._in_oracle.read()  # while there is nothing to wait for
                self._unchecked = []
            return measured
        later: set[int] = set()  # plans that ask again what others ask here: the journal will have it by then
        seen: set[tuple[str, int]] = set()
        for number, plan in enumerate(plans) if self.journal and len(plans) > 1 else ():
            keys = {(plan.digest, repeat) for repeat in plan.all_repeats}
            later |= {number} if keys & seen else set()
            seen |= keys
        gathered = [Gathering(plan) for plan in plans]
        missing: list[Slice] = []
        for number, each in enumerate(gathered):
            if number not in later:
                self._announce(each.plan)
                missing += self._missing(number, each)
        self._ask_together(gathered, missing, self.lanes)
        replies = []
        for number, each in enumerate(gathered):
            if number in later:
                replies.append(self.measure(each.plan))
            else:
                values = each.values
                values = self._no_answers(each.plan) if values is None else values
                replies.append(Measurements(values, self.signature.noise.radius_of_mean(each.plan.repeats)))
        return replies

    def _missing(self, number: int, gathering: Gathering) -> list[Slice]:
        """What the journal does not have of a plan; what it has is counted and placed."""
        plan = gathering.plan
        missing: list[Slice] = []
        for repeat in plan.all_repeats:
            known = self.journal.slices(plan.digest, repeat) if self.journal else []
            for start, answers in known:
                gathering.place(repeat, start, self._from_journal(plan, answers), self.signature)
            missing += gathering.gaps(number, repeat, [(start, start + len(answers)) for start, answers in known])
        return missing

    def _ask_together(self, gathered: Sequence[Gathering], missing: Sequence[Slice], lanes: Lanes) -> None:
        """Ask what is missing, as far as the budget goes; every answer is kept as it comes."""
        cut: list[Slice] = []
        affordable = left = int(min(self.left, sum(each.stop - each.start for each in missing)))
        for each in missing:
            plan = gathered[each.plan].plan
            size = lanes.size(affordable, self._batch(plan), plan.length * self.signature.width)
            for piece in each.cut(size):
                if left > 0:
                    cut.append(replace(piece, stop=min(piece.stop, piece.start + left)))
                    left -= cut[-1].stop - cut[-1].start
        with self._in_oracle:
            rest = self._ask_pieces(gathered, cut, lanes)
            while rest:
                rest = self._ask_pieces(gathered, rest, lanes)
        asked = sum(each.stop - each.start for each in cut)
        for each in missing:
            asked -= each.stop - each.start
            if asked < 0:
                self._afford(gathered[each.plan].plan, 1)

    def _ask_pieces(self, gathered: Sequence[Gathering], pieces: Sequence[Slice], lanes: Lanes) -> list[Slice]:
        """Ask several pieces; halves of those that are left where one does not fit into memory."""
        left = dict(enumerate(pieces))
        try:
            for number, came in self._in_lanes(gathered, pieces, lanes):
                piece, plan = left.pop(number), gathered[pieces[number].plan].plan
                answers = copy_of(self._same_shape(came, plan))
                if self.journal:
                    self.journal.add(plan.digest, piece.repeat, piece.start, to_numpy(answers))
                self._count(plan, piece.stop - piece.start, new=True)
                gathered[piece.plan].place(piece.repeat, piece.start, answers, self.signature)
        except OutOfMemory:
            largest = max(left.values(), key=lambda each: each.stop - each.start)
            count = largest.stop - largest.start
            if count == 1:
                raise
            self._halve(gathered[largest.plan].plan, count)
        else:
            return []
        return [half for each in left.values() for half in each.cut(count // 2)]

    def _in_lanes(
        self, gathered: Sequence[Gathering], pieces: Sequence[Slice], lanes: Lanes
    ) -> Iterator[tuple[int, Array]]:
        def batches() -> Iterator[tuple[str, Array]]:
            for each in pieces:
                plan = gathered[each.plan].plan
                label = "" if lanes.copies is None else f"{plan.digest} {each.repeat} {each.start}"
                yield label, self._tokens(plan, each.start, each.stop)

        if lanes.copies is None and len(pieces) == 1:  # nobody to share it with
            return ((number, self.oracle(tokens)) for number, (_, tokens) in enumerate(batches()))
        return lanes.ask(batches())

    def _announce(self, plan: Plan) -> None:
        if plan.attempt != self._attempt:
            self._attempt = plan.attempt
            if self.watcher is not None:
                self.watcher.discarded()
        if plan.so_far is not None and self.watcher is not None:
            self.watcher.sketched(plan.so_far)
        self.observer.planned(plan.stage, plan.count * plan.repeats)

    def measure(self, plan: Plan) -> Measurements:
        """The answers to a plan, from the journal where it has them, else from the oracle."""
        return self.measure_all([plan])[0]

    def _measure(self, plan: Plan) -> Measurements:
        """The same, one batch after the other."""
        self._announce(plan)
        repeats = plan.all_repeats
        values = self._answers(plan, repeats[0])
        if plan.repeats > 1:
            values = (values + sum(self._answers(plan, repeat) for repeat in repeats[1:])) / plan.repeats
        return Measurements(values, self.signature.noise.radius_of_mean(plan.repeats))

    def _answers(self, plan: Plan, repeat: int) -> Array:
        """All answers to one repeat of a plan."""
        known = self.journal.slices(plan.digest, repeat) if self.journal else []
        pieces: list[Array] = []
        done = 0
        for start, answers in [*known, (plan.count, None)]:
            while done < start:
                piece = self._ask(plan, repeat, done, start)
                pieces.append(piece)
                done += piece.shape[0]
            if answers is not None:
                pieces.append(self._from_journal(plan, answers))
                done += len(answers)
        if not pieces:
            return self._no_answers(plan)
        values = pieces[0] if len(pieces) == 1 else self.signature.space.xp.concat(pieces)
        if self._checks_late:
            self._unchecked.append(values)
        return values

    def _from_journal(self, plan: Plan, answers: np.ndarray) -> Array:
        self._afford(plan, len(answers))
        self._count(plan, len(answers), new=False)
        return self._same_shape(self.signature.space.asarray(answers), plan)

    def _no_answers(self, plan: Plan) -> Array:
        """To a plan that asks nothing."""
        places = () if self.signature.positions == "last" else (len(plan.positions),)
        return self.signature.space.zeros(0, *places, *(self._outputs or ()))

    def _ask(self, plan: Plan, repeat: int, start: int, stop: int) -> Array:
        """Ask the next batch of a slice; what was answered is kept before anything else happens."""
        while True:
            most = min(stop, start + self._batch(plan), start + self._afford(plan, 1))
            try:
                answers = self._ask_batch(plan, start, most)
                break
            except OracleError as error:
                self._keep_partial(error, plan, repeat, start)
                if not isinstance(error, OutOfMemory) or error.arrived or most == start + 1:
                    raise
            self._halve(plan, most - start)  # past the handler, whose error holds what filled the memory
        if self.journal:
            self.journal.add(plan.digest, repeat, start, to_numpy(answers))
        self._count(plan, most - start, new=True)
        return answers

    def _ask_batch(self, plan: Plan, start: int, stop: int) -> Array:
        """The answers to some queries of a plan, in memory of their own."""
        tokens = self._tokens(plan, start, stop, self._room(plan, stop - start))
        with self._in_oracle:
            answers = self.oracle.ask(tokens) if self._checks_late else self.oracle(tokens)
            # Copied: it may be memory that the next call writes to.
            return copy_of(self._same_shape(answers, plan))

    def _tokens(self, plan: Plan, start: int, stop: int, room: Array | None = None) -> Array:
        """Some queries of a plan."""
        try:
            return plan.tokens(start, stop, self.signature.space, self.signature.width, room)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            count = stop - start
            raise OutOfMemory(f"the tokens of a batch of {count} queries do not fit into memory: {error}") from error

    def _halve(self, plan: Plan, count: int) -> None:
        """Ask batches of half as many queries from now on: so many did not fit into memory."""
        self._memory = None
        self._batch_bytes = count // 2 * self._bytes_each(plan)

    def _affordable_bytes(self) -> int:
        """Bytes of tokens in a batch, from the memory that is free."""
        space = self.signature.space
        free = space.free_bytes()
        room = CPU_BATCH_BYTES if space.on_cpu else GPU_BATCH_BYTES
        return room if free is None else min(room, free // GPU_BATCH_SHARE)

    def _bytes_each(self, plan: Plan) -> int:
        """Bytes of the tokens of one query."""
        return self.signature.space.itemsize * len(plan.positions) * self.signature.width

    def _keep_partial(self, error: OracleError, plan: Plan, repeat: int, start: int) -> None:
        """Keep what was answered of a batch before the rest of it failed, if it is this oracle that says so."""
        for first, some in error.arrived if error.box is self.oracle else ():
            answers = copy_of(self._same_shape(some, plan))
            if self.journal:
                self.journal.add(plan.digest, repeat, start + first, to_numpy(answers))
            self._count(plan, answers.shape[0], new=True)

    def _room(self, plan: Plan, count: int) -> Array | None:
        """Memory for a batch of tokens: the last batch's, unless it is too small or somebody still holds it.

        Fresh memory costs a page fault for every 4 KiB, which is more than writing the tokens. Only NumPy
        tells who holds an array: a view of a torch tensor does not count as a reference to it.
        """
        if not array_api_compat.is_numpy_namespace(self.signature.space.xp):
            return None
        size = count * len(plan.positions) * self.signature.width
        if self._memory is None or self._memory.shape[0] < size or getrefcount(self._memory) > UNSHARED:
            self._memory = self.signature.space.zeros(size)
        return self._memory[:size]

    def _batch(self, plan: Plan) -> int:
        fitting = max(1, self._batch_bytes // self._bytes_each(plan))
        return min(fitting, self.signature.batch_limit or fitting)

    def _afford(self, plan: Plan, wanted: int) -> int:
        """Queries left; BudgetExhausted when they are fewer than wanted."""
        if self.left < wanted:
            raise BudgetExhausted(
                f"the budget of {self.budget} queries ended in stage {plan.stage!r}, "
                f"after {self.queries} queries: raise it"
            )
        return int(min(self.left, plan.count))

    def _count(self, plan: Plan, queries: int, *, new: bool) -> None:
        place = plan.attempt, plan.stage
        self.stages[place] = self.stages.get(place, 0) + queries
        self.new_queries += queries if new else 0
        self.observer.answered(queries, new=new)

    def _same_shape(self, answers: Array, plan: Plan) -> Array:
        leading = 1 if self.signature.positions == "last" else 2
        outputs = tuple(answers.shape[leading:])
        if self._outputs is None:
            self._outputs = outputs
        if outputs != self._outputs:
            raise WrongShape(
                f"the oracle {self.oracle.name!r} answered {outputs or 'one number'} per sequence in stage "
                f"{plan.stage!r}, before it was {self._outputs or 'one number'}: it must not change"
            )
        return answers


def box_of(oracle: Oracle) -> str:
    """What a journal belongs to: the oracle and how it is asked."""
    signature = oracle.signature
    labels = " | labels" if signature.answers == "labels" else ""
    letters = "" if signature.alphabet is None else f" | alphabet {signature.alphabet.digest}"
    how = f"positions {signature.positions}{labels}{letters}"
    return f"{oracle.name} | width {signature.width} | {signature.space.label} | {how}"
