"""Data sets as batches: every way to write them, the bound on memory, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from building import seeded
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from hago.data.batches import Batch, Batches, spread_indices
from hago.errors import DataError

X, Y = seeded(10, 3), torch.arange(10) % 4
Z = seeded(10, 2, seed=1)


def whole(batches: Batches) -> tuple[list[Tensor], Tensor | None]:
    parts = list(batches)
    inputs = [torch.cat(column) for column in zip(*(b.inputs for b in parts), strict=True)]
    labels = [b.labels for b in parts if b.labels is not None]
    return inputs, torch.cat(labels) if labels else None


def rows(*tensors: Tensor, size: int = 4) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(t.split(size) for t in tensors), strict=True)


# ---------------------------------------------------------------- every way to write one input
ONE_INPUT: dict[str, Callable[[], Any]] = {
    "tensor": lambda: X,
    "tensors": lambda: list(X.split(4)),
    "tuples": lambda: [(x,) for x in X.split(4)],
    "arrays": lambda: [x.numpy() for x in X.split(4)],
    "float64": lambda: [x.double() for x in X.split(4)],
    "dicts": lambda: [{"x": x} for x in X.split(4)],
    "other keys": lambda: [{"image": x, "y": y} for x, y in rows(X, Y)],
    "loader": lambda: DataLoader(TensorDataset(X), batch_size=4),
    "generator": lambda: (x for x in X.split(4)),
    "batches": lambda: [Batch((x,), None) for x in X.split(4)],
    "strided": lambda: list(X.t().contiguous().t().split(4)),
}


@pytest.mark.parametrize("form", ONE_INPUT)
def test_one_input(form: str) -> None:
    batches = Batches(ONE_INPUT[form](), ["x"])
    inputs, labels = whole(batches)
    assert len(inputs) == 1 and inputs[0].equal(X) and inputs[0].dtype == torch.float32
    assert batches.samples == 10 and batches.labelled == (labels is not None) == (form == "other keys")
    assert whole(batches)[0][0].equal(X)  # any number of times
    if form != "tensor" and not batches.labelled:
        assert batches.sha256 == Batches(list(X.split(4)), ["x"]).sha256


LABELLED: dict[str, Callable[[], Any]] = {
    "pairs": lambda: list(rows(X, Y)),
    "lists": lambda: [[x, y] for x, y in rows(X, Y)],
    "nested": lambda: [((x,), y) for x, y in rows(X, Y)],
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=4),
    **{
        key: (lambda key=key: [{"x": x, key: y} for x, y in rows(X, Y)])
        for key in ("label", "labels", "target", "targets", "y")
    },
    "dict and labels": lambda: [({"x": x}, y) for x, y in rows(X, Y)],
    "arrays": lambda: [(x.numpy(), y.numpy()) for x, y in rows(X, Y)],
    "batches": lambda: [Batch((x,), y) for x, y in rows(X, Y)],
}


@pytest.mark.parametrize("form", LABELLED)
def test_one_input_with_labels(form: str) -> None:
    batches = Batches(LABELLED[form](), ["x"])
    inputs, labels = whole(batches)
    assert inputs[0].equal(X) and labels is not None and labels.equal(Y) and batches.labelled


@pytest.mark.parametrize(
    "make, labelled",
    [
        (lambda: list(rows(X, Z)), False),
        (lambda: list(rows(X, Z, Y)), True),
        (lambda: [((x, z), y) for x, z, y in rows(X, Z, Y)], True),
        (lambda: [{"b": z, "a": x} for x, z in rows(X, Z)], False),
        (lambda: [{"b": z, "labels": y, "a": x} for x, z, y in rows(X, Z, Y)], True),
        (lambda: [({"b": z, "a": x}, y) for x, z, y in rows(X, Z, Y)], True),
    ],
)
def test_two_inputs(make: Callable[[], Any], labelled: bool) -> None:
    batches = Batches(make(), ["a", "b"])
    inputs, labels = whole(batches)
    assert inputs[0].equal(X) and inputs[1].equal(Z) and (labels is not None) == batches.labelled == labelled


def test_an_input_that_is_called_like_labels_is_an_input() -> None:
    batches = Batches([{"y": x, "target": y} for x, y in rows(X, Y)], ["y"])
    inputs, labels = whole(batches)
    assert inputs[0].equal(X) and labels is not None and labels.equal(Y)


def test_a_model_that_takes_a_dict() -> None:
    batches = Batches([{"a": x, "b": z} for x, z in rows(X, Z)], ["named"])
    inputs, _ = whole(batches)
    assert inputs[0].equal(X) and inputs[1].equal(Z)
    assert set(batches.example[0]) == {"a", "b"} and len(batches.example) == 1


def test_the_labels_of_the_first_batch_are_kept_although_the_batches_are_not() -> None:
    batches = Batches(DataLoader(TensorDataset(X, Y), batch_size=4), ["x"], cache_bytes=0)
    assert batches.kept is None and batches.example_labels is not None
    assert batches.example_labels.equal(Y[:4])
    assert Batches(batches, ["x"]).example_labels is batches.example_labels
    assert Batches([X], ["x"]).example_labels is None


def test_integers_stay_integers() -> None:
    (ids,), _ = whole(Batches([Y[:4], Y[4:]], ["ids"]))
    assert ids.dtype == torch.int64


def test_batches_of_batches_are_themselves() -> None:
    batches = Batches([X], ["x"])
    assert Batches(batches, ["x"]).sha256 == batches.sha256 and whole(Batches(batches, ["x"]))[0][0].equal(X)


# ---------------------------------------------------------------- hash
def test_the_hash_is_of_values_and_their_order() -> None:
    plain = Batches(list(rows(X, Y)), ["x"]).sha256
    assert Batches(DataLoader(TensorDataset(X, Y), batch_size=4), ["x"]).sha256 == plain
    for other in (
        list(rows(X.flip(0), Y)),
        list(rows(X, Y + 1)),
        list(rows(X + 1e-6, Y)),
        list(rows(X, Y, size=5)),
        list(X.split(4)),
    ):
        assert Batches(other, ["x"]).sha256 != plain


# ---------------------------------------------------------------- memory
class Source:
    """A data set that counts how often it is read."""

    def __init__(self, change: float = 0.0) -> None:
        self.read, self.change = 0, change

    def __iter__(self) -> Iterator[Tensor]:
        self.read += 1
        for x in X.split(4):
            yield x + self.change * self.read


def test_what_fits_is_read_once() -> None:
    source = Source()
    batches = Batches(source, ["x"], cache_bytes=X.numel() * 4)
    for _ in range(3):
        assert whole(batches)[0][0].equal(X)
    assert source.read == 1


def test_what_does_not_fit_is_read_again_and_must_be_the_same() -> None:
    source = Source()
    batches = Batches(source, ["x"], cache_bytes=X.numel() * 4 - 1)
    for _ in range(3):
        assert whole(batches)[0][0].equal(X)
    assert source.read == 4
    changing = Batches(Source(change=1.0), ["x"], cache_bytes=8)
    with pytest.raises(DataError, match=r"different values when it was read again.*DataLoader\(shuffle=False\)"):
        list(changing)


def test_a_shuffling_loader() -> None:
    def loader() -> DataLoader[tuple[Tensor, ...]]:
        order = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(X), batch_size=4, shuffle=True, generator=order)

    assert Batches(loader(), ["x"]).samples == 10  # kept as it came
    with pytest.raises(DataError, match="do not shuffle"):
        list(Batches(loader(), ["x"], cache_bytes=8))


def test_an_iterator_that_does_not_fit() -> None:
    with pytest.raises(DataError, match="iterator of more than 8 bytes, which can be read only once; pass a list"):
        Batches(iter(X.split(4)), ["x"], cache_bytes=8)


def test_memory_that_a_generator_fills_again() -> None:
    def reusing() -> Iterator[np.ndarray]:
        buffer = np.zeros((5, 3), dtype=np.float32)
        for half in X.split(5):
            buffer[:] = half.numpy()
            yield buffer

    assert whole(Batches(reusing(), ["x"]))[0][0].equal(X)


# ---------------------------------------------------------------- what is refused
NAN = torch.where(torch.arange(30).reshape(10, 3) == 13, torch.tensor(float("nan")), X)


@pytest.mark.parametrize(
    "make, names, says",
    [
        (list, ["x"], "the data set is empty; pass at least one batch"),
        (lambda: iter([]), ["x"], "empty"),
        (lambda: torch.zeros(0, 3), ["x"], r"batch 0 is empty: it has the shape \(0, 3\); leave out"),
        (lambda: 3, ["x"], "the data set is of type int; expected an iterable of batches"),
        (lambda: None, ["x"], "the data set is of type NoneType"),
        (lambda: ["cifar"], ["x"], "batch 0 holds the text 'cifar'; expected numbers"),
        (lambda: [object()], ["x"], "batch 0 holds a object; expected a tensor"),
        (lambda: [torch.tensor(1.0)], ["x"], "batch 0 holds a single number; expected tensors or"),
        (lambda: [(X, torch.tensor(2.0))], ["a", "b"], "batch 0 holds a single number beside tensors; expected axis 0"),
        (lambda: [X, X[:, :2]], ["x"], r"batch 1 has sample shapes \[\(2,\)\]; batch 0 has \[\(3,\)\]"),
        (lambda: [(X, Z, Z, Z)], ["a", "b"], "batch 0 holds 4 inputs; the model takes 2: a, b"),
        (lambda: [X], ["a", "b"], "batch 0 holds 1 input; the model takes 2"),
        (lambda: [(X, Z[:5])], ["a", "b"], r"batch sizes \[5, 10\]; expected one size above 0"),
        (lambda: [{"a": X}], ["a", "b"], r"batch 0 has keys \['a'\]; expected the model's inputs \['a', 'b'\]"),
        (lambda: [(X, Y[:7])], ["x"], r"batch 0 has 10 samples but labels of shape \(7,\)"),
        (lambda: [(X, "cat")], ["x"], "labels of batch 0 holds the text 'cat'"),
        (lambda: list(NAN.split(4)), ["x"], "batch 1, input 0: sample 0 holds NaN or infinite values"),
        (lambda: [X, X * float("inf")], ["x"], "batch 1, input 0: sample 0 holds NaN"),
    ],
)
def test_what_is_no_data_set(make: Callable[[], Any], names: list[str], says: str) -> None:
    with pytest.raises(DataError, match=says):
        Batches(make(), names)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("count", [1, 3, 6, 9])
def test_thinned_batches_hold_samples_spread_over_all(count: int, cache_bytes: int) -> None:
    batches = Batches([(X[:3], Y[:3]), (X[3:7], Y[3:7]), (X[7:], Y[7:])], ["x"], cache_bytes=cache_bytes)
    made, rows = batches.thinned(count), spread_indices(10, count)
    assert made.sizes == tuple(min(4, count - at) for at in range(0, count, 4))  # batches as large as the largest
    (inputs,), labels = whole(made)
    assert inputs.equal(X[rows]) and labels is not None and labels.equal(Y[rows])
    assert (made.samples, made.whole.samples, batches.samples) == (count, 10, 10)
    assert made.whole.sha256 == batches.sha256 and made.whole.sizes == (3, 4, 3)
    # the data set is the same, what is read is not
    assert made.sha256 == batches.sha256 != made.read_sha256 == Batches(made.source, ["x"]).sha256
    assert Batches(made, ["x"]).read_sha256 == made.read_sha256


@pytest.mark.parametrize("count", [None, 10, 11])
def test_batches_of_few_samples_are_not_thinned(count: int | None) -> None:
    batches = Batches([X[:4], X[4:]], ["x"])
    assert batches.thinned(count) is batches is batches.whole and batches.read_sha256 == batches.sha256


def test_thinned_batches_have_labels_where_all_have() -> None:
    made = Batches([(X[:4], Y[:4]), X[4:]], ["x"]).thinned(6)
    assert not made.labelled and whole(made)[1] is None


def test_what_is_made_of_thinned_batches_calls_what_it_is_told() -> None:
    seen: list[int] = []
    made = Batches([X[:4], X[4:]], ["x"], on_batch=lambda done, _: seen.append(done)).thinned(6).observed(None)
    seen.clear()
    assert len(list(made)) == 1 and len(list(made.whole)) == 2 and not seen
