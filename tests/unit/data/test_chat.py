"""Conversations to masked tokens: the kinds of records, what is trained, and what is refused with its sample."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from chats import MARKS, byte_level, sentence_piece, turns, write_lines

from meshwright.config import load
from meshwright.config.run import Data, Source
from meshwright.data import chat
from meshwright.data.chat import NAMED, ChatTemplate
from meshwright.data.conversation import conversation
from meshwright.data.mask import MaskedSample, Masker, truncated
from meshwright.data.prepare import described, prepare, problems
from meshwright.data.sources import listing, read_objects
from meshwright.spec.problem import InputError

PLAIN_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWO = turns("What is two and two?", "It is four.", "Which colours?", "Red, green.")


def a_masker(source: str = PLAIN_CHATML, train_on="assistant", tokenizer=None) -> Masker:
    tokenizer = tokenizer or byte_level()
    ends = frozenset([tokenizer.token_to_id("<|endoftext|>")])
    return Masker(ChatTemplate("the test", source, {"eos_token": "<|endoftext|>"}), tokenizer, train_on, ends)


def said(masker: Masker, record: dict) -> list[str]:
    """The text of every run of trained tokens."""
    (sample,) = masker.samples([conversation("chat.jsonl:1", record, {})])
    edges = np.flatnonzero(np.diff(sample.mask, prepend=0, append=0))
    runs = zip(edges[::2], edges[1::2], strict=True)
    return [masker.tokenizer.decode(sample.tokens[a:b].tolist(), skip_special_tokens=False) for a, b in runs]


KINDS = {
    "messages": {"messages": TWO[:2]},
    "parts": {"messages": [TWO[0], {"role": "assistant", "content": [{"type": "text", "text": "It is four."}]}]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": TWO[0]["content"]}, {"from": "gpt", "value": "It is four."}]
    },
    "prompt": {"prompt": TWO[0]["content"], "completion": "It is four."},
    "turns": {"prompt": TWO[:1], "completion": TWO[1:2]},
    "alpaca": {"instruction": TWO[0]["content"], "input": "", "output": "It is four."},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_known_by_their_fields(kind):
    asked, answer = conversation("chat.jsonl:1", KINDS[kind], {}).messages
    assert (asked["role"], asked["content"], answer["role"], answer["content"]) == (
        *("user", TWO[0]["content"], "assistant", "It is four."),
    )


def test_columns_can_be_named_and_a_system_prompt_and_tools_stand_beside():
    record = {"q": "What is two and two?", "a": "It is four.", "system": "Be brief.", "tools": '[{"name": "add"}]'}
    found = conversation("x", record, {"prompt": "q", "completion": "a"})
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant"]
    assert found.tools == [{"name": "add"}]
    assert found.prompt == 2


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"text": "no"}, r"chat.jsonl:7 has none of the fields .*only text; name its own as data.columns"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, r'chosen .*; set objective = dpo, or .*"completion=chosen"'),
        ({"messages": "no"}, r"'messages' holds .*not a list of turns"),
        ({"messages": [{"content": "who?"}]}, r"turn 1 has no role"),
        ({"messages": turns("What?", " \n")}, r'turn 2 is an empty answer after "What\?"; .*"weight": 0'),
        ({"messages": [TWO[0], TWO[0]]}, r"turn 2: the role 'user' is out of order after 'user'"),
        ({"messages": TWO[1:]}, r"turn 1: the role 'assistant' is out of order at the beginning"),
        ({"messages": [*TWO, {"role": "system", "content": "x"}]}, r"turn 5: the role 'system' is out of order"),
        ({"messages": [{"role": "poet", "content": "x"}]}, r"the role 'poet', which is none of"),
        ({"messages": [TWO[0], TWO[1] | {"weight": 0.5}]}, r"turn 2 has the weight 0.5; use 0 or 1"),
        ({"messages": [TWO[0] | {"weight": 1}, TWO[1]]}, r"only answers are trained"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"parts that are not text"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, r"history of earlier turns"),
        ({"prompt": "a\ufdd0", "completion": "b"}, r"has U\+FDD0, one of Unicode's noncharacters"),
        ({"prompt": "a\ufdd2", "completion": "b"}, r"U\+FDD2"),
        ({"messages": [TWO[0], TWO[1] | {"reasoning_content": "\ufdd1\ufdd0 all of this"}]}, r"U\+FDD1"),
        (
            {"messages": [TWO[0], {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "2, 3"}]}]},
            r"turn 2: the arguments of the call of 'add' are not a JSON object: \"2, 3\"",
        ),
        ([], r"is not a JSON object"),
    ],
)
def test_a_record_that_cannot_be_used_is_named_with_its_place(record, told):
    with pytest.raises(InputError, match=told) as error:
        conversation("chat.jsonl:7", record, {})
    assert str(error.value).startswith("chat.jsonl:7")


FOUR, RED = "It is four.<|im_end|>", "Red, green.<|im_end|>"


@pytest.mark.parametrize("source", [PLAIN_CHATML, NAMED["chatml"][1]], ids=["prefixes", "marks"])
def test_what_is_trained_is_what_was_asked_for(source):
    weighed = [TWO[0], TWO[1] | {"weight": 0}, *TWO[2:]]
    divided = {"prompt": TWO[:1], "completion": TWO[1:]}
    assert said(a_masker(source), {"messages": TWO}) == [FOUR, RED]
    assert said(a_masker(source), {"messages": weighed}) == [RED]
    assert said(a_masker(source, "last"), {"messages": TWO}) == [RED]
    assert said(a_masker(source, "last"), {"messages": [*TWO[:3], TWO[3] | {"weight": 0}]}) == []
    assert said(a_masker(source, "completion"), {"messages": TWO}) == [RED], "what follows the last question"
    assert said(a_masker(source, "completion"), divided) == [FOUR, RED]
    (whole,) = said(a_masker(source, "all"), {"messages": TWO})
    assert whole.startswith("<|im_start|>user\nWhat")
    assert whole.endswith("<|im_end|>\n")
    before, after = said(a_masker(source, "all"), {"messages": weighed})
    assert before.endswith("assistant\n")
    assert after.startswith("\n<|im_start|>user")


def test_a_call_of_a_tool_is_an_answer_and_its_result_is_not():
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% if m.tool_calls %}"
        "{{ m.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    messages = [TWO[0], call, {"role": "tool", "content": "4"}, TWO[1]]
    assert said(a_masker(source), {"messages": messages}) == [json.dumps(call["tool_calls"]) + "<|im_end|>", FOUR]


# As Qwen3's: the last answer has its reasoning, or an empty one, and those that are past have none.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1] }}"
    "{% for call in m.tool_calls or [] %}{{ '[' + call.function.name + call.function.arguments | tojson + ']' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}]}
CALLED = [TWO[0], CALL, {"role": "tool", "content": "4"}, TWO[1]]


def test_what_opens_the_next_turn_is_no_stop_token():
    only_last = PLAIN_CHATML.replace("'<|im_end|>", "('<|im_end|>' if m.role == 'user' or loop.last else '') + '")
    with pytest.raises(InputError, match=r'an answer ends as "It is four.\\n", without a special token'):
        said(a_masker(only_last), {"messages": TWO})
    assert said(a_masker(only_last), {"messages": TWO[:2]}) == [FOUR]


def test_answers_that_are_written_otherwise_once_they_are_past_are_told_of_and_lose_nothing():
    masker = a_masker(THINKING)
    assert said(masker, {"messages": TWO}) == [FOUR, f"<think>\n\n</think>\n{RED}"]
    assert "</think>\\nIt is four" in masker.notes["past"]
    masker = a_masker(THINKING)
    assert said(masker, {"messages": CALLED}) == ['[add{"a": 2}]<|im_end|>', f"<think>\n\n</think>\n{FOUR}"]
    assert "past" in masker.notes
    reasoned = [turn | {"reasoning_content": "Well."} if turn["role"] == "assistant" else turn for turn in TWO]
    inside = [turn | {"content": f"<think>Well.</think>{turn['content']}"} for turn in TWO]
    for messages in (reasoned, inside):
        with pytest.raises(InputError, match=r"leaves out .*Well\..* of turn 2; .*data.train_on = last"):
            said(a_masker(THINKING), {"messages": messages})
    assert said(a_masker(THINKING, "last"), {"messages": reasoned}) == [f"<think>\nWell.\n</think>\n{RED}"]
    masker = a_masker()
    assert said(masker, {"messages": reasoned}) == [FOUR, RED], "a template without reasoning"
    assert "writes no reasoning" in masker.notes["reasoning"]


def test_arguments_of_calls_are_objects_or_json_as_the_template_takes_them():
    for source in (THINKING, THINKING.replace("arguments | tojson", "arguments")):
        assert said(a_masker(source), {"messages": CALLED})[0] == '[add{"a": 2}]<|im_end|>'
    with pytest.raises(InputError, match=r'leaves out "add" of turn 2'):
        said(a_masker(), {"messages": CALLED})


def test_an_answer_begins_with_a_token_of_its_own():
    """Whose first letters would make one token with the last of the prompt: generation cannot be given half of one."""
    lexicon = byte_level()
    lexicon.add_tokens(["\n\n"])
    masker = a_masker(tokenizer=lexicon)
    (sample,) = masker.samples([conversation("x", {"messages": turns("Why?", "\nBecause.")}, {})])
    prompt = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    first = int(np.argmax(sample.mask))
    assert sample.tokens[:first].tolist() == lexicon.encode(prompt, add_special_tokens=False).ids
    assert said(masker, {"messages": turns("Why?", "\nBecause.")}) == ["\nBecause.<|im_end|>"]


def test_a_special_token_that_somebody_wrote_stays_text():
    stop = "<|im_end|>"
    masker = a_masker()
    (sample,) = masker.samples([conversation("x", {"messages": turns(f"Is {stop} a word?", f"{stop} is a mark.")}, {})])
    assert (sample.tokens == masker.special[stop]).sum() == 2, "those of the template"
    assert stop in masker.notes["spelled"]
    assert said(masker, {"messages": turns("Is it?", f"{stop} is a mark.")}) == [f"{stop} is a mark.{stop}"]
    masker = a_masker(NAMED["alpaca"][1].replace("{{ bos_token }}", ""))
    record = {"instruction": "Say <|endoftext|>", "input": "<|endoftext|>", "output": "No."}
    (sample,) = masker.samples([conversation("x", record, {})])
    assert (sample.tokens == masker.special["<|endoftext|>"]).sum() == 1


def test_tokenizers_that_put_a_space_before_a_text_are_masked_as_a_whole():
    lexicon = sentence_piece((*MARKS, "<s>", "</s>"))
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
    )
    assert said(a_masker(source, tokenizer=lexicon), {"messages": TWO}) == [" It is four. </s>", " Red, green. </s>"]


FAULTS = {
    "no stop token": (
        PLAIN_CHATML.replace("m.content + '<|im_end|>", "m.content + '"),
        "nothing would teach the model to stop",
    ),
    "the stop outside the marks": (
        NAMED["chatml"][1].replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}"),
        "end before '<|im_end|>': the stop token would never be trained",
    ),
    "marks around a question": (
        PLAIN_CHATML.replace("{{ '<|im_start|>' + m.role", "{% generation %}{{ '<|im_start|>' + m.role").replace(
            "{% endfor %}", "{% endgeneration %}{% endfor %}"
        ),
        "which is no answer",
    ),
    "marks around the last answer alone": (
        NAMED["chatml"][1].replace("message.role == 'assistant' %}", "message.role == 'assistant' and loop.last %}"),
        "leave out turn 2",
    ),
    "a prompt that no text begins with": (
        PLAIN_CHATML.replace("assistant\n", "assistant\n<think>"),
        "cannot be told apart",
    ),
    "an answer that is left out": (PLAIN_CHATML.replace("m.content", "m.content[:5]"), "leaves out \"It is four.\""),
    "a template that raises": ("{{ raise_exception('only poems') }}", "refuses the sample: only poems"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_template_that_would_train_something_else_is_refused_with_the_sample(fault):
    source, told = FAULTS[fault]
    with pytest.raises(InputError) as error:
        said(a_masker(source), {"messages": TWO})
    (problem,) = error.value.problems
    assert problem.text.startswith("chat.jsonl:1")
    assert told in problem.text
    assert "data.template" in problem.remedy


def test_marks_around_what_the_prompt_gives_are_cut_back_and_it_is_told():
    header = "{{ '<|im_start|>' + message.role + '\\n' }}"
    begin = "{% if message.role == 'assistant' %}{% generation %}"
    source = (
        NAMED["chatml"][1]
        .replace(header, "")
        .replace(begin, begin + header)
        .replace("{% else %}", "{% else %}" + header)
    )
    masker = a_masker(source)
    for _ in range(20):  # also once its marks are known
        assert said(masker, {"messages": TWO}) == [FOUR, RED]
    assert "<|im_start|>assistant" in masker.notes["marks"]


def test_truncation_keeps_what_begins_a_text_and_cuts_on_the_side_that_is_stated():
    sample = MaskedSample(np.array([9, 1, 2, 3, 4]), np.array([0, 0, 1, 1, 1]), "x")
    assert truncated(sample, 5, "left", 9) is sample
    assert truncated(sample, 3, "right", 9).tokens.tolist() == [9, 1, 2]
    left = truncated(sample, 3, "left", 9)
    assert (left.tokens.tolist(), left.mask.tolist()) == ([9, 3, 4], [0, 1, 1])
    assert truncated(sample, 3, "left", None).tokens.tolist() == [2, 3, 4]


@pytest.fixture
def folder(tmp_path):
    """A model folder as far as text goes."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(PLAIN_CHATML)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return tmp_path


