"""Data sources that the user names: an .npz file, a folder of images, or `package.module:callable`.

Every source gives the same batches each time it is read. If only some samples of a file or folder are used, they are
evenly spread, so that data that is sorted by class keeps every class.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hago.data.batches import BATCH_SIZE, NamedData, check_data_set, native, split_samples, spread_indices
from hago.data.named_objects import call_named, import_object, one_line
from hago.errors import DataError, HagoError
from hago.serialization.text_table import counted

#: The endings of image files.
_IMAGES: Final = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
#: The formats that Pillow may read. It detects the format from the content, not from the name, and other formats start
#: programs (EPS) or read other files.
_FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


@dataclass(frozen=True, slots=True)
class ImageShape:
    """The preprocessing of image files.

    Args:
        size: (height, width), to which images are scaled and cropped around the centre; None keeps their sizes.
        mean, std: normalization of values in [0, 1]; one value per channel, or one for all.
        gray: whether images have one channel instead of three.
    """

    size: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    gray: bool = False

    def __post_init__(self) -> None:
        channels = 1 if self.gray else 3
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise DataError(
                    f"{name} has {counted(len(values), 'value')}; images have {counted(channels, 'channel')}: give one "
                    "value, or one per channel"
                )
        if 0.0 in self.std:
            raise DataError("std holds 0, by which images would be divided")


def load_data(
    spec: str, *, batch_size: int = BATCH_SIZE, samples: int | None = None, images: ImageShape | None = None
) -> Iterable[Any]:
    """Load the data that `spec` names.

    Args:
        spec: an `.npz` file whose arrays have the names of the model's inputs (or a single array of inputs), and
            optionally `y` or `labels`; a folder of images with a subfolder per class, or without subfolders; or
            `package.module:callable`, which returns an iterable of batches.
        batch_size: the batch size of files and folders; a callable makes its own batches.
        samples: the most samples to use; None for all.
        images: the preprocessing of image files.

    Returns:
        An iterable of batches, which can be read many times.

    Raises:
        DataError: there is no such data, or it cannot be read.
        HagoError: there is no such callable, or Pillow is not installed.
    """
    for name, count in (("batch size", batch_size), ("number of samples", samples)):
        if count is not None and count < 1:
            raise DataError(f"{name} {count}; expected 1 or more")
    path = Path(spec)
    exists = os.path.exists(path)
    if os.path.isdir(path):
        folder = next(f for f in FOLDER_FORMATS if f.holds(path))
        return folder.read(path, batch_size, samples, images or ImageShape())
    if path.suffix in FILE_FORMATS and os.path.isfile(path):
        return FILE_FORMATS[path.suffix](path, batch_size, samples)
    if ":" in spec and not exists:
        return CalledBatches(spec, samples)
    raise DataError(
        f"data {spec!r}: "
        + (f"neither {_FILES} nor a folder" if exists else "no such file or folder")
        + f"; expected {_FILES}, {_FOLDERS}, or 'package.module:callable'"
    )


# ---------------------------------------------------------------- .npz
@dataclass(frozen=True, slots=True)
class ArrayBatches(NamedData):
    """The batches of an .npz file: its arrays divided along axis 0."""

    spec: str
    arrays: Mapping[str, np.ndarray[Any, Any]]
    batch_size: int
    classes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        samples = len(next(iter(self.arrays.values())))
        for start in range(0, samples, self.batch_size):
            cut = {k: torch.from_numpy(a[start : start + self.batch_size]) for k, a in self.arrays.items()}
            yield cut if len(cut) > 1 else next(iter(cut.values()))


def _arrays(path: Path, batch_size: int, samples: int | None) -> ArrayBatches:
    try:
        with open(path, "rb") as file:  # numpy leaves a file open that it cannot read
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise DataError(f"data {str(path)!r} is one array; write it with numpy.savez(path, x=array)")
            _check_sizes(path)
            arrays = {name: loaded[name] for name in loaded.files}
    except DataError:
        raise
    except Exception as error:  # numpy's and zip's readers raise many types for damaged files
        why = one_line(error)
        if isinstance(error, ValueError) and "allow_pickle" in why:  # numpy's advice is to run what the file says
            why = "it is no file of numpy, or holds objects; expected arrays of numbers in which all samples have the "
            why += "same shape, written with numpy.savez(path, x=array)"
        elif isinstance(error, (zipfile.BadZipFile, EOFError)) and "CRC" not in why:
            why = f"it is no .npz file, or was cut off ({why}); write it again with numpy.savez(path, x=array)"
        raise DataError(f"data {str(path)!r} cannot be read: {why}") from None
    lengths = {name: len(a) if a.ndim else 0 for name, a in arrays.items()}
    if not arrays:
        raise DataError(f"data {str(path)!r} holds no arrays; write it with numpy.savez(path, x=array)")
    if min(lengths.values()) == 0:
        got = ", ".join(f"{name} of shape {a.shape}" for name, a in arrays.items())
        raise DataError(f"data {str(path)!r} holds no samples: {got}; expected one sample or more along axis 0")
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"data {str(path)!r} holds arrays of different lengths: {lengths}; expected one entry per sample along "
            "axis 0 of each"
        )
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise DataError(f"data {str(path)!r}: array {name!r} holds {array.dtype}; expected numbers")
    rows = spread_indices(next(iter(lengths.values())), samples)
    return ArrayBatches(str(path), {n: native(a[rows]) for n, a in arrays.items()}, batch_size)


def _check_sizes(path: Path) -> None:
    """Refuse arrays without values, or with fewer bytes than their shapes need, before memory is allocated for them."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                header = (
                    np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = header(file)
                wanted, left = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
            name = member.filename.removesuffix(".npy")
            if wanted != left and not dtype.hasobject:  # numpy refuses objects
                raise DataError(
                    f"data {str(path)!r}: array {name!r} of shape {shape} needs {wanted} bytes; the file holds {left}"
                )
            if 0 in shape[1:]:
                raise DataError(f"data {str(path)!r}: array {name!r} of shape {shape} holds no values")


