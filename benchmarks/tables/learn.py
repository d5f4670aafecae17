"""Layers learned from examples by `varpro`: success, errors and processor time; noise; heads found; what is refused."""

from __future__ import annotations

import resource
from functools import partial
from time import perf_counter, process_time

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.samples.examples import ExampleCount
from keyhole.samples.restarts import RestartFit
from keyhole.samples.variable_projection import LayerProblem
from keyhole.targets.datasets import random_layer, signs

SIZES = (0.1, 0.5, 1.0, 2.0)  # entries of scores times √d: logits of standard deviation size·√d
CASES = {(4, 4, 2): 20, (8, 4, 2): 20, (8, 6, 3): 20, (16, 8, 2): 20, (16, 8, 4): 20, (32, 8, 4): 5}
RATIO = {(32, 8, 4): 8.0}  # numbers per parameter, where not 10
# Starts of a prototype that succeeded, for the same sizes.
PROTOTYPE = {
    (4, 4, 2): "42, 44, 45, 43 of 50",
    (8, 4, 2): "49–50 of 50",
    (8, 6, 3): "49–50 of 50",
    (16, 8, 2): "18 of 18",
    (16, 8, 4): "18 of 18",
    (32, 8, 4): "6, 6, 5 of 6, 3 of 4",
}
# Sizes of scores, and numbers per parameter: at (128, 8, 2) 10 of them are 2.2 × d²/(k(k − 1)) examples, 27.5 are 6.
LARGE = (
    *(((32, 8, 4), size, 8.0) for size in (0.5, 1.0, 2.0)),
    *(((64, 8, 4), size, 10.0) for size in (0.5, 1.0)),
    *(((64, 8, 8), size, 10.0) for size in (0.5, 1.0)),
    ((128, 8, 2), 0.5, 10.0),
    ((128, 8, 2), 0.5, 27.5),
)
SOLVED = 1e-9


def instance(
    d: int, k: int, m: int, size: float, ratio: float, seed: int
) -> tuple[kh.AttentionLayer, np.ndarray, np.ndarray, np.random.Generator]:
    rng = np.random.default_rng([seed, d, k, m, int(100 * size)])
    layer = random_layer(d, m, d, size, rng)
    # A tenth is held out.
    inputs = signs(rng, int(np.ceil(ExampleCount(1, k, d, d, m).needed(ratio, 1.5) / 0.9)), k, d)
    return layer, inputs, layer(inputs), rng


def test_error(found: kh.AttentionLayer, truth: kh.AttentionLayer, k: int, rng: np.random.Generator) -> float:
    fresh = signs(rng, 500, k, truth.width)
    return float(np.sqrt(np.mean((found(fresh) - truth(fresh)) ** 2)))


def table(kept: Kept) -> str:
    parts = {
        "Instances solved within 10 restarts (certified, error of function and of parameters ≤ 1e-9), 10 numbers per "
        "parameter (8 for d = 32), entries of scores of size/√d": solved,
        "The same at 4 numbers per parameter, size .5": at_ratio_4,
        'Heads found, `heads="auto"`, d = 8, k = 4, 10 numbers per parameter': heads_found,
        "One start of large layers": large,
        "Normal errors of outputs, (8, 4, 2), 20 instances": noise,
        "What is not there to be learned": refused,
    }
    return "\n\n".join(f"### {title}\n\n{make(kept)}" for title, make in parts.items())


def name_of(case: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, case))})"


def solved(kept: Kept) -> str:
    measured = {
        f"{name_of(case)} {size:g}": partial(_solved, case, size, count)
        for case, count in CASES.items()
        for size in SIZES
    }
    columns = ["(d, k, m)", "size", "solved", "starts that succeeded", "prototype's starts, sizes .1, .5, 1, 2"]
    columns += ["certified and wrong", "processor s of one thread: median, worst"]
    return markdown(columns, kept.rows_of("solved", measured))


