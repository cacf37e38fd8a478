"""Data sources: arrays, images and callables give the same batches each time they are read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hago.data import sources
from hago.data.batches import Batches
from hago.data.sources import (
    EXPECTED_DATA,
    FILE_FORMATS,
    FOLDER_FORMATS,
    FolderFormat,
    ImageShape,
    load_data,
    read_image,
    spread_indices,
)
from hago.errors import DataError, HagoError


def whole(batches: Batches) -> tuple[torch.Tensor, torch.Tensor | None]:
    parts = list(batches)
    labels = [b.labels for b in parts if b.labels is not None]
    return torch.cat([b.inputs[0] for b in parts]), torch.cat(labels) if labels else None


@given(st.integers(1, 200), st.none() | st.integers(1, 300))
def test_spread_indices_are_evenly_spaced(count: int, wanted: int | None) -> None:
    rows = spread_indices(count, wanted)
    assert len(rows) == min(count, wanted or count) and rows == sorted(set(rows)) and rows[0] >= 0 and rows[-1] < count
    gaps = [b - a for a, b in zip(rows, [*rows[1:], count + rows[0]], strict=True)]
    assert max(gaps) - min(gaps) <= 1


# ---------------------------------------------------------------- .npz
IMAGES = np.arange(10 * 4, dtype=np.float32).reshape(10, 4)
LABELS = np.arange(10)


@pytest.mark.parametrize("label", ["y", "labels", "target"])
@pytest.mark.parametrize("name", ["x", "images"])
def test_arrays(tmp_path: Path, name: str, label: str) -> None:
    np.savez(tmp_path / "d.npz", **{name: IMAGES, label: LABELS})
    made = Batches(load_data(str(tmp_path / "d.npz"), batch_size=3), ["images"])
    images, labels = whole(made)
    assert [b.size for b in made] == [3, 3, 3, 1]
    assert np.array_equal(images, IMAGES) and labels is not None and np.array_equal(labels, LABELS)


def test_one_array_without_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", anything=IMAGES)
    made = Batches(load_data(str(tmp_path / "d.npz"), samples=5), ["images"])
    assert np.array_equal(whole(made)[0], IMAGES[::2]) and not made.labelled


def test_arrays_are_matched_to_inputs_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", b=IMAGES + 100, a=IMAGES)
    first = next(iter(Batches(load_data(str(tmp_path / "d.npz")), ["a", "b"])))
    assert np.array_equal(first.inputs[0], IMAGES) and np.array_equal(first.inputs[1], IMAGES + 100)


class Arbitrary:
    pass


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({}, "holds no arrays; write it with numpy.savez"),
        ({"x": IMAGES[:0]}, "holds no samples"),
        ({"x": np.float32(1)}, "holds no samples"),
        ({"x": IMAGES, "y": LABELS[:3]}, "different lengths"),
        ({"x": np.array(["a", "b"])}, "expected numbers"),
        ({"x": np.array([Arbitrary()], dtype=object)}, "cannot be read"),
    ],
)
def test_arrays_that_are_refused(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(DataError, match=says):
        load_data(str(tmp_path / "d.npz"))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04"])
def test_a_file_that_is_not_an_npz_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        load_data(str(tmp_path / "d.npz"))


def test_an_array_under_another_name(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", IMAGES)
    (tmp_path / "d.npy").rename(tmp_path / "d.npz")
    with pytest.raises(DataError, match=r"write it with numpy\.savez"):
        load_data(str(tmp_path / "d.npz"))


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"samples": 0}, {"samples": -1}])
def test_counts_below_one(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(DataError, match="expected 1 or more"):
        load_data("d.npz", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["none.npz", "nowhere", "file.txt"])
def test_names_of_no_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("", "utf-8")
    with pytest.raises(
        DataError, match=rf"expected an {' or '.join(FILE_FORMATS)} file, a folder of images, or 'package"
    ):
        load_data(spec)


# ---------------------------------------------------------------- images
def paint(path: Path, size: tuple[int, int] = (8, 6), color: tuple[int, int, int] = (255, 0, 51)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def test_a_folder_per_class(tmp_path: Path) -> None:
    for name, color in (("cat/b.png", (0, 0, 0)), ("cat/deep/a.PNG", (0, 0, 0)), ("dog/a.bmp", (255, 255, 255))):
        paint(tmp_path / name, color=color)
    (tmp_path / "empty").mkdir()
    made = Batches(load_data(str(tmp_path), batch_size=2), ["images"])
    images, labels = whole(made)
    assert labels is not None and labels.tolist() == [0, 0, 1]
    assert images.shape == (3, 3, 6, 8) and images.dtype == torch.float32
    assert images.flatten(1).mean(1).tolist() == [0.0, 0.0, 1.0]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        paint(tmp_path / name)
    made = Batches(load_data(str(tmp_path), samples=2, images=ImageShape(gray=True)), ["images"])
    assert not made.labelled and whole(made)[0].shape == (2, 1, 6, 8)


def test_mean_and_std_are_by_channel(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    pixel = read_image(tmp_path / "a.png", ImageShape(mean=(1.0, 0.0, 0.2), std=(1.0, 1.0, 0.5)))[:, 0, 0]
    assert pixel.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20), st.integers(1, 20))
def test_images_get_the_size_asked_for(
    tmp_path_factory: pytest.TempPathFactory, width: int, height: int, rows: int, columns: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "sized.png"
    paint(path, (width, height))
    found = read_image(path, ImageShape((rows, columns)))
    assert found.shape == (3, rows, columns)
    assert found.mean((1, 2)).tolist() == pytest.approx([1.0, 0.0, 0.2], abs=1e-3)  # nothing but the picture is seen


def test_the_centre_is_kept(tmp_path: Path) -> None:
    image = Image.new("RGB", (30, 10))
    image.paste((255, 255, 255), (10, 0, 20, 10))
    image.save(tmp_path / "a.png")
    assert float(read_image(tmp_path / "a.png", ImageShape((10, 10))).min()) == 1.0


@pytest.mark.parametrize("options", [{"mean": (0.0, 0.0)}, {"std": (1.0, 1.0, 1.0), "gray": True}, {"std": (0.0,)}])
def test_invalid_image_shapes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        ImageShape(**options)


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no images"):
        load_data(str(tmp_path))
    paint(tmp_path / "a.png")
    paint(tmp_path / "class" / "a.png")
    with pytest.raises(DataError, match="images and folders of images"):
        load_data(str(tmp_path))


def test_images_of_different_sizes_and_invalid_files_are_refused(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    paint(tmp_path / "b.png", (3, 3))
    with pytest.raises(DataError, match=r"differ in size: .*a\.png is 8x6, .*b\.png is 3x3"):
        list(load_data(str(tmp_path)))
    (tmp_path / "b.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"b\.png cannot be read"):
        list(load_data(str(tmp_path)))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(HagoError, match=r"pip install 'hago\[images\]'"):
        load_data(str(tmp_path))


# ---------------------------------------------------------------- callables
FEEDS = """
import torch
def listed():
    return [torch.full((4, 2), float(i)) for i in range(3)]
