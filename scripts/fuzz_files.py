"""Feed hago mutated files: it must load each, or refuse it with one short HagoError.

    python scripts/fuzz_files.py --count 10000                   # every kind
    python scripts/fuzz_files.py --kind strategy log --seed 3
    python scripts/fuzz_files.py --kind model --only 1234        # one case again

Kinds: hardware, strategy, front, log, rfc (a log of the prototype), losses (a table of sensitivities) and kernels (the
manifest of built kernels), all JSON; npz and image (calibration data), weights (a state dict) and safetensors; ranges
and modes (tables of TPU-MLIR); model and checkpoint (sealed anew so that their checksums are right). `quantizer`,
`replay`, `page` and `training` are strategies, logs and checkpoints, too, which are not only loaded but used, because
some parts are read only then. A case
depends on (seed, kind, number) alone. Cases run in child processes; if one crashes, another child continues after it.
A model that loads must give the same outputs in both engines, or refuse to run. The exit status is 1 if anything else
happened; the cases are printed, so that they can be run again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import functools
import hashlib
import io
import json
import logging
import multiprocessing
import random
import re
import resource
import signal
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tqdm import tqdm

import hago
from hago.arithmetic.types import dtype
from hago.calibration import make_given_ranges
from hago.data import ImageShape, load_data
from hago.data.sources import read_image
from hago.errors import HagoError, HagoWarning
from hago.graph.model_source import read_weights
from hago.hardware import Groups, OpDesc, TensorScheme
from hago.qat import run as checkpoint
from hago.qat.run import Checkpoint
from hago.report import ReportOptions, page_of, read_records
from hago.report.gather import report_of_log
from hago.runtime.native import build
from hago.runtime.stored_model import KIND
from hago.search import load_front
from hago.serialization.tensor_file import from_bytes, to_bytes
from hago.study import read_log
from hago.study.rfc_log import read_rfc_log

#: The longest message in characters, and the most memory in bytes and time in seconds of a case.
LONGEST: Final = 2500
MEMORY: Final = 6 << 30
SECONDS: Final = 60
#: Values that replace others.
ODD: Final = (
    None, True, False, 0, -1, 1, 2, 3.5, 1e308, -0.0, 10**18, 10**30, -(10**19), float("nan"), float("inf"), "", "x",
    "int8",
    "float32", "../../etc/passwd", "/etc/passwd", "os:system", "package.module:x", "__reduce__", "a" * 5000, [], {},
    [[]], {"": 0}, [None] * 50, {"__enum__": True, "fqn": "os:system", "name": "x"}, "\u005f_enum__", "\ud800", "\0",
)  # fmt: skip


# ---------------------------------------------------------------- what is mutated
def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 5),
    ).eval()


def _data() -> list[torch.Tensor]:
    return [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))]


def _groups() -> hago.Hardware:
    """Convolutions that multiply groups of weights, and linear layers with weights in groups alone."""
    product = OpDesc(["int8", "int8", "int32"], "int32", groups=Groups(4, 4, dtype("int16")))
    alone = OpDesc(["float32", "int4"], "float32", groups=Groups(16))
    symmetric = TensorScheme("symmetric")
    return hago.Hardware({"conv2d": product, "linear": alone}, activation=symmetric, weight=symmetric)


def originals(folder: Path) -> dict[str, bytes]:
    """A valid file of every kind."""
    model, data = _network(), _data()
    paths = {kind: folder / f"{kind}{ENDINGS.get(kind, '.' + kind)}" for kind in READERS}
    hago.search_quantize_strategy(
        model, "x86_vnni", data, searcher="random", budget=6, progress=False,
        save=paths["strategy"], front=paths["front"], log=paths["log"],
    )  # fmt: skip
    hago.create_quantizer(model, "x86_vnni", paths["strategy"], data).realize().save(paths["model"])
    hago.quantize(model, _groups(), data).realize().save(paths["groups"])
    hago.search_quantize_strategy(
        model, "x86_vnni", data, searcher="gradient", budget=3, progress=False, log=paths["replay"],
        keep_float=["4"], fix_bits={"0:1": 8}, thresholds={"0": (-2.0, 2.0)},
    )  # fmt: skip
    hago.save_hardware(hago.load_hardware("x86_vnni"), paths["hardware"])
    hago.measure_sensitivity(model, "x86_vnni", data).save(paths["losses"])
    np.savez(paths["npz"], images=data[0].numpy(), labels=np.arange(4))
    state = model.state_dict()
    torch.save(state, paths["weights"])
    save_file(state, paths["safetensors"])
    Checkpoint(_SETTINGS, 3, 1.5, {**state, "optimizer.step": torch.tensor(3)}).save(paths["checkpoint"])
    Image.fromarray(data[0][0].clamp(0, 1).mul(255).byte().permute(1, 2, 0).numpy()).save(paths["image"])
    paths["ranges"].write_text("# op_name threshold min max\n0 2.5 -1.0 2.5\n4 1.0e-05 0 1\n#int4_th\n0 1.0 -1.0 1.0\n")
    paths["modes"].write_text("# op_name quantize_mode\n0 W4INT8\n4 F16\n")
    library = {"library": _LIBRARY[0], "bytes": len(_LIBRARY[1]), "sha256": hashlib.sha256(_LIBRARY[1]).hexdigest()}
    paths["kernels"].write_text(json.dumps(library))
    strategy = {"bits": [8, 4, 16], "model_hash": -12, "thresholds": [1.0, 0.5], "topology": {"node_conds": [True]}}
    line = json.dumps({"result": {"accuracy": 0.5}, "strategy": strategy, "version": 0.1})
    paths["rfc"].write_text(f"{line}\n{line}\n")
    _finetune(paths["training"])
    paths["quantizer"].write_bytes(paths["strategy"].read_bytes())
    paths["page"].write_bytes(paths["log"].read_bytes())
    return {kind: path.read_bytes() for kind, path in paths.items()}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutated_json(value: Any, rng: random.Random) -> Any:
    """The JSON value with one to three changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed(value, rng.choice(list(places(value))), rng)
    return value


