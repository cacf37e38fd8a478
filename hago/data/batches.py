"""Batches: a data set of the user that is checked once and can be read many times, in bounded memory.

Invariants: every batch has the inputs of the graph, the same shapes except for the batch axis, and finite values;
errors begin with the name of the data. A data set that exceeds the memory bound is read from its source each time, and
must give the same bytes each time, so a shuffling loader is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hago.data.plausibility import ValueStatistics
from hago.errors import DataError, shortened
from hago.serialization.text_table import counted

#: The most bytes of inputs and labels that are kept in memory.
CACHE_BYTES: Final = 1 << 30
#: The default number of samples in a batch.
BATCH_SIZE: Final = 64
#: Called after a batch with the number of samples of this pass so far, and of all; None where that is not known yet.
OnBatch = Callable[[int, int | None], None]
#: The names of the data in messages, by what it is for.
CALIBRATION_DATA: Final = "calibration data"
HELD_OUT_DATA: Final = "held-out data"
_LABEL_KEYS: Final = ("label", "labels", "target", "targets", "y")


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch. `Batches` makes and yields them.

    Args:
        inputs: flat inputs in the order of the graph, each of shape (batch, ...).
        labels: of shape (batch, ...): classes, or values that an objective of the user reads; None if there are none.
    """

    inputs: tuple[Tensor, ...]
    labels: Tensor | None

    @property
    def size(self) -> int:
        return int(self.inputs[0].shape[0])

    def rows(self, start: int, stop: int) -> Batch:
        """Views of the samples `start:stop`."""
        labels = None if self.labels is None else self.labels[start:stop]
        return Batch(tuple(t[start:stop] for t in self.inputs), labels)

    @staticmethod
    def joined(batches: Iterable[Batch]) -> Batch:
        """The samples of several batches as one, in memory of its own."""
        parts = list(batches)
        inputs = tuple(torch.cat(tensors) for tensors in zip(*(part.inputs for part in parts), strict=True))
        labels = [part.labels for part in parts if part.labels is not None]
        return Batch(inputs, torch.cat(labels) if labels else None)

    def copy(self) -> Batch:
        """The same values in memory of their own."""
        return Batch(tuple(t.clone() for t in self.inputs), None if self.labels is None else self.labels.clone())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The inputs, and the labels if there are any."""
        return self.inputs if self.labels is None else (*self.inputs, self.labels)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


class NamedData:
    """A base of data that the user named: a file, a folder or a callable.

    Attributes:
        spec: the name, as the user gave it.
        classes: the names of the classes in the order of their labels, where labels were numbered by hago.
    """

    __slots__ = ()
    spec: str
    classes: tuple[str, ...]


class Batches:
    """A checked data set, which can be iterated any number of times and yields `Batch`es.

    Args:
        dataset: an iterable of batches, each a tensor, a tuple of inputs, `(inputs, labels)` or a
            dict (labels under one of label, labels, target, targets, y); or one tensor or array of samples.
        names: the names of the model's inputs, in order.
        optional: those that follow and that the model runs without; they are inputs if the first batch is a dict that
            has them.
        cache_bytes: the most bytes of batches that are kept in memory.
        like: Batches of the same model, whose first batch fixes the order of inputs in dicts.
        on_batch: called after every batch of every pass, the first included, in which batches are checked. Batches that
            are made of other Batches do not take over theirs.
        role: what the data is for, e.g. "calibration data", with which messages begin. Batches that are made of other
            Batches keep theirs.

    Attributes:
        title: the name of the data in messages: its role, and what the user called it if it was loaded by name.
        classes: the names of classes in the order of their labels if hago numbered them, else empty.
        statistics: what is known of the values of all inputs.
        sizes: the numbers of samples of the batches.
        samples: the number of all samples.
        labelled: whether every batch has labels.
        classed: whether all labels are classes: whole numbers of any dtype.
        sha256: the hash of all inputs and labels of the data set.
        read_sha256: of those that are iterated, which are fewer if the batches are thinned.
        example: the arguments of the first batch, nested as the model takes them.
        example_labels: the labels of the first batch; None if it has none.

    Raises:
        DataError: the data set is empty, ragged or not finite, or does not hold the inputs of the model; the message
            says which batch.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        names: Sequence[str],
        cache_bytes: int = CACHE_BYTES,
        like: Batches | None = None,
        on_batch: OnBatch | None = None,
        role: str = "",
        optional: Sequence[str] = (),
    ) -> None:
        if isinstance(dataset, Batches):
            self.__dict__.update(dataset.__dict__)  # checked already
            self._on_batch = on_batch
            return
        self._on_batch = on_batch
        self.title = data_title(dataset, role)
        self.classes = dataset.classes if isinstance(dataset, NamedData) else ()
        dataset = split_samples(dataset, self.title)
        check_data_set(dataset, self.title)
        self._source, self._names, self._optional = dataset, tuple(names), tuple(optional)
        self._cache: list[Batch] | None = []  # None where the batches exceed `cache_bytes`
        self.example: tuple[Any, ...] = () if like is None else like.example
        self.example_labels: Tensor | None = None
        self.samples, digest, used = 0, hashlib.sha256(), 0
        sizes = list[int]()
        self.labelled = self.classed = True
        self.statistics = ValueStatistics()
        is_materialized = isinstance(dataset, (list, tuple))
        for batch in self._checked():
            batch = batch if is_materialized else batch.copy()  # a generator may reuse its buffer
            used += batch.bytes
            if not self.samples:
                self.example_labels = batch.labels
            if self._cache is not None and used <= cache_bytes:
                self._cache.append(batch)
            elif isinstance(dataset, Iterator):
                raise DataError(
                    f"{self.title} is an iterator of more than {cache_bytes} bytes, which can be read only once; "
                    "pass a list, a DataLoader, or fewer batches"
                )
            else:
                self._cache = None
            self.samples += batch.size
            sizes.append(batch.size)
            self.labelled &= batch.labels is not None
            self.classed &= batch.labels is not None and are_whole(batch.labels)
            self.statistics.add(batch.inputs)
            _digest(digest, batch)
            if on_batch is not None:
                on_batch(self.samples, None)
        if self.samples == 0:
            is_read = isinstance(dataset, Iterator)
            raise DataError(
                f"{self.title} is empty; "
                + ("an iterator is read only once: pass a new one, or a list" if is_read else "pass at least one batch")
            )
        self.sizes = tuple(sizes)
        self._whole: Batches | None = None  # where these are thinned
        self.sha256 = self.read_sha256 = digest.hexdigest()

    def __iter__(self) -> Iterator[Batch]:
        done = 0
        for batch in self._read():
            yield batch
            done += batch.size
            if self._on_batch is not None:
                self._on_batch(done, self.samples)

    def observed(self, on_batch: OnBatch | None) -> Batches:
        """The same batches, which call `on_batch` after every batch of every pass, or nothing if it is None."""
        return Batches(self, self._names, on_batch=on_batch)

    def _read(self) -> Iterator[Batch]:
        if self._cache is not None:
            yield from self._cache
            return
        digest = hashlib.sha256()
        for batch in self._checked():
            _digest(digest, batch)
            yield batch
        if digest.hexdigest() != self.sha256:
            raise DataError(
                f"{self.title} gave different values when it was read again; hago reads it more than once, so do not "
                "shuffle or augment (DataLoader(shuffle=False)), or pass a list"
            )

    def first(self, count: int) -> Iterator[Batch]:
        """Yield the first samples, batch by batch."""
        for batch in self:
            yield batch.rows(0, count)
            count -= batch.size
            if count <= 0:
                return

    def at(self, numbers: Sequence[int]) -> Batch:
        """The samples of these numbers, which rise, in one batch. Labels are kept where all batches have them."""
        wanted, parts, start = torch.tensor(numbers), list[Batch](), 0
        for batch in self:
            rows = wanted[(wanted >= start) & (wanted < start + batch.size)] - start
            labels = batch.labels[rows] if self.labelled and batch.labels is not None else None
            parts.append(Batch(tuple(x[rows] for x in batch.inputs), labels))
            start += batch.size
        return Batch.joined(parts)

    def thinned(self, count: int | None) -> Batches:
        """At most `count` samples, evenly spread over all of them and kept in memory, in batches as large as the
        largest; the same batches if there are no more samples, or for None. They keep the hash of all."""
        if count is None or count >= self.samples:
            return self
        chosen, size = self.at(spread_indices(self.samples, count)), max(self.sizes)
        batches = [chosen.rows(at, at + size).copy() for at in range(0, count, size)]
        digest = hashlib.sha256()
        for batch in batches:
            _digest(digest, batch)
        made = self.observed(self._on_batch)
        made._cache, made.samples, made.sizes = batches, count, tuple(batch.size for batch in batches)
        made._whole, made.read_sha256 = self, digest.hexdigest()
        return made

    @property
    def whole(self) -> Batches:
        """The batches of the whole data set, which are others if these are thinned."""
        return self if self._whole is None else self._whole.observed(self._on_batch)

    @property
    def kept(self) -> list[Batch] | None:
        """The batches if all of them are kept in memory, else None."""
        return self._cache

    def spread(self, count: int) -> tuple[Any, ...] | None:
        """The arguments of a batch of `count` samples, or up to twice as many, that are evenly spread over all of them,
        nested as the model takes them; None where the batches are not kept in memory."""
        if self._cache is None:
            return None
        step, start, chosen = max(1, self.samples // count), 0, []
        for batch in self._cache:
            chosen.append([x[-start % step :: step] for x in batch.inputs])
            start += batch.size
        leaves = [torch.cat(rows) for rows in zip(*chosen, strict=True)]
        nested: tuple[Any, ...] = pytree.tree_unflatten(leaves, pytree.tree_structure(self.example))
        return nested

    @property
    def source(self) -> Iterable[Any]:
        """An iterable from which equal Batches can be made: the kept batches, or the user's data set."""
        return self._source if self._cache is None else self._cache

    def _checked(self) -> Iterator[Batch]:
        first: Batch | None = None
        for index, item in enumerate(self._source):
            try:
                if index == 0 and isinstance(item, Mapping):
                    self._names = (*self._names, *_given(item, self._optional))
                    self._optional = ()
                if isinstance(item, Batch):
                    batch, args = item, item.inputs
                else:
                    batch, args = _read(item, self._names, index, self.example)
                _check_alike(batch, index, first or batch)
                _check_finite(batch, index)
            except DataError as error:
                raise DataError(f"{self.title}: {error}") from None
            self.example = self.example or args
            # what is compared is kept without its values, which may be large
            first = first or Batch(tuple(x[:1].clone() for x in batch.inputs), None)
            yield batch


def spread_indices(count: int, wanted: int | None) -> list[int]:
    """At most `wanted` evenly spread indices below `count`; all of them if `wanted` is None."""
    number = count if wanted is None else min(count, wanted)
    return [i * count // number for i in range(number)]


def data_title(dataset: Any, role: str) -> str:
    """The name of a data set in messages.

    Args:
        role: what it is for; empty where that is not known.
    """
    if isinstance(dataset, NamedData):
        return f"{role or 'data'} {dataset.spec!r}"
    return role or "the data set"


def split_samples(dataset: Any, what: str) -> Any:
    """The batches of a tensor or an array of samples; any other data set as it is."""
    if isinstance(dataset, np.ndarray):
        dataset = as_tensor(dataset, what)
    if not isinstance(dataset, Tensor):
        return dataset
    if dataset.ndim == 0:
        raise DataError(f"{what} is a single number; expected samples along axis 0, or an iterable of batches")
    return torch.split(dataset, BATCH_SIZE)


def _check_alike(batch: Batch, index: int, first: Batch) -> None:
    """Refuse a batch whose samples have other shapes, or another kind of numbers, than those of the first."""
    shapes, expected = ([tuple(t.shape[1:]) for t in b.inputs] for b in (batch, first))
    if shapes != expected:
        raise DataError(
            f"batch {index} has sample shapes {shapes}; batch 0 has {expected}; resize or pad all to one shape"
        )
    kinds, real = ([t.is_floating_point() for t in b.inputs] for b in (batch, first))
    if kinds != real:
        raise DataError(
            f"batch {index} has inputs of {', '.join(str(t.dtype) for t in batch.inputs)}; batch 0 has "
            f"{', '.join('real numbers' if r else 'integers' for r in real)}; convert all in the same way"
        )


def _is_batch_with_labels(dataset: Any) -> bool:
    """Whether a data set is one batch that was passed without a list around it."""
    if not isinstance(dataset, tuple) or len(dataset) != 2:
        return False
    inputs, labels = dataset
    if not all(isinstance(x, (Tensor, np.ndarray)) and x.ndim for x in dataset):
        return False
    return bool(inputs.ndim > 1 and labels.ndim == 1 and len(inputs) == len(labels))


def check_data_set(dataset: Any, what: str = "the data set") -> None:
    """Refuse values that can be iterated over, but not as batches.

    Args:
        what: the name of the data set in the message.

    Raises:
        DataError: it is a text, a path, a dict, a batch with labels, or nothing that can be iterated over.
    """
    if isinstance(dataset, (str, bytes, PathLike)):
        raise DataError(f"{what} is {shortened(dataset)}; expected batches: read it with hago.data.load_data")
    if isinstance(dataset, Mapping):
        keys = ", ".join(map(repr, list(dataset)[:8]))
        raise DataError(f"{what} is a dict with the keys {keys}; expected batches: pass one batch as [batch]")
    if _is_batch_with_labels(dataset):
        raise DataError(
            f"{what} is a tuple of inputs and labels; expected batches: pass one batch as [(inputs, labels)]"
        )
    if not isinstance(dataset, Iterable):
        advice = ""
        if isinstance(dataset, torch.utils.data.Dataset):
            advice = f": pass torch.utils.data.DataLoader(dataset, batch_size={BATCH_SIZE})"
        elif callable(dataset):
            advice = ": call it, and pass what it returns"
        raise DataError(f"{what} is of type {type(dataset).__name__}; expected an iterable of batches{advice}")


def are_whole(labels: Tensor) -> bool:
    """Whether all labels are whole numbers, as classes are."""
    return not labels.is_floating_point() or bool((labels == labels.round()).all())


def _digest(digest: Any, batch: Batch) -> None:
    for tensor in batch.tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())


def split_batch(item: Any, names: Sequence[str], index: int = 0) -> tuple[list[Any], Any]:
    """Split one batch of the user's data set into (inputs, labels); labels are None if there are none.

    Raises:
        DataError: the batch does not hold the model's inputs.
    """
    if isinstance(item, Batch):
        return list(item.inputs), item.labels
    if isinstance(item, Mapping):
        if len(names) == 1 and names[0] not in item and not any(k in item for k in _LABEL_KEYS):
            return [item], None  # the model takes the dict itself
        labels = next((item[k] for k in _LABEL_KEYS if k in item and k not in names), None)
        missing = [n for n in names if n not in item]
        others = [v for k, v in item.items() if k not in _LABEL_KEYS]
        # by position only where no name is one of the model's, lest one input is taken for another
        if missing and (len(missing) < len(names) or len(others) != len(names)):
            raise DataError(
                f"batch {index} has keys {list(item)}; expected the model's inputs {list(names)} and maybe 'labels'"
            )
        return (others if missing else [item[n] for n in names]), labels
    if not isinstance(item, (tuple, list)):
        return [item], None
    parts = list(item)
    if len(parts) == 2 and len(names) == 1 and isinstance(parts[0], Mapping) and names[0] not in parts[0]:
        return [parts[0]], parts[1]
    if len(parts) == 2 and isinstance(parts[0], (tuple, list, Mapping)):
        has_all = len(parts[0]) == 2 or (isinstance(parts[0], Mapping) and set(names) <= set(parts[0]))
        if len(names) == 2 and not has_all:
            return parts, None  # two inputs, the first of which is nested
        inputs, _ = split_batch(parts[0], names, index)
        return inputs, parts[1]
    if len(parts) == len(names) + 1:
        return parts[:-1], parts[-1]
    return parts, None


def _given(item: Mapping[str, Any], optional: Sequence[str]) -> tuple[str, ...]:
    """The optional inputs that a batch has.

    Raises:
        DataError: it has one without another before it; inputs are passed in their order.
    """
    given = tuple(name for name in optional if name in item and name not in _LABEL_KEYS)
    if given != tuple(optional[: len(given)]):
        without = next(name for name in optional if name not in given)
        raise DataError(
            f"batch 0 has {given[-1]!r} without {without!r}, and inputs are passed in the order of forward; give "
            f"{without!r}, too, or wrap the model in one that takes what the batch has"
        )
    return given


def _read(item: Any, names: Sequence[str], index: int, first: Sequence[Any]) -> tuple[Batch, tuple[Any, ...]]:
    """Convert a batch of the user's data set to a `Batch`, and to the arguments that the model takes.

    Args:
        first: the arguments of the first batch, in whose order inputs in dicts are read; empty for the first batch.
    """
    inputs, labels = split_batch(item, names, index)
    if len(inputs) != len(names):
        alike = len({x.shape if isinstance(x, (Tensor, np.ndarray)) else None for x in inputs}) == 1
        are_samples = len(names) == 1 and alike and isinstance(inputs[0], (Tensor, np.ndarray))
        raise DataError(
            f"batch {index} holds {counted(len(inputs), 'input')}; the model takes {len(names)}: {', '.join(names)}; "
            + ("make one tensor of several samples with torch.stack" if are_samples else _expected_batch(names))
        )
    args = pytree.tree_map(lambda x: _cpu_tensor(x, f"batch {index}"), tuple(inputs))
    try:
        tensors = tuple(pytree.tree_structure(tuple(first or args)).flatten_up_to(args))
    except ValueError as error:
        raise DataError(f"batch {index} is nested differently from the first: {error}") from None
    if any(not isinstance(t, Tensor) for t in tensors):
        raise DataError(f"batch {index} holds lists or dicts where the first holds tensors; nest all in the same way")
    sizes = sorted({int(t.shape[0]) for t in tensors if t.ndim})
    if not sizes:
        raise DataError(
            f"batch {index} holds {'a single number' if len(tensors) == 1 else 'single numbers'}; expected tensors or "
            "arrays whose axis 0 is the batch: convert lists of numbers with torch.tensor"
        )
    if any(not t.ndim for t in tensors):
        raise DataError(
            f"batch {index} holds a single number beside tensors; expected axis 0 of every input to be the batch: pass "
            "one number per sample, or make it an attribute of the model"
        )
    if sizes == [0]:
        shapes = " and ".join(str(tuple(t.shape)) for t in tensors)
        raise DataError(f"batch {index} is empty: it has the shape {shapes}; leave out batches without samples")
    if len(sizes) != 1:
        raise DataError(
            f"batch {index}: inputs have batch sizes {sizes}; expected one size above 0: axis 0 of every input is the "
            "batch"
        )
    label_tensor = None if labels is None else _cpu_tensor(labels, f"labels of batch {index}")
    if label_tensor is not None and label_tensor.shape[:1] != tensors[0].shape[:1]:
        raise DataError(
            f"batch {index} has {tensors[0].shape[0]} samples but labels of shape {tuple(label_tensor.shape)}; "
            + (
                "expected one label per sample along axis 0: pass as many labels as inputs, in the same order"
                if label_tensor.ndim
                else "if it is one sample, pass a torch.utils.data.DataLoader of the data set"
            )
        )
    return Batch(tensors, label_tensor), args


def _expected_batch(names: Sequence[str]) -> str:
    """What a batch of a model with these inputs is."""
    inputs = "inputs" if len(names) == 1 else f"({', '.join(names)})"
    with_labels = "(inputs, labels)" if len(names) == 1 else f"({', '.join(names)}, labels)"
    return f"expected a batch to be {inputs} or {with_labels}"


def _cpu_tensor(value: Any, where: str) -> Tensor:
    return as_tensor(value, where).detach().cpu()


def as_tensor(value: Any, where: str) -> Tensor:
    """Convert a value to a tensor; floats become float32.

    Integers stay integers, since their real values (of images from 0 to 255, for example) are unknown here.

    Raises:
        DataError: the value cannot be converted, or the tensor is not dense.
    """
    if isinstance(value, (str, bytes)):
        raise DataError(f"{where} holds the text {shortened(value)}; expected numbers: convert texts and files first")
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
        kind = "Python objects" if value.dtype.hasobject else str(value.dtype)
        raise DataError(
            f"{where} holds an array of {kind}; expected numbers: make samples of one shape an array of numbers with "
            "numpy.stack"
        )
    try:
        tensor = torch.as_tensor(native(value) if isinstance(value, np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where} holds a {type(value).__name__}; expected a tensor or an array: {error}") from None
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        kind = "nested" if tensor.is_nested else "meta" if tensor.device.type == "meta" else str(tensor.layout)
        raise DataError(f"{where} is a {kind} tensor; expected a dense one that holds values")
    if tensor.is_complex():
        raise DataError(
            f"{where} holds complex numbers ({tensor.dtype}), which hago does not quantize; expected real numbers: "
            "pass x.real where imaginary parts are 0"
        )
    if tensor.dtype in (torch.float64, torch.float16, torch.bfloat16):
        tensor = tensor.to(torch.float32)
    return tensor.resolve_neg()  # imaginary parts may be views whose signs are still to be changed


def native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array in native byte order, contiguous, and in a dtype that torch has: long doubles become float64."""
    dtype = np.dtype(np.float64) if array.dtype.kind == "f" and array.dtype.itemsize > 8 else array.dtype
    return np.ascontiguousarray(array, dtype=dtype.newbyteorder("="))


def _check_finite(batch: Batch, index: int) -> None:
    for slot, tensor in enumerate(batch.inputs):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            row = int((~torch.isfinite(tensor)).flatten(1).any(1).nonzero()[0]) if tensor.ndim > 1 else 0
            raise DataError(f"batch {index}, input {slot}: sample {row} holds NaN or infinite values; remove it")
