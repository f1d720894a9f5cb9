"""`meshwright verify`: what is equal passes, what is wrong is caught and named."""

import json
import shutil
from pathlib import Path

import bugs
import msgspec
import pytest
import safetensors.torch
from commands import TINY, meshwright
from waiting import HANG

from meshwright.runtime.ranks import RankError, Remote, run_ranks
from meshwright.verify import prove
from meshwright.verify.evidence import compare
from meshwright.verify.prove import TOLERANCES, ParityResult


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("verify")
    prove.write_ragged(made / prove.TEXT)
    return made


def test_the_standard_set_for_eight_ranks_is_equal_to_one_process(folder):
    # As deep and as long as its plans can cut, and one step that begins with states: what is wrong shows here too.
    words = ("arch.layers=4", "sequence=16", "--steps", "2")
    done = meshwright("verify", "--matrix", "--ranks", "8", "--json", *words, folder=folder)
    verdicts = json.loads(done.stdout)
    bad = [verdict for verdict in verdicts if not verdict["passed"]]
    assert not bad, msgspec.json.encode(bad).decode()
    assert done.returncode == 0
    assert len(verdicts) == len(prove.matrix(8))
    keys = {"plan", "passed", "loss_deviation", "norm_deviation", "gradient_deviation", "weight_deviation", "first_bad"}
    assert verdicts[0].keys() >= keys
    certificates = json.loads((folder / "runs/verify-matrix/certificate.json").read_text())
    assert sum(len(certificate["verdicts"]) for certificate in certificates) == len(verdicts)
    assert all(certificate["tolerance"] <= 1e-11 for certificate in certificates)


def seeded(folder: Path, bug: str, plan: str, model: str, words: tuple[str, ...] = ()) -> ParityResult:
    """A plan with a bug beside the true reference."""
    ((reference, [(_, run)]),) = prove.jobs(model, [*TINY[1:], *words], [plan], 2, folder)
    theirs, ours = folder / f"reference-{bug}", folder / f"plan-{bug}"
    for each in (theirs, ours):
        each.mkdir()
    run_ranks(Remote("meshwright.verify.evidence", "record"), 1, (reference, folder / "cache", theirs), HANG)
    run_ranks(bugs.record, run.plan.world, (run, folder / "cache", ours, bug), HANG)
    return compare(run, theirs, ours, TOLERANCES["fp64"][0], 0.0)


CASES = [
    ("gradient_not_reduced", "cp=2", "tiny", "step 1: gradient of embed.weight"),
    ("norm_counted_twice", "tp=2", "tiny", "step 1: gradient norm"),
    ("loss_averaged_per_rank", "replicate=2", "tiny", "step 1: loss"),
    ("expert_left_out_of_the_norm", "shard=2,zero=3,ep=2", "tiny-moe", "step 1: gradient norm"),
    ("microbatch_dropped", "replicate=2,grad_accum=2", "tiny", "step 1: loss"),
]


@pytest.mark.parametrize(("bug", "plan", "model", "named"), CASES, ids=[case[0] for case in CASES])
def test_a_classic_bug_is_caught_and_named(folder, bug, plan, model, named):
    verdict = seeded(folder, bug, plan, model)
    assert not verdict.passed
    assert verdict.first_bad is not None
    assert verdict.first_bad.startswith(named)


@pytest.mark.parametrize("name", ["adafactor", "sm3", "lamb"])
def test_an_optimizer_that_takes_its_shard_for_the_whole_is_caught(folder, name):
    bug = "optimizer_of_its_own_shard"
    again = folder / name
    again.mkdir()
    prove.write_ragged(again / prove.TEXT)
    verdict = seeded(again, bug, "shard=2,zero=3", "tiny", (f"optim.name={name}",))
    assert verdict.first_bad is not None
    assert verdict.first_bad.startswith("step 2: ")  # SM3 is right until there is something to bound
    assert verdict.state_deviation > 1e-3


