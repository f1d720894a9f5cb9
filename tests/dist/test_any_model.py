"""Models that are not ours, under plans: what is equal passes, what cannot be is refused or caught."""

import importlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import strangers
import torch
from strangers import TOWER, Tied, Tower, averaged, batches, loss, plain
from waiting import HANG

from meshwright.config.check import missing
from meshwright.parallel.model_spec import ModelSpec, sequential_stage
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError
from meshwright.verify import parity
from meshwright.verify.prove import TOLERANCES

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", ["verify_transformers_llama", "verify_vision_transformer"])
def test_an_example_proves_its_plans(example, tmp_path):
    if "transformers" in example:
        pytest.importorskip("transformers")
    words = [sys.executable, str(EXAMPLES / f"{example}.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=HANG, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["shard=2,zero=3", "tp=2", "pp=2,schedule=1f1b"]
    assert all(line.endswith("equal") for line in lines[2:])
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


def test_the_package_is_imported_without_torch():
    words = [sys.executable, "-c", "import sys, meshwright.verify; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(words, timeout=HANG).returncode == 0


def test_a_model_that_says_nothing_is_copied_and_sharded():
    plans = ["grad_accum=4", "replicate=2", "shard=2,zero=1,grad_accum=2", "shard=2,zero=2", "shard=2,zero=3"]
    verdicts = parity(plain, batches(), loss, plans)
    assert [verdict.plan for verdict in verdicts] == plans
    assert [verdict.first_bad for verdict in verdicts] == [None] * 5
    assert all(verdict.passed for verdict in verdicts)


def test_a_model_that_answers_is_split_every_way():
    plans = ["tp=2", "pp=2,schedule=gpipe", "pp=2,schedule=zbv", "shard=2,zero=3,tp=2"]
    verdicts = parity(Tower, batches(), loss, [*plans, Plan(replicate=2, microbatch=4, precision="fp64")], TOWER)
    assert [verdict.first_bad or verdict.error for verdict in verdicts] == [""] * 5
    assert verdicts[0].gradient_deviation <= TOLERANCES["fp64"][0]
    assert verdicts[-1].plan.startswith("replicate=2")


def test_a_stranger_is_computed_anew_and_compiled(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    vision = importlib.import_module("verify_vision_transformer")
    plans = ["recompute=selective", "shard=2,zero=3,recompute=full", "tp=2,recompute=every-3", "pp=2,recompute=sqrt"]
    if not any(missing(Plan(microbatch=1, compile=True))):
        plans.append("shard=2,zero=3,compile=true")
    images = [vision.batch(step) for step in range(2)]
    verdicts = parity(vision.VisionTransformer, images, vision.loss, plans, vision.VIT)
    assert [verdict.first_bad or verdict.error for verdict in verdicts] == [""] * len(plans)
    assert max(verdict.gradient_deviation for verdict in verdicts) < 1e-12


def test_a_model_that_works_between_its_blocks_cannot_recompute_several_together():
    whole, several = parity(strangers.Scaled, batches(), loss, ["recompute=full", "recompute=every-2"])
    assert whole.passed, whole
    assert several.error.strip().endswith("use plan.recompute = full, which takes each block by itself")


def test_a_named_precision_is_used_on_both_sides():
    torch.manual_seed(0)  # from some weights a gradient is so small that bf16 turns its sign, and AdamW's step with it
    (verdict,) = parity(Tower, batches(), loss, ["shard=2,zero=3,precision=bf16"], TOWER)
    assert verdict.passed, verdict
    assert verdict.weight_deviation > 1e-9  # it is not secretly float64


def test_an_average_of_averages_is_caught():
    (verdict,) = parity(Tower, batches(), averaged, ["replicate=2"])
    assert not verdict.passed
    assert verdict.first_bad is not None
    assert verdict.first_bad.startswith("step 1: loss")


def test_a_plan_that_breaks_tells_its_own_words_and_the_others_go_on():
    wrong = ModelSpec(tp_plan=strangers.half_a_table, stage_fn=TOWER.stage_fn)
    broken, whole = parity(Tower, batches(), loss, ["tp=2", "replicate=2"], wrong)
    assert not broken.passed
    assert "rank" in broken.error
    assert whole.passed


def refused(*args, **kwargs) -> list[str]:
    with pytest.raises(InputError) as error:
        parity(*args, **kwargs)
    return [str(problem) for problem in error.value.problems]


def test_every_missing_answer_is_named_at_once():
    problems = refused(Tower, batches(), loss, ["tp=2", "pp=2", "cp=2", "shard=2,zero=1,ep=2"])
    assert "plan tp=2: plan.tp = 2 needs the model's split table" in problems[0]
    assert "pp=2: plan.pp = 2 needs the model's cut points" in problems[1]
    assert "plan.cp = 2 puts another attention into the model" in problems[2]
    assert "plan.ep = 2 shares out the experts" in problems[3]
    assert len(problems) == 4


def test_parts_that_share_or_lose_a_weight_are_refused():
    both = refused(Tower, batches(), loss, ["pp=2"], ModelSpec(stage_fn=strangers.forgetful))
    assert [problem.split(";")[0] for problem in both] == [
        "plan pp=2: 2 stages hold end.bias",
        "plan pp=2: 2 stages hold end.weight",
    ]
    lost = ModelSpec(stage_fn=partial(sequential_stage, before=("begin", "end"), after=("end",)))
    assert "plan pp=2: no stage holds end.weight" in "\n".join(refused(Tower, batches(), loss, ["pp=2"], lost))
    (tied,) = refused(Tied, batches(), loss, ["pp=2"], TOWER)
    assert tied.startswith("plan pp=2: end.weight of a stage is in the whole model another weight, tied to it")


def test_a_split_table_that_cuts_nothing_is_refused():
    (problem,) = refused(Tower, batches(), loss, ["tp=2", "replicate=2"], ModelSpec(tp_plan=strangers.misnamed))
    assert problem.startswith("no module is called layers.*.dwon, which the split table cuts")


CALLS = [
    ((lambda: Tower(), batches(), loss, ["replicate=2"]), "make_model is a function that ranks"),
    ((Tower, [], loss, ["replicate=2"]), "there are no batches"),
    ((Tower, [(torch.ones(4, 3), torch.ones(3))], loss, ["replicate=2"]), "different numbers of rows"),
    ((Tower, [torch.ones(4, 3)], loss, ["replicate=2"]), "not a tuple or dict"),
    ((Tower, batches(), loss, []), "no plan to prove"),
    ((Tower, batches(), loss, ["replicate=3"]), "batches of 8 rows are not"),
    ((Tower, batches(), loss, ["replcate=2"]), "did you mean plan.replicate?"),
    ((Tower, batches(), loss, ["shard=2"]), "shards nothing"),
    ((Tower, batches(), loss, ["recompute=some"]), "plan.recompute = 'some' is not a recompute policy"),
    ((Tower, batches(), loss, ["pp=2,schedule=zbv,compile=true"], TOWER), "needs its two halves"),
    ((Tower, batches(), loss, ["pp=8", "tp=2"], TOWER), "8 stages are more than the model's 4 blocks"),
]


@pytest.mark.parametrize(("arguments", "told"), CALLS, ids=[told for _, told in CALLS])
def test_what_cannot_be_proved_is_refused_before_a_rank_starts(arguments, told):
    assert told in "\n".join(refused(*arguments))
