"""Files of examples of every kind are read alike, a few rows at a time, and every fault is named."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from keyhole.errors import FileError, UsageError
from keyhole.samples.sharded.stream import write_stream
from keyhole.shards.shard import Shard, find_shards

INPUTS = np.random.default_rng(0).choice([-1.0, 1.0], (11, 3, 4))
OUTPUTS = np.random.default_rng(1).standard_normal((11, 3, 2)).astype(np.float32)


def npz(path: Path, **arrays: np.ndarray) -> None:
    np.savez(path, **arrays)


def packed(path: Path, **arrays: np.ndarray) -> None:
    np.savez_compressed(path, **{name: np.asfortranarray(each) for name, each in arrays.items()})


def safetensors(path: Path, **arrays: np.ndarray) -> None:
    save_file(arrays, path)


def torch(path: Path, **arrays: np.ndarray) -> None:
    library = pytest.importorskip("torch")
    library.save({name: library.asarray(each) for name, each in arrays.items()}, path)


def parquet(path: Path, **arrays: np.ndarray) -> None:
    library = pytest.importorskip("pyarrow.parquet")
    library.write_table(table(arrays), path, row_group_size=4)


def arrow(path: Path, **arrays: np.ndarray) -> None:
    library = pytest.importorskip("pyarrow")
    with library.OSFile(str(path), "wb") as sink, library.ipc.new_stream(sink, table(arrays).schema) as writer:
        writer.write_table(table(arrays), max_chunksize=3)


def table(arrays: dict[str, np.ndarray]) -> object:
    library = pytest.importorskip("pyarrow")
    return library.table({name: each.tolist() for name, each in arrays.items()})


def zarr(path: Path, **arrays: np.ndarray) -> None:
    library = pytest.importorskip("zarr")
    group = library.open_group(str(path), mode="w")
    for name, each in arrays.items():
        group.create_array(name, data=each, chunks=(4, *each.shape[1:]))


WRITERS: dict[str, Callable[..., None]] = {
    "a.npz": npz,
    "packed.npz": packed,
    "a.safetensors": safetensors,
    "a.pt": torch,
    "a.parquet": parquet,
    "a.arrow": arrow,
    "a.zarr": zarr,
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_of_every_kind_are_read_in_blocks(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name, x=INPUTS, y=OUTPUTS)
    (shard,) = find_shards(tmp_path / name, ("x", "y"))
    blocks = list(shard.blocks(numbers=5 * 18))
    assert [len(one) for one, _ in blocks] == [5, 5, 1]
    assert np.array_equal(np.concatenate([one for one, _ in blocks]), INPUTS)
    assert np.allclose(np.concatenate([two for _, two in blocks]), OUTPUTS, rtol=1e-7, atol=0)
    with pytest.raises(FileError, match="has no array 'inputs': it must hold inputs"):
        list(find_shards(tmp_path / name)[0].blocks())


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a.pt", "a.parquet", "a.arrow", "a.zarr", "inputs.npy"])
def test_what_is_no_such_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"nothing of the kind")
    (tmp_path / "outputs.npy").write_bytes(b"nothing of the kind")
    if name == "a.pt":
        pytest.importorskip("torch")
    if name == "a.zarr":
        pytest.importorskip("zarr")
    if name in ("a.parquet", "a.arrow"):
        pytest.importorskip("pyarrow")
    with pytest.raises(FileError, match="is not a"):
        list(find_shards(tmp_path / name)[0].blocks())


def test_nothing_that_a_pickle_holds_is_executed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"inputs": INPUTS, "run": print}, protocol=4))
    with pytest.raises(FileError, match=r"not a file of plain tensors.*nothing in it was executed"):
        list(find_shards(tmp_path / "a.pt")[0].blocks())


def test_pairs_of_npy_files_make_a_shard(tmp_path: Path) -> None:
    for part in ("a", "b"):
        np.save(tmp_path / f"{part}-inputs.npy", INPUTS)
        np.save(tmp_path / f"{part}-outputs.npy", OUTPUTS)
    shards = find_shards(tmp_path)
    assert [str(each.inputs.name) for each in shards] == ["a-inputs.npy", "b-inputs.npy"]
    assert all(np.array_equal(next(each.blocks())[1], OUTPUTS) for each in shards)
    (tmp_path / "b-inputs.npy").unlink()
    with pytest.raises(FileError, match=r"b-inputs.npy: no such file, whose outputs are in"):
        find_shards(tmp_path)
    np.save(tmp_path / "other.npy", INPUTS)
    with pytest.raises(FileError, match="come in pairs"):
        find_shards(tmp_path / "other.npy")


def test_names_of_a_pair_are_words(tmp_path: Path) -> None:
    for name in ("max-x-1.npy", "max-y-1.npy"):
        np.save(tmp_path / name, np.ones((2, 3, 4)))
    (shard,) = find_shards(tmp_path, ("x", "y"))
    assert (shard.inputs.name, shard.outputs.name) == ("max-x-1.npy", "max-y-1.npy")
    assert find_shards(tmp_path / "max-x-1.npy", ("x", "y")) == [shard]
    with pytest.raises(UsageError, match="twice"):
        find_shards(tmp_path, ("x", "x"))


def test_patterns_folders_and_lists_name_shards(tmp_path: Path) -> None:
    for number in range(3):
        npz(tmp_path / f"{number}.npz", inputs=INPUTS, outputs=OUTPUTS)
    (tmp_path / "notes.txt").write_text("of no account in a folder")
    files = [str(tmp_path / f"{number}.npz") for number in range(3)]
    for data in (str(tmp_path / "*.npz"), tmp_path, files):
        assert [str(each) for each in find_shards(data)] == files
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="holds no file of examples"):
        find_shards(tmp_path / "empty")
    with pytest.raises(FileError, match="no file matches"):
        find_shards(tmp_path / "*.pt")
    with pytest.raises(UsageError, match="cannot tell what"):
        find_shards(tmp_path / "*.txt")
    with pytest.raises(UsageError, match="list of files is empty"):
        find_shards([])
    with pytest.raises(UsageError, match="two names of arrays"):
        find_shards(tmp_path, ("inputs",))


BAD = [
    (INPUTS[:0], OUTPUTS[:0], "holds no examples"),
    (INPUTS, OUTPUTS[:10], "must agree in the number of examples"),
    (INPUTS, OUTPUTS[:, :2], "must agree in the number of examples and of tokens"),
    (INPUTS[:, 0], OUTPUTS, r"must have shape \(n, k, d\)"),
    (INPUTS, OUTPUTS.astype(complex), "must hold real numbers"),
]


@pytest.mark.parametrize(("inputs", "outputs", "says"), BAD, ids=[says[:20] for *_, says in BAD])
def test_what_does_not_fit_together_is_named(
    inputs: np.ndarray, outputs: np.ndarray, says: str, tmp_path: Path
) -> None:
    npz(tmp_path / "a.npz", inputs=inputs, outputs=outputs)
    with pytest.raises(FileError, match=says):
        list(find_shards(tmp_path / "a.npz")[0].blocks())


def test_rows_of_tables_that_differ_are_named(tmp_path: Path) -> None:
    library = pytest.importorskip("pyarrow.parquet")
    arrow_library = pytest.importorskip("pyarrow")
    for rows, says in (([[[1.0], [2.0]], [[1.0]]], "different lengths"), ([[[1.0]], None], "are missing")):
        library.write_table(arrow_library.table({"inputs": rows, "outputs": rows}), tmp_path / "a.parquet")
        with pytest.raises(FileError, match=says):
            list(Shard(tmp_path / "a.parquet", tmp_path / "a.parquet").blocks())


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(UsageError, match=r"a Parquet file needs pyarrow.parquet .*keyhole\[data\]"):
        list(find_shards(tmp_path / "a.parquet")[0].blocks())


# --- streams ----------------------------------------------------------------------------------------------------------


def rows_of(inputs: np.ndarray, outputs: np.ndarray) -> Iterator[dict[str, object]]:
    """As a data set of the library `datasets` is gone through: nested lists of one example at a time."""
    for one, two in zip(inputs, outputs, strict=True):
        yield {"text": "of no account", "inputs": one.tolist(), "outputs": two.tolist()}


def test_streams_are_kept_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyhole.samples.sharded.stream.SHARD", 5 * 18)
    batches = ((INPUTS[start : start + 2], OUTPUTS[start : start + 2]) for start in range(0, 11, 2))
    for number, stream in enumerate((batches, rows_of(INPUTS, OUTPUTS))):
        folder = tmp_path / str(number)
        folder.mkdir()
        shards = write_stream(stream, folder, ("inputs", "outputs"))
        assert len(shards) == 2 + number
        blocks = [pair for shard in shards for pair in shard.blocks()]
        assert np.array_equal(np.concatenate([one for one, _ in blocks]), INPUTS)
        assert np.allclose(np.concatenate([two for _, two in blocks]), OUTPUTS)


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([], "holds no examples"),
        ([{"inputs": INPUTS}], "item 0 of the stream has no column 'outputs'"),
        ([INPUTS], "must be a pair"),
        ([(INPUTS, OUTPUTS[:3])], "must be an example"),
        ([(INPUTS, OUTPUTS), ([["a"]], [["b"]])], "item 1 of the stream must hold real numbers"),
        ([(INPUTS, OUTPUTS), (INPUTS[:, :, :2], OUTPUTS)], "different shapes"),
    ],
)
def test_what_no_stream_can_hold_is_named(items: list[object], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        write_stream(items, tmp_path, ("inputs", "outputs"))
