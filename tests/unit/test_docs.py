"""What the pages say is so: commands resolve, refusals are the program's own words, links lead somewhere."""

import ast
import json
import math
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pages
import pytest
from commands import script

from meshwright.cli import env, main
from meshwright.cli.options import target as target_of
from meshwright.cli.query import put
from meshwright.config import explain, load, presets, schema
from meshwright.config.huggingface import config_of
from meshwright.config.run import Run, Source
from meshwright.cost.layout import total
from meshwright.cost.resident import states
from meshwright.hardware.profile import read_profile
from meshwright.spec.params import count
from meshwright.spec.plan import Plan
from meshwright.verify import prove, resume

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"^# (\S+\.toml)$")


class Block(NamedTuple):
    """What stands between two fences."""

    page: Path
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0]}"


def blocks(kind: str) -> list[Block]:
    return [
        Block(page, found, text) for page in PAGES for found, text in FENCE.findall(page.read_text()) if found == kind
    ]


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command, lines that go on joined, comments left out."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def ours(words: list[str]) -> list[str] | None:
    """The words after `meshwright`, called by its name or by another launcher as a module; None for other programs."""
    for number, word in enumerate(words):
        if word == "meshwright" and (number == 0 or words[number - 1] == "-m"):
            return words[number + 1 :]
    return None


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder as a reader has it who has made the run files that the pages show."""
    for block in blocks("toml"):
        first = block.text.splitlines()[0]
        if named := NAMED.match(first):
            (tmp_path / named[1]).write_text(block.text)
    for name in ("recipes", "results"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, preset in (("llama-7b", "llama-7b"), ("my-hf-model", "tiny")):  # models that a reader has fetched
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config_of(presets.preset(preset), "bfloat16")))
    planned = '[goal]\ncluster = "8xh100"\n[plan]\nshard = 8\nzero = 1\nmicrobatch = 4\nprecision = "bf16"\n'
    (tmp_path / "planned.toml").write_text((tmp_path / "eight.toml").read_text() + planned)  # as `plan --write` does
    measured = (ROOT / "results" / "profile-h200.json").read_text()
    (tmp_path / "profile.json").write_text(measured.replace("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    monkeypatch.chdir(tmp_path)


def resolve(words: list[str]) -> None:
    """Everything that a command does before it starts anything; a mistake raises."""
    options = main.parse(words)
    if words[0] == "plan" and not options.traffic:
        # A table to price is the reader's own, and the largest model is looked for in the zoo.
        if options.price is None and options.largest != "model":
            assert put(options).question
        return
    if words[0] in ("train", "plan") or words[:2] == ["config", "show"]:
        target, overrides = target_of(options.words)
        if target in presets.preset_names():
            target, overrides = None, [f"arch.preset={target}", *overrides]
        # A folder to begin from is made by the command before; here nothing is trained.
        overrides = [word for word in overrides if not word.startswith("init.from=") or Path(word[10:]).is_dir()]
        load.load(Path(target) if target else None, overrides, ranks=getattr(options, "ranks", None), default_ranks=2)
    elif words[0] == "verify" and options.resume is not None:
        target, overrides = target_of([options.resume, *options.words])
        assert len(resume.runs(target, overrides, Path("runs"))) > 1
    elif words[0] == "verify" and options.checkpoint is None:
        target, overrides = target_of(options.words)
        wanted = prove.matrix(options.ranks, target, overrides) if options.matrix else options.plan
        assert wanted, "a proof names its plans"
        assert prove.jobs(target, overrides, wanted, options.steps, Path("runs"))


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_every_command_resolves(block, desk):
    for words in commands(block.text):
        mine = ours(words)
        if mine is not None:
            resolve(mine)
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), f"{words[1]} is not there"
        else:
            assert words[0] in ("make", "pip", "export"), f"{words[0]}: a command that this test does not know"


def test_there_are_commands_to_resolve():
    assert len(blocks("sh")) > 10


def test_a_command_that_is_wrong_is_noticed(desk):
    with pytest.raises(load.InputError):
        resolve(["train", "plan.tpp=2"])
    with pytest.raises(load.InputError):
        resolve(["verify", "--plan", "tp=3"])
    with pytest.raises(SystemExit):
        resolve(["trian"])


@pytest.mark.parametrize("block", blocks("console"), ids=str)
def test_every_refusal_is_the_programs_own(block, capsys):
    made = ""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line = part.partition("\n")[0]
        assert main.main(ours(shlex.split(line))) == 2
        made += f"$ {line}\n{capsys.readouterr().err.strip()}\n"
    if os.environ.get("PAGES") == "write":
        block.page.write_text(block.page.read_text().replace(block.text, made))
    assert f"```console\n{made}```" in block.page.read_text(), "run this test with PAGES=write"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    prose = FENCE.sub("", page.read_text())
    targets = [target.partition("#")[0] for target in LINK.findall(prose) if "://" not in target]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert not missing


def test_the_readme_is_a_landing_page():
    """What is longer belongs to a page of docs/: the techniques, the figures, what was not tried."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in LINK.findall(index.read_text())}
    assert set(PAGES) - {index} <= linked


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_every_example_is_python_and_runs_where_it_needs_no_model(block, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = compile(block.text, str(block.page), "exec")
    if "meshwright.cost" in block.text:
        exec(code, {})
        assert capsys.readouterr().out


def test_the_measured_bubble_is_the_records():
    record = json.loads((ROOT / "results" / "bubble.json").read_text())
    page = (ROOT / "docs" / "axes" / "pipeline.md").read_text()
    assert script("bubble").table(record) in page
    assert f"works\n{record['seconds_of_a_third']} s" in page


def test_the_costs_of_saving_are_the_records():
    record = json.loads((ROOT / "results" / "checkpoint.json").read_text())
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    for line in script("checkpoint").rows(record):
        assert line in page


ZERO = {  # a row of the table: the textbook's bytes for each parameter on eight ranks, and the plan
    "replicas": (16, {"replicate": 8}),
    "zero 1": (4 + 12 / 8, {"shard": 8, "zero": 1}),
    "zero 1, grad_accum = 8": (4 + 12 / 8, {"shard": 8, "zero": 1, "grad_accum": 8}),
    "zero 2": (2 + 14 / 8, {"shard": 8, "zero": 2}),
    "zero 3": (16 / 8, {"shard": 8, "zero": 3}),
}


@pytest.mark.parametrize("name", ZERO)
def test_the_gigabytes_of_a_row_are_the_ledgers(name):
    textbook, fields = ZERO[name]
    arch = presets.preset("llama3-8b")
    lines = states(arch, Plan(microbatch=1, precision="bf16", **fields))
    figures = [textbook * count(arch), total(lines), *(line.bytes for line in lines)]
    cells = [f"{figure / 1e9:.1f}" if figure else "" for figure in figures]
    assert f"| {name} | {' | '.join(cells)} |" in (ROOT / "docs" / "axes" / "shard.md").read_text()


def rows_of_products() -> list[str]:
    page = (ROOT / "docs" / "axes" / "nd.md").read_text()
    return re.findall(r"^\| `[^`]+=\d+` \|.*$", page, re.MULTILINE)


@pytest.mark.parametrize("row", rows_of_products())
def test_the_gigabytes_of_a_product_are_the_ledgers(row):
    words, *cells = (cell.strip(" `") for cell in row.strip("|").split("|"))
    overrides = [f"plan.{word}" for word in words.split()]
    settings = ["arch.preset=llama3-8b", "plan.replicate=1", "plan.grad_accum=8", "plan.precision=bf16"]
    run = load.load(None, [*settings, *overrides, f"batch={8 * data_ranks(words)}"]).run
    lines = states(run.arch, run.plan)
    figures = [*(line.bytes for line in lines), total(lines)]
    assert cells == [f"{figure / 1e9:.1f}" if figure else "" for figure in figures]


def data_ranks(words: str) -> int:
    fields = dict(word.split("=") for word in words.split())
    return int(fields.get("replicate", 1)) * int(fields.get("shard", 1))


def test_the_products_are_found():
    assert len(rows_of_products()) == 7


def test_every_key_of_a_run_file_is_on_its_page():
    pages.agree(ROOT / "docs" / "run-file.md", "keys", pages.keys())


def test_no_key_is_explained_twice():
    commented = {key for key in explain.SAID if _comment(key)}
    assert not commented, "these have a comment now: take them out of SAID"
    assert set(explain.SAID) | set(explain.DERIVED) <= {*schema.every_key(), *(f"data.mix.{name}" for name in MIX)}


MIX = [field.encode_name for field in msgspec.structs.fields(Source)]


def _comment(key: str) -> str:
    """What the sources say beside a key."""
    struct: type[msgspec.Struct] = Run
    *sections, name = key.split(".")
    for section in sections:
        kind = next(field.type for field in msgspec.structs.fields(struct) if field.encode_name == section)
        struct = Source if section == "mix" else kind
    return explain.commented(struct).get(name, "")


def named_files(page: str) -> list[str]:
    found = [NAMED.match(text.splitlines()[0]) for kind, text in FENCE.findall((ROOT / page).read_text())]
    return [name[1] for name in found if name]


@pytest.mark.parametrize("page", ["docs/run-file.md", "docs/many-machines.md", "docs/fine-tune.md", "docs/tutorial.md"])
def test_every_run_file_of_a_page_is_shown_resolved(page, desk, capsys):
    assert named_files(page)
    for name in named_files(page):
        assert main.main(["config", "show", name]) == 0
        assert f"# {name}:" in capsys.readouterr().out


def test_no_two_pages_name_the_same_run_file():
    names = [name for page in PAGES for name in named_files(str(page.relative_to(ROOT)))]
    assert len(names) == len(set(names))


def test_every_variable_that_is_read_is_on_the_page_of_many_machines():
    page = (ROOT / "docs" / "many-machines.md").read_text()
    for file in ("runtime/place.py", "cli/env.py", "runtime/ranks.py"):
        tree = ast.parse((ROOT / "meshwright" / file).read_text())
        words = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        variables = {word for word in words if re.fullmatch(r"[A-Z][A-Z_]{3,}", word)} - set(env.DEBUG)
        assert not {word for word in variables - SET if f"`{word}`" not in page}


SET = {"GLOO_SOCKET_IFNAME", "CUBLAS_WORKSPACE_CONFIG", "TORCH_FR_BUFFER_SIZE", "DEBUG", "INFO", "DETAIL"}  # or a value


def test_the_figures_of_the_search_are_the_records():
    record = json.loads((ROOT / "results" / "search.json").read_text())
    pages.agree(ROOT / "docs" / "plan.md", "search", script("search").table(record))


def test_the_figures_of_live_survivors_are_the_records():
    record = json.loads((ROOT / "results" / "survivors.json").read_text())
    pages.agree(ROOT / "docs" / "faults.md", "survivors", script("survivors").table(record))
    pages.agree(ROOT / "docs" / "faults.md", "machines", script("survivors").machine_table(record))
    pages.agree(ROOT / "README.md", "survivors", script("survivors").told(record))


def test_the_seconds_of_the_doctor_are_the_records():
    record = json.loads((ROOT / "results" / "doctor.json").read_text())
    pages.agree(ROOT / "docs" / "doctor.md", "seconds", script("doctor").table(record))


def test_the_figures_of_silent_corruption_are_the_records():
    record = json.loads((ROOT / "results" / "corruption.json").read_text())
    pages.agree(ROOT / "docs" / "faults.md", "corruption", script("corruption").table(record))


@pytest.mark.parametrize("name", ["models", "muon", "windows"])
def test_the_figures_of_a_gpu_are_the_records(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # these scripts share parts
    record = json.loads((ROOT / "results" / f"{name}.json").read_text())
    pages.agree(ROOT / "docs" / "measured.md", name, script(name).table(record))


def test_the_readme_counts_the_plans_of_the_certificate():
    certificates = json.loads((ROOT / "results" / "certificate.json").read_text())
    passed = [verdict["passed"] for certificate in certificates for verdict in certificate["verdicts"]]
    assert all(passed)
    assert f"does this for {len(passed)} plans: [all equal]" in (ROOT / "README.md").read_text()


def test_the_predictions_of_the_steps_on_a_gpu_are_todays_planners():
    gpu, records = script("gpu"), json.loads((ROOT / "results" / "gpu.json").read_text())
    for record in records:
        kept, today = record["ours"]["predicted_seconds"], gpu.prediction(record)["predicted_seconds"]
        assert today == pytest.approx(kept), "run: python benchmarks/gpu.py --predict"
    late = [round(100 * _late(record, record["ours"])) for record in records]
    profile = read_profile(ROOT / "results" / "profile-h200.json")
    off = [math.ceil(100 * abs(_late(record, gpu.prediction(record, profile)))) for record in records]
    llamas = [error for error, record in zip(off, records, strict=True) if _is_llama_in_bf16(record["case"])]
    page = (ROOT / "docs" / "time.md").read_text()
    between = f"between {-min(late)} % too short and {max(late)} % too long"
    assert f"The {len(records)} steps of `results/gpu.json` on one H200 are predicted {between}" in page
    assert f"and within {max(off)} %\nwith the profile (those of Llama in bf16 within {max(llamas)} %)" in page


def _late(record: dict[str, Any], predicted: dict[str, Any]) -> float:
    """A prediction beside what was measured."""
    return predicted["predicted_seconds"] / record["ours"]["step_seconds"] - 1


def _is_llama_in_bf16(case: dict[str, Any]) -> bool:
    return case["shape"].startswith("llama") and "precision=bf16" in case["plan"]


def test_what_determinism_costs_on_a_gpu_is_the_records():
    record = json.loads((ROOT / "results" / "gpu_faults.json").read_text())["bits"]
    page = (ROOT / "docs" / "deterministic.md").read_text()
    assert record["same_bits"]
    assert f"three runs of {record['steps']} steps" in page
    assert len(record["digests"]) == 3
    assert f"{record['cost']:.2f} ×" in page


@pytest.mark.parametrize(
    ("path", "name"), [("README.md", "plan"), ("docs/tutorial.md", "search"), ("docs/tutorial.md", "exact")]
)
def test_the_planners_answers_on_a_page_are_todays(path, name, desk, capsys):
    page = ROOT / path
    command = re.search(rf"<!-- {name}: meshwright (.*) -->", page.read_text())
    assert command is not None
    assert main.main(shlex.split(command[1])) == 0
    head = capsys.readouterr().out.split("\n\n")[:3]  # the answer, what was asked, and the table
    lines = [line.rstrip() for line in "\n\n".join(head).splitlines()]
    pages.agree(page, name, "\n".join(["```", *lines, "```"]))


def test_the_answer_about_a_slow_network_is_lossy_as_its_page_says(capsys):
    page = (ROOT / "docs" / "communication.md").read_text()
    (command,) = re.findall(r"^meshwright (plan .*--vary communication)$", page, re.MULTILINE)
    assert main.main(shlex.split(command)) == 0
    (best,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("best then: ")]
    assert best.startswith("best then: replicate=2 ")
    assert re.findall(r"powersgd=\d+", best) == re.findall(r"`(powersgd=\d+)` between", page)


def test_every_key_that_the_glossary_names_is_one():
    keys = set(
        re.findall(r"`((?:arch|data|faults|goal|init|optim|plan)\.\w+)", (ROOT / "docs" / "glossary.md").read_text())
    )
    assert len(keys) > 30
    assert not keys - {*schema.every_key()}
