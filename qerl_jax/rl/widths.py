"""How wide micro-batches may be; without JAX, since configurations are checked by it."""

NARROWEST = 128  # of the widths that are not T itself: narrower rows save less than compiling for them takes
_MULTIPLE = 16  # of such a width


def widths_of(longest: int, buckets: int) -> tuple[int, ...]:
    """T, T / 2, T / 4, .. up to a multiple of 16, as long as they are at least NARROWEST."""
    widths = [longest]
    for k in range(1, buckets):
        width = -(-longest // (2**k * _MULTIPLE)) * _MULTIPLE
        if not NARROWEST <= width < widths[-1]:
            break
        widths.append(width)
    return tuple(widths)
