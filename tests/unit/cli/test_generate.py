"""`meshwright generate` as a user types it."""

import builtins
import json
import sys
from io import StringIO

import msgspec
import pytest
import torch

from meshwright.checkpoint.model_folder import save_native
from meshwright.cli.main import main
from meshwright.config.presets import preset
from meshwright.data import tokenize
from meshwright.models.init import initial
from meshwright.spec.params import params

ARCH = msgspec.structs.replace(preset("tiny"), vocab=300, context=256)
TEXT = [f"line {number}: the quick brown fox jumps over {number * 7 % 13} dogs" for number in range(50)]
CHATML = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    """A model of ours with random weights, large enough that they have opinions, and its tokenizer."""
    tokenize.train(TEXT, ARCH.vocab).save(str(tmp_path / "tokenizer.json"))
    weights = ((param.name, initial(param, 3) * (8 if len(param.shape) > 1 else 1)) for param in params(ARCH))
    save_native(tmp_path / "model", ARCH, weights, tmp_path / "tokenizer.json")
    return tmp_path / "model"


@pytest.fixture
def says(folder, capsys):
    """What the verb prints when it is given these words after the folder."""

    def run(*words: str) -> str:
        assert main(["generate", str(folder), "--tokens", "12", *words]) == 0
        return capsys.readouterr().out

    return run


def texts(answer: str) -> list[str]:
    return [each["text"] for each in json.loads(answer)["completions"]]


def test_prompts_of_words_and_of_a_file_are_continued_as_each_alone(says, tmp_path):
    prompts = ["line 7", "the quick brown fox jumps", "dogs"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts[1:]) + "\n")
    for how in (("--greedy",), ("--temperature", "1.5", "--top-k", "40", "--top-p", "0.9", "--seed", "4")):
        together = texts(says("--prompt", prompts[0], "--prompts", str(tmp_path / "prompts.txt"), *how, "--json"))
        assert together == [texts(says("--prompt", prompt, *how, "--json"))[0] for prompt in prompts]


def test_a_pipe_gets_the_text_and_several_have_a_heading(says):
    (greedy,) = texts(says("--prompt", "line 7", "--greedy", "--json"))
    assert says("--prompt", "line 7", "--greedy") == f"line 7{greedy}\n"
    assert says("--prompt", "line 7", "--prompt", "line 7", "--temperature", "0").count(f"line 7{greedy}\n") == 2
    assert says("--prompt", "a", "--prompt", "b").startswith("=== 1 of 2\na")


def test_draws_are_those_of_the_seed(says):
    drawn = {says("--prompt", "line 7", "--temperature", "2", "--seed", str(seed)) for seed in (1, 1, 2, 3)}
    assert len(drawn) == 3
    assert says("--prompt", "line 7", "--temperature", "9", "--top-k", "1") == says("--prompt", "line 7", "--greedy")


def test_another_dtype_is_computed_in(says):
    assert json.loads(says("--prompt", "line", "--dtype", "bfloat16", "--json"))["dtype"] == "bfloat16"
    assert json.loads(says("--prompt", "line", "--json"))["dtype"] == "float32"