def pairs():
    return [(torch.full((4, 2), float(i)), torch.full((4,), i)) for i in range(3)]
def generated():
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        yield torch.randn(4, 2, generator=generator)
def tensor():
    return torch.zeros(100, 2)
def failing():
    yield torch.zeros(4, 2)
    raise RuntimeError("the disk is gone")
def nothing():
    return None
"""


@pytest.fixture
def feeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "data_feeds.py").write_text(FEEDS, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("data_feeds", None)


@pytest.mark.parametrize("name", ["listed", "generated", "pairs"])
def test_a_callable_can_be_read_again(feeds: None, name: str) -> None:
    data = load_data(f"data_feeds:{name}")
    first, second = (Batches(data, ["x"], cache_bytes=0) for _ in range(2))
    assert first.samples == 12 and first.sha256 == second.sha256 and len(list(first)) == 3


@pytest.mark.parametrize(("samples", "sizes"), [(1, [1]), (4, [4]), (6, [4, 2]), (50, [4, 4, 4])])
@pytest.mark.parametrize("name", ["listed", "generated", "pairs"])
def test_a_callable_is_limited_to_the_number_of_samples(feeds: None, name: str, samples: int, sizes: list[int]) -> None:
    made = Batches(load_data(f"data_feeds:{name}", samples=samples), ["x"])
    assert [b.size for b in made] == sizes


def test_a_tensor_is_divided_into_batches(feeds: None) -> None:
    assert [b.size for b in Batches(load_data("data_feeds:tensor"), ["x"])] == [64, 36]


def test_callables_that_are_refused(feeds: None) -> None:
    with pytest.raises(DataError, match="returned is of type NoneType; expected an iterable"):
        load_data("data_feeds:nothing")
    with pytest.raises(DataError, match="raised RuntimeError: the disk is gone"):
        list(load_data("data_feeds:failing"))
    with pytest.raises(HagoError, match="data_feeds has no 'none'"):
        load_data("data_feeds:none")


def test_a_new_kind_of_folder_is_read_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = FolderFormat("a folder of arrays", lambda folder: any(folder.glob("*.npy")), lambda *_: [torch.ones(2, 3)])
    monkeypatch.setattr(sources, "FOLDER_FORMATS", (kind, *FOLDER_FORMATS))
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "x.npy", np.ones(3))
    (read,) = load_data(str(tmp_path / "arrays"))
    assert read.equal(torch.ones(2, 3))
    paint(tmp_path / "images" / "x.png")
    (image,) = load_data(str(tmp_path / "images"))
    assert image.shape == (1, 3, 6, 8)
    for known in FOLDER_FORMATS:
        assert known.words in EXPECTED_DATA


def test_images_are_the_last_kind_of_folder() -> None:
    # it is of every folder that no other kind is of, and says that the folder holds no images
    assert FOLDER_FORMATS[-1].words == "a folder of images"


def test_normalization_has_one_value_or_one_per_channel() -> None:
    for gray, channels in ((False, "3 channels"), (True, "1 channel")):
        for name in ("mean", "std"):
            says = f"^{name} has 2 values; images have {channels}: give one value, or one per channel$"
            with pytest.raises(DataError, match=says):
                ImageShape(gray=gray, **{name: (0.5, 0.5)})
            ImageShape(gray=gray, **{name: (0.5,)})
            ImageShape(gray=gray, **{name: (0.5,) * int(channels[0])})
