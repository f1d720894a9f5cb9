"""`--help` of every verb, on a terminal of 80 columns."""

import pytest

from meshwright.cli import main


@pytest.mark.parametrize("verb", main.VERBS)
def test_no_option_is_wider_than_the_terminal(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main.parse([verb, "--help"])
    _, *parts = capsys.readouterr().out.split("\n\n")  # the usage apart, whose words argparse does not break
    assert parts
    assert [line for part in parts for line in part.splitlines() if len(line) > 80] == []
