"""Counts and lists of names in messages."""

from vqprompt.core.words import counted, shorten


def test_one_is_singular_and_everything_else_is_plural():
    assert counted(1, "class") == "1 class" and counted(2, "class") == "2 classes"
    assert counted(1, "new image") == "1 new image" and counted(0, "new image") == "0 new images"
    assert counted(2, "batch") == "2 batches"


def test_a_long_list_is_cut_and_counted():
    assert shorten([]) == ""
    assert shorten(["a", "b"]) == "'a', 'b'"
    assert shorten(["a", "b", "c"], 2) == "'a', 'b' … (3 in total)"
