import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from waiting import HANG

from meshwright.config.run import Data, Init, Source
from meshwright.data import prepare as module
from meshwright.data import tokenize
from meshwright.data.prepare import described, prepare, problems
from meshwright.data.sources import listing
from meshwright.spec.problem import InputError

STORY = "It was the best of times, it was the worst of times, it was the age of wisdom.\n"


def silent(_: str) -> None: ...


@pytest.fixture
def text(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(STORY * (number + 1))
    return folder


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def made(cache: Path) -> list[str]:
    return sorted(folder.name for folder in cache.iterdir() if not folder.name.startswith("."))


def texts_of(run) -> list[str]:
    return [str(problem) for problem in problems(run)]


def test_text_becomes_tokens_that_can_be_read_back(text, cache, make_run):
    corpus = prepare(make_run(Data(source=str(text))), cache, silent)
    (tokens,) = corpus.sources
    assert corpus.tokenizer is not None
    tokenizer = tokenize.load(corpus.tokenizer)
    assert len(tokens.ends) == 5
    starts = [0, *tokens.ends.tolist()[:-1]]
    for number, (start, end) in enumerate(zip(starts, tokens.ends.tolist(), strict=True)):
        document = tokens.read(start, end - start).tolist()
        assert document[-1] == corpus.end_token
        assert tokenizer.decode(document[:-1]) == STORY * (number + 1)


def test_the_second_time_nothing_is_said_and_nothing_is_made(text, cache, make_run):
    said: list[str] = []
    prepare(make_run(Data(source=str(text))), cache, said.append)
    before, told = made(cache), len(said)
    assert told >= 2
    prepare(make_run(Data(source=str(text))), cache, said.append)
    assert made(cache) == before
    assert len(said) == told


def test_a_damaged_tokenizer_of_our_own_is_told_with_its_folder(text, cache, make_run):
    file = prepare(make_run(Data(source=str(text))), cache, silent).tokenizer
    assert file is not None
    file.write_text("")
    with pytest.raises(InputError, match=f"which was trained here, is damaged; delete {file.parent}"):
        prepare(make_run(Data(source=str(text))), cache, silent)


def test_what_changes_the_tokens_changes_the_place_in_the_cache(text, cache, make_run):
    prepare(make_run(Data(source=str(text))), cache, silent)
    assert len(made(cache)) == 2  # the tokenizer and the tokens
    prepare(make_run(Data(source=str(text), end_token=5)), cache, silent)
    assert len(made(cache)) == 3
    prepare(make_run(Data(source=str(text)), vocab=280), cache, silent)
    assert len(made(cache)) == 5
    (text / "0.txt").write_text("Something else, long enough to be read.")
    prepare(make_run(Data(source=str(text))), cache, silent)
    assert len(made(cache)) == 7


def test_a_broken_line_found_late_leaves_nothing_in_the_cache(tmp_path, cache, make_run):
    lines = [json.dumps({"text": STORY})] * 300
    lines[200] = '{"text": '
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    tokenizer = tmp_path / "tokenizer.json"
    tokenize.train([STORY], 280).save(str(tokenizer))
    run = make_run(Data(source=str(tmp_path / "a.jsonl"), tokenizer=str(tokenizer)))
    assert problems(run) == []
    with pytest.raises(InputError, match=r"a\.jsonl:201 is not JSON"):
        prepare(run, cache, silent)
    assert made(cache) == []
    assert list(cache.glob(".*.part")) == []


def test_text_of_nothing_but_empty_documents_is_refused(tmp_path, cache, make_run):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 9)
    with pytest.raises(InputError, match="holds no text"):
        prepare(make_run(Data(source=str(tmp_path / "a.jsonl"))), cache, silent)


def test_ready_tokens_need_no_tokenizer(make_tokens, cache, make_run):
    corpus = prepare(make_run(Data(source=str(make_tokens("a.bin", 200)))), cache, silent)
    assert corpus.tokenizer is None
    assert corpus.end_token is None
    assert corpus.sources[0].read(0, 200).tolist() == list(range(200))


