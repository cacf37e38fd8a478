"""The operators that a stored model may name: none does more than give a value or raise, whatever its arguments are."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from products import whole
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from hago.ops import _opaque

#: Calls of every overload.
DRAWS = 60 if whole() else 4
NUMBERS = (0, 1, -1, 2, 3, 7, -3, 1 << 16, -(1 << 31), (1 << 31) - 1, 1 << 40, (1 << 63) - 1, -(1 << 63))
REALS = (0.0, 1.0, -1.0, 0.5, 1e38, -1e300, float("inf"), float("nan"))
SHAPES = ((), (0,), (1,), (3,), (2, 3), (3, 3), (2, 3, 4), (2, 3, 4, 5), (1, 2, 3, 3, 3), (2, 0, 3))
DTYPES = (torch.float32, torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)


def overloads() -> list[str]:
    """Every overload that a file may name."""
    names = []
    for base in sorted(_opaque.PORTABLE):
        packet = getattr(torch.ops.aten, base, None)  # an older torch lacks some
        targets = [] if packet is None else [f"aten.{base}.{overload}" for overload in packet.overloads()]
        names += [t for t in targets if _opaque.why_not_portable({"target": t}) is None]
    return names


def tensor(rng: random.Random) -> torch.Tensor:
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    count = torch.Size(shape).numel()
    if dtype.is_floating_point:
        drawn = [rng.choice((*REALS, rng.gauss(0, 1))) for _ in range(count)]
    elif dtype == torch.bool:
        drawn = [rng.random() < 0.5 for _ in range(count)]
    else:
        span = torch.iinfo(dtype)
        drawn = [rng.choice((0, 1, -1, 2, 5, span.min, span.max)) for _ in range(count)]
        drawn = [min(max(v, span.min), span.max) for v in drawn]
    return torch.tensor(drawn, dtype=dtype).reshape(shape)


def argument(kind: str, rng: random.Random) -> Any:
    """A value of a type of torch's schemas."""
    if any(name in kind for name in ("Layout", "MemoryFormat", "Device")):
        return None
    if kind.startswith("Optional["):
        return None if rng.random() < 0.4 else argument(kind[len("Optional[") : -1], rng)
    if kind.startswith("List["):
        return [argument(kind[len("List[") : -1], rng) for _ in range(rng.randrange(5))]
    if kind == "Tensor":
        return tensor(rng)
    if kind in ("int", "SymInt"):
        return rng.choice(NUMBERS[:7] if rng.random() < 0.6 else NUMBERS)
    if kind in ("number", "Scalar"):
        return rng.choice((*NUMBERS, *REALS, True))
    if kind == "float":
        return rng.choice(REALS)
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "str":
        return rng.choice(
            ("", "mean", "sum", "none", "tanh", "floor", "trunc", "constant", "ij,jk->ik", "ii->i", "x" * 999)
        )
    return None  # layouts, devices, memory formats and generators


def constant(kind: str, rng: random.Random) -> Any:
    """A dtype, or None where that is allowed: `why_not_portable` sees to that."""
    return rng.choice((None, *DTYPES)) if "Optional" in kind else rng.choice(DTYPES)


def call(target: str, seed: int) -> None:
    """One call as a stored model makes it: on tensors without values first, as `plan.document_checks` does."""
    rng = random.Random(f"{target} {seed}")
    overload = _opaque.resolve_target(target)
    schema = overload._schema.arguments  # type: ignore[attr-defined]

    def made(a: Any) -> Any:
        return (constant if "ScalarType" in str(a.real_type) else argument)(_kind(a), rng)

    args = [made(a) for a in schema if not a.kwarg_only]
    kwargs = {a.name: made(a) for a in schema if a.kwarg_only and (not a.has_default_value() or rng.random() < 0.3)}
    try:
        with FakeTensorMode() as mode:
            fake = tree_map(lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v, (args, kwargs))
            shown = overload(*fake[0], **fake[1])
        values = shown if isinstance(shown, (list, tuple)) else [shown]
        if any(isinstance(v, torch.Tensor) and v.numel() > 1 << 22 for v in values):
            return
        overload(*args, **kwargs)
    except Exception as error:
        if isinstance(error, MemoryError):
            raise


def _kind(a: Any) -> str:
    real = str(a.real_type)
    return real if any(name in real for name in ("Layout", "MemoryFormat", "Device", "ScalarType")) else str(a.type)


def run_all(targets: list[str]) -> None:
    """In a process of its own: every call, the last one named on the standard output."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for target in targets:
        for seed in range(DRAWS):
            print(target, seed, flush=True)
            signal.alarm(20)  # ends the process where a call does not
            call(target, seed)
            signal.alarm(0)
    print("ended")


@pytest.mark.parametrize("part", range(2))
def test_no_call_ends_the_process_or_hangs(part: int) -> None:
    targets = overloads()[part::2]
    code = f"import sys; sys.path[:0] = {sys.path!r}; import warnings; warnings.simplefilter('ignore'); "
    code += f"import products; products.asked['whole'] = {whole()}; import json; "
    code += "import runtime.test_portable_operators as t; "
    code += f"t.run_all(json.loads({json.dumps(targets)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=False)
    assert done.returncode == 0 and done.stdout.endswith("ended\n"), (done.stdout[-200:], done.stderr[-2000:])


def test_unsafe_operators_are_left_out() -> None:
    unsafe = {"segment_reduce", "_unsafe_index", "as_strided", "empty", "from_file", "nonzero", "put", "set", "resize"}
    assert not unsafe & _opaque.PORTABLE
    assert len(overloads()) > len(_opaque.PORTABLE)
