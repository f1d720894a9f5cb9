"""What fits only with a host, and what is said where nobody knows how much that has."""

import pytest
from asking import answer, told

GIB = 2**30
ALONE = "plan llama3-8b --cluster 1xrtx-4090"


def test_a_model_too_large_for_a_node_is_offloaded(capsys):
    found = answer(capsys, "plan llama3-70b --cluster 8xa100-80g")
    first = found["plans"][0]
    assert (first["plan"]["zero"], first["plan"]["cpu_offload"], first["fits"]) == (3, True, True)
    assert found["answer"]["fits"] is True
    less = answer(capsys, "plan llama3-70b --cluster 8xa100-80g plan.activation_offload=true --top 1")["plans"][0]
    assert less["headroom_bytes"] > 25 * GIB


def test_a_host_of_which_nobody_knows_is_asked_about_first(capsys):
    text = told(capsys, ALONE)
    assert text.splitlines()[0].startswith(
        "Does each machine have 120 GiB of host memory free? 1xrtx-4090 does not say"
    )
    found = answer(capsys, ALONE)
    assert (found["answer"]["fits"], found["plans"][0]["fits"]) == (None, None)
    assert found["plans"][0]["plan"]["cpu_offload"]


def test_a_neighbour_that_wants_an_unknown_host_says_how_much(capsys):
    words = ALONE, "plan.activation_offload=true"
    others = {each["change"]: each for each in answer(capsys, *words)["neighbours"]}
    faster = others["recompute full → none"]  # and it wants half as much again of the host, so it is not the first
    assert faster["fits"] is None
    assert faster["problem"].startswith("if there are 185.6 GiB of host RAM per GPU")
    assert faster["problem"] in told(capsys, *words)
    known = {each["change"]: each for each in answer(capsys, *words, "goal.host_gib=128")["neighbours"]}
    assert known["recompute full → none"]["fits"] is False


def test_a_host_that_is_told_is_an_answer(capsys):
    assert answer(capsys, ALONE, "goal.host_gib=128")["answer"]["fits"] is True


def test_too_small_a_host_is_the_reason_that_nothing_fits(capsys):
    text = told(capsys, ALONE, "goal.host_gib=16", code=3)
    assert text.startswith("Nothing fits. Of the nearest plan, the most loaded rank needs ")
    assert "of host RAM per GPU; there are 16.0" in text
    assert "8 of these GPUs" in text


@pytest.mark.parametrize(("size", "said"), [("0", "out of range"), ("-1", "out of range"), ("much", "should be")])
def test_a_host_that_none_has_is_refused(capsys, size, said):
    assert said in told(capsys, ALONE, f"goal.host_gib={size}", code=2)


def test_a_stated_plan_on_an_unknown_host_is_a_question_too(capsys):
    exact = "--exact --sequence 1024 plan.zero=3 plan.cpu_offload=true plan.microbatch=1 plan.recompute=full --json"
    found = answer(capsys, ALONE, *exact.split()[:-1])
    assert found["plans"][0]["fits"] is None


def test_the_fewest_gpus_are_told_with_and_without_the_host(capsys):
    lines = told(capsys, ALONE, "--gpus-needed").splitlines()
    assert "of host memory free?" in lines[0]
    assert lines[1] == "At least 1 rtx-4090 is needed, with offload to the host; 8 without."
    found = answer(capsys, "plan llama3-70b --cluster 8xa100-80g --gpus-needed")
    assert (found["gpus"], found["gpus_without_offload"]) == (8, 16)
    same = "plan llama3-70b --cluster 72xgb200 --gpus-needed"  # two trays of four hold it either way
    assert told(capsys, same).startswith("At least 8 gb200 are needed.\n")


def test_the_largest_asks_only_where_nothing_fits_for_sure(capsys):
    sure = told(capsys, "plan --cluster 1xrtx-4090 --largest model").splitlines()[0]
    assert sure.endswith("does not fit without host memory, of which the cluster says nothing (goal.host_gib)")
    found = answer(capsys, ALONE, "--largest", "sequence", "--batch", "1")
    assert found["plans"][0]["fits"] is None
    assert "host memory" in found["host_question"]


@pytest.mark.parametrize(
    "what", ["llama3.2-1b --largest sequence --batch 512", "--largest model --sequence 8192 --batch 8192"]
)
def test_no_step_of_more_than_an_hour_is_offered_as_the_largest(capsys, what):
    found = answer(capsys, f"plan --cluster 1xa100-80g {what}")
    assert found["plans"][0]["seconds"] <= 3600
    assert "hours a step: more than one is not offered" in found["end"]
    assert found["end"].startswith(str(found["next"]))


def test_advice_offloads_before_it_asks_for_more_gpus(capsys):
    text = told(capsys, "advise llama3-70b --cluster 8xa100-80g")
    assert "not even then" not in text
    assert "plan.cpu_offload=true" in text
    assert told(capsys, "advise llama3-8b --cluster 1xrtx-4090").startswith("Does each machine have ")