def test_ends_of_ready_tokens_are_searched_once_when_documents_matter(make_tokens, cache, make_run):
    data = {"source": str(make_tokens("a.bin", 200)), "end_token": 99}
    assert len(prepare(make_run(Data(**data)), cache, silent).sources[0].ends) == 0
    said: list[str] = []
    for _ in range(2):
        corpus = prepare(make_run(Data(**data, mask_documents=True)), cache, said.append)
        assert corpus.sources[0].ends.tolist() == [100, 200]
    assert len(said) == 1


def test_text_and_tokens_may_be_mixed_with_the_tokenizer_of_the_tokens(text, make_tokens, cache, make_run, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenize.train([STORY], 280).save(str(tokenizer))
    mix = (Source(source=str(text)), Source(source=str(make_tokens("a.bin", 100)), weight=3.0))
    corpus = prepare(make_run(Data(mix=mix, tokenizer=str(tokenizer))), cache, silent)
    assert len(corpus.sources) == 2
    assert corpus.tokenizer == tokenizer
    (problem,) = problems(make_run(Data(mix=mix)))
    assert problem.key == "data.tokenizer"


def test_weights_of_a_folder_are_not_given_another_tokenizers_numbers(text, make_tokens, make_run):
    started = msgspec.structs.replace(make_run(Data(source=str(text))), init=Init(folder="somewhere"))
    (problem,) = problems(started)
    assert "somewhere has no tokenizer" in problem.text
    ready = Data(source=str(make_tokens("a.bin", 200)))
    assert problems(msgspec.structs.replace(make_run(ready), init=Init(folder="somewhere"))) == []


def test_a_tokenizer_must_fit_the_model(text, make_run, tmp_path):
    tokenize.train([STORY * 3], 290).save(str(tmp_path / "tokenizer.json"))  # such a short text gives only 287
    data = Data(source=str(text), tokenizer=str(tmp_path))
    assert problems(make_run(data, vocab=287)) == []
    (problem,) = problems(make_run(data, vocab=280))
    assert "has 287 entries and arch.vocab is 280" in problem.text
    assert problem.key == "data.tokenizer"


def test_a_missing_tokenizer_is_named(text, make_run):
    assert "there is no tokenizer at /no/such" in texts_of(make_run(Data(source=str(text), tokenizer="/no/such")))[0]


def test_every_byte_needs_an_entry(text, make_run):
    assert "use at least 257" in texts_of(make_run(Data(source=str(text)), vocab=256))[0]


def test_an_end_token_must_be_a_token(text, make_run):
    assert "use 0 to 299" in texts_of(make_run(Data(source=str(text), end_token=300)))[0]


def test_all_that_is_wrong_with_ready_tokens_is_told_at_once(make_tokens, make_run):
    found = problems(make_run(Data(source=str(make_tokens("a.bin", 10, 295)), mask_documents=True)))
    assert [problem.key for problem in found] == ["arch.vocab", "data.end_token", "sequence"]
    assert "holds token 300, and arch.vocab is 300" in found[0].text
    assert "holds 10 tokens, and one sample needs 17 tokens" in found[2].text


def test_an_end_token_that_cannot_occur_is_named(make_tokens, make_run):
    run = make_run(Data(source=str(make_tokens("a.bin", 100)), end_token=70_000), vocab=80_000)
    assert "cannot occur" in texts_of(run)[0]


def test_text_that_is_too_short_is_told_before_and_after(tmp_path, cache, make_run):
    (tmp_path / "a.txt").write_text("short")
    assert (
        "holds 5 bytes, and one sample needs 17 tokens" in texts_of(make_run(Data(source=str(tmp_path / "a.txt"))))[0]
    )
    (tmp_path / "b.jsonl").write_text('{"text": "short"}')
    with pytest.raises(InputError, match=r"holds \d tokens, and one sample needs 17"):
        prepare(make_run(Data(source=str(tmp_path / "b.jsonl"))), cache, silent)


def test_the_sample_is_fair_to_short_and_long_files(tmp_path, monkeypatch):
    for name, size in (("a.txt", 100), ("b.txt", 5000), ("c.txt", 9000)):
        (tmp_path / name).write_text(name[0] * size)
    monkeypatch.setattr(module, "SAMPLE", 3000)
    sample = "".join(module._sample([listing(Source(source=str(tmp_path)))]))
    assert {letter: sample.count(letter) for letter in "abc"} == {"a": 100, "b": 1450, "c": 1450}


WORKER = """
import sys
from pathlib import Path
import msgspec
from meshwright.data.prepare import prepare
from meshwright.config.run import Run

run = msgspec.json.decode(sys.stdin.buffer.read(), type=Run)
said = []
corpus = prepare(run, Path(sys.argv[1]), said.append)
print(corpus.sources[0].total, sum(line.startswith("tokenising") for line in said), "torch" in sys.modules)
"""


def test_two_processes_prepare_at_once_and_one_of_them_works(text, cache, make_run):
    run = msgspec.json.encode(make_run(Data(source=str(text))))
    command = [sys.executable, "-c", WORKER, str(cache)]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(run)
        worker.stdin.close()
        worker.stdin = None
    said = [worker.communicate(timeout=HANG)[0].split() for worker in workers]
    totals, worked, torch = zip(*said, strict=True)
    assert len(set(totals)) == 1
    assert sorted(worked) == [b"0", b"0", b"1"]
    assert set(torch) == {b"False"}  # the launcher prepares while ranks still import it


def test_tokens_beyond_16_bits_are_kept(tmp_path, cache, make_run):
    tokens = np.array([70_000, 1, 2] * 20, "<u4")
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, len(tokens)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + tokens.tobytes())
    corpus = prepare(make_run(Data(source=str(tmp_path / "a.bin")), vocab=80_000), cache, silent)
    assert corpus.sources[0].read(0, 3).tolist() == [70_000, 1, 2]