def _solved(case: tuple[int, int, int], size: float, count: int) -> Row:
    good, wrong, starts, spent = 0, 0, 0, []
    for seed in range(count):
        truth, inputs, outputs, rng = instance(*case, size, RATIO.get(case, 10.0), seed)
        began = process_time()
        result = kh.learn(inputs, outputs, heads=case[2], seed=seed, throw=False)
        spent.append(process_time() - began)
        right = result.params is not None and kh.distance(result.params, truth) <= SOLVED
        right = right and test_error(result.params, truth, case[1], rng) <= SOLVED
        good += right and result.certified
        wrong += result.certified and not right
        starts += result.stats.details["restarts"]["made"]
    seconds = f"{np.median(spent):.2f}, {max(spent):.1f}"
    return [name_of(case), f"{size:g}", f"{good} of {count}", f"{good} of {starts}", PROTOTYPE[case], wrong, seconds]


def at_ratio_4(kept: Kept) -> str:
    measured = {name_of(case): partial(_at_ratio_4, case) for case in ((4, 4, 2), (8, 4, 2), (8, 6, 3), (16, 8, 2))}
    columns = ["(d, k, m)", "first starts that succeed", "within 10 restarts", "certified and wrong"]
    return markdown(columns, kept.rows_of("ratio 4", measured))


def _at_ratio_4(case: tuple[int, int, int]) -> Row:
    good, wrong, within = 0, 0, 0
    for seed in range(20):
        truth, inputs, outputs, _ = instance(*case, 0.5, 4.0, 100 + seed)
        once = kh.learn(inputs, outputs, heads=case[2], seed=seed, restarts=1, throw=False)
        result = once if once.certified else kh.learn(inputs, outputs, heads=case[2], seed=seed, throw=False)
        good += once.certified
        within += result.certified
        wrong += result.certified and kh.distance(result.params, truth) > SOLVED
    return [name_of(case), f"{good} of 20", f"{within} of 20", wrong]


def heads_found(kept: Kept) -> str:
    measured = {f"{search} {m}": partial(_heads_found, search, m) for search in ("grow", "prune") for m in (1, 2, 3, 4)}
    columns = ["search", "heads", "found and certified", "admitted failures", "s"]
    return markdown(columns, kept.rows_of("heads", measured))


def _heads_found(search: str, m: int) -> Row:
    found, spent = [], []
    for seed in range(20):
        _, inputs, outputs, _ = instance(8, 4, m, 0.5, 10.0, 200 + seed)
        began = process_time()
        result = kh.learn(inputs, outputs, heads="auto", search=search, max_heads=6, seed=seed, throw=False)
        spent.append(process_time() - began)
        found.append(result.params.heads if result.certified else 0)
    return [search, m, f"{found.count(m)} of 20", f"{found.count(0)}", f"{np.median(spent):.2f}"]


def large(kept: Kept) -> str:
    measured = {
        f"{name_of(case)} {size:g} {ratio:g}": partial(_large, case, size, ratio) for case, size, ratio in LARGE
    }
    columns = ["(d, k, m)", "size", "examples", "over d²/(k(k − 1))", "steps", "products", "cut short", "test error"]
    columns += ["processor s of all threads", "s by the clock", "peak memory of the process, GiB"]
    return markdown(columns, kept.rows_of("large", measured))


def _large(case: tuple[int, int, int], size: float, ratio: float) -> Row:
    truth, inputs, outputs, rng = instance(*case, size, ratio, 0)
    train = slice(0, int(0.9 * len(inputs)))
    problem = LayerProblem(inputs[train], outputs[train])
    began, clock = process_time(), perf_counter()
    trace = RestartFit(problem, case[2], 576 * np.finfo(float).eps).start(0, 0)
    spent, clock = process_time() - began, perf_counter() - clock
    point = problem.at(trace.scores)
    error = test_error(kh.AttentionLayer(point.scores, point.projections), truth, case[1], rng)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    pairs = ExampleCount(len(inputs[train]), case[1], case[0], case[0], case[2]).pairs
    row = [name_of(case), f"{size:g}", len(inputs), f"{pairs:.1f}", trace.steps, trace.products]
    row += ["yes" if trace.cut else "no", f"{error:.1e}"]
    return [*row, f"{spent:.1f}", f"{clock:.1f}", f"{memory:.1f}"]