# ---------------------------------------------------------------- images
@dataclass(frozen=True, slots=True)
class ImageBatches(NamedData):
    """The batches of a folder of images: float32 of shape (batch, channels, height, width), and labels if there are
    classes: the folders of classes, numbered from 0 in the order of their names."""

    spec: str
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: tuple[int, ...] | None
    shape: ImageShape
    batch_size: int

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.files), self.batch_size):
            rows = slice(start, start + self.batch_size)
            images = torch.stack(_same_shape([(f, read_image(f, self.shape)) for f in self.files[rows]]))
            yield images if self.labels is None else (images, torch.tensor(self.labels[rows]))


def _image_folder(folder: Path, batch_size: int, samples: int | None, shape: ImageShape) -> ImageBatches:
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise HagoError("reading images needs Pillow: pip install 'hago[images]'") from None
    classes = sorted(d for d in folder.iterdir() if d.is_dir() and _image_files(d, "**/*"))
    flat = _image_files(folder, "*")
    if classes and flat:
        raise DataError(
            f"data {str(folder)!r} holds images and folders of images; expected a folder per class, or none"
        )
    files = [(f, label) for label, d in enumerate(classes) for f in _image_files(d, "**/*")] or [(f, 0) for f in flat]
    if not files:
        raise DataError(f"data {str(folder)!r} holds no images; expected files that end in {', '.join(_IMAGES)}")
    chosen = [files[i] for i in spread_indices(len(files), samples)]
    labels = tuple(label for _, label in chosen) if classes else None
    names = tuple(d.name for d in classes)
    return ImageBatches(str(folder), names, tuple(f for f, _ in chosen), labels, shape, batch_size)


def _image_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(f for f in folder.glob(pattern) if f.suffix.lower() in _IMAGES and f.is_file())