def line_of(run, cache: Path) -> str:
    (line, *warnings) = described(run, prepare(run, cache, silent))
    assert not warnings
    return line


def test_one_line_says_what_is_read_and_what_is_left_out(text, cache, make_run):
    for name in ("table.csv", "letter.docx", "other.DOCX", "LICENSE", ".hidden.csv"):
        (text / name).write_text(STORY)
    run = make_run(Data(source=str(text)))
    line = line_of(run, cache)
    assert f"data: {text}: 5 .txt read, left out: 2 .docx, 1 .csv, 1 without ending; " in line
    tokens = prepare(run, cache, silent).sources[0].total
    samples = (tokens - 1) // run.sequence
    assert f"{tokens:,} tokens, {samples} samples of {run.sequence} (1 for validation, 0% filler)" in line
    assert f"{(samples - 1) / run.batch:.4g} steps per epoch ({run.steps} steps: " in line
    whole = msgspec.structs.replace(run, batch=samples - 1, steps=1)
    assert line_of(whole, cache).endswith("; 1 step per epoch (1 step: 1 epoch)")


def test_files_that_are_named_leave_nothing_out(text, cache, make_run):
    (text / "table.csv").write_text(STORY)
    assert "left out" not in line_of(make_run(Data(source=f"{text}/*.txt")), cache)


def test_filler_is_told_with_what_to_use_instead(tmp_path, cache, make_run):
    (tmp_path / "answers.jsonl").write_text('{"text": "yes"}\n' * 40)
    run = make_run(Data(source=str(tmp_path / "answers.jsonl"), pack="documents"))
    corpus = prepare(run, cache, silent)
    line, warning = described(run, corpus)
    predicted = (corpus.sources[0].total - 40) / 40
    assert f"{1 - predicted / run.sequence:.0%} filler" in line
    assert warning.startswith(f"warning: {1 - predicted / run.sequence:.0%} of ")
    assert "data.pack=best_fit lays several documents" in warning
    assert "warning" not in "".join(described(make_run(Data(source=str(tmp_path / "answers.jsonl"))), corpus))


def test_every_source_of_a_mix_has_a_line_and_an_epoch_of_its_own(text, cache, make_run):
    mix = (Source(source=str(text), weight=3.0), Source(source="stdlib", weight=1.0))
    run = make_run(Data(mix=mix))
    ours, theirs = described(run, prepare(run, cache, silent))
    assert "5 .txt read" in ours
    assert re.search(r"data: stdlib: \d+ .py read; ", theirs)
    samples = int(re.findall(r"([\d,]+) samples", ours)[0].replace(",", ""))
    assert f"{(samples - 1) / (run.batch * 0.75):,.4g} steps per epoch" in ours
