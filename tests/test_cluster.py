"""A Dask cluster of several processes on this machine: what is shared, and a worker that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import keyhole as kh
from benchmarks.fuzz.runner import run_on_dask
from keyhole.audit import audit
from keyhole.cli import main
from keyhole.executors.base import Workers
from keyhole.targets import open_target
from support.slow_head import WIDTH, Slow

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    with distributed.LocalCluster(**options) as made:
        yield made


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(cluster: Any, tmp_path: Path) -> None:
    expected = kh.recover(kh.FunctionOracle(Slow(), WIDTH, name="slow"))
    mortal = kh.FunctionOracle(Slow(marks=tmp_path, fault="dies"), WIDTH, name="slow")
    for oracle in (mortal, kh.FunctionOracle(Slow(), WIDTH, name="slow")):
        found = kh.recover(oracle, dask=cluster.scheduler_address)
        assert kh.distance(found.params, expected.params) < 1e-12
        assert found.stats.queries == expected.stats.queries
        assert found.stats.new_queries == expected.stats.new_queries
    assert (tmp_path / "met").exists()


@pytest.mark.slow
def test_a_cluster_shares_what_can_be_shared(cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = cluster.scheduler_address
    found = audit("demo:single-head?width=4", ["round:3"], [1, 2], dask=address, folder=tmp_path)
    assert len(found.rows) == 4
    assert audit("demo:single-head?width=4", ["round:3"], [1, 2], folder=tmp_path).new_queries == 0
    with pytest.raises(SystemExit) as ended:
        main(["bench", "demo:single-head?width=4", "--runs", "2", "--dask", address, "-q"])
    assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        main(["learn", "demo:layer?d=4&k=4&m=1&n=300", "--heads", "1", "--restarts", "2", "--dask", address, "-q"])
    assert ended.value.code == 0
    for done in (2, 0):  # boxes that have a record are not run again
        keys, file = [("head", 0), ("head", 1)], tmp_path / "boxes.jsonl"
        assert run_on_dask(keys, file, lambda kind, seed: {"kind": kind, "seed": seed}, address, seconds=60.0) == done
    with distributed.Client(cluster) as client, Workers(executor=client.get_executor(pure=False)).open() as crew:
        assert crew.workers >= 1
        assert list(crew.map(abs, range(6))) == list(range(6))


@pytest.mark.slow
def test_a_target_that_workers_cannot_open_is_named(cluster: Any, tmp_path: Path) -> None:
    file = tmp_path / "box.py"
    file.write_text(
        "import keyhole as kh\nimport numpy as np\ndef make(): return kh.SingleHead(np.eye(3), np.ones(3))\n"
    )
    target = f"python:{file}:make"
    opened = open_target(target).oracle
    file.unlink()
    with pytest.raises(kh.RecoveryFailed, match=r"a worker cannot open .*box.py.*the same files"):
        kh.recover(opened, dask=cluster.scheduler_address)
