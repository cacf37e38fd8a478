"""Kinds of wrong data: each gives one message that says which batch, what was got and expected, and what to do."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import hago
from hago.cli import main
from hago.data import Batches, as_tensor, load_data, warn_if_shared
from hago.errors import DataError, GraphError
from hago.importing import import_with_data
from hago.search.preparation import held_out_batches

CHIP: Final = "x86_vnni"
#: The longest message, a few lines of a terminal.
LONGEST: Final = 600


class Net(nn.Module):
    """Two layers with a classifier of a fixed size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 64, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(torch.relu(self.conv(images)).flatten(1))


def net() -> nn.Module:
    return Net().eval()


class Mean(Net):
    """A network that takes images of any size."""

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).mean((2, 3))


def images(*shape: int) -> Tensor:
    return torch.rand(*(shape or (4, 3, 8, 8)), generator=torch.Generator().manual_seed(1))


def read_already() -> Any:
    generator = (x for x in [images()])
    list(generator)
    return generator


@dataclass(frozen=True, slots=True)
class Wrong:
    """Data that the network does not take.

    Args:
        data: makes it.
        says: parts of the message, in order.
        mended: the data after the advice is taken.
    """

    data: Callable[[], Any]
    says: tuple[str, ...]
    mended: Callable[[], Any]


def bytes_of(x: Tensor) -> Tensor:
    return (x * 255).to(torch.uint8)


def objects(*values: Any) -> np.ndarray[Any, Any]:
    """An array of Python objects."""
    made = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        made[index] = value
    return made


