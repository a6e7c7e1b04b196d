"""Stop strings and half characters, with a vocabulary of byte strings; growing texts with tokenizers of many kinds."""

import random
from itertools import chain
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from qerl_jax.models.tokenizer import Tokenizer, load_tokenizer
from qerl_jax.rollout.stop_strings import GrowingText, cut_at_stop, first_stop, showable, tokens_until_stop

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


FOLDERS = Path(__file__).parent / "oracles" / "tokenizers"
WORDS = ["▁a", "b", "▁", "▁▁", "é", "##x", "c</w>", "d|", "|", " ", "!", "▁好", "<s>", "</s>"]
DECODERS = {
    "llama2": decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ]),
    "metaspace": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece(cleanup=True),
    "bpe": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
}  # fmt: skip


def tokenizer_of(name):
    if name not in DECODERS:
        return load_tokenizer(name if ":" in name else FOLDERS / name)
    pieces = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Backend(models.WordLevel({piece: id for id, piece in enumerate(pieces)}, unk_token="!"))
    made.decoder = DECODERS[name]
    return Tokenizer(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def drawn_ids(draw, name, tokenizer):
    """Any ids, or of few, or with many special tokens in a row; bytes only where they make whole characters."""
    count, bytes_from = draw.randrange(1, 400), len(WORDS)
    some = draw.sample(range(bytes_from if name in DECODERS else len(tokenizer)), 10)
    kind = draw.randrange(3)
    if name == "llama2" and kind < 2:
        pieces = [[bytes_from + byte for byte in char.encode()] for char in draw.choices("a é好😀\n", k=count)]
        return list(chain.from_iterable(draw.choice([piece, some[:1]]) if kind else piece for piece in pieces))
    if kind == 0 and name not in DECODERS:
        return draw.choices(range(len(tokenizer)), k=count)
    if kind == 1:
        return draw.choices(some, k=count)
    special = tokenizer.all_special_ids
    pieces = ([draw.choice(special)] * draw.choice([0, 40, 70]) + draw.choices(some, k=50) for _ in range(4))
    return list(chain.from_iterable(pieces))


@pytest.mark.parametrize("name", ["builtin:quickstart", "qwen2", "qwen3", "llama30", "llama31", "llama32", *DECODERS])
def test_a_text_grows_as_if_it_were_made_whole_each_time(name):
    tokenizer, draw = tokenizer_of(name), random.Random(0)

    def text_of(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    for _ in range(60):
        ids, stops = drawn_ids(draw, name, tokenizer), []
        if draw.random() < 0.3 and (whole := text_of(ids)):
            begin = draw.randrange(len(whole))
            stops = [] if "\ufffd" in (stop := whole[begin : begin + draw.randint(1, 6)]) else [stop, "STOP"]
        growing, expected, count = GrowingText(text_of, stops), "", 0
        while count < len(ids):
            count = min(len(ids), count + draw.choice([1, 4, 4, 4, 33]))
            text = text_of(ids[:count])
            now = text[:stop] if (stop := first_stop(text, stops)) is not None else showable(text, stops)
            expected = max(expected, now, key=len)  # bytes of half a character may hide others for a while
            assert growing.grown(ids[:count]) == expected
            if stop is not None:
                break
        assert text_of(ids[:count]).startswith(expected)


def test_a_growing_text_takes_no_longer_when_it_is_long():
    lengths = []

    def counted(ids):
        lengths.append(len(ids))
        return decode(ids)

    growing, ids = GrowingText(counted, ["##q"]), [0, 5, 6, 4] * 1000
    for count in range(4, len(ids) + 1, 4):
        assert growing.grown(ids[:count]) == "a€a#" * (count // 4 - 1) + "a€a"
    assert max(lengths) < 80
    growing.grown([*ids, 8])
    assert growing.grown([*ids, 8, 0]) == decode(ids) + "xyz"


def test_nor_where_each_window_begins_in_a_character():
    """Of three tokens: where one ends with a look, the first of the last 32 tokens is its second byte."""
    lengths = []

    def counted(ids):
        lengths.append(len(ids))
        return bytes(ids).decode(errors="replace")

    growing, ids = GrowingText(counted, []), "好".encode() * 1000
    for count in range(4, len(ids) + 1, 4):
        assert growing.grown(ids[:count]) == "好" * (count // 3)
    assert max(lengths) < 80