def _changed(value: Any, path: tuple[Any, ...], rng: random.Random) -> Any:
    if not path:
        return copy.deepcopy(rng.choice(ODD)) if rng.random() < 0.1 else value
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key, here = path[-1], parent[path[-1]]
    choice = rng.randrange(7)
    if choice == 0:
        del parent[key]
    elif choice == 1 and isinstance(parent, dict):
        parent[str(rng.choice(ODD))[:200]] = parent.pop(key)
    elif choice == 2 and isinstance(parent, list):
        parent.insert(key, json.loads(json.dumps(here)))
    elif choice == 3 and isinstance(here, (int, float)) and not isinstance(here, bool):
        parent[key] = rng.choice((here + 1, here - 1, -here, float(here), here * 2, here * 10**6, str(here)))
    elif choice == 4:
        parent[key] = f"nested {rng.choice((3, 90, 110, 2000, 100_000))} deep"  # see `text_of`
    elif choice == 5 and isinstance(here, str):
        parent[key] = rng.choice((here[::-1], here + "x", here[:-1], here.upper(), f"{here}\0", here * 1000))
    else:
        parent[key] = copy.deepcopy(rng.choice(ODD))
    return value


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    """The bytes with some changed, removed, reversed or inserted."""
    made = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, size = rng.randrange(len(made) + 1), rng.choice((1, 2, 16, 300))
        choice = rng.randrange(5)
        if choice == 0:
            del made[at:]
        elif choice == 1:
            del made[at : at + size]
        elif choice == 2:
            made[at:at] = rng.randbytes(size)
        elif choice == 3:
            made[at : at + size] = made[at : at + size][::-1]
        elif at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        if not made:
            break
    return bytes(made)