class Screen(StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_the_text_grow_with_control_characters_escaped(says, folder, monkeypatch):
    def shown(*words: str) -> list[str]:
        screen, pieces = Screen(), []
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(screen, "write", lambda text: pieces.append(text) or len(text))
        assert main(["generate", str(folder), *words]) == 0
        monkeypatch.undo()
        return pieces

    words = ("--prompt", "\x1b[31mline", "--temperature", "50", "--seed", "2", "--tokens", "40")
    raw = json.loads(says(*words, "--json"))["completions"][0]
    assert raw["prompt"].startswith("\x1b")  # JSON keeps the text as it is
    assert any(ord(char) < 32 and char != "\n" for char in raw["text"]), "the seed should draw some"
    pieces = shown(*words)
    assert len(pieces) > 20  # as tokens came
    screen = "".join(pieces)
    assert screen.startswith("\\x1b[31mline")
    assert all(char in "\n\t" or char.isprintable() for char in screen)
    assert "\\x1b[31mline" in "".join(shown(*words, "--prompt", "b"))  # of several at the end


REFUSALS = {
    "--prompt is empty; give a text to continue": ["--prompt", ""],
    "there is no prompt; add --prompt TEXT, or --prompts FILE, or --chat": [],
    "line 2 of {folder}/lines.txt is empty; remove it, or fill it in": ["--prompts", "{folder}/lines.txt"],
    "{folder}/none.txt cannot be read: No such file or directory; give a text file, a prompt a line": [
        "--prompts", "{folder}/none.txt"
    ],
    "the prompt has 256 tokens, and the model has 256 positions; use a prompt of at most 255 tokens": [
        "--prompt", "!" * 256
    ],
    "a prompt of 4 tokens and --tokens 253 exceed the model's 256 positions; use at most --tokens 252": [
        "--prompt", "!!!!", "--tokens", "253"
    ],
    "a prompt is not UTF-8 text; give it in UTF-8": ["--prompt", "\udcff"],
    "--top-k cannot be combined with --greedy; leave one of them out": ["--prompt", "a", "--greedy", "--top-k", "3"],
    "--temperature -1 is not a temperature; use 0 (greedy) or more": ["--prompt", "a", "--temperature", "-1"],
    "--top-p 0 is not a probability; use more than 0 and at most 1": ["--prompt", "a", "--top-p", "0"],
    "--seed -1 is not a seed; use 0 to 9223372036854775807": ["--prompt", "a", "--seed", "-1"],
    "{folder} has no chat template; "
    "generate without --chat, or put the model's chat_template.jinja beside its weights": ["--chat"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("sentence", "words"), REFUSALS.items(), ids=[" ".join(words)[:30] for words in REFUSALS.values()]
)
def test_a_mistake_is_one_sentence(folder, capsys, sentence, words):
    (folder / "lines.txt").write_text("a\n\nb\n")
    assert main(["generate", str(folder), *(word.replace("{folder}", str(folder)) for word in words)]) == 2
    said = capsys.readouterr()
    assert said.err == f"meshwright: {sentence.replace('{folder}', str(folder))}\n"
    assert said.out == ""


@pytest.mark.parametrize("count", ["-3", "0", "many"])
def test_a_count_that_is_none_is_refused(folder, capsys, count):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", str(folder), "--prompt", "a", "--tokens", count])
    assert "--tokens" in capsys.readouterr().err.splitlines()[-1]


def test_folders_that_cannot_be_used_are_refused(folder, tmp_path, capsys):
    def refusal(path, *words: str) -> str:
        assert main(["generate", str(path), "--prompt", "a", *words]) == 2
        return capsys.readouterr().err

    assert "is not a folder" in refusal(tmp_path / "nowhere")
    assert "fetch them first: meshwright convert s3://bucket/run FOLDER" in refusal("s3://bucket/run")
    if not torch.cuda.is_available():
        assert refusal(folder, "--device", "cuda") == (
            "meshwright: there is no GPU that torch can use; use --device cpu\n"
        )
    large = tokenize.train(TEXT, 305)
    large.save(str(folder / "tokenizer.json"))
    assert "has 305 entries, and the model knows 300; put the tokenizer.json" in refusal(folder)
    (folder / "tokenizer.json").unlink()
    assert refusal(folder) == (
        f"meshwright: {folder} has no tokenizer; put the tokenizer.json that it was trained with into the folder\n"
    )


@pytest.mark.parametrize("kind", ["file", "value", "by name"])
def test_a_chat_is_the_template_of_all_turns_so_far(folder, says, capsys, monkeypatch, kind):
    description = {"bos_token": {"content": "line"}}
    if kind == "file":
        (folder / "chat_template.jinja").write_text(CHATML)
    named = [{"name": "tools", "template": "{{ nonsense }}"}, {"name": "default", "template": CHATML}]
    description |= {"value": {"chat_template": CHATML}, "by name": {"chat_template": named}}.get(kind, {})
    (folder / "tokenizer_config.json").write_text(json.dumps(description))
    monkeypatch.setattr(sys, "stdin", StringIO("the fox\n\n  \nthe dogs\n"))
    first, second = map(json.loads, says("--chat", "--greedy", "--json").splitlines())
    assert (first["prompt"], second["prompt"]) == ("the fox", "the dogs")
    prompt = "line<user>the fox\n<assistant>"
    assert first["text"] == texts(says("--prompt", prompt, "--greedy", "--json"))[0]
    prompt += f"{first['text'].strip()}\n<user>the dogs\n<assistant>"
    assert second["text"] == texts(says("--prompt", prompt, "--greedy", "--json"))[0]
    # Turns may be words too; people get the answers alone.
    said = says("--chat", "--greedy", "--prompt", "the fox", "--prompt", "the dogs")
    assert said == f"{first['text']}\n{second['text']}\n"


def test_a_chat_on_a_terminal_asks_and_answers_until_the_end_of_input(folder, monkeypatch):
    (folder / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    screen, keys = Screen(), Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stdin", keys)
    lines = iter(["the fox", "the dogs"])

    def typed(prompt: str = "") -> str:
        assert prompt == "> "
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr(builtins, "input", typed)
    assert main(["generate", str(folder), "--chat", "--tokens", "5"]) == 0
    assert screen.getvalue().endswith("\n")


TEMPLATES = {
    "a loop that never ends": "{% for i in range(10**12) %}x{% endfor %}",
    "Python's insides": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "its own refusal": "{{ raise_exception('system role is not supported') }}",
    "not a template": "{% if %}",
    "nothing there": "{{ messages[7].content }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_that_cannot_be_used_is_one_sentence(folder, capsys, template):
    (folder / "chat_template.jinja").write_text(template)
    assert main(["generate", str(folder), "--chat", "--prompt", "hi"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"meshwright: the chat template of {folder} cannot be used: ")
    assert "Traceback" not in said


def test_without_jinja2_a_chat_says_what_to_install(folder, capsys, monkeypatch):
    (folder / "chat_template.jinja").write_text(CHATML)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["generate", str(folder), "--chat", "--prompt", "hi"]) == 2
    assert capsys.readouterr().err == (
        "meshwright: a chat template needs jinja2, which is not installed; run: pip install jinja2\n"
    )


def test_eval_names_its_own_flags_where_a_run_file_has_keys(folder, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"txt": "hello"}\n')
    assert main(["eval", str(folder), "--data", str(tmp_path / "a.jsonl")]) == 2
    assert "a.jsonl:1 has no field 'text', only txt; set --field \"txt\"" in capsys.readouterr().err
