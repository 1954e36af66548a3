"""Counts and lists of names in messages."""

import io
import subprocess
import sys

import pytest
from conftest import command_environment
from rich.table import Table

from vqprompt.commands.console import SafeConsole, print_json
from vqprompt.core.words import counted, duration, look_misspelled, printable, shorten


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
    [(0, "0.0 s"), (9.97, "10 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (754, "12 min 34 s"), (90_061, "25 h 1 min")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_no_name_can_change_the_terminal():
    hostile = "a\x1b[2J\x9b\x07\r\u202e\udcff\U000e0001"
    assert printable(hostile) == r"a\x1b[2J\x9b\x07\x0d\u202e\xff\U000e0001"
    assert printable("größe\tü\n") == "größe\tü\n"


def test_no_name_in_a_table_or_in_json_can_change_the_terminal(capsys):
    table = Table("class")
    table.add_row("heron\x1b[2J\x9b")
    printed = io.StringIO()
    SafeConsole(file=printed, force_terminal=True, color_system=None).print(table)
    print_json({"heron\x1b\x9b": "größe \udcff"})
    shown = printed.getvalue() + capsys.readouterr().out
    assert "heron\\x1b[2J\\x9b" in shown and '{"heron\\u001b\\u009b": "größe \\udcff"}' in shown
    assert not {"\x1b", "\x9b", "\udcff"} & set(shown)


def test_a_terminal_without_unicode_shows_escapes(home):
    environment = {**command_environment(home), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "vqprompt", "datasets"], env=environment, capture_output=True)
    assert done.returncode == 0 and done.stdout.isascii() and b"cub200" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("elefant", "elephant", True),
        ("aple", "apple", True),
        ("Red kestrel", "red_kestral", True),
        ("dogs", "dog", True),
        ("horse", "house", False),
        ("class 11", "class 12", False),
        ("n02085620", "n02085782", False),
        ("Tree_Sparrow", "Tree_Swallow", False),
        ("", "x", False),
    ],
)
def test_misspelled_names_are_told_from_different_ones(one, other, alike):
    assert look_misspelled(one, other) is look_misspelled(other, one) is alike
