"""From messages and a Hugging Face folder to a merged model by the three commands of docs/chat.md, as they stand."""

import json
import re
import shlex
from pathlib import Path

import forked
from chats import byte_level, ragged, write_lines
from commands import environment
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.convert import convert
from meshwright.checkpoint.model_folder import SeededWeights, save_native
from meshwright.spec.arch import Arch
from meshwright.spec.params import params

PAGE = (Path(__file__).parents[2] / "docs" / "chat.md").read_text()
SECTION = PAGE.partition("## Three commands\n")[2].partition("\n## ")[0]
ARCH = Arch(vocab=336, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, context=256)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def a_model(folder: Path) -> None:
    """A Hugging Face folder, made on the spot."""
    byte_level().save(str(folder / "tokenizer.json"))
    drawn = SeededWeights(ARCH, 3)
    weights = ((param.name, drawn.tensor(param.name)) for param in params(ARCH))
    save_native(folder / "native", ARCH, weights, folder / "tokenizer.json")
    convert(folder / "native", folder / "my-hf-model", lambda text: None)
    (folder / "my-hf-model" / "chat_template.jinja").write_text(CHATML)


def test_three_commands_make_a_merged_model(tmp_path):
    a_model(tmp_path)
    write_lines(tmp_path / "messages.jsonl", ragged(12))
    (run_file,) = re.findall(r"```toml\n(# (\S+)\n.*?)```", SECTION, re.DOTALL)
    (tmp_path / run_file[1]).write_text(run_file[0])
    (block,) = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
    said = []
    assert len(block.splitlines()) == 3
    for line in block.splitlines():
        done = forked.run(shlex.split(line)[1:], tmp_path, environment(tmp_path))
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        said.append(done.stdout)
    assert "⟦" in said[0], "what is trained is seen before it is"
    assert "merged = adapter + base" in said[2]
    merged = tmp_path / "merged"
    assert (merged / "chat_template.jinja").read_text() == CHATML
    stop = byte_level().token_to_id("<|im_end|>")
    assert stop in json.loads((merged / "generation_config.json").read_bytes())["eos_token_id"]
    kept = (tmp_path / "runs" / "tune-chat").rglob("chat_template.jinja")
    for file in kept:
        file.rename(file.with_suffix(".lost"))
    done = forked.run(["convert", "runs/tune-chat", "other", "--merge"], tmp_path, environment(tmp_path))
    assert done.returncode == 2, done.stdout
    assert "was trained on chat data" in done.stderr
    assert "has no chat template any more; put the base's" in done.stderr
    another_base(tmp_path / "my-hf-model" / "model.safetensors")
    for words in (["convert", "runs/tune-chat", "other", "--merge"], ["generate", "runs/tune-chat", "--prompt", "It"]):
        done = forked.run(words, tmp_path, environment(tmp_path))
        assert done.returncode == 2, done.stdout
        assert "is not the base of the adapter" in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "other").exists()


def another_base(file: Path) -> None:
    """The same shapes with one value changed in one matrix."""
    weights = load_file(file)
    weights["model.layers.1.self_attn.o_proj.weight"][3, 4] += 1e-3
    save_file(weights, file, {"format": "pt"})
