"""Heads behind servers that are not ours: MLServer and KServe from PyPI, each in an environment of its own.

They are installed on the first run, which takes minutes and a network; later runs take what is there. The head itself
is plain NumPy, so that nothing of Keyhole runs behind these servers.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.oracles import Oracle

WIDTH = 8
FOREIGN = Path(__file__).parents[1] / "support" / "foreign"
ENVIRONMENTS = Path(__file__).parents[1] / ".rows" / "environments"
START_SECONDS = 120.0
TENSORS = {
    "inputs": [{"name": "tokens", "datatype": "FP64", "shape": [-1, -1, WIDTH]}],
    "outputs": [{"name": "answers", "datatype": "FP64", "shape": [-1, 1]}],
}


def table(kept: Kept) -> str:
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        head = written_head(Path(folder))
        for name, serve, asks in (("mlserver", mlserver, MLSERVER), ("kserve", kserve, KSERVE)):
            python = environment(name)
            with serve(python, Path(folder)) as address:
                who = f"{name} {version_of(python, name)}"
                measured = {what: partial(row, who, what, ask, address, head) for what, ask in asks.items()}
                rows += kept.rows_of(name, measured)
    columns = ["server", "asked", "outcome", "queries", "requests", "retries", "tensors", "distance"]
    return markdown(columns, rows)


MLSERVER = {
    "no tensors described: `input_name=`": lambda at: kh.HttpOracle(f"{at}/head", WIDTH, input_name="tokens"),
    "tensors described": lambda at: kh.HttpOracle(f"{at}/described"),
    "16 requests at a time": lambda at: kh.HttpOracle(
        f"{at}/head", WIDTH, input_name="tokens", batch=4, connections=16
    ),
}
KSERVE = {
    "no tensors described: `input_name=`": lambda at: kh.HttpOracle(f"{at}/v2/models/head", WIDTH, input_name="tokens"),
    "tensors described": lambda at: kh.HttpOracle(f"{at}/v2/models/described"),
    "16 requests at a time": lambda at: kh.HttpOracle(f"{at}/v2/models/described", batch=4, connections=16),
    "version 1, by a mapping": lambda at: kh.RestOracle(
        f"{at}/v1/models/head:predict", WIDTH, '{"instances": $TOKENS}', "predictions"
    ),
    "version 1, one sequence a request": lambda at: kh.RestOracle(
        f"{at}/v1/models/head:predict", WIDTH, '{"instances": [$SEQUENCE]}', "predictions"
    ),
}


def row(who: str, what: str, ask: Callable[[str], Oracle], address: str, head: kh.SingleHead) -> Row:
    oracle = ask(address)
    result = kh.recover(oracle, throw=False)
    facts = oracle.facts()["server"]
    binary = oracle.binary if isinstance(oracle, kh.HttpOracle) else False
    oracle.close()
    found = result.params
    apart = "" if found is None else f"{np.linalg.norm(np.asarray(found.score) - head.score):.1e}"
    stats = result.stats
    queries = stats.queries + stats.heldout_queries
    tensors = "binary" if binary else "JSON"
    return [who, what, result.outcome.name, queries, facts["requests"], facts["retries"], tensors, apart]


def written_head(folder: Path) -> kh.SingleHead:
    rng = np.random.default_rng(0)
    head = kh.SingleHead(rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5, rng.standard_normal(WIDTH))
    np.savez(folder / "head.npz", score=head.score, value=head.value)
    return head


def environment(name: str) -> Path:
    """The Python of an environment that has the server."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", name], check=True)
    return python


def version_of(python: Path, name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def mlserver(python: Path, folder: Path) -> Iterator[str]:
    http, grpc, metrics = free_port(), free_port(), free_port()
    models = folder / "models"
    for name, tensors in (("head", {}), ("described", TENSORS)):
        made = models / name
        made.mkdir(parents=True)
        for file in ("softmax_head.py", "mlserver_head.py"):
            shutil.copy(FOREIGN / file, made)
        settings = {"name": name, "implementation": "mlserver_head.Head", **tensors}
        (made / "model-settings.json").write_text(json.dumps(settings))
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "parallel_workers": 0}
    (models / "settings.json").write_text(json.dumps(ports))
    command = [str(python.with_name("mlserver")), "start", str(models)]
    with running(command, folder, f"http://127.0.0.1:{http}/v2/health/ready"):
        yield f"http://127.0.0.1:{http}/v2/models"


@contextmanager
def kserve(python: Path, folder: Path) -> Iterator[str]:
    port = free_port()
    command = [str(python), str(FOREIGN / "kserve_head.py"), str(port)]
    with running(command, folder, f"http://127.0.0.1:{port}/v2/health/ready"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running(command: list[str], folder: Path, ready: str) -> Iterator[None]:
    """A server, once it says that it is ready."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**own, "HEAD_FILE": str(folder / "head.npz")}, cwd=folder, stdout=out, stderr=out
        )
        try:
            wait_until_ready(ready, process, log)
            yield
        finally:
            process.terminate()
            process.wait(30)


def wait_until_ready(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"no server at {address}: {log.read_text()[-2000:]}")


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])
