from __future__ import annotations

import io

from rl_lab.tools.terminal import plain_table, print_table

ROWS = [("a", "1.5", "x" * 200), ("long name", "22", "[atari]")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_piped_tables_are_aligned_and_never_cut() -> None:
    file = io.StringIO()
    print_table(ROWS, header=("name", "value", "text"), right=(1,), file=file)
    lines = file.getvalue().splitlines()
    assert lines[0] == "name       value  text"
    assert lines[1] == "a            1.5  " + "x" * 200
    assert lines[2] == "long name     22  [atari]"


def test_titles_indent_and_empty_tables_are_their_title() -> None:
    assert plain_table([("a", "b")], title="things") == "things\n  a  b"
    assert plain_table([], title="things") == "things"


def test_terminal_keeps_brackets_and_folds_long_cells() -> None:
    file = Terminal()
    print_table(ROWS, title="things", file=file)
    assert "[atari]" in file.getvalue() and file.getvalue().count("x") == 200
