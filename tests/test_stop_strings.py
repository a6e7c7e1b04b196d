"""Stop strings and half characters, with a vocabulary of byte strings."""

import random

import pytest

from qerl_jax.rollout.stop_strings import cut_at_stop, first_stop, showable, tokens_until_stop

EURO = "€".encode()
PIECES = [b"a", b"b", b"##", b"# ", b"a#", EURO[:1], EURO[1:], b"STOP", b"xyz##q"]


def decode(ids):
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


def of_bytes(ids):
    """As in Llama 2's tokenizer, where a run of bytes is a text only as a whole."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


@pytest.mark.parametrize(
    ("ids", "stops", "until", "text", "count"),
    [
        ([0, 1, 7, 0], ["STOP"], 3, "ab", 2),  # a token of its own
        ([0, 4, 2, 0], ["##"], 3, "aa", 2),  # begins in one token, ends in the next
        ([1, 8, 0], ["##"], 2, "bxyz", 2),  # inside one token
        ([2, 3, 0], ["###"], 2, "", 0),  # at the very beginning
        ([0, 1, 0, 7], ["STOP", "ba"], 3, "a", 1),  # the first of several
        ([0, 1], ["STOP"], None, "ab", 2),
        ([5, 6, 7], ["STOP"], 3, "€", 2),
        ([0, 1], [], None, "ab", 2),
    ],
)
def test_the_text_ends_before_the_stop_string(ids, stops, until, text, count):
    found = tokens_until_stop(decode, ids, stops)
    assert found == until
    assert cut_at_stop(decode, ids[:found], stops) == (text, count)
    for more in ([], [0], [7, 2]):  # what comes later does not matter
        assert until is None or tokens_until_stop(decode, ids + more, stops) == until


@pytest.mark.parametrize(("stop", "until", "before"), [("\n", 7, 6), ("好", 10, 7), ("a好", None, 0), ("é😀", 6, 0)])
def test_half_a_character_that_hides_others_hides_no_stop_string(stop, until, before):
    ids = list("é😀\n好é😀".encode())
    for more in ([], [0xE5], [0xE5, 0xA5], [0xF0, 0x9F, 0x98]):
        found = tokens_until_stop(of_bytes, ids + more, [stop])
        assert found == until
        if found is not None:
            assert cut_at_stop(of_bytes, ids[:found], [stop])[1] == before


@pytest.mark.parametrize("text_of", [decode, of_bytes])
def test_looks_at_the_newest_tokens_find_a_stop_string_as_soon_as_looks_at_all(text_of):
    draw = random.Random(0)
    for _ in range(300):
        if text_of is decode:
            ids = draw.choices(range(len(PIECES)), k=40)
        else:
            ids = list("".join(draw.choices("ab#é好😀\n", k=30)).encode())[:40]
        stops = ["".join(draw.choices("ab#é好😀\n€", k=draw.randint(1, 4))) for _ in range(2)]
        for end in range(4, 41, 4):
            found = tokens_until_stop(text_of, ids[:end], stops)
            assert tokens_until_stop(text_of, ids[:end], stops, new=4) == found
            if found is not None:
                break


def test_a_look_takes_no_longer_in_a_long_text():
    lengths = []

    def counted(ids):
        lengths.append(len(ids))
        return decode(ids)

    assert tokens_until_stop(counted, [0, 1] * 5000, ["STOP"], new=32) is None
    assert sum(lengths) == 48


def test_first_stop():
    assert first_stop("one two", ["two", "ne"]) == 1
    assert first_stop("one", ["two"]) is None


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("price \ufffd", [], "price "),
        ("price \ufffd\ufffd", [], "price "),
        ("answer #", ["##"], "answer "),
        ("answer ST", ["STOP", "Tx"], "answer "),
        ("answer SX", ["STOP"], "answer SX"),
        ("answer TO", ["STOP"], "answer TO"),
        ("a", ["aaa"], ""),
        ("abc", [], "abc"),
    ],
)
def test_what_may_still_change_is_not_shown(text, stops, shown):
    assert showable(text, stops) == shown


def test_pieces_shown_in_turn_make_the_text():
    ids, stops = [0, 5, 6, 4, 0, 8, 0], ["##q"]
    shown = ""
    for count in range(1, len(ids) + 1):
        if tokens_until_stop(decode, ids[:count], stops) is not None:
            break
        now = showable(decode(ids[:count]), stops)
        assert now.startswith(shown) and "\ufffd" not in now and "#q" not in now
        shown = now
    text, _ = cut_at_stop(decode, ids[:count], stops)
    assert text.startswith(shown) and text == "a€a#axyz"
