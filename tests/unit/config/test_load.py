import tomllib
from operator import attrgetter

import msgspec
import pytest

from meshwright.config import load, schema
from meshwright.config.run import Run, digest
from meshwright.spec.problem import InputError


def problems(*words, file=None, **options):
    with pytest.raises(InputError) as caught:
        load.load(file, words, **options)
    return [str(problem) for problem in caught.value.problems]


def test_without_a_file_it_is_the_default_run():
    loaded = load.load(None, default_ranks=2)
    assert loaded.run.name == "starter"
    assert loaded.run.plan.replicate == 2
    assert loaded.origins["plan.replicate"] == "derived: ranks"
    assert loaded.origins["steps"] == "default run"


def test_a_file_extends_another_and_the_command_line_has_the_last_word(tmp_path):
    (tmp_path / "base.toml").write_text(
        'steps = 7\nsequence = 64\n[arch]\npreset = "tiny"\n[optim]\nlr = 0.5\ngrad_clip = 2.0\n'
    )
    (tmp_path / "top.toml").write_text('extends = "base.toml"\nsequence = 128\n\n[optim]\nlr = 0.25\n')
    loaded = load.load(tmp_path / "top.toml", ["optim.grad_clip=0.125"])
    run = loaded.run
    assert (run.steps, run.sequence, run.optim.lr, run.optim.grad_clip) == (7, 128, 0.25, 0.125)
    assert loaded.origins["steps"] == f"{tmp_path}/base.toml:1"
    assert loaded.origins["sequence"] == f"{tmp_path}/top.toml:2"
    assert loaded.origins["optim.lr"] == f"{tmp_path}/top.toml:5"
    assert loaded.origins["optim.grad_clip"] == "command line"
    assert loaded.origins["arch.layers"] == "preset tiny"
    assert loaded.origins["arch.head_dim"] == "derived: hidden ÷ heads"


def test_a_run_written_and_read_again_is_the_same(tmp_path):
    mix = '[{source="a", weight=2.0}, {source="b \\"x\\" \\n"}]'
    run = load.load(None, [f"data.mix={mix}", "optim.lr=1e-7", 'log.writers=["wandb"]', "data.end_token=5"]).run
    file = tmp_path / "run.toml"
    file.write_text(load.write(run))
    assert load.load(file).run == run


def test_an_override_of_a_string_needs_no_quotes():
    assert load.load(None, ["data.source=text/*.txt"]).run.data.source == "text/*.txt"
    assert load.load(None, ["name=123"]).run.name == "123"
    assert load.load(None, ['name="a b"']).run.name == "a b"


def test_every_problem_is_told_at_once():
    told = problems("stepz=3", "optim.schedule=cosin", "seed=abc", "batch=15", "arch.hiden=3", default_ranks=2)
    assert len(told) == 5
    assert any("stepz is not a key; did you mean steps?" in line for line in told)
    assert any("did you mean 'cosine'?" in line for line in told)
    assert any('seed = "abc" should be a whole number' in line for line in told)
    assert any("batch = 15 is not microbatch 7 × grad_accum 1 × 2 data ranks" in line for line in told)
    assert any("arch.hiden is not a key; did you mean arch.hidden?" in line for line in told)
    assert all(line.startswith("command line: ") for line in told)


def test_a_problem_names_its_file_and_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('steps = 3\n\n[arch]\npreset = "tiny"\n\n[optim]\nrate = 3e-4\n')
    assert problems(file=file) == [f"{file}:7: optim.rate has a new name; write optim.lr"]


@pytest.mark.parametrize(("theirs", "ours"), schema.ELSEWHERE.items())
def test_what_other_tools_call_it_is_translated_to_a_key_that_exists(theirs, ours):
    assert ours in schema.every_key()
    assert problems(f"{theirs}=1") == [f"command line: {theirs} is not a key; here it is called {ours}"]


@pytest.mark.parametrize("key", [key for key, kind in schema.every_key().items() if not schema.is_struct(kind)])
def test_one_wrong_letter_in_any_key_is_refused_with_a_suggestion(key):
    *sections, last = key.split(".")
    wrong = ".".join([*sections, last[:-1] + ("q" if last[-1] != "q" else "x")])
    if wrong.rsplit(".", 1)[-1] in schema.ELSEWHERE or wrong in schema.every_key():
        return
    (told,) = problems(f"{wrong}=1")
    assert "is not a key; did you mean" in told


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("steps = ", "is not TOML"),
        ("steps = 1\nsteps = 2", "is not TOML"),
        ("steps = 3", "does not say what to train"),
        ('[arch]\npreset = "lama3-8b"', "did you mean llama3-8b?"),
        ("[arch]\nlayers = 3", "arch.vocab is missing"),
        ('extends = "nowhere.toml"', "No such file"),
        ('extends = "run.toml"', "circle"),
        ("extends = 3", "is not a file name"),
        ('arch = "tiny"', "should be a table"),
        ('[arch]\npreset = "tiny"\n[data]\nmix = [{sauce = "x"}]', "data.mix.0.source is missing"),
        ('[arch]\npreset = "tiny"\n[optim]\nlr = nan', "optim.lr = nan is out of range"),
        ('[arch]\npreset = "tiny"\nvocab = 1000000000000', "beyond any model"),
        ('steps = true\n[arch]\npreset = "tiny"', "steps = true should be a whole number"),
    ],
)
def test_a_bad_file_is_refused_with_its_reason(tmp_path, text, word):
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert any(word in line for line in problems(file=file))