def noise(kept: Kept) -> str:
    measured = {
        f"{level:g} {'declared' if declared else 'unknown'}": partial(_noise, level, declared=declared)
        for level in (1e-3, 1e-2, 1e-1)
        for declared in (True, False)
    }
    columns = ["noise ε", "which is", "test error over ε/√ratio: median, worst"]
    return markdown([*columns, "truth within all error bars, of certified"], kept.rows_of("noise", measured))


def _noise(level: float, *, declared: bool) -> Row:
    errors, certified, covered = [], 0, 0
    for seed in range(20):
        truth, inputs, outputs, rng = instance(8, 4, 2, 0.5, 10.0, 300 + seed)
        noisy = outputs + level * rng.standard_normal(outputs.shape)
        ask = kh.Noise.gaussian(level) if declared else "measure"
        result = kh.learn(inputs, noisy, heads=2, noise=ask, seed=seed, throw=False)
        ratio = result.stats.details["samples"]["ratio"]
        errors.append(test_error(result.params, truth, 4, rng) / (level / np.sqrt(ratio)))
        certified += result.certified
        covered += result.certified and _covered(result, truth)
    middle = f"{np.median(errors):.2f}, {max(errors):.2f}"
    return [level, "declared" if declared else "unknown", middle, f"{covered} of {certified}"]


def _covered(result: kh.Recovery, truth: kh.AttentionLayer) -> bool:
    found, radius = result.params, result.certificate.radius
    order = [int(np.argmin([np.linalg.norm(each - one) for one in truth.scores])) for each in found.scores]
    scores = np.abs(found.scores - truth.scores[order]) <= radius.scores
    return bool(np.all(scores) and np.all(np.abs(found.projections - truth.projections[order]) <= radius.projections))


def refused(kept: Kept) -> str:
    rng = np.random.default_rng(7)
    layer = random_layer(6, 2, 6, 0.5, rng)
    inputs = signs(rng, 80, 4, 6)
    outputs = layer(inputs)
    broken = outputs.copy()
    broken[3, 1, 2] = np.nan
    net = np.maximum(inputs @ rng.standard_normal((6, 16)), 0) @ rng.standard_normal((16, 6))
    cases = {
        "one example more than outputs": (inputs, outputs[1:]),
        "a nan among the outputs": (inputs, broken),
        "outputs 1.5 everywhere": (inputs, np.full(outputs.shape, 1.5)),
        "outputs 0 everywhere": (inputs, np.zeros(outputs.shape)),
        "outputs of a ReLU net": (inputs, net),
        "undeclared noise of .001": (inputs, outputs + 1e-3 * rng.standard_normal(outputs.shape)),
        "5 examples": (inputs[:5], outputs[:5]),
        "5 examples, each 50 times": (np.repeat(inputs[:5], 50, axis=0), np.repeat(outputs[:5], 50, axis=0)),
        "examples of one token": (inputs[:, :1], layer(inputs[:, :1])),
    }
    measured = {name: partial(_refused, name, *arrays) for name, arrays in cases.items()}
    return markdown(["case", "ends as", "message"], kept.rows_of("refused", measured))


def _refused(name: str, inputs: np.ndarray, outputs: np.ndarray) -> Row:
    try:
        result = kh.learn(inputs, outputs, heads=2, throw=False)
    except kh.KeyholeError as error:
        return [name, type(error).__name__, error]
    return [name, result.outcome.name, result.message]