def a_run(make_run, folder, source, **words):
    words = {"format": "chat", "pack": "best_fit", "eval_fraction": 0.0} | words
    return make_run(
        Data(source=str(source), tokenizer=str(folder), **words), vocab=340, sequence=words.pop("sequence", 64)
    )


def test_all_files_of_chat_data_hold_the_same(folder):
    records = [{"messages": turns(f"What is {number}?", "Red.")} for number in range(5)]
    write_lines(folder / "a.jsonl", records)
    (folder / "b.json").write_text(json.dumps(records, indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / "c.parquet")
    for name in ("a.jsonl", "b.json", "c.parquet"):
        assert [record for _, record in read_objects(folder / name)] == records
    (folder / "all").mkdir()
    for name in ("a.jsonl", "b.json", "c.parquet"):
        (folder / name).rename(folder / "all" / name)
    assert len(listing(Source(source=str(folder / "all"), format="chat")).files) == 3


def test_what_is_left_out_is_counted_and_told(folder, make_run):
    records = [
        {"messages": turns("What is two and two?", "It is four.")},
        {"messages": turns("Only a question")},
        {"messages": turns("a " * 80, "Too late.")},
        {"messages": turns("What is it?", "green " * 60)},
    ]
    run = a_run(make_run, folder, write_lines(folder / "chat.jsonl", records))
    corpus = prepare(run, folder / "cache", lambda text: None)
    (report,) = corpus.chats
    assert report is not None
    assert (report.records, report.untrained, report.truncated) == (4, 2, 2)
    assert report.trained == int(corpus.sources[0].mask.read(0, report.tokens).sum())
    line = next(line for line in described(run, corpus) if line.startswith("chat:"))
    assert "4 samples, 2 left out without a trained token, 2 truncated" in line
    assert "answers end with <|im_end|>" in line
    assert any("<|im_end|> did not end a text before" in line for line in described(run, corpus))


def test_a_set_without_a_trained_token_is_refused(folder, make_run):
    run = a_run(make_run, folder, write_lines(folder / "chat.jsonl", [{"messages": turns("Only a question")}] * 3))
    with pytest.raises(InputError, match=r"none of the 3 samples .* has a token to be trained; add answers"):
        prepare(run, folder / "cache", lambda text: None)
    run = a_run(make_run, folder, write_lines(folder / "chat.jsonl", [{"messages": turns("a " * 80, "Red.")}]))
    with pytest.raises(
        InputError, match=r"1 were cut to sequence = 64; use a longer sequence, or set data.truncation_side"
    ):
        prepare(run, folder / "cache", lambda text: None)
    left = a_run(make_run, folder, folder / "chat.jsonl", truncation_side="left")
    assert prepare(left, folder / "cache", lambda text: None).chats[0].trained == 4


def test_a_file_of_empty_lines_has_no_samples(folder, make_run):
    (folder / "chat.jsonl").write_text("\n\n  \n")
    with pytest.raises(InputError, match=r"chat.jsonl has no samples; name files with content"):
        prepare(a_run(make_run, folder, folder / "chat.jsonl"), folder / "cache", lambda text: None)


@pytest.mark.parametrize(("name", "stated"), [("tokenizer_config.json", "eos_token"), ("config.json", "eos_token_id")])
def test_documents_end_with_the_token_that_the_model_s_folder_says(folder, make_run, name, stated):
    lexicon = byte_level(("<|of|>", "<|the_end|>"))
    lexicon.save(str(folder / "tokenizer.json"))
    run = make_run(Data(source=str(folder), tokenizer=str(folder)), vocab=400)
    with pytest.raises(InputError, match=r"none of the usual end tokens"):
        chat.document_end(run, lexicon)
    end = lexicon.token_to_id("<|the_end|>")
    (folder / name).write_text(json.dumps({stated: "<|the_end|>" if stated == "eos_token" else [end]}))
    assert chat.document_end(run, lexicon) == end
    (folder / name).write_text(json.dumps({stated: "<|other|>" if stated == "eos_token" else 9999}))
    with pytest.raises(InputError, match=r"none of the usual end tokens"):
        chat.document_end(run, lexicon)


def test_the_first_sample_and_the_template_are_looked_at_before_anything_starts(folder, make_run):
    file = write_lines(folder / "chat.jsonl", [{"messages": turns("Why?", "")}])
    (found,) = problems(a_run(make_run, folder, file))
    assert f"{file}:1, turn 2 is an empty answer" in found.text
    (found,) = problems(a_run(make_run, folder, file, template="llama3"))
    assert "writes <|start_header_id|>, which is not a single special token" in found.text
    assert "chatml, alpaca, plain" in found.remedy
    (found,) = problems(a_run(make_run, folder, file, template="nothing"))
    assert "neither a named template nor a file" in found.text
    (folder / "chat_template.jinja").write_text("{% if %}")
    (found,) = problems(a_run(make_run, folder, file))
    assert "cannot be used" in found.text
    (folder / "chat_template.jinja").write_text("\n")  # as transformers saves a template that is ""
    (found,) = problems(a_run(make_run, folder, file))
    assert "has no chat template" in found.text
    (folder / "chat_template.jinja").unlink()
    (found,) = problems(a_run(make_run, folder, file))
    assert "has no chat template" in found.text
    assert "alpaca" in found.remedy
    found, *_ = problems(make_run(Data(source=str(file), format="chat", pack="best_fit")))
    assert "needs the tokenizer of a model" in found.text


def test_named_templates_begin_texts_as_the_tokenizer_does(folder, make_run):
    file = write_lines(folder / "chat.jsonl", [{"instruction": "Why?", "output": "Red."}])
    run = a_run(make_run, folder, file, template="alpaca")
    assert not chat.chat_template(run, byte_level()).special["bos_token"]
    made = chat.chat_template(run, byte_level((*MARKS, "<s>"), begin="<s>"))
    assert made.text([{"role": "user", "content": "Why?"}]).startswith("<s>Below is")
    assert made.special["eos_token"] == "<|endoftext|>"


def test_keys_of_chat_are_for_chat_and_pack_follows_the_format():
    loaded = load.load(None, ["data.format=chat", "data.source=x.jsonl", "data.columns=prompt=q,completion=a"])
    assert (loaded.run.data.pack, loaded.origins["data.pack"]) == ("best_fit", "usual for chat")
    assert loaded.run.data.columns == ("prompt=q", "completion=a")
    for words, key in (
        (["data.train_on=last"], "data.train_on"),
        (["data.format=chat", "data.pack=stream"], "data.pack"),
    ):
        with pytest.raises(InputError) as error:
            load.load(None, words)
        assert [problem.key for problem in error.value.problems] == [key]


def test_epochs_stand_in_the_place_of_steps(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('steps = 5\nepochs = 2\n[arch]\npreset = "tiny"\n')
    with pytest.raises(InputError, match="steps = 5 and epochs = 2 both say"):
        load.load(file)
    file.write_text('epochs = 2\n[arch]\npreset = "tiny"\n')
    assert load.load(file).origins["steps"] == "of epochs, once the data is read"
