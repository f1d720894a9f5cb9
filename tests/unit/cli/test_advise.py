import json

from meshwright.cli import main

SMALL = "advise llama3-8b --cluster 8xh100 --sequence 4096 --batch 32"


def test_every_question_is_shown_with_its_answer_and_numbers(capsys):
    assert main.main(SMALL.split()) == 0
    text = capsys.readouterr().out
    assert " 1. Is the model too big for one GPU?\n    yes: " in text
    assert "GiB" in text
    assert "Does it scale" in text
    assert "\nThe plan: plan." in text


def test_the_words_of_the_advice_are_the_plan(capsys):
    assert main.main([*SMALL.split(), "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    asked = list(SMALL.split()[1:])
    assert main.main(["plan", *asked, *advice["words"], "--exact", "--json"]) == 0
    (priced,) = json.loads(capsys.readouterr().out)["plans"]
    assert priced["plan"] == advice["plan"]["plan"]
    assert priced["seconds"] == advice["plan"]["seconds"]
    assert {step["answer"] for step in advice["steps"]} <= {"yes", "no", "taken as yes"}


def test_nothing_that_fits_is_exit_3(capsys):
    assert main.main(["advise", "llama3-70b", "--cluster", "1xa100-80g"]) == 3
    text = capsys.readouterr().out
    assert text.endswith("No plan fits these machines.\n")


def test_without_machines_the_remedy_is_told(capsys):
    assert main.main(["advise", "gpt2"]) == 2
    assert "--cluster" in capsys.readouterr().err


def test_accumulation_on_one_gpu_is_not_said_of_all(capsys):
    assert main.main(["advise", "gpt2", "--cluster", "8xh100"]) == 0
    assert "gradient accumulation: on one GPU, gradients of 16 microbatches of 32" in capsys.readouterr().out
