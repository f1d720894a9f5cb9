"""`meshwright clusters`: the catalogue for people and for programs."""

import json

from meshwright.cli import main
from meshwright.hardware.cluster import catalogue


def answer(capsys, *words: str) -> str:
    assert main.main(["clusters", *words]) == 0
    return capsys.readouterr().out


def test_every_card_and_network_is_listed(capsys):
    text = answer(capsys)
    for name in (*catalogue().cards, *catalogue().networks):
        assert name in text


def test_lines_fit_a_terminal(capsys):
    assert max(len(line) for line in answer(capsys).splitlines()) <= 100


def test_a_program_gets_si_units(capsys):
    table = json.loads(answer(capsys, "--json"))
    h100 = next(card for card in table["cards"] if card["gpu"]["name"] == "h100")
    assert h100["gpu"]["bf16"] == 989e12
    assert h100["scale_up"]["bandwidth"] == 450e9
    assert h100["network"]["bandwidth"] == 50e9
    assert set(table) == {"cards", "links", "networks"}