HWC: Final = images(4, 8, 8, 3)
WRONG: Final = {
    "channels": Wrong(
        lambda: [images(4, 1, 8, 8)],
        ("batch 0 has shape (4, 1, 8, 8) and dtype float32; the model fails on it: RuntimeError: ", "have 3 channels",
         "its Conv2d 'conv' takes (batch, 3, height, width)", "It runs on images.repeat(1, 3, 1, 1)"),
        lambda: [images(4, 1, 8, 8).repeat(1, 3, 1, 1)],
    ),
    "bytes": Wrong(
        lambda: [bytes_of(images())],
        ("batch 0 has shape (4, 3, 8, 8) and dtype uint8", "It runs on images.float() / 255, of shape (batch, 3, 8, ",
         "normalize (mean and std) as in training"),
        lambda: [bytes_of(images()).float() / 255],
    ),
    "channels last": Wrong(
        lambda: [HWC],
        ("batch 0 has shape (4, 8, 8, 3) and dtype float32", "It runs on images.permute(0, 3, 1, 2)"),
        lambda: [HWC.permute(0, 3, 1, 2)],
    ),
    "bytes with channels last": Wrong(
        lambda: [bytes_of(HWC)],
        ("batch 0 has shape (4, 8, 8, 3) and dtype uint8", "It runs on (images.float() / 255).permute(0, 3, 1, 2)"),
        lambda: [(bytes_of(HWC).float() / 255).permute(0, 3, 1, 2)],
    ),
    "no batch axis": Wrong(
        lambda: list(images()),
        ("batch 0 has shape (3, 8, 8)", "its Linear 'fc' takes 256 values on the last axis", "It runs on images[None]"),
        lambda: [x[None] for x in images()],
    ),
    "labels first": Wrong(
        lambda: [(torch.arange(4), images())],
        ("batch 0 has shape (4,) and dtype int64", "It runs on what was taken for the labels, of shape (4, 3, 8, 8)",
         "a batch is (inputs, labels); change their order"),
        lambda: [(images(), torch.arange(4))],
    ),
    "NaN": Wrong(
        lambda: [images(), images() * float("nan")],
        ("batch 1, input 0: sample 0 holds NaN or infinite values; remove it",),
        lambda: [images()],
    ),
    "nothing": Wrong(lambda: [], (" is empty; pass at least one batch",), lambda: [images()]),
    "dict": Wrong(
        lambda: [{"pixels": images()}],
        ("batch 0 has shape (4, 3, 8, 8) and dtype float32, in a dict with the keys 'pixels'",
         "It runs on the tensor under 'pixels': name that key 'images', or pass the tensor alone"),
        lambda: [{"images": images()}],
    ),
    "dict of all": Wrong(
        lambda: {"images": images()},
        (" is a dict with the keys 'images'; expected batches: pass one batch as [batch]",),
        lambda: [{"images": images()}],
    ),
    "texts": Wrong(
        lambda: ["a.png", "b.png"],
        ("batch 0 holds the text 'a.png'; expected numbers: convert texts and files first",),
        lambda: [images(2, 3, 8, 8)],
    ),
    "ragged batches": Wrong(
        lambda: [images(), images(4, 3, 6, 6)],
        ("batch 1 has sample shapes [(3, 6, 6)]; batch 0 has [(3, 8, 8)]; resize or pad all to one shape",),
        lambda: [images(), nn.functional.interpolate(images(4, 3, 6, 6), (8, 8))],
    ),
    "a batch with labels": Wrong(
        lambda: (images(), torch.arange(4)),
        (" is a tuple of inputs and labels; expected batches: pass one batch as [(inputs, labels)]",),
        lambda: [(images(), torch.arange(4))],
    ),
    "size": Wrong(
        lambda: [images(4, 3, 9, 9)],
        ("batch 0 has shape (4, 3, 9, 9)", "its Linear 'fc' takes 256 values on the last axis and got float32 of shape "
         "(4, 324)", "It runs on torch.nn.functional.interpolate(images, (8, 8)), of shape (batch, 3, 8, 8)"),
        lambda: [nn.functional.interpolate(images(4, 3, 9, 9), (8, 8))],
    ),
    "bytes of a wrong size": Wrong(
        lambda: [bytes_of(images(4, 3, 9, 9))],
        ("It runs on torch.nn.functional.interpolate(images.float() / 255, (8, 8))",),
        lambda: [nn.functional.interpolate(bytes_of(images(4, 3, 9, 9)).float() / 255, (8, 8))],
    ),
    "lists of samples": Wrong(
        lambda: [list(images())],
        ("batch 0 holds 4 inputs; the model takes 1: images; make one tensor of several samples with torch.stack",),
        lambda: [torch.stack(list(images()))],
    ),
    "an empty batch": Wrong(
        lambda: [images(), images()[:0]],
        ("batch 1 is empty: it has the shape (0, 3, 8, 8); leave out batches without samples",),
        lambda: [images()],
    ),
    "lists of numbers": Wrong(
        lambda: [[images()[0, 0, 0].tolist()]],
        ("batch 0 holds single numbers; expected tensors or arrays", "convert lists of numbers with torch.tensor"),
        lambda: [torch.tensor(images().tolist())],
    ),
    "complex numbers": Wrong(
        lambda: [images().to(torch.complex64)],
        ("batch 0 holds complex numbers (torch.complex64)", "pass x.real where imaginary parts are 0"),
        lambda: [images().to(torch.complex64).real],
    ),
    "complex array": Wrong(
        lambda: [images().numpy().astype(np.complex64)],
        ("batch 0 holds complex numbers (torch.complex64)", "expected real numbers"),
        lambda: [images().numpy()],
    ),
    "an array of objects": Wrong(
        lambda: [objects(images()[0].numpy(), None)],
        ("batch 0 holds an array of Python objects; expected numbers", "with numpy.stack"),
        lambda: [np.stack(list(images().numpy()))],
    ),
    "too few labels": Wrong(
        lambda: [(images(), torch.arange(3))],
        ("batch 0 has 4 samples but labels of shape (3,); expected one label per sample along axis 0: pass as many",),
        lambda: [(images(), torch.arange(4))],
    ),
    "two kinds of labels": Wrong(
        lambda: [(images(), torch.arange(4), torch.arange(4))],
        ("batch 0 holds 3 inputs; the model takes 1: images; expected a batch to be inputs or (inputs, labels)",),
        lambda: [(images(), torch.arange(4))],
    ),
    "a number": Wrong(lambda: torch.tensor(3.0), (" is a single number; expected samples",), images),
    "samples with labels": Wrong(
        lambda: [(x, 1) for x in images()],
        ("batch 0 has 3 samples but labels of shape (); if it is one sample, pass a torch.utils.data.DataLoader",),
        lambda: torch.utils.data.DataLoader([(x, 1) for x in images()], batch_size=2),
    ),
}  # fmt: skip

