"""A layer from examples in shards: memory, processor time, and a worker killed twice."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import threading
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from time import perf_counter, sleep

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.targets.datasets import random_layer, signs

WIDTH, LENGTH, HEADS = 8, 4, 2
# Examples, shards, processes, how often a worker is killed, standard deviation of the outputs' errors.
RUNS = (
    (200_000, 10, 1, 0, 0.0),
    (10_000_000, 100, 1, 0, 0.0),
    (200_000, 10, 1, 0, 1e-2),
    (200_000, 10, 2, 0, 1e-2),
    (200_000, 10, 2, 2, 1e-2),
    # These ask for four cores.
    (2_000_000, 40, 1, 0, 1e-2),
    (2_000_000, 40, 4, 0, 1e-2),
    (2_000_000, 40, 4, 2, 1e-2),
    (10_000_000, 100, 4, 0, 0.0),
    (10_000_000, 100, 4, 2, 0.0),
)


def table(kept: Kept) -> str:
    columns = ["examples", "GB", "shards", "processes", "killed", "noise", "outcome", "distance", "digest", "peak MiB"]
    columns += ["processor s", "s"]
    measured = {
        f"{count} {workers} {killed} {noise:g}": partial(_measure, count, shards, workers, killed, noise)
        for count, shards, workers, killed, noise in RUNS
    }
    return (
        f"Layers of ({WIDTH}, {LENGTH}, {HEADS}), entries of scores .5 over √d, signs kept as int8 and outputs as "
        f"float64, "
        "in .npz files. Peak of the largest process; the digest is of all bits of the parameters.\n\n"
        + markdown(columns, kept.rows_of("shards", measured))
    )


def _measure(count: int, shards: int, workers: int, killed: int, noise: float) -> Row:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        size = _write(Path(folder), count, shards, noise)
        command = [sys.executable, "-m", __name__, folder, str(workers), str(killed), str(noise)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    row = [f"{count:,}", f"{size / 1e9:.2g}", shards, workers, killed, f"{noise:g}", found["outcome"]]
    row += [f"{found['distance']:.1e}", found["digest"], f"{found['peak']:.0f}", f"{found['spent']:.0f}"]
    return [*row, f"{found['seconds']:.0f}"]


def truth() -> kh.AttentionLayer:
    return random_layer(WIDTH, HEADS, WIDTH, 0.5, np.random.default_rng(19))


def _write(folder: Path, count: int, shards: int, noise: float) -> int:
    layer = truth()
    for number in range(shards):
        rng = np.random.default_rng([number, count])
        inputs = signs(rng, count // shards, LENGTH, WIDTH)
        outputs = layer(inputs)
        if noise:
            outputs = outputs + noise * rng.standard_normal(outputs.shape)
        np.savez(folder / f"{number:03d}.npz", inputs=inputs.astype(np.int8), outputs=outputs)
    return sum(each.stat().st_size for each in folder.iterdir())


def _kill(often: int) -> None:
    """Kill a worker, wait until there is another, and so on."""
    for _ in range(often):
        while not (workers := active_children()):
            sleep(0.1)
        sleep(8.0)  # in the middle of its work
        workers[0].kill()
        sleep(8.0)


def _learn(folder: str, workers: int, killed: int, noise: float) -> dict[str, object]:
    threading.Thread(target=_kill, args=(killed,), daemon=True).start()
    began = perf_counter()
    result = kh.learn(f"{folder}/*.npz", heads=HEADS, noise=noise, workers=workers, throw=False, max_seconds=1e5)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    bits = result.params.scores.tobytes() + result.params.projections.tobytes()
    return {
        "outcome": result.outcome.name,
        "distance": kh.distance(result.params, truth()),
        "digest": f"{np.bitwise_xor.reduce(np.frombuffer(bits, np.uint64)):016x}",
        "peak": max(each.ru_maxrss for each in used) / 1024,
        "spent": sum(each.ru_utime + each.ru_stime for each in used),
        "seconds": perf_counter() - began,
    }


if __name__ == "__main__":
    print(json.dumps(_learn(sys.argv[1], *map(int, sys.argv[2:4]), float(sys.argv[4]))))
