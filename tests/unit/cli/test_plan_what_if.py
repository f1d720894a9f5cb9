from asking import answer, told

ASKED = "plan gpt2 --cluster 8xh100 --sequence 1024 --batch 64"


def test_a_change_is_held_to_the_rules_of_a_run(capsys):
    assert "learned positions" in told(capsys, ASKED, "--what-if", "sequence=2048", code=2)


def test_an_assumed_precision_is_assumed_anew_on_a_card_without_it(capsys):
    found = answer(capsys, ASKED, "--what-if", "cluster=8xv100-32g")
    assert found["assumed_then"] == ["precision = fp16"]
    assert found["base"]["plan"]["precision"] == "bf16"
    assert found["same_plan"]["plan"]["precision"] == found["plans"][0]["plan"]["precision"] == "fp16"
    assert "assumed then: precision = fp16" in told(capsys, ASKED, "--what-if", "cluster=8xv100-32g")


def test_a_stated_precision_that_a_card_lacks_is_kept_and_told(capsys):
    found = answer(capsys, ASKED, "plan.precision=bf16", "--what-if", "cluster=8xv100-32g")
    assert found["assumed_then"] == []
    assert found["plans"][0]["plan"]["precision"] == "bf16"
    assert "v100-32g has no bf16" in told(capsys, ASKED, "plan.precision=bf16", "--what-if", "cluster=8xv100-32g")
    assert "v100-32g has no bf16" in told(capsys, ASKED.replace("h100", "v100-32g"), "plan.precision=bf16")


def test_the_same_plan_has_the_mathematics_that_was_chosen(capsys):
    vary = ["plan.tp=1", "plan.pp=1", "plan.cp=1", "--vary", "optimizer", "--vary", "batch", "--vary", "precision"]
    found = answer(capsys, ASKED, *vary, "--what-if", "network=10gbe")  # one node: nothing changes
    base, same = found["base"], found["same_plan"]
    assert (base["master_weights"], base["batch"], base["plan"]["precision"]) != ("fp32", 64, "bf16")
    assert same == base
    text = told(capsys, ASKED, *vary, "--what-if", "network=10gbe")
    assert f"batch={base['batch']}" in text
    assert f"precision={base['plan']['precision']}" in text


def test_another_batch_takes_more_microbatches_of_the_same_size(capsys):
    found = answer(capsys, ASKED, "--what-if", "batch=128")
    base, same = found["base"]["plan"], found["same_plan"]["plan"]
    assert same == base | {"grad_accum": 2 * base["grad_accum"]}
    assert answer(capsys, ASKED, "--what-if", "batch=8", "plan.microbatch=8")["same_plan"] is None
