"""Tensor files: a JSON document and tensors in one file of the safetensors format, with a checksum.

The file holds eight bytes of length, a JSON header, and the bytes of the tensors; any safetensors reader opens it. It
is not written by the safetensors package, so that equal content gives equal bytes and hago does not depend on that
package. The document and a SHA-256 of the whole file (computed with zeros in place of its own digits) are in the
metadata of the header, so a file that was truncated or edited anywhere is refused.

References:
    The safetensors format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from hago.errors import HagoError, LogError, ModelFileError
from hago.serialization.file_kind import kind_of
from hago.serialization.json_text import parse_json

_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}
#: The order in which tensors are written, by dtype.
_RANK: Final = {dtype: i for i, dtype in enumerate(_NAMES)}
_NO_DIGEST: Final = "0" * 64
#: The key of the metadata in the header, which no tensor may have as its name.
RESERVED: Final = "__metadata__"


def storable(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be stored."""
    return dtype in _NAMES


def dtype_name(dtype: torch.dtype) -> str:
    """The name that torch gives a dtype, e.g. `float32`."""
    return str(dtype).removeprefix("torch.")


def storable_dtype(name: str) -> torch.dtype:
    """The storable dtype to which torch gives that name.

    Raises:
        HagoError: there is no such dtype, or it cannot be stored.
    """
    for dtype in _NAMES:
        if dtype_name(dtype) == name:
            return dtype
    raise HagoError(f"a tensor of dtype {name!r}")


# ---------------------------------------------------------------- writing
def to_bytes(kind: str, document: Any, tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a tensor file.

    Args:
        kind: the kind of file, in words; `from_bytes` refuses files of other kinds.
        document: JSON values.
        tensors: tensors of storable dtypes, by name.
    """
    # widest elements first, so that every tensor is aligned to its elements
    order = sorted(tensors, key=lambda n: (_RANK[tensors[n].dtype], n))
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    entries: dict[str, Any] = {RESERVED: {"kind": kind, "sha256": _NO_DIGEST, "document": text}}
    parts, end = [], 0
    for name in order:
        tensor = tensors[name].detach().cpu().contiguous()
        parts.append(tensor.flatten().view(torch.uint8).numpy().tobytes())
        start, end = end, end + len(parts[-1])
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode("ascii")
    header += b" " * (-len(header) % 8)
    content = b"".join([len(header).to_bytes(8, "little"), header, *parts])
    digest = hashlib.sha256(content).hexdigest()
    return content.replace(_quoted(_NO_DIGEST), _quoted(digest), 1)


def begins(data: bytes, kind: str) -> bool:
    """Whether bytes begin like a file of that kind; the file may be incomplete."""
    return data[8:].startswith(json.dumps({RESERVED: {"kind": kind}}).rstrip("}").encode("ascii"))


def _quoted(digest: str) -> bytes:
    return f'"sha256": "{digest}"'.encode("ascii")


# ---------------------------------------------------------------- reading
def from_bytes(data: bytes, kind: str, where: str) -> tuple[Any, dict[str, Tensor]]:
    """Read the document and the tensors from the content of a file.

    Args:
        where: the name of the file, for errors.

    Raises:
        ModelFileError: the file is of another kind, or was truncated or edited.
    """
    header, body = _header(data, kind, where)
    metadata = header.pop(RESERVED, None)
    if not isinstance(metadata, dict) or metadata.get("kind") != kind:
        other = metadata.get("kind") if isinstance(metadata, dict) else None
        raise ModelFileError(f"{where} is not a {kind}" + (f" but a {other}" if isinstance(other, str) else ""))
    digest, text = metadata.get("sha256"), metadata.get("document")
    if not isinstance(digest, str) or not isinstance(text, str) or len(digest) != 64 or not _whole(data, digest):
        raise ModelFileError(
            f"{where} was truncated or edited after it was written: its checksum differs; write it again"
        )
    tensors = {name: _tensor(name, entry, body, where) for name, entry in header.items()}
    try:
        return parse_json(text, where), tensors
    except LogError as error:
        raise ModelFileError(str(error)) from None


def _header(data: bytes, kind: str, where: str) -> tuple[dict[str, Any], memoryview]:
    # the size of a header is a multiple of 8, so its first byte is not that of a JSON object
    if data[:1] == b"{" and (other := kind_of(data)) is not None:
        raise ModelFileError(f"{where} is not a {kind} but {other.name}, for {other.used_by}")
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ModelFileError(f"{where} is not a {kind}, or was truncated: it has {len(data)} bytes")
    try:
        header = parse_json(bytes(data[8 : 8 + size]).decode("utf-8"), where)
    except (UnicodeDecodeError, HagoError):
        header = None
    if not isinstance(header, dict):
        raise ModelFileError(f"{where} is not a {kind}: it does not begin like one")
    return header, memoryview(data)[8 + size :]


def _whole(data: bytes, digest: str) -> bool:
    blank = data.replace(_quoted(digest), _quoted(_NO_DIGEST), 1)
    return hashlib.sha256(blank).hexdigest() == digest


def _tensor(name: str, entry: Any, body: memoryview, where: str) -> Tensor:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], [int(n) for n in entry["shape"]]
        start, end = (int(n) for n in entry["data_offsets"])
        if not 0 <= start <= end <= len(body) or min([0, *shape]) < 0:
            raise ValueError
        # a copy: aligned, writable, and the file's bytes can go
        flat = torch.frombuffer(bytearray(body[start:end]), dtype=dtype) if end > start else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        raise ModelFileError(
            f"{where}: tensor {name!r} has an invalid entry in the header: {str(entry)[:80]}"
        ) from None
