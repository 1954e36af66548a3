"""Counts and lists of names in messages."""

import pytest

from vqprompt.core.words import counted, duration, printable, shorten


def test_one_is_singular_and_everything_else_is_plural():
    assert counted(1, "class") == "1 class" and counted(2, "class") == "2 classes"
    assert counted(1, "new image") == "1 new image" and counted(0, "new image") == "0 new images"
    assert counted(2, "batch") == "2 batches"


def test_a_long_list_is_cut_and_counted():
    assert shorten([]) == ""
    assert shorten(["a", "b"]) == "'a', 'b'"
    assert shorten(["a", "b", "c"], 2) == "'a', 'b' … (3 in total)"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "1 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (754, "12 min 34 s"), (90_061, "25 h 1 min")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_no_name_can_change_the_terminal():
    hostile = "a\x1b[2J\x9b\x07\r\u202e\udcff\U000e0001"
    assert printable(hostile) == r"a\x1b[2J\x9b\x07\x0d\u202e\xff\U000e0001"
    assert printable("größe\tü\n") == "größe\tü\n"