def text_of(value: Any, rng: random.Random) -> bytes:
    """The text of a JSON value, in which the string `nested N deep` becomes N nested lists."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    text = re.sub(r'"nested (\d+) deep"', lambda m: "[" * int(m[1]) + "]" * int(m[1]), text)
    return text.encode("utf-8", "surrogatepass")


def mutated(kind: str, content: bytes, rng: random.Random) -> bytes:
    """A mutation of a valid file."""
    if rng.random() < 0.25 or kind in ("image", "ranges", "modes"):
        return mutated_bytes(content, rng)
    if kind in ("npz", "weights"):
        return zipped(content, rng)
    if kind in SEALED:
        return sealed(content, SEALED[kind], rng)
    if kind == "safetensors":
        size = int.from_bytes(content[:8], "little")
        header = text_of(mutated_json(json.loads(content[8 : 8 + size]), rng), rng)
        return len(header).to_bytes(8, "little") + header + content[8 + size :]
    if kind not in ("log", "replay", "page", "rfc"):
        return text_of(mutated_json(json.loads(content), rng), rng)
    lines = content.splitlines()
    # most of what a replay reads is in the header
    number = 0 if kind == "replay" and rng.random() < 0.7 else rng.randrange(len(lines))
    lines[number] = text_of(mutated_json(json.loads(lines[number]), rng), rng)
    return b"\n".join(lines) + b"\n"


def zipped(content: bytes, rng: random.Random) -> bytes:
    """A zip file of which one member is mutated, with the right checksum."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        names = old.namelist()
        chosen = rng.choice([n for n in names if n.endswith(".pkl")] or names)
        for name in names:
            new.writestr(name, mutated_bytes(old.read(name), rng) if name == chosen else old.read(name))
    return made.getvalue()


def sealed(content: bytes, kind: str, rng: random.Random) -> bytes:
    """A stored model or checkpoint with a mutated document or a mutated tensor, and the right checksum."""
    document, tensors = from_bytes(content, kind, "the valid file")
    if rng.random() < 0.75:
        # NaN and infinities, which JSON does not have, become strings
        document = json.loads(json.dumps(mutated_json(document, rng)), parse_constant=lambda name: name)
    else:
        name = rng.choice(sorted(tensors))
        tensors[name] = hostile(tensors[name], rng)
    return to_bytes(kind, document, tensors)


