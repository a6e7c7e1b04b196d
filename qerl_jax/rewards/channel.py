"""Messages over a pipe: eight bytes of length, then a pickle.

Both ends are this library's own processes, of one user and one run, so a pickle is no new trust: it carries whatever
values a data set holds.
"""

import pickle
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")


def packed(message: Any) -> bytes:
    """The bytes of a message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def unpacked(data: bytes | bytearray) -> tuple[bool, Any]:
    """(whether `data` holds a whole message, the message)."""
    if len(data) < _LENGTH.size:
        return False, None
    (length,) = _LENGTH.unpack_from(data)
    body = memoryview(data)[_LENGTH.size :]
    return (True, pickle.loads(body[:length])) if len(body) >= length else (False, None)


def read(stream: BinaryIO) -> Any:
    """The next message of a blocking stream.

    Raises:
      EOFError: the other side is gone.
    """
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    if len(body) < length:
        raise EOFError
    return pickle.loads(body)