def test_a_file_that_is_not_text_or_not_there_is_refused(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large.toml").write_bytes(b"#" * 2_000_000)
    assert "not UTF-8" in problems(file=tmp_path / "binary.toml")[0]
    assert "larger than" in problems(file=tmp_path / "large.toml")[0]
    assert "No such file" in problems(file=tmp_path / "absent.toml")[0]
    assert "Is a directory" in problems(file=tmp_path)[0]


def test_control_characters_never_reach_the_terminal():
    (told,) = problems('name="x"', 'optim.schedule="\\u001b[31mred"')
    assert "\x1b" not in told


def test_ranks_that_are_not_the_plan_are_refused():
    (told,) = problems("plan.replicate=4", "batch=8", ranks=2)
    assert "the plan needs replicate 4 = 4 ranks, not 2" in told


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), (2, 8, 1)),
        (("plan.grad_accum=4",), (2, 2, 4)),
        (("plan.microbatch=2",), (2, 2, 4)),
        (("plan.shard=2", "plan.zero=3"), (1, 8, 1)),
        (("plan.replicate=1",), (1, 16, 1)),
    ],
)
def test_what_a_plan_leaves_open_follows_from_the_batch(words, expected):
    plan = load.load(None, ["batch=16", *words], default_ranks=2).run.plan
    assert (plan.replicate, plan.microbatch, plan.grad_accum) == expected
    assert plan.batch == 16


def test_the_digest_names_the_mathematics_and_not_the_plan():
    one = load.load(None, [], default_ranks=1).run
    assert digest(one) == digest(load.load(None, ["name=other", "log.every=1"], default_ranks=4).run)
    assert digest(one) != digest(load.load(None, ["seed=2"]).run)
    assert digest(one) != digest(load.load(None, ["plan.precision=bf16"]).run)
    fp8 = ["plan.precision=fp8", "sequence=256"]
    kinds = ([], ["plan.fp8_scaling=rowwise"], ["plan.fp8_accumulate=exact"], ["plan.fp8_grad=e5m2"])
    assert len({digest(load.load(None, [*fp8, *kind]).run) for kind in kinds}) == len(kinds)


def test_the_schema_accepts_what_the_loader_accepts():
    described = schema.json_schema()
    assert described["$defs"]["Run"]["properties"].keys() >= {"steps", "arch", "plan", "extends"}
    assert "preset" in described["$defs"]["Arch"]["properties"]
    assert described["$defs"]["Init"]["properties"].keys() == {"from", "optimizer_state"}
    msgspec.json.encode(described)


def test_every_default_is_what_the_types_say():
    table = tomllib.loads(load.write(load.load(None).run))
    assert msgspec.convert(table, Run) == load.load(None).run


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("log.writers=wandb", "log.writers", ("wandb",)),
        ("log.writers=wandb,tensorboard", "log.writers", ("wandb", "tensorboard")),
        ("plan.compile=True", "plan.compile", True),
        ("plan.compile=FALSE", "plan.compile", False),
        ("goal.vary=batch", "goal.vary", ("batch",)),
    ],
)
def test_values_are_taken_as_people_write_them(word, key, value):
    assert attrgetter(key)(load.load(None, [word]).run) == value


def test_a_list_of_numbers_needs_no_brackets():
    words = ["arch.layers=4", "plan.pp=2", "plan.stages=1,3"]
    assert load.load(None, words).run.plan.stages == (1, 3)


def test_what_the_default_run_chose_for_its_own_text_does_not_reach_others():
    """The prompt is Python, and 20 steps of warm-up are more than a short run has."""
    default = load.load(None, ["steps=44"])
    assert (default.run.eval.prompt, default.run.optim.warmup) == ("    def __init__(self", 20)
    own = load.load(None, ["steps=44", "data.source=my/*.txt"])
    assert (own.run.eval.prompt, own.run.optim.warmup) == ("", 2)
    assert own.origins["optim.warmup"] == "derived: steps ÷ 22"
    assert load.load(None, ["data.source=my/*.txt"]).run.optim.warmup == 20
    stated = load.load(None, ["data.source=my/*.txt", "optim.warmup=7", "eval.prompt=Once"]).run
    assert (stated.eval.prompt, stated.optim.warmup) == ("Once", 7)


def test_keys_of_an_architecture_are_beside_the_rest_of_the_folder_s(tmp_path):
    """Such as dropout in a fine-tuning, which no folder states."""
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
    }
    config |= {"num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    words = [f"init.from={tmp_path}", "data.source=a.txt", "sequence=16", "batch=1"]
    whole, told = load.examine(None, [*words, "arch.dropout=0.1"])
    assert whole is not None
    assert (whole.run.arch.dropout, whole.run.arch.layers, whole.run.arch.hidden) == (0.1, 2, 32), told
    assert whole.origins["arch.layers"].startswith("folder ")
    assert not [problem for problem in told if "is missing" in problem.text]


def test_a_warm_up_longer_than_the_run_is_a_mistake_where_it_is_said_beside_it(tmp_path):
    with pytest.raises(
        InputError, match=r"warmup = 500 is not shorter than the run, whose steps = 100; use at most 99"
    ):
        load.load(None, ["optim.warmup=500", "steps=100"])
    assert load.load(None, ["optim.warmup=99", "steps=100"]).run.optim.warmup == 99
    file = tmp_path / "long.toml"
    file.write_text('steps = 1000\n[arch]\npreset = "tiny"\n[data]\nsource = "stdlib"\n[optim]\nwarmup = 50\n')
    assert load.load(file, ["steps=10"]).run.optim.warmup == 50  # a trial