def hostile(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A tensor of another shape or dtype, or with an extreme value."""
    made = tensor.clone()
    choice = rng.randrange(6)
    if choice == 0:
        return made.reshape(-1)
    if choice == 1:
        return made.to(rng.choice((torch.float64, torch.int64, torch.bool, torch.uint8, torch.float16)))
    if choice == 2:
        return made.reshape(-1)[:0]
    if choice == 3:
        return made.unsqueeze(0)
    flat = made.reshape(-1)
    if flat.numel():
        largest = torch.finfo(made.dtype).max if made.is_floating_point() else 127
        odd = (float("nan"), float("inf"), largest) if made.is_floating_point() else (largest, -largest, 1)
        flat[rng.randrange(flat.numel())] = rng.choice(odd)
    return made


# ---------------------------------------------------------------- what reads it
def _load_model(path: Path) -> None:
    plain = hago.load_integer_model(path, engine="reference")
    fast = hago.load_integer_model(path)
    for batch in _data():
        one, other = (_leaves(model(batch)) for model in (plain, fast))
        for a, b in zip(one, other, strict=True):
            same = a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
            if not same:
                raise AssertionError("the engines differ")


def _leaves(outputs: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]


def _load_npz(path: Path) -> None:
    for _ in load_data(str(path)):
        pass


@functools.cache
def _graph() -> hago.Graph:
    return hago.from_torch(_network(), (_data()[0][:2],))


def _make_quantizer(path: Path) -> None:
    """Apply a strategy; the inputs that it holds are read only if a module is exported with them."""
    strategy = hago.Strategy.load(path)
    unchanged = [{"dtype": "float32", "shape": [2, 3, 8, 8]}]
    graph = _graph() if strategy.made_by.get("inputs", {}).get("tensors") == unchanged else _network()
    hago.create_quantizer(graph, "x86_vnni", strategy).simulate()(*_data())
    hago.replay(_graph(), "x86_vnni", path, _data())


def _replay(path: Path) -> None:
    """Replay a log, take its scores in another search, and continue it; refused if all three refuse it."""
    done = 0
    for read in (
        lambda: hago.replay(_graph(), "x86_vnni", path, _data()),
        lambda: _search(reuse=[path], searcher="default"),
        lambda: _search(log=path, searcher="gradient", keep_float=["4"], fix_bits={"0:1": 8}, thresholds=_RANGES),
    ):
        try:
            read()
            done += 1
        except HagoError as error:
            refused = error
    if not done:
        raise refused


def _search(**options: Any) -> None:
    hago.search_quantize_strategy(_graph(), "x86_vnni", _data(), budget=3, progress=False, **options)


def _finetune(path: Path) -> None:
    hago.finetune(
        _graph(), "x86_vnni", _graph_strategy(), _data(), objective="mse", steps=2, checkpoint=path, progress=False
    )


@functools.cache
def _graph_strategy() -> hago.Strategy:
    return hago.quantize(_graph(), "x86_vnni", _data()).strategy


def _load_kernels(path: Path) -> None:
    library = path.with_name(_LIBRARY[0])
    library.write_bytes(_LIBRARY[1])
    library.chmod(0o755)
    path.chmod(0o600)
    kept = build._kept(path)
    if kept is not None and kept != library:
        raise AssertionError(f"another library is taken: {kept}")
    if kept is None:
        raise HagoError("it is built anew")


def _make_page(path: Path) -> None:
    """The page of a log, without its network."""
    report = report_of_log(
        read_records([path]), hago.load_hardware("x86_vnni"), ReportOptions(), lambda source: [], running=False
    )
    page_of(report.to_json())


#: The function that reads each kind of file.
READERS: Final[dict[str, Callable[[Path], object]]] = {
    "hardware": hago.load_hardware,
    "strategy": hago.Strategy.load,
    "front": load_front,
    "log": lambda path: read_log(path, lambda text: None),
    "npz": _load_npz,
    "model": _load_model,
    "groups": _load_model,
    "rfc": read_rfc_log,
    "weights": read_weights,
    "safetensors": read_weights,
    "checkpoint": lambda path: Checkpoint.load(path, _SETTINGS),
    "image": lambda path: read_image(path, ImageShape((8, 8))),
    "ranges": lambda path: make_given_ranges(path, None, hago.load_hardware("x86_vnni")),
    "modes": lambda path: make_given_ranges(None, path, hago.load_hardware("x86_vnni")),
    "kernels": _load_kernels,
    "losses": lambda path: read_records([path]),
    "page": _make_page,
    "quantizer": _make_quantizer,
    "replay": _replay,
    "training": _finetune,
}
ENDINGS: Final = dict.fromkeys(("hardware", "strategy", "front", "quantizer", "kernels", "losses"), ".json") | {
    "npz": ".npz", "image": ".png", "weights": ".pt", "replay": ".jsonl", "page": ".jsonl",
}  # fmt: skip
SEALED: Final = {"model": KIND, "groups": KIND, "checkpoint": checkpoint._KIND, "training": checkpoint._KIND}
_SETTINGS: Final = {"steps": 5, "rate": 0.1, "graph": "abc"}
_LIBRARY: Final = ("kernels-0123.so", b"not a library")
_RANGES: Final = {"0": (-2.0, 2.0)}


class _TooLong(BaseException):
    pass


def _ring(*_: object) -> None:
    raise _TooLong


def outcome(kind: str, content: bytes, folder: Path) -> str:
    """The result of reading a file: `loaded`, `refused`, or a description of what went wrong."""
    path = folder / f"case{ENDINGS.get(kind, '.' + kind)}"
    path.write_bytes(content)
    signal.signal(signal.SIGALRM, _ring)
    signal.alarm(SECONDS)
    try:
        with said_aside() as notices:
            READERS[kind](path)
        if (longest := max(map(len, notices), default=0)) > LONGEST:
            return f"a notice of {longest} characters"
    except HagoError as error:
        said = str(error)
        if len(said) > LONGEST or said.count("\n") > 25:
            return f"a message of {len(said)} characters and {said.count(chr(10)) + 1} lines"
        return "refused"
    except _TooLong:
        return f"took more than {SECONDS} s"
    except MemoryError:
        return f"took more than {MEMORY >> 30} GiB"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    finally:
        signal.alarm(0)
    return "loaded"


class _Kept(logging.Handler):
    def __init__(self, kept: list[str]) -> None:
        super().__init__()
        self.kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())


@contextlib.contextmanager
def said_aside() -> Iterator[list[str]]:
    """Collect hago's log records and warnings while the context is open, without showing them."""
    notices: list[str] = []
    logger, handler = logging.getLogger("hago"), _Kept(notices)
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield notices
        notices += [str(w.message) for w in caught if issubclass(w.category, HagoWarning)]
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def _child(kind: str, content: bytes, seed: int, numbers: range, sent: Any) -> None:
    """Run the cases of a range; send the number of each before it begins, and its result after it."""
    faulthandler.disable()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            sent.send((number, ""))
            made = mutated(kind, content, random.Random(f"{seed} {kind} {number}"))
            sent.send((number, outcome(kind, made, Path(folder))))
    sent.send((None, ""))


def run(kind: str, content: bytes, seed: int, numbers: range, bar: Any) -> dict[int, str]:
    """The results of the cases, by number."""
    context, found = multiprocessing.get_context("fork"), dict[int, str]()
    while numbers:
        received, sent = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(kind, content, seed, numbers, sent))
        child.start()
        sent.close()
        begun: int | None = None
        with contextlib.suppress(EOFError):
            while (said := received.recv())[0] is not None:
                begun, result = said
                if result:
                    found[begun] = result
                    bar.update()
        child.join()
        if begun is None or begun in found:
            break
        found[begun] = f"ended the process, with {child.exitcode}"
        bar.update()
        numbers = range(begun + 1, numbers.stop)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", nargs="+", choices=sorted(READERS), default=sorted(READERS))
    parser.add_argument("--count", type=int, default=10_000, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case, whose file is kept and named")
    args = parser.parse_args(arguments)
    _graph()  # once for all children
    # in a child: a process that has computed gradients cannot fork another that does, with PyTorch built for GPUs
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(1) as pool:
        good = pool.apply(originals, (Path(folder),))
    bad = 0
    for kind in args.kind:
        if args.only is not None:
            made = mutated(kind, good[kind], random.Random(f"{args.seed} {kind} {args.only}"))
            kept = Path(tempfile.mkdtemp()) / f"case{ENDINGS.get(kind, '.' + kind)}"
            kept.write_bytes(made)
            print(f"{kind} {args.only}: {kept}", flush=True)
        numbers = range(args.count) if args.only is None else range(args.only, args.only + 1)
        with tqdm(total=len(numbers), desc=kind, disable=None) as bar:
            found = run(kind, good[kind], args.seed, numbers, bar)
        wrong = {n: said for n, said in found.items() if said not in ("loaded", "refused")}
        counts = Counter(said for said in found.values() if said in ("loaded", "refused"))
        print(f"{kind}: {len(found)} files, {counts['loaded']} loaded, {counts['refused']} refused, {len(wrong)} wrong")
        for said, times in Counter(wrong.values()).most_common(20):
            first = next(n for n, other in wrong.items() if other == said)
            print(f"  {times} x {said}  (--kind {kind} --seed {args.seed} --only {first})")
        bad += len(wrong)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
