"""What stands for a full disk, which only root can make."""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(room=0):
    """While no file can grow beyond `room` bytes: a write that would raises EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