#: Data that only Python can pass.
OF_PYTHON: Final = {
    "read already": Wrong(
        read_already,
        ("calibration data is empty; an iterator is read only once: pass a new one, or a list",),
        lambda: (x for x in [images()]),
    ),
    "a Dataset": Wrong(
        lambda: torch.utils.data.TensorDataset(images(), torch.arange(4)),
        ("calibration data is of type TensorDataset", "pass torch.utils.data.DataLoader(dataset, batch_size=64)"),
        lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images(), torch.arange(4)), batch_size=64),
    ),
    "a function": Wrong(
        lambda: images,
        ("calibration data is of type function; expected an iterable of batches: call it, and pass what it returns",),
        images,
    ),
    "a path": Wrong(
        lambda: "data.npz",
        ("calibration data is 'data.npz'; expected batches: read it with hago.data.load_data",),
        lambda: [images()],
    ),
}


def in_order(parts: tuple[str, ...]) -> str:
    return ".*".join(map(re.escape, parts))


@pytest.mark.parametrize("kind", [*WRONG, *OF_PYTHON])
def test_wrong_data_is_explained(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = (WRONG | OF_PYTHON)[kind]
    with pytest.raises(DataError) as caught:
        hago.quantize(net(), CHIP, wrong.data())
    assert re.search(in_order(wrong.says), str(caught.value)), str(caught.value)
    assert str(caught.value).startswith("calibration data"), "the message names the data"
    assert len(str(caught.value)) <= LONGEST and "\n" not in str(caught.value)
    assert not re.search(r"\bs\d+\b|torch\.export", str(caught.value)), "symbols of torch.export"
    assert capfd.readouterr() == ("", "")
    hago.quantize(net(), CHIP, wrong.mended())


def test_float64_is_taken() -> None:
    found = hago.quantize(net(), CHIP, [images().double()])
    assert found.strategy == hago.quantize(net(), CHIP, [images()]).strategy


@pytest.mark.parametrize("kind", WRONG)
def test_the_command_line_explains_wrong_data(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong_data.py").write_text(
        f"from {__name__} import WRONG, net\n\ndef data():\n    return WRONG[{kind!r}].data()\n", "utf-8"
    )
    monkeypatch.delitem(sys.modules, "wrong_data", raising=False)
    assert main(["quantize", "wrong_data:net", "--hardware", CHIP, "--data", "wrong_data:data"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert re.fullmatch(f"hago: error: .*{in_order(WRONG[kind].says)}.*\n", err), err
    assert re.match("hago: error: (calibration data|what data) 'wrong_data:data'", err), "the message names the data"


@pytest.mark.parametrize("kind", WRONG)
def test_held_out_data_is_refused_before_calibration(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrate(*_: Any) -> None:
        raise AssertionError("the calibration began")

    monkeypatch.setattr("hago.search.preparation.collect", calibrate)
    with pytest.raises(DataError) as caught:
        hago.search_quantize_strategy(net(), CHIP, [images()], held_out=WRONG[kind].data(), progress=False)
    assert str(caught.value).startswith("held-out data"), str(caught.value)


def test_an_array_is_a_data_set_as_a_tensor_is() -> None:
    made = hago.quantize(net(), CHIP, images().numpy())
    assert made.strategy == hago.quantize(net(), CHIP, images()).strategy
    assert made.strategy == hago.quantize(net(), CHIP, [images()]).strategy


class Scaled(nn.Module):
    """A network that multiplies its outputs by an input, or by a number of its own."""

    def __init__(self, factor: float | None = None) -> None:
        super().__init__()
        self.body, self.factor = net(), factor

    def forward(self, images: Tensor, factor: Tensor) -> Tensor:
        return self.body(images) * factor


class ScaledByItself(Scaled):
    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        return self.body(images) * self.factor


def test_a_single_number_beside_tensors_is_refused() -> None:
    says = "batch 0 holds a single number beside tensors.*pass one number per sample, or make it an attribute"
    with pytest.raises(DataError, match=says):
        hago.quantize(Scaled().eval(), CHIP, [(images(), torch.tensor(2.0))])
    assert hago.quantize(Scaled().eval(), CHIP, [(images(), torch.full((4, 1), 2.0))]).strategy.bits
    assert hago.quantize(ScaledByItself(2.0).eval(), CHIP, [images()]).strategy.bits


# ---------------------------------------------------------------- data that runs, but is hardly meant
def class_folders(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / "images" / name).mkdir(parents=True, exist_ok=True)
        pixels = (images(3, 8, 8) * 255).to(torch.uint8).permute(1, 2, 0).numpy()
        for index in range(2):
            Image.fromarray(np.roll(pixels, index)).save(folder / "images" / name / f"{index}.png")
    return folder / "images"


#: Values that a model runs on, with what a warning says of them; None where it says nothing.
PLAUSIBLE: Final[dict[str, tuple[Callable[[], Any], str | None]]] = {
    "zeros": (lambda: [images() * 0] * 2, "holds zeros alone"),
    "zeros in one sample": (lambda: [images()[:1] * 0], "holds zeros alone"),
    "equal": (lambda: [images()[:1].repeat(4, 1, 1, 1)], "holds the same values in all 4 samples"),
    "equal over batches": (lambda: [images()[:1]] * 3, "holds the same values in all 3 samples"),
    "large": (lambda: [images() * 1e6], "holds values up to 9"),
    "images": (lambda: [images()], None),
    "a single sample": (lambda: [images()[:1]], None),
    "from 0 to 255": (lambda: [images() * 255], None),
    "a blank sample": (lambda: [images() * torch.tensor([0.0, 1, 1, 1])[:, None, None, None]], None),
    "zeros at first": (lambda: [images() * 0, images()], None),
    "negative": (lambda: [images() * -1e9], None),
}


@pytest.mark.parametrize("kind", PLAUSIBLE)
@pytest.mark.parametrize("role", ["calibration data", "held-out data"])
def test_implausible_values_are_warned_of(kind: str, role: str) -> None:
    make, said = PLAUSIBLE[kind]
    data, held_out = (make(), None) if role == "calibration data" else ([images()], make())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hago.search_quantize_strategy(
            net(), CHIP, data, held_out=held_out, searcher="default", progress=False, allow_overflow=True
        )
    found = [str(w.message) for w in seen if "holds" in str(w.message)]
    assert len(found) == (said is not None)
    assert all(text.startswith(f"{role} {said}") for text in found), found


def codes(seed: int) -> Tensor:
    """Samples of which there are few different ones."""
    return torch.randint(0, 2, (50, 3), generator=torch.Generator().manual_seed(seed)).to(torch.float32)


#: Calibration data and held-out data, with how many samples of this are said to be in both; None where it says nothing.
SHARED: Final[dict[str, tuple[list[Any], list[Any], int | None]]] = {
    "the same": ([images()], [images()], 4),
    "the same with labels and in other batches": ([images()], [(x, torch.zeros(2)) for x in images().split(2)], 4),
    "all of few": ([images()[:2]], [images()], 2),
    "all of few, at the end": ([images()[:2]], [images() + 1, images()], 2),
    "most": ([images()], [images()[1:], images()[:1] + 1], 3),
    "half": ([images()], [images()[2:], images()[:2] + 1], None),
    "one of many": ([images()], [torch.cat([images() + i for i in range(9)])[3:]], None),
    "none": ([images()], [images() + 1], None),
    "two inputs": ([(images(), images())], [(images(), images() + 1)], None),
    "few different ones": ([codes(0)], [codes(1)], None),
    "numbers": ([torch.arange(5.0)], [torch.arange(9.0)], 5),
}


@pytest.mark.parametrize("kind", SHARED)
def test_held_out_samples_that_calibration_saw_are_counted(kind: str) -> None:
    calibration, held_out, shared = SHARED[kind]
    names = ["x", "y"] if kind == "two inputs" else ["x"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn_if_shared(*(Batches(data, names).statistics for data in (held_out, calibration)))
    found = [str(w.message).partition(" ")[0] for w in seen]
    assert found == ([] if shared is None else [str(shared)])


def test_data_that_is_no_real_number_is_not_judged() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hago.quantize(Words().eval(), CHIP, [torch.zeros(3, 4, dtype=torch.int64)])


# ---------------------------------------------------------------- another scale than in training
def trained_norm(batches: int = 0, **changes: Any) -> nn.Module:
    """A network whose batch norm has seen `images` of 16 samples, normalized as ImageNet's."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8, momentum=None)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    model(normalized())
    assert isinstance(norm.num_batches_tracked, Tensor)
    norm.num_batches_tracked.fill_(batches)
    for name, value in changes.items():
        getattr(norm, name)[:] = value
    return model.eval()


def normalized(samples: int = 16) -> Tensor:
    return (images(samples, 3, 8, 8) - 0.45) / 0.225


#: A network and its data, with whether it is said to be on another scale.
SCALES: Final[dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], bool]]] = {
    "as in training": (trained_norm, lambda: [normalized()], False),
    "with a little contrast": (trained_norm, lambda: [0.4 * normalized()], False),
    "from -1 to 1": (trained_norm, lambda: [2 * images(16, 3, 8, 8) - 1], False),
    "from 0 to 1": (trained_norm, lambda: [images(16, 3, 8, 8)], True),
    "from 0 to 255": (trained_norm, lambda: [255 * images(16, 3, 8, 8)], True),
    "from 0 to 255, sample by sample": (trained_norm, lambda: (255 * images(16, 3, 8, 8)).split(1), True),
    "from 0 to 255, with labels": (trained_norm, lambda: [(255 * images(16, 3, 8, 8), torch.zeros(16))], True),
    "trained on 1000 batches": (lambda: trained_norm(1000), lambda: [255 * images(16, 3, 8, 8)], True),
    "a blank sample at first": (trained_norm, lambda: [0 * normalized(8), normalized()], False),
    "few samples": (trained_norm, lambda: [normalized(7) / 100], False),
    "few batches of training": (lambda: trained_norm(9), lambda: [images(16, 3, 8, 8) / 9], False),
    "not trained": (lambda: trained_norm(running_var=1.0), lambda: [255 * images(16, 3, 8, 8)], False),
    "channels that disagree": (
        lambda: trained_norm(running_var=10.0 ** torch.arange(-4, 4)),
        lambda: [normalized()],
        False,
    ),
    "channels that are not in use": (lambda: trained_norm(running_var=0.0), lambda: [normalized()], False),
    "without a norm": (net, lambda: [255 * images()], False),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("role", ["calibration data", "held-out data"])
def test_another_scale_than_in_training_is_warned_of(kind: str, role: str) -> None:
    make, data, warned = SCALES[kind]
    model = make()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if role == "calibration data":
            hago.quantize(model, CHIP, data())
        else:
            right = [normalized() if kind != "without a norm" else images()]
            calibration = import_with_data(model, [x + 0.01 for x in right])[1]
            held_out_batches(model, calibration, data(), labels=False)
    found = [str(w.message) for w in seen if "as in training" in str(w.message)]
    assert len(found) == warned, [str(w.message) for w in seen]
    assert all(text.startswith(f"{role} is hardly scaled as in training: at batch norm '1', its") for text in found)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_labels_out_of_range_name_the_data_and_the_first_sample() -> None:
    labels = torch.tensor([0, 1, 77, 2])
    says = "^held-out data: labels from 0 to 77 do not fit outputs of 5 classes; expected 0 to 4 .sample 2 is the first"
    with pytest.warns(hago.HagoWarning, match=says):
        hago.search_quantize_strategy(
            net(), CHIP, [images() + 1.0], held_out=[(images(), labels)], searcher="default", progress=False
        )
    with pytest.raises(DataError, match=r"^calibration data: labels.*sample 2 is the first outside\)"):
        hago.search_quantize_strategy(net(), CHIP, [(images(), labels)], objective="accuracy", progress=False)


def test_folders_that_are_not_the_classes_of_the_network(tmp_path: Path) -> None:
    folder = class_folders(tmp_path, "cat", "dog")
    says = (
        re.escape(f"calibration data {str(folder)!r} has 2 folders for the 5 classes of the network.")
        + r".*\(cat = 0, dog = 1\).*else pass labels in an .npz file or by a callable.*--mean and --std"
    )
    with pytest.warns(hago.HagoWarning, match=says):
        hago.quantize(net(), CHIP, load_data(str(folder)))
    pixels = torch.cat([x for x, _ in load_data(str(folder))])
    np.savez(tmp_path / "x.npz", images=pixels.numpy(), labels=np.array([3, 3, 4, 4]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hago.quantize(net(), CHIP, load_data(str(tmp_path / "x.npz")))
        hago.quantize(net(), CHIP, load_data(str(class_folders(tmp_path / "all", *"abcde"))))


def test_a_file_that_was_cut_off_is_told(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.npz", tmp_path / "cut.npz"
    np.savez(whole, images=images().numpy())
    cut.write_bytes(whole.read_bytes()[:500])
    with pytest.raises(DataError, match="^data '.*cut.npz' cannot be read: it is no .npz file, or was cut off .*write"):
        load_data(str(cut))
    assert hago.quantize(net(), CHIP, load_data(str(whole))).strategy


@pytest.mark.parametrize("make", ["empty", "both", "nothing"])
def test_messages_on_files_name_the_data(make: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    if make == "empty":
        np.savez(path)
    else:
        path = tmp_path / "images"
        path.mkdir()
        if make == "both":
            Image.new("RGB", (8, 8)).save(class_folders(tmp_path, "cat") / "x.png")
    with pytest.raises(DataError, match=f"^data {str(path)!r} holds"):
        load_data(str(path))


# ---------------------------------------------------------------- models of other kinds
class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.words(ids).mean(1))


def test_indices_are_explained() -> None:
    model, ids = Words().eval(), torch.arange(8).reshape(2, 4)
    with pytest.raises(DataError, match=r"'words' takes integers from 0 to 9 and got integers from 5 to 12"):
        hago.quantize(model, CHIP, [ids + 5])
    with pytest.raises(DataError, match=r"It runs on ids.long\(\), of shape \(batch, 4\)"):
        hago.quantize(model, CHIP, [ids.float()])


def test_a_missing_batch_axis_is_found_where_the_model_takes_one_sample() -> None:
    model = Mean().eval()
    model.forward = lambda images: model.conv(images)  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"runs on it, but fails on its first 2 samples.*It runs on images\[None\]"):
        hago.quantize(model, CHIP, list(images()))


def test_a_model_without_a_conversion_is_told_what_its_layer_takes() -> None:
    with pytest.raises(DataError, match=r"takes \(batch, 3, height, width\). Pass the inputs that"):
        hago.quantize(Mean().eval(), CHIP, [images(2, 5, 7, 11)])


class Trying(nn.Module):
    """A model that catches the error of one layer, runs another while it does, and fails for another reason."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        self.large, self.small, self.last, self.ending = nn.Linear(9, 9), nn.Linear(3, 4), nn.Linear(5, 5), ending

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.large(x)
        except RuntimeError:
            self.small(x)
            if self.ending == "again":
                raise
        if self.ending == "other":
            raise ValueError("an error of the model itself")
        return torch.as_tensor(self.last(x))


@pytest.mark.parametrize("ending, layer", [("other", None), ("again", "large"), ("last", "last")])
def test_only_the_layer_that_raised_the_error_is_named(ending: str, layer: str | None) -> None:
    with pytest.raises(DataError) as refused:
        hago.from_torch(Trying(ending).eval(), (torch.zeros(2, 3),))
    assert re.findall(r"its Linear '(\w+)' takes", str(refused.value)) == ([] if layer is None else [layer])


def test_example_inputs_without_a_tensor_are_described() -> None:
    with pytest.raises(DataError, match="example_inputs has no tensor, but int and NoneType; the model fails on it"):
        hago.from_torch(net(), [3, None])


@pytest.mark.parametrize("shape", [(2, 3, 8, 0), (0, 3, 9, 9), (1, 100_000, 8, 8)])
def test_no_size_is_tried_of_images_that_are_empty_or_have_many_channels(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.functional.interpolate", lambda *_: pytest.fail("made another size"))
    with pytest.raises(DataError, match=r"the model fails"):
        hago.from_torch(net(), (torch.zeros(shape),))


class Optional(Net):
    """A network with inputs that it runs without."""

    def forward(self, images: Tensor, scale: Tensor | None = None, offset: Tensor | None = None) -> Tensor:
        out = super().forward(images)
        out = out if scale is None else out * scale[:, None]
        return out if offset is None else out + offset[:, None]


def test_inputs_with_a_default_are_inputs_if_the_data_has_them() -> None:
    model = Optional().eval()
    data = [{"images": images(), "scale": torch.rand(4) + 5.0, "label": torch.arange(4) % 2} for _ in range(2)]
    graph, batches = import_with_data(model, data)
    assert graph.inputs == ("images", "scale") and batches.classed
    quantizer = hago.quantize(model, "vta", data)
    inputs = (data[0]["images"], data[0]["scale"])
    assert (quantizer.realize()(*inputs) - model(*inputs)).abs().max() < 0.1 * model(*inputs).abs().max()
    assert len(hago.from_torch(model, (images(),)).inputs) == 1
    only = [{"images": images(), "offset": torch.ones(4)}]
    with pytest.raises(DataError, match="batch 0 has 'offset' without 'scale'.*give 'scale', too, or wrap the model"):
        hago.quantize(model, "vta", only)
    hago.quantize(model, "vta", [only[0] | {"scale": torch.ones(4)}])


class Nested(Net):
    """A network with two inputs that hold tensors."""

    def forward(self, views: dict[str, Tensor], more: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(views["left"]) * more[0][:, None] + more[1][:, None]


def test_two_nested_inputs_are_no_inputs_and_labels() -> None:
    model, more = Nested().eval(), (torch.rand(4) + 1.0, torch.rand(4))
    views = {"left": images()}
    expected = hago.quantize(model, "vta", [{"views": views, "more": more}]).strategy
    assert hago.quantize(model, "vta", [(views, more)]).strategy.bits == expected.bits
    _, batches = import_with_data(model, [(views, more)])
    assert not batches.labelled and len(next(iter(batches)).inputs) == 3


def test_a_model_for_one_sample_is_told_what_helps() -> None:
    class OfOne(Net):
        def forward(self, images: Tensor) -> Tensor:
            return self.fc(torch.relu(self.conv(images)).view(1, -1))

    data = [x[None] for x in images(3, 3, 8, 8)]
    with pytest.raises(DataError, match=r"fails on its first 2 samples.*such as x.flatten\(1\) for x.view\(1, -1\)"):
        hago.quantize(OfOne().eval(), "vta", data)
    hago.quantize(net(), "vta", data)  # which has flatten(1)


def test_models_are_left_as_they_were() -> None:
    model = net()
    with pytest.raises(DataError):
        hago.quantize(model, CHIP, [images(4, 1, 8, 8)])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Choosing(Net):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by

    def forward(self, images: Tensor) -> Tensor:
        if self.by == "where":
            return super().forward(torch.where(images.sum() > 0, images * 2, images))
        if self.by == "if" and images.sum() > 0:
            images = images * 2
        if self.by == "item":
            images = images[:, :, : int(images.max().item())]
        return super().forward(images)


@pytest.mark.parametrize(("by", "line"), [("if", 'if self.by == "if" and images'), ("item", "images = images[:, :,")])
def test_control_flow_by_values_names_the_line(by: str, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    says = rf"test_wrong_data.py:\d+ `{re.escape(line)}.*` depends on the values of the data.*torch.where"
    with pytest.raises(GraphError, match=says):
        hago.from_torch(Choosing(by).eval(), (images() + 8,))
    assert capfd.readouterr() == ("", "")
    hago.quantize(Choosing("where").eval(), CHIP, [images()])


class Talking(Net):
    def forward(self, images: Tensor) -> Tensor:
        print("the model runs", file=sys.stderr)
        logging.getLogger("torch.export").warning("a warning of torch")
        return super().forward(images)


def test_what_models_say_is_kept_where_they_are_exported(capfd: pytest.CaptureFixture[str]) -> None:
    handler, logger = logging.StreamHandler(sys.stderr), logging.getLogger("torch.export")
    logger.addHandler(handler)
    try:
        hago.from_torch(Talking().eval(), (images(),))
    finally:
        logger.removeHandler(handler)
    said = capfd.readouterr().err
    assert "the model runs" in said and "a warning of torch" in said


def test_a_file_of_objects_is_told_without_advice_to_run_it(tmp_path: Path) -> None:
    ragged = np.empty(2, dtype=object)
    ragged[:] = [np.zeros((1, 4, 4)), np.zeros((1, 5, 5))]
    np.savez(tmp_path / "ragged.npz", x=ragged)
    (tmp_path / "text.npz").write_text("x,y\n1,2\n")
    for name in ("ragged.npz", "text.npz"):
        with pytest.raises(DataError, match="or holds objects; expected arrays of numbers") as refused:
            load_data(str(tmp_path / name))
        assert "pickle" not in str(refused.value)


def test_an_array_that_is_called_pickle_is_no_file_of_objects(tmp_path: Path) -> None:
    file = tmp_path / "damaged.npz"
    np.savez(file, pickle=np.arange(64.0).reshape(8, 8))
    content = bytearray(file.read_bytes())
    content[content.index(b"\x93NUMPY") + 200] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="Bad CRC-32 for file 'pickle.npy'"):
        load_data(str(file))


def test_signs_that_are_still_to_be_changed_are() -> None:
    """The imaginary part of conjugates is a view of the same memory, which kernels read as it lies."""
    x = torch.arange(1.0, 5.0)
    read = as_tensor(torch._neg_view(x), "the data")
    assert not read.is_neg() and read.numpy().tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert as_tensor(x, "the data") is x


class Difference(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(a - 2.0 * b)


@pytest.mark.parametrize("keys", [("c", "a"), ("b", "c")])
def test_inputs_are_not_taken_for_one_another(keys: tuple[str, ...]) -> None:
    """One name that is right and one that is not: by position, the first would be `a`."""
    batch = {key: torch.ones(4, 3) for key in keys}
    with pytest.raises(DataError, match=r"has keys .*expected the model's inputs \['a', 'b'\]"):
        hago.quantize(Difference(), "x86_vnni", [batch])


def test_a_batch_of_other_inputs_is_refused_by_a_stored_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.rand(4, 3)
    hago.quantize(nn.Linear(3, 2).eval(), "x86_vnni", [x]).realize().save(tmp_path / "m.safetensors")
    np.savez(tmp_path / "two.npz", a=x.numpy(), b=x.numpy())
    assert main(["run", str(tmp_path / "m.safetensors"), "--data", str(tmp_path / "two.npz")]) == 2
    assert "the model takes 1 tensors (input), got 2" in capsys.readouterr().err
