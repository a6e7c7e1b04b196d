"""The safetensors file format, read by memory map and written in a stream.

    8 bytes   length n of the header, little-endian
    n bytes   JSON: {"tensor name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
              "__metadata__": {"key": "text"}}
    the rest  the tensors' bytes, row-major little-endian; the offsets count from here and leave no gap

The library of that name fails on 8-bit floats in its numpy loader, and a file from elsewhere is untrusted input: every
length in the header is compared with the file's size before anything is allocated or viewed.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from qerl_jax.errors import UserError, shown
from qerl_jax.input_files import file_size, parse_json

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the format's own limit
_PICKLE = "it looks like a PyTorch pickle, which can run code and is never loaded: convert it to safetensors"
_LOOKALIKES = {
    b"version https://git-lfs": "it is a Git LFS pointer, not the file itself: run `git lfs pull`",
    b"PK\x03\x04": _PICKLE,
    b"<": "it looks like a web page: download the file again",
}


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read-only views of the file's tensors by name; bytes are read from disk when they are used.

    Raises:
      UserError: the file is missing, or not a well-formed safetensors file of exactly the length its header states.
    """
    path = Path(path)
    file_size(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    entries, start = _header(path, data, size)
    return {name: _view(data, start, entry) for name, entry in entries.items()}


def write_safetensors(
    path: str | os.PathLike[str],
    specs: Mapping[str, jax.ShapeDtypeStruct],
    array_of: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors one at a time, so that only one of them need be in memory.

    Args:
      path: the file; the caller flushes and renames it into place.
      specs: name -> dtype and shape.
      array_of: gives the tensor of a name; called once per name, in the file's order.
      metadata: free text; transformers asks for {"format": "pt"}.
    """
    # Wide dtypes first keeps every tensor aligned to its own width.
    names = sorted(specs, key=lambda name: (-np.dtype(specs[name].dtype).itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        dtype = np.dtype(specs[name].dtype)
        begin, end = end, end + math.prod(specs[name].shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(specs[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            array = np.asarray(array_of(name), order="C")
            if (array.dtype, array.shape) != (np.dtype(specs[name].dtype), tuple(specs[name].shape)):
                raise ValueError(f"{name}: announced as {specs[name]}, given {array.dtype}{array.shape}")
            file.write(array.reshape(-1).view(np.uint8))


def _header(path: Path, data: Any, size: int) -> tuple[dict[str, dict[str, Any]], int]:
    """The checked entries of the header, and the place of the first tensor byte."""

    def refuse(what: str) -> UserError:
        return UserError(f"{path}: not a valid safetensors file: {what}{_lookalike(data[:64])}")

    if size < 8:
        raise refuse(f"it has {size} bytes; expected at least 8")
    length = int.from_bytes(data[:8], "little")
    if length > min(_MAX_HEADER, size - 8):
        raise refuse(f"its header claims {length} bytes; the file has {size}, and a header at most {_MAX_HEADER}")
    try:
        header = parse_json(data[8 : 8 + length])
    except ValueError as error:
        raise refuse(f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise refuse("its header is not a JSON object")
    header.pop("__metadata__", None)
    available = size - 8 - length
    expected = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1])):
        if (problem := _problem(entry, available)) is not None:
            raise refuse(f"tensor {shown(name)}: {problem}")
        begin, end = entry["data_offsets"]
        if begin != expected:
            raise refuse(
                f"tensor {shown(name)} begins at byte {begin}; expected {expected}, where the one before it ends"
            )
        expected = end
    if expected != available:
        raise refuse(f"its tensors have {expected} bytes by the header; the file has {available} for them")
    return header, 8 + length


def _lookalike(begin: bytes) -> str:
    """What else a file with these first bytes may be."""
    # PROTO and its version can also be the low bytes of a true header's length; then a brace follows the eight bytes.
    if begin[:1] == b"\x80" and begin[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and begin[8:9] != b"{":
        return f"; {_PICKLE}"
    return next((f"; {hint}" for start, hint in _LOOKALIKES.items() if begin.startswith(start)), "")


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _offsets(entry: Any) -> tuple[int, int]:
    """Sorting key; (0, 0) for an entry that `_problem` will refuse."""
    match entry:
        case {"data_offsets": [int(begin), int(end)]}:
            return begin, end
    return 0, 0


def _problem(entry: Any, available: int) -> str | None:
    """What is wrong with one entry of the header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return f"expected dtype, shape and data_offsets; found {shown(entry, 100)}"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"dtype is '{shown(dtype, 100)}'; known are {', '.join(DTYPES)}"
    if not _is_sizes(shape) or len(shape) > 32:
        return f"shape is {shown(shape, 100)}; expected a list of sizes"
    if not _is_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= available:
        return f"data_offsets are {shown(offsets, 100)}; expected two within the {available} bytes of the file"
    stated, needed = offsets[1] - offsets[0], math.prod(shape) * DTYPES[dtype].itemsize
    if stated != needed:
        return f"{dtype}{shape} needs {needed} bytes; data_offsets give {stated}"
    if math.prod(size for size in shape if size) * DTYPES[dtype].itemsize >= 2**63:  # of an empty tensor
        return f"shape is {shown(shape, 100)}; expected sizes whose product has 63 bits"
    return None


def _view(data: Any, start: int, entry: dict[str, Any]) -> np.ndarray:
    dtype, count = DTYPES[entry["dtype"]], math.prod(entry["shape"])
    if not count:
        return np.zeros(entry["shape"], dtype)
    flat = np.frombuffer(data, np.uint8, count * dtype.itemsize, start + entry["data_offsets"][0])
    return flat.view(dtype).reshape(entry["shape"])
