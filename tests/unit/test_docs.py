"""What the pages say is so: commands resolve, refusals are the program's own words, links lead somewhere."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import script

from meshwright import cli
from meshwright.cost.memory import states, total
from meshwright.spec import load, zoo
from meshwright.spec.params import count
from meshwright.spec.plan import Plan
from meshwright.verbs.plan_question import put
from meshwright.verbs.words import target as target_of
from meshwright.verify import plans, resume

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
    monkeypatch.chdir(tmp_path)


def resolve(words: list[str]) -> None:
    """Everything that a command does before it starts anything; a mistake raises."""
    options = cli.parse(words)
    if words[0] == "plan" and not options.traffic:
        # A table to price is the reader's own, and the largest model is looked for in the zoo.
        if options.price is None and options.largest != "model":
            assert put(options).question
        return
    if words[0] in ("train", "config", "plan"):
        target, overrides = target_of(options.words)
        if target in zoo.preset_names():
            target, overrides = None, [f"arch.preset={target}", *overrides]
        # A folder to begin from is made by the command before; here nothing is trained.
        overrides = [word for word in overrides if not word.startswith("init.from=") or Path(word[10:]).is_dir()]
        load.load(Path(target) if target else None, overrides, ranks=getattr(options, "ranks", None), default_ranks=2)
    elif words[0] == "verify" and options.resume is not None:
        target, overrides = target_of([options.resume, *options.words])
        assert len(resume.runs(target, overrides, Path("runs"))) > 1
    elif words[0] == "verify" and options.checkpoint is None:
        target, overrides = target_of(options.words)
        wanted = plans.matrix(options.ranks) if options.matrix else options.plan
        assert wanted, "a proof names its plans"
        assert plans.jobs(target, overrides, wanted, options.steps, Path("runs"))


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_every_command_resolves(block, desk):
    for words in commands(block.text):
        mine = ours(words)
        if mine is not None:
            resolve(mine)
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), f"{words[1]} is not there"
        else:
            assert words[0] in ("make", "pip"), f"{words[0]}: a command that this test does not know"


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
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, expected = part.partition("\n")
        assert cli.main(ours(shlex.split(line))) == 2
        assert capsys.readouterr().err.strip() == expected.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    prose = FENCE.sub("", page.read_text())
    targets = [target.partition("#")[0] for target in LINK.findall(prose) if "://" not in target]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert not missing


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
    share = f"{100 * record['stall_share_of_a_save_interval']:.1f} %"
    assert f"| {1000 * record['stall_seconds']:.0f} ms, {share} of the time" in page
    for what in ("load_at_0.5_gb_per_second", "cold_load", "warm_load"):
        assert f"| {100 * record[what]['overhead']:.0f} % of the load |" in page


ZERO = {  # a row of the table: the textbook's bytes for each parameter on eight ranks, and the plan
    "replicas": (16, {"replicate": 8}),
    "zero 1": (4 + 12 / 8, {"shard": 8, "zero": 1}),
    "zero 1, accumulate = 8": (4 + 12 / 8, {"shard": 8, "zero": 1, "accumulate": 8}),
    "zero 2": (2 + 14 / 8, {"shard": 8, "zero": 2}),
    "zero 3": (16 / 8, {"shard": 8, "zero": 3}),
}


@pytest.mark.parametrize("name", ZERO)
def test_the_gigabytes_of_a_row_are_the_ledgers(name):
    textbook, fields = ZERO[name]
    arch = zoo.preset("llama3-8b")
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
    settings = ["arch.preset=llama3-8b", "plan.replicate=1", "plan.accumulate=8", "plan.precision=bf16"]
    run = load.load(None, [*settings, *overrides, f"batch={8 * data_ranks(words)}"]).run
    lines = states(run.arch, run.plan)
    figures = [*(line.bytes for line in lines), total(lines)]
    assert cells == [f"{figure / 1e9:.1f}" if figure else "" for figure in figures]


def data_ranks(words: str) -> int:
    fields = dict(word.split("=") for word in words.split())
    return int(fields.get("replicate", 1)) * int(fields.get("shard", 1))


def test_the_products_are_found():
    assert len(rows_of_products()) == 7