def test_an_optimizer_state_that_is_off_is_named(folder):
    ((reference, _),) = prove.jobs("tiny", list(TINY[1:]), ["grad_accum=2"], 2, folder)
    theirs, ours = folder / "states", folder / "other-states"
    theirs.mkdir()
    run_ranks(Remote("meshwright.verify.evidence", "record"), 1, (reference, folder / "cache", theirs), HANG)
    shutil.copytree(theirs, ours)
    assert compare(reference, theirs, ours, TOLERANCES["fp64"][0], 0.0).passed
    states = safetensors.torch.load_file(ours / "states.safetensors")
    states["second/blocks.1.attn.q.weight"][1] *= 1 + 1e-6
    safetensors.torch.save_file(states, ours / "states.safetensors")
    verdict = compare(reference, theirs, ours, TOLERANCES["fp64"][0], 0.0)
    assert verdict.first_bad is not None
    assert verdict.first_bad.startswith("step 2: optimizer state second/blocks.1.attn.q.weight")


def test_a_run_file_is_proved_on_its_own_data(folder):
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 300)
    (folder / "run.toml").write_text(
        'sequence = 32\nbatch = 4\n[arch]\npreset = "tiny"\nlayers = 2\n'
        '[data]\nsource = "text.txt"\n[optim]\nwarmup = 1\n'
    )
    words = ["verify", "run.toml", "--plan", "shard=2,zero=3", "--plan", "grad_accum=2", "--steps", "2"]
    done = meshwright(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 plans equal" in done.stdout


def test_a_named_precision_is_used_on_both_sides(folder):
    words = ("tiny", *TINY[1:], "--plan", "shard=2,zero=3,precision=bf16", "--json")
    done = meshwright("verify", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    (certificate,) = json.loads((folder / "runs/verify-tiny/certificate.json").read_text())
    assert certificate["run"]["plan"]["precision"] == "bf16"
    assert json.loads(done.stdout)[0]["gradient_deviation"] > 1e-9  # it is not secretly float64


def test_fp8_of_models_that_route_has_the_numbers_of_one_process_to_the_last_digits(folder):
    words = (
        "tiny-moe",
        "plan.precision=fp8",
        "arch.layers=2",
        "sequence=16",
        "--plan",
        "replicate=2",
        "--plan",
        "pp=2",
        "--plan",
        "tp=2",
        "--plan",
        "cp=2",
    )
    done = meshwright("verify", *words, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    found = [value for each in json.loads(done.stdout) for name, value in each.items() if name.endswith("_deviation")]
    assert max(found) < 1e-11  # a token that changes experts is seen at 0.1, scales of other tokens at 0.01
    certificates = json.loads((folder / "runs/verify-tiny-moe/certificate.json").read_text())
    assert {each["reference"] for each in certificates} == {prove.OWN_REFERENCES["fp8"][0]}
    assert all(each["reason"].startswith("reference arithmetic") for each in certificates)


BAD = [
    (["--plan", "tp=3"], "arch.kv_heads = 4 cannot be sharded over plan.tp = 3 ranks"),
    (["--plan", "cp=4,tp=2", "sequence=24"], "cannot be split into 16 equal slices"),
    (["--plan", "tp"], "is not field=value"),
    (["--plan", "tq=2"], "did you mean plan.tp?"),
    ([], "no plan to prove"),
    (["tinny", "--plan", "tp=2"], "neither a run file nor a model"),
]


@pytest.mark.parametrize(("words", "told"), BAD, ids=[told for _, told in BAD])
def test_what_cannot_be_proved_is_refused_before_a_rank_starts(tmp_path, words, told):
    done = meshwright("verify", *words, folder=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_rank_that_fails_brings_all_down_with_its_own_words():
    with pytest.raises(RankError, match=r"(?s)rank 1: .*broken on purpose"):
        run_ranks(bugs.fail_on_one, 2, (), HANG)