def read_image(file: Path, shape: ImageShape) -> Tensor:
    """Read an image file as float32 of shape (channels, height, width).

    Raises:
        DataError: the file is not an image of an accepted format.
    """
    from PIL import Image

    try:
        with Image.open(file, formats=_FORMATS) as opened:
            image = opened.convert("L" if shape.gray else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"image {file} cannot be read: {one_line(error)}") from None
    if shape.size is not None:
        height, width = shape.size
        factor = max(width / image.width, height / image.height)
        wide, high = max(width, round(image.width * factor)), max(height, round(image.height * factor))
        left, top = (wide - width) // 2, (high - height) // 2
        image = image.resize((wide, high), Image.Resampling.BILINEAR).crop((left, top, left + width, top + height))
    pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255.0)
    x = pixels.unsqueeze(0) if shape.gray else pixels.permute(2, 0, 1)
    mean, std = (torch.tensor(v, dtype=torch.float32).reshape(-1, 1, 1) for v in (shape.mean, shape.std))
    return (x - mean) / std


def _same_shape(images: list[tuple[Path, Tensor]]) -> list[Tensor]:
    (first, one), *_ = images
    for file, image in images:
        if image.shape != one.shape:
            raise DataError(
                f"images differ in size: {first} is {one.shape[2]}x{one.shape[1]}, {file} is "
                f"{image.shape[2]}x{image.shape[1]}; give one size"
            )
    return [image for _, image in images]


# ---------------------------------------------------------------- callables
@dataclass(slots=True)
class CalledBatches(NamedData):
    """The first `samples` samples of the batches that a named callable returns.

    An iterator can be read only once, so a callable that returns one is called again for every pass.
    """

    spec: str
    samples: int | None
    classes: tuple[str, ...] = ()
    _kept: Any = field(init=False)

    def __post_init__(self) -> None:
        batches = self._call()
        self._kept = None if isinstance(batches, Iterator) else batches

    def _call(self) -> Any:
        batches = call_named(import_object(self.spec, "data"), self.spec, "data")
        what = f"what data {self.spec!r} returned"
        batches = split_samples(batches, what)
        check_data_set(batches, what)
        return batches

    def __iter__(self) -> Iterator[Any]:
        remaining = self.samples
        try:
            for batch in self._call() if self._kept is None else self._kept:
                cut = batch if remaining is None else pytree.tree_map(lambda t, n=remaining: _first(t, n), batch)
                if remaining is not None:
                    remaining -= _size(cut)
                yield cut
                if remaining is not None and remaining <= 0:
                    return
        except HagoError:
            raise
        except Exception as error:
            raise DataError(f"data {self.spec!r} raised {one_line(error)}") from error


def _first(value: Any, count: int) -> Any:
    return value[:count] if isinstance(value, (Tensor, np.ndarray)) and value.ndim else value


def _size(batch: Any) -> int:
    sizes = [len(t) for t in pytree.tree_leaves(batch) if isinstance(t, (Tensor, np.ndarray)) and t.ndim]
    return sizes[0] if sizes else 1


# ---------------------------------------------------------------- formats of files and folders
#: The readers of data files by suffix, called with the path, the size of a batch and the most samples. To add a format,
#: add its reader here; messages and the help of `--data` list the suffixes.
FILE_FORMATS: Final[Mapping[str, Callable[[Path, int, int | None], Iterable[Any]]]] = {".npz": _arrays}


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """A kind of data folder, an entry of `FOLDER_FORMATS`.

    Args:
        words: the kind in messages.
        holds: whether a folder is of this kind.
        read: called with the path, the size of a batch, the most samples and the preprocessing of image files.
    """

    words: str
    holds: Callable[[Path], bool]
    read: Callable[[Path, int, int | None, ImageShape], Iterable[Any]]


#: The kinds of data folders. The first that a folder is of reads it; images come last, since they refuse any folder
#: that holds none. To add a kind, add its reader and its entry here; messages and the help of `--data` list them.
FOLDER_FORMATS: Final = (FolderFormat("a folder of images", lambda folder: True, _image_folder),)
_FILES: Final = f"an {' or '.join(FILE_FORMATS)} file"
_FOLDERS: Final = ", ".join(folder.words for folder in FOLDER_FORMATS)
#: The kinds of data that `load_data` takes, in words.
EXPECTED_DATA: Final = f"{_FILES}, {_FOLDERS}, or package.module:callable"
