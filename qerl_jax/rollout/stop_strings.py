"""Where a completion's text ends and how much of it can be shown while it grows.

Tokens and characters do not meet at the same borders: a token may hold half a character, or the end of the text and the
beginning of a stop string.
"""

from collections.abc import Callable, Iterator, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text; a character that is not complete at the end becomes U+FFFD."""

_WINDOW = 32  # tokens: a look at a growing text makes the text of up to twice as many, or of more if they have none


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of the stop strings in `text` begins, or None."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def tokens_until_stop(decode: Decode, ids: Sequence[int], stops: Sequence[str], new: int | None = None) -> int | None:
    """The fewest tokens whose text holds a stop string, or None: the `until` of `Engine.generate`.

    With `new` it may be None by mistake: the whole text is made only if the last so many tokens, with those before them
    that a stop string may begin in, seem to end one. They do not where it goes on over special tokens, or a decoder
    makes something else of a part than of the whole.
    """

    def holds(count: int) -> bool:
        return any(first_stop(text, stops) is not None for text in _texts(decode, ids[:count]))

    if not stops or (new is not None and not _seems_to_end(decode, ids, stops, new)):
        return None
    return _fewest(len(ids), holds) if holds(len(ids)) else None


def _seems_to_end(decode: Decode, ids: Sequence[int], stops: Sequence[str], new: int) -> bool:
    size = new + 4 * max(map(len, stops))  # a token is a byte or more of at most four a character, but for special ones
    for count in range(size, size + 4):  # the first token may be in a character
        texts = list(_texts(decode, ids[-count:]))
        if any(first_stop(text, stops) is not None for text in texts):
            return True
        if not texts[0].startswith("\ufffd"):
            return False
    return False


def cut_at_stop(decode: Decode, ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int]:
    """The text before the first stop string, and the fewest tokens that spell it; the last of them may go on into the
    stop string. Without a stop string, the whole text and all tokens."""
    text = decode(ids)
    place = first_stop(text, stops)
    if place is None:
        return text, len(ids)

    def spells(count: int) -> bool:
        return any(found.startswith(text[:place]) for found in _texts(decode, ids[:count]))

    return text[:place], _fewest(len(ids), spells)


def showable(text: str, stops: Sequence[str]) -> str:
    """The part of a growing text that no further token can change: without a character that is not complete, and
    without the beginning of what may become a stop string."""
    text = text.rstrip("\ufffd")
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return text[:-length]
    return text


class GrowingText:
    """The part of a growing text that can be shown, in a time that does not grow with the text.

    Each look makes the text of the newest tokens alone, from a token on that stays the same for many looks: what a
    decoder makes of the beginning of a part (it may leave out a space, or half a character) stays so too.

    Args:
      decode: token ids to text.
      stops: the text ends where the first of them begins.
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._shown, self._ended = "", False
        self._start, self._skip = 0, 0  # the first token looked at, and how much of the text from there on is shown

    def grown(self, ids: Sequence[int]) -> str:
        """What can be shown of the text of `ids`, which begin with those of the call before."""
        if self._ended:
            return self._shown
        text = self._decode(ids[self._start :])
        rest = text[self._skip :]
        stop = first_stop(rest, self._stops)
        self._ended = stop is not None
        new = showable(rest, self._stops) if stop is None else rest[:stop]
        self._shown += new
        self._skip += len(new)
        # With Llama 2's tokenizer half a character makes U+FFFD of whole ones before it, if they are bytes too.
        if len(ids) - self._start > 2 * _WINDOW and not text.endswith("\ufffd"):
            self._start_later(ids, text)
        return self._shown

    def _start_later(self, ids: Sequence[int], text: str) -> None:
        """Looks from the last `_WINDOW` tokens on, if what they make is the end of `text` and some of it is shown."""
        left = len(text) - self._skip
        for start in range(len(ids) - _WINDOW, len(ids) - _WINDOW - 4, -1):  # the first token may be in a character
            end = self._decode(ids[start:])
            if text.endswith(end) and len(end) > left:
                self._start, self._skip = start, len(end) - left
                return


def _texts(decode: Decode, ids: Sequence[int]) -> Iterator[str]:
    """The text, and while a character at its end is not complete those of up to three tokens less: with Llama 2's
    tokenizer, half a character makes U+FFFD of whole ones before it, if they are bytes too."""
    for count in range(len(ids), max(-1, len(ids) - 4), -1):
        text = decode(ids[:count])
        yield text
        if not text.endswith("\ufffd"):
            return


def _fewest(most: int, holds: Callable[[int], bool]) -> int:
    """The smallest count at which `holds` is true. It must be true at `most`, and stay true once it is."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
