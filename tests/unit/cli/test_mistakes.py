"""What people get wrong, as a table: the first sentence, the remedy, the exit code; nothing is left behind."""

import os
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from meshwright.cli import main, preflight
from meshwright.spec.units import GIB

TEXT = "a line of text that a person wrote\n" * 300
RUN = 'steps = 3\nsequence = 32\nbatch = 4\n[arch]\npreset = "tiny"\n[data]\nsource = "my.txt"\n'


class Mistake(NamedTuple):
    """Words after `meshwright`, what is said first and what to do; files beside my.txt (None: a folder)."""

    words: str
    says: str
    remedy: str
    files: dict[str, str | bytes | None] = {}  # noqa: RUF012 - never written to
    code: int = 2


MISTAKES = [
    # Words the program does not know
    Mistake("trian", "trian is not a verb", "did you mean train?"),
    Mistake("run.toml", "run.toml is not a verb", "write: meshwright train run.toml"),
    Mistake("", "no verb is named", "use one of train, plan, advise, verify,"),
    Mistake("train --lr 1e-3", "--lr is not a flag", "settings are words, such as optim.lr=1e-3"),
    Mistake("train --epochs 3", "--epochs is not a flag", "settings are words, such as epochs=3"),
    Mistake("train --rnaks 2", "--rnaks is not a flag", "did you mean --ranks?"),
    Mistake("train --ranks 0", "argument --ranks: '0'", "should be a whole number of at least 1"),
    Mistake("train --ranks 1.5", "argument --ranks: '1.5'", "should be a whole number of at least 1"),
    Mistake("convert none --step 3 out", "none is not a folder", "give the folder of a Hugging Face model, or of a"),
    Mistake("report none --json no", "there is no folder none", "give the folder of a run: `meshwright train` says"),
    Mistake("cache clear --json foo", "argument NAME: invalid choice: 'foo'", "(choose from "),
    Mistake("models gpt2", "unknown: gpt2", "leave it out, or see `--help`"),
    Mistake("clusters --cards", "--cards is not a flag", "`--help` lists the flags, `meshwright config"),
    Mistake("clusters foo", "unknown: foo", "leave it out, or see `--help`"),
    Mistake("models --jsno", "--jsno is not a flag", "did you mean --json?"),
    # Keys
    Mistake("train stepz=3", "stepz is not a key", "did you mean steps?"),
    Mistake("train learning_rate=1e-3", "learning_rate is not a key", "here it is called optim.lr"),
    Mistake("train optim.rate=1e-3", "optim.rate has a new name", "write optim.lr"),
    Mistake("train held.every=3", "command line: held has a new name", "write eval"),
    Mistake(
        "train faults.live=true plan.replicate=2 plan.powersgd=2",
        "command line: faults.live cannot be combined with plan.powersgd, which factors",
        "leave one of them out",
    ),
    Mistake("train evel.every=3", "command line: evel is not a key", "did you mean eval?"),
    Mistake("train arch.feed_forward=65", "command line: arch.feed_forward is not a key", "here it is called arch.ffn"),
    Mistake("train arch.fff=65", "arch.fff is not a key", "did you mean arch.ffn?"),
    Mistake("train arch.feedforward_width=65", "arch.feedforward_width is not a key", "`meshwright config schema`"),
    Mistake("train plan.tpp=2", "plan.tpp is not a key", "did you mean plan.tp?"),
    Mistake("train lora.rank=8", "lora is not a key", "adapters are of [adapter], as in adapter.kind"),
    Mistake("train adapter.use_dora=true", "use_dora is not a key", 'adapter.kind = "dora"'),
    Mistake("train adapter.modules_to_save=lm_head", "modules_to_save is not a key", "trained by optim.freeze"),
    Mistake(
        "train adapter.bias=all", "adapter.bias is not a key", "beside the linear layers that adapter.targets names"
    ),
    Mistake("train load_in_4bit=true", "load_in_4bit is not a key", "here it is called adapter.base"),
    Mistake(
        "train adapter.kind=dora adapter.dropout=0.1 adapter.base=fp8 plan.precision=fp8 plan.tp=2",
        "adapter.dropout of DoRA with plan.precision = fp8 is not proved under plan.tp = 2",
        "use plan.tp = 1 or plan.precision = bf16",
    ),
    Mistake(
        "train adapter.kind=lora adapter.dropout=0.1 adapter.targets=q_proj arch.preset=tiny-moe plan.tp=2",
        "not proved under",
        "plan.tp = 1",
    ),
    Mistake(
        "train adapter.kind=lora adapter.dropout=0.1 arch.preset=tiny-moe",
        "adapter.dropout is not of routed experts",
        "leave it out, or use adapter.targets",
    ),
    Mistake("train adapter.kind=dora adapter.rank=999", "larger than the 192 × 192 matrix", "use at most 192"),
    Mistake(
        "train arch.preset=tiny adapter.kind=qlora arch.hidden=128 arch.head_dim=16 arch.ffn=960 plan.tp=4 steps=1",
        "plan.tp = 4 would cut NF4 blocks: blocks.0.attn.out has 128 inputs, in blocks of 64",
        "use plan.tp = 2 with plan.shard",
    ),
    Mistake(
        "train arch.preset=tiny adapter.kind=qlora arch.hidden=512 arch.head_dim=64 arch.ffn=960 plan.tp=4 steps=1",
        "plan.tp = 4 would cut NF4 blocks: blocks.0.mlp.down has 960 inputs, in blocks of 64",
        "use plan.tp = 1 with plan.shard",  # 960 are 15 blocks: three ranks would cut none, and are no part of four
    ),
    Mistake(
        "train adapter.kind=qlora plan.tp=2 arch.ffn=192",
        "plan.tp = 2 would cut NF4 blocks: blocks.0.attn.out has 192 inputs, in blocks of 64",
        "use plan.tp = 1 with plan.shard",
    ),
    Mistake(
        "train adapter.kind=lora adapter.base=nf4 arch.ffn=100", "blocks.0.mlp.down has 100", "adapter.base = bf16"
    ),
    Mistake("train adapter.kind=qlora arch.preset=tiny-moe", "blocks.0.mlp.experts.down has 96", "adapter.kind = lora"),
    Mistake(
        "train adapter.kind=none adapter.rank=8", "is of an adapter, and adapter.kind = none", "set adapter.kind = lora"
    ),
    Mistake(  # the default's own number says nothing by its value
        "train adapter.rank=16",
        "adapter.rank without adapter.kind: all weights would be trained",
        'adapter.kind = "lora"',
    ),
    Mistake(
        "plan llama2-7b --cluster 1xrtx4090 adapter.rank=16 adapter.alpha=8",
        "adapter.rank and adapter.alpha without adapter.kind",
        'adapter.kind = "lora"',
    ),
    Mistake("plan gpt2 --cluster laptop", '"laptop" is no GPU', "`meshwright bench --probe` measures the machine"),
    Mistake("plan gpt2 --cluster 3xh100+5xa100", "mixes cards", "plan each kind by itself"),
    Mistake(
        "plan meta-llama/Meta-Llama-3-70B --cluster 8xh100",
        "neither a known model nor a file",
        "did you mean llama3-70b? A model of Hugging Face's hub is named by the folder",
    ),
    Mistake("plan gpt2 --cluster 8xh100 plan.tensor_parallel=8", "is not a key", "here it is called plan.tp"),
    Mistake("plan gpt2 --gpus 8", "--gpus is not a flag", "did you mean --cluster 8xh100?"),
    Mistake("plan gpt2 --lora", "--lora is not a flag", "adapters are of [adapter]"),
    Mistake("report runs/x --html page.html", "--html is not a flag", "did you mean --page FILE.html?"),
    Mistake("eval runs/x my.txt", "unknown: my.txt", "did you mean --data my.txt?", {"my.txt": "text"}),
    Mistake(
        "train adapter.kind=lora adapter.rank=999", "larger than the 192 × 192 matrix of attn.q", "use at most 192"
    ),
    Mistake("train adapter.kind=lora adapter.targets=w1", "'w1' is none of the linear layers", 'use "all-linear"'),
    Mistake(
        "train adapter.kind=lorra adapter.rank=8 adapter.alpha=16",  # and nothing of adapter.kind = none
        'adapter.kind = "lorra" should be one of "none", "lora", "dora", "qlora"',
        "did you mean 'lora'?",
    ),
    Mistake("train adapter.kind=lora plan.precision=fp8", "it is not held in FP8", "use adapter.base = fp8, or"),
    Mistake("train adapter.kind=qlora plan.precision=fp8", "it is not held in FP8", "use adapter.kind = lora with"),
    Mistake(
        "train adapter.kind=lora adapter.base=fp8 plan.precision=fp8 arch.preset=tiny-moe",
        "plan.precision = fp8 is not offered for adapters of MoE models",
        "use plan.precision = bf16",
    ),
    Mistake("train optim.freeze=embed plan.precision=fp8", "optim.freeze freezes some", "use plan.precision = bf16"),
    Mistake("train adapter.kind=lora optim.freeze=embed", "beside an adapter nothing is", "leave optim.freeze out"),
    Mistake(
        "train optim.name=onebit_adam plan.replicate=2 plan.grad_reduce=int8",
        "exchanges momenta in one bit",
        "leave plan.grad_reduce out",
    ),
    Mistake(
        "train plan.replicate=2 plan.staleness=1 plan.grad_reduce=int8",
        "sends them to a parameter server",
        "leave plan.grad_reduce or plan.staleness out",
    ),
    Mistake("train optim.freeze=foo", "'foo' is no weight and no part of the model", "name weights or what holds"),
    Mistake("train optim.freeze=*", "optim.freeze leaves nothing to train", "leave some weights out"),
    Mistake("train num_train_epochs=3", "num_train_epochs is not a key", "here it is called epochs"),
    Mistake("train steps=3 epochs=3", "steps = 3 and epochs = 3 both say how long", "leave one of them out"),
    Mistake("train messages=true", "messages is not a key", 'set data.format = "chat", which reads conversations'),
    Mistake("train plan.zero.stage=3", 'plan.zero = {"stage":3} should be one of 0, 1, 2, 3', "use one of them"),
    Mistake("train steps", "steps is not a file", "write settings as key=value: steps=…"),
    Mistake("train =3", "'=3' is not key=value", "write overrides like plan.grad_accum=4"),
    Mistake("train steps:3", "steps:3 is not a file", "write settings as key=value: steps=…"),
    # Values
    Mistake("train steps=ten", 'steps = "ten" should be a whole number', "write it in digits, without a unit"),
    Mistake("train steps=-1", "steps = -1 is not a count", "give steps a whole number of at least 1"),
    Mistake("train steps=1e3", "steps = 1000.0 should be a whole number", "write steps = 1000"),
    Mistake(
        "train batch=7",
        "batch = 7 is not microbatch 3 × grad_accum 1 × 2 data ranks = 6",
        "set batch = 6, or batch = 8 with",
    ),
    Mistake("train optim.lr=fast", 'optim.lr = "fast" should be a number', "write it in digits, without a unit"),
    Mistake("train optim.lr=-1", "optim.lr = -1.0 is out of range", "use 0 to 1000"),
    Mistake("train optim.lr=nan", "optim.lr = nan is out of range", "use 0 to 1000"),
    Mistake("train optim.beta1=1.0", "optim.beta1 = 1.0 is out of range", "use 0 to below 1"),
    Mistake(
        "train plan.precision=bf17",
        'plan.precision = "bf17" should be one of "fp32", "bf16", "fp16",',
        "did you mean 'bf16'?",
    ),
    Mistake(
        "train plan.compile=maybe",
        'plan.compile = "maybe" should be true or false',
        "write plan.compile = true or plan.compile =",
    ),
    Mistake("train optim.name=adam", 'optim.name = "adam" should be one of "adamw", "sgd"', "did you mean 'adamw'?"),
    Mistake(
        "train seed=99999999999999999999",
        "seed = 99999999999999999999 has more than 63 bits",
        "use 0 to 9223372036854775807",
    ),
    Mistake("train arch.vocab=999999999", "arch.vocab = 999999999 is beyond any model", "use at most 10000000"),
    Mistake("train arch.preset=gpt5", 'arch.preset = "gpt5" is not a known model', "did you mean gpt2?"),
    Mistake("train arch=gpt2", 'arch = "gpt2" should be a table', "write arch.preset=gpt2"),
    Mistake("train plan=fsdp", 'plan = "fsdp" should be a table', "write plan.NAME = VALUE for each of its keys"),
    Mistake("train log.writers=mlflow", 'log.writers = ["mlflow"] should be a list, each one of', "use some of them"),
    Mistake("train log.writers=wanb", 'log.writers = ["wanb"] should be a list, each one of', "did you mean 'wandb'?"),
    Mistake("train arch.dropout=1.5", "arch.dropout = 1.5 is no probability", "use 0 up to below 1"),
    Mistake(
        "train goal.memory_gib=80GB",
        'goal.memory_gib = "80GB" should be a number',
        "write it in digits, without a unit",
    ),
    Mistake(
        "train name=../../x data.source=my.txt",
        "name = '../../x' cannot be part of a folder's name",
        "use letters, digits, - and _, or say by",
    ),
    Mistake(
        "train sequence=1000000000000000000000000000000 data.source=my.txt",
        "sequence = 1000000000000000000000000000000 is beyond any run",
        "use at most 1000000000000",
    ),
    Mistake(
        "plan gpt2 --cluster 8xh100 --batch 100000000000000000000000",
        "meshwright: command line: batch = 100000000000000000000000 is beyond any run",  # and one problem, not two
        "use at most 1000000000000",
    ),
    Mistake(
        "train optim.momentum=0.5 data.source=my.txt",
        "optim.momentum is for SGD with momentum, and optim.name = adamw",
        "leave optim.momentum out, or set optim.name =",
    ),
    # Plans and worlds
    Mistake("train goal.memory_gib=0.0001", "goal.memory_gib = 0.0001 is too little for this plan", "allow"),
    Mistake(
        "train plan.tp=3",
        "arch.kv_heads = 2 cannot be sharded over plan.tp = 3 ranks",
        "use plan.tp = 2, and the other ranks for",
    ),
    Mistake(
        "train plan.shard=2", "plan.shard = 2 with plan.zero = 0 shards nothing", "set plan.zero = 1, 2 or 3, or use"
    ),
    Mistake(
        "train plan.pp=99",
        "plan.pp = 99 × plan.chunks = 1 are more stages than arch.layers =",
        "use plan.pp of at most 4",
    ),
    Mistake(
        "train plan.cp=3",
        "sequence = 256 cannot be split into 6 equal slices for plan.cp =",
        "use a multiple of 6, such as 252, or smaller",
    ),
    Mistake(
        "train plan.replicate=2 --ranks 3",
        "the plan needs replicate 2 = 2 ranks, not 3",
        "start 2 ranks, or leave plan.replicate out",
    ),
    Mistake("train plan.tp=2 --ranks 3", "3 ranks are no multiple of tp 2 = 2", "start 2, 4 or 6 ranks"),
    Mistake("train plan.zero=4", "plan.zero = 4 should be one of 0, 1, 2, 3", "use one of them"),
    Mistake(
        "train plan.recompute=some",
        "plan.recompute = 'some' is not a recompute policy",
        "use one of none, full, selective, sqrt,",
    ),
    Mistake(
        "train plan.cpu_offload=true",
        "plan.cpu_offload frees a block's weights after use, and plan.zero",
        "set plan.zero = 3, on one rank too, or leave",
    ),
    Mistake(
        "train plan.bf16_params=true",
        "plan.bf16_params is for single-rank plans, and this plan has 2",
        "leave plan.bf16_params out: sharded weights",
    ),
    Mistake(
        "train plan.pp=1000000000 data.source=my.txt",
        "plan.pp = 1000000000 × plan.chunks = 1 are more stages than",
        "use plan.pp of at most 4",
    ),
    Mistake(
        "train arch.experts=4 data.source=my.txt", "arch.expert_ffn is missing", "state the width inside one expert"
    ),
    Mistake(
        "train arch.experts=1000000000 arch.expert_ffn=8 data.source=my.txt",
        "4000000000 experts in all layers are beyond any model",
        "use at most 100000",
    ),
    Mistake("bench tiny --plan tp=2 --ranks 1", "1 rank is no multiple of tp 2 = 2", "start 2, 4 or 6 ranks"),
    # Machines, memory, trackers
    Mistake(
        "train log.writers=wandb",
        "log.writers names wandb, which is not installed",
        "run: pip install wandb, or leave it out of",
    ),
    Mistake(
        "train goal.cluster=64xh100",
        "the plan is for 2 × h100 (goal.cluster = 64xh100), and this",
        "start it there (docs/many-machines.md), or",
    ),
    Mistake("train goal.cluster=64xh1000", 'unknown card "h1000"', "did you mean h100? `meshwright clusters`"),
    Mistake(
        "train batch=1000000000000",
        "the run does not fit: it needs 12513160705.6 GiB for 2 ranks,",
        "this plan fits: plan.",
        code=3,
    ),
    Mistake(
        "train run.toml",
        "run.toml:9: the plan is for 2 × h100 (goal.cluster = 8xh100), and",
        "start it there (docs/many-machines.md), or",
        {"run.toml": RUN + "[goal]\ncluster = '8xh100'\n"},
    ),
    # Models
    Mistake(
        "train arch.heads=7",
        "arch.hidden = 192 does not divide into arch.heads = 7",
        "use a multiple of 7, or state arch.head_dim",
    ),
    Mistake(
        "train arch.hidden=-64", "arch.hidden = -64 is not a count", "give arch.hidden a whole number of at least 1"
    ),
    Mistake("train arch.layers=1000000000", "arch.layers = 1000000000 is beyond any model", "use at most 10000"),
    # Run files
    Mistake("train nothere.toml", "nothere.toml: No such file or directory", "name a run file that can be read"),
    Mistake("train .", ".: Is a directory", "name a run file that can be read; for the text in it"),
    Mistake("train gpt2", "gpt2 is a model, not a run file", "write arch.preset=gpt2"),
    Mistake(
        "train Llama-3-8B", "Llama-3-8B is neither a run file nor a model", "for the model write arch.preset=llama3-8b"
    ),
    Mistake(
        "train run.toml",
        "run.toml is not TOML: Invalid value",
        "correct that line: steps =",
        {"run.toml": "steps = \n"},
    ),
    Mistake(
        "train run.toml", "run.toml is not TOML: Invalid value", "write true for True", {"run.toml": "compile = True\n"}
    ),
    Mistake(
        "train run.toml",
        "run.toml is not TOML: Invalid value",
        'write strings in quotes: "gpt2"',
        {"run.toml": "name = gpt2\n"},
    ),
    Mistake(
        "train run.toml",
        "run.toml is not TOML: Expected ']' at the end of a table",
        "correct that line: [arch",
        {"run.toml": "[arch\n"},
    ),
    Mistake("train run.toml", "run.toml is not UTF-8 text (byte 0)", "is it a run file?", {"run.toml": b"\xff\xfe"}),
    Mistake(
        "train run.toml",
        "the run does not say what to train: arch is missing",
        'begin with [arch] preset = "gpt2";',
        {"run.toml": ""},
    ),
    Mistake(
        "train run.toml",
        "run.toml:1: extends goes round in a circle",
        "name one other run file",
        {"run.toml": 'extends = "run.toml"\n'},
    ),
    Mistake(
        "train run.toml",
        "run.toml:7: data.sourc is not a key",
        "did you mean data.source?",
        {"run.toml": 'steps = 3\nsequence = 32\nbatch = 4\n[arch]\npreset = "tiny"\n[data]\nsourc = "my.txt"\n'},
    ),
    Mistake(
        "train run.toml",
        "run.toml:1: held has a new name",
        "write eval",
        {"run.toml": "held.every = 3\n" + RUN},
    ),
    Mistake(
        "train run.toml",
        "run.toml:9: optim.rate has a new name",
        "write optim.lr",
        {"run.toml": RUN + "[optim]\nrate = 1\n"},
    ),
    Mistake(
        "train run.toml",
        'run.toml:2: log.writers = "wandb" should be a list, each one of',
        'write log.writers = ["wandb"]',
        {"run.toml": '[log]\nwriters="wandb"\n[arch]\npreset="tiny"\n'},
    ),
    Mistake(
        "train my.txt",
        "my.txt is not TOML: Expected '=' after a key in a key/value pair",
        "a run file is TOML, as in docs/run-file.md;",
    ),
    Mistake(
        "train run.yaml",
        "run.yaml is not TOML: Expected '=' after a key in a key/value pair",
        "a run file is TOML, as in docs/run-file.md;",
        {"run.yaml": "steps: 3\n"},
    ),
    Mistake(
        "train run.toml --ranks 2",
        "run.toml:9: the plan needs replicate 4 = 4 ranks, not 2",
        "start 4 ranks, or leave plan.replicate out",
        {"run.toml": RUN + "[plan]\nreplicate = 4\n"},
    ),
    Mistake(
        "train run.toml",
        'run.toml:9: optim.lr = "3e-4" should be a number',
        "write it in digits, without a unit",
        {"run.toml": RUN + '[optim]\nlr = "3e-4"\n'},
    ),
    Mistake("train run.toml", "run.toml: Is a directory", "name a run file that can be read", {"run.toml/": None}),
    Mistake(
        "train run.toml",
        'run.toml:8: data.mix = {"source":"a"} should be a list, each a',
        "write a list, as in data.mix = [{source =",
        {"run.toml": RUN + '[data.mix]\nsource="a"\n'},
    ),
    Mistake(
        "train run.toml",
        "run.toml:6: data.mix.0.sourc is not a key",
        "did you mean data.mix.0.source?",
        {"run.toml": 'steps = 3\nsequence = 32\nbatch = 4\n[arch]\npreset = "tiny"\n[[data.mix]]\nsourc = "my.txt"\n'},
    ),
    # Data
    Mistake("train data.source=nowhere.txt", "no file matches nowhere.txt", "the nearest folder that exists is"),
    Mistake("train data.source=", "the source of the data is empty", "name a file, a folder or a glob as data.source"),
    Mistake(
        "train data.source=empty",
        "the folder empty is empty",
        "put files there, or name another folder",
        {"empty/": None},
    ),
    Mistake(
        "train data.source=empty.txt",
        "all 1 file(s) of empty.txt are empty",
        "name files with content",
        {"empty.txt": ""},
    ),
    Mistake(
        "train data.source=my.bin",
        "my.bin holds 3 bytes, an odd number, and its tokens have 2 bytes",
        "write it again",
        {"my.bin": b"\x01\x02\x03"},
    ),
    Mistake(
        "train data.source=pic.txt",
        "pic.txt is not UTF-8: byte 0x89 at offset 0",
        "convert it to UTF-8, or leave it out",
        {"pic.txt": b"\x89PNG\r\n\x1a\n\xff\xff"},
    ),
    Mistake(
        "train data.source=a.jsonl",
        "a.jsonl:1 has no field 'text', only txt",
        'set data.field = "txt"',
        {"a.jsonl": '{"txt": "hello"}\n'},
    ),
    Mistake(
        "train data.source=a.jsonl",
        "a.jsonl:1 has no field 'text', only messages",
        'set data.format = "chat", which reads conversations',
        {"a.jsonl": '{"messages": []}\n'},
    ),
    Mistake(
        "train data.source=a.jsonl",
        "a.jsonl:1: the field 'text' holds int, not text",
        "repair the line, or name another field as",
        {"a.jsonl": '{"text": 3}\n'},
    ),
    Mistake(
        "train data.source=a.json",
        "a.json has an ending that says nothing about its content",
        'set data.format ("text", "jsonl", "parquet",',
        {"a.json": "[]"},
    ),
    Mistake(
        "train data.source=a.csv",
        "a.csv has an ending that says nothing about its content",
        "convert it to text (.txt) or JSON lines",
        {"a.csv": "a,b\n"},
    ),
    Mistake(
        "train data.source=d",
        "none of the 2 file(s) below d has a known ending",
        'name them by a glob, such as "d/**/*", and',
        {"d/a.csv": "x", "d/b.docx": "y"},
    ),
    Mistake(
        "train data.source=a.parquet",
        "a.parquet is not a whole Parquet file",
        "fetch or write it again",
        {"a.parquet": "x"},
    ),
    Mistake(
        "train data.source=a.txt.gz", "a.txt.gz is cut short or broken", "fetch or pack it again", {"a.txt.gz": "x"}
    ),
    Mistake(
        "train data.source=d",
        "d mixes text (d/a.txt) and ready tokens (d/b.bin)",
        "name them as two sources under data.mix",
        {"d/a.txt": "x" * 999, "d/b.bin": "yy"},
    ),
    Mistake(
        "train data.tokenizer=nowhere.json",
        "there is no tokenizer at nowhere.json",
        "name a tokenizer.json or its folder, or set",
    ),
    Mistake("train data.tokenizer=my.txt", "my.txt is not a tokenizer.json", "name a file that `tokenizers` wrote"),
    Mistake(
        "train arch.vocab=100", "arch.vocab = 100 is too small to hold every byte and the end of a", "use at least 257"
    ),
    Mistake(
        "train data.mask_documents=true data.pack=documents",
        "data.mask_documents = true has no meaning for data.pack =",
        "leave one of them out",
    ),
    Mistake(
        "train data.mix=my.txt",
        'data.mix = ["my.txt"] should be a list, each a table of source,',
        "write a list, as in data.mix = [{source =",
    ),
    Mistake(
        "train data.source=a.jsonl data.format=json",
        'data.format = "json" should be one of "auto", "text", "jsonl",',
        "did you mean 'jsonl'?",
        {"a.jsonl": "{}"},
    ),
    Mistake("train sequence=1000000000", "stdlib holds", "use a smaller sequence, or more data"),
    # Where a run begins, and where it goes
    Mistake(
        "train init.from=nowhere data.source=my.txt",
        "nowhere is not a folder",
        "give the folder of a Hugging Face model, or of a run",
    ),
    Mistake(
        "train init.from=model.bin data.source=my.txt",
        "model.bin is a pickle: loading one runs its code, so that is",
        "if you trust it, convert it elsewhere:",
        {"model.bin": b"\x80"},
    ),
    Mistake(
        "train init.optimizer_state=true data.source=my.txt",
        "init.optimizer_state takes the optimizer state of the run in",
        "name one, or leave init.optimizer_state out",
    ),
    Mistake(
        "train data.source=my.txt --folder my.txt", "my.txt cannot be written: Not a directory", "name another --folder"
    ),
    Mistake(
        "train data.source=my.txt --folder other", "other holds other files", "name an empty --folder", {"other/x": "1"}
    ),
    Mistake(
        "train data.source=my.txt --folder other --fresh",
        "other is not a run folder, so --fresh leaves it alone",
        "name another --folder",
        {"other/x": "1"},
    ),
    # plan
    Mistake("plan", "no model is named", "name a model of `meshwright models`, a run"),
    Mistake("plan llama3-8b", "no cluster is named", "add --cluster 64xh100, or [goal] cluster to"),
    Mistake("plan llama9 --cluster 8xh100", "llama9 is neither a known model nor a file", "did you mean llama-7b?"),
    Mistake("plan gpt2 --cluster 8xh1000", 'unknown card "h1000"', "did you mean h100? `meshwright clusters`"),
    Mistake(
        "plan gpt2 --cluster 8xh100 --tokens many",
        "argument --tokens: 'many'",
        "should be a number above 0, such as 1.5e12",
    ),
    Mistake("plan gpt2 --cluster 8xh100 --dollars 2", "--dollars needs --tokens", "add --tokens, for example 1.5e12"),
    Mistake(
        "plan gpt2 --cluster 8xh100 --sequence 0", "argument --sequence: '0'", "should be a whole number of at least 1"
    ),
    Mistake("plan gpt2 --cluster 8xh100 --batch 1M", "argument --batch: '1M'", "a batch is counted in sequences"),
    Mistake("plan gpt2 --cluster cpu", '"cpu" is no GPU', "`meshwright train` runs there without a cluster"),
    Mistake(
        "plan gpt2 --cluster 8xh100 plan.tp=5",
        "plan.tp = 5 does not divide 8 GPUs",
        "fix other numbers, or take other machines",
    ),
    Mistake(
        "plan gpt2 --cluster 8xh100 --network warp",
        'unknown network "warp"',
        "`meshwright clusters` lists them, and a file",
    ),
    Mistake(
        "plan gpt2 --cluster 8xh100 --write x/y/run.toml",
        "x/y/run.toml: No such file or directory",
        "name a file in a folder that can be written",
    ),
    Mistake(
        "plan gpt2 --cluster 8xh100 --write my.toml",
        "my.toml exists",
        "add --force to replace it, or name another",
        {"my.toml": ""},
    ),
    Mistake(
        "plan gpt2 --cluster 8xh100 --profile nowhere.json",
        "there is no profile nowhere.json: No such file or directory",
        "measure one first: meshwright bench --probe",
    ),
    Mistake(
        "plan gpt2 --cluster 8xh100 --profile p.json",
        "p.json is not a machine profile",
        "give a file that the probe wrote, or correct",
        {"p.json": "{}"},
    ),
    Mistake(
        "plan gpt2 --cluster mine.toml", "mine.toml: No such file or directory", "name a cluster file that can be read"
    ),
    Mistake(
        "plan gpt2 --cluster mine.toml",
        "cluster.gpu = 3 should be a string",
        'write a string, as in cluster.gpu = "…"',
        {"mine.toml": "gpu = 3\n"},
    ),
    Mistake(
        "plan --price in.csv --out out.csv", "in.csv: No such file or directory", "name a CSV file that can be read"
    ),
    Mistake(
        "plan --price in.csv --out out.csv",
        "in.csv lacks the columns layers, hidden, seq_len, gpu, n_gpus",
        "docs/accuracy.md lists the columns that rows",
        {"in.csv": "a,b\n1,2\n"},
    ),
    Mistake(
        "plan gpt2 --cluster 8xh100 --chart --json",
        "--chart cannot be combined with --json",
        "leave one of them out, or use --page",
    ),
    Mistake(
        "plan gpt2 --cluster 8xh100 steps=x",
        'steps = "x" should be a whole number',
        "write it in digits, without a unit",
    ),
    Mistake(
        "plan gpt2 --cluster 8xh100 --profile d",
        "there is no profile d: Is a directory",
        "measure one first: meshwright bench --probe",
        {"d/": None},
    ),
    Mistake(
        "plan gpt2 --cluster 8xh100 plan.precision=fp9",
        'plan.precision = "fp9" should be one of "fp32", "bf16", "fp16",',
        "did you mean 'fp8'?",
    ),
    Mistake("plan run.toml", "no cluster is named", "add --cluster 64xh100, or [goal] cluster to", {"run.toml": RUN}),
    Mistake("plan gpt2 8xh100", "'8xh100' is not key=value", "write --cluster 8xh100"),
    # advise
    Mistake("advise gpt2", "no cluster is named", "add --cluster 64xh100, or [goal] cluster to"),
    Mistake("advise gtp2 --cluster 8xh100", "gtp2 is neither a known model nor a file", "did you mean gpt2?"),
    # verify
    Mistake("verify", "no plan to prove", 'name one with --plan "shard=2,zero=3", or all'),
    Mistake(
        "verify --plan tp=3",
        "arch.heads = 8 cannot be sharded over plan.tp = 3 ranks",
        "use plan.tp = 2, and the other ranks for",
    ),
    Mistake("verify --plan tp", "'tp' of --plan 'tp' is not field=value", "write tp=2,shard=2"),
    Mistake("verify --plan tp=two", "tp=two of --plan is not a count", "use whole numbers of at least 1"),
    Mistake("verify --checkpoint nowhere", "nowhere is not a folder", "give a run folder, or one of its"),
    Mistake("verify --checkpoint e", "e holds no checkpoint", "give a run folder, or one of its", {"e/": None}),
    Mistake(
        "verify --checkpoint w.bin",
        "w.bin is a pickle: loading one runs its code, so that is never",
        "if you trust it, convert it elsewhere:",
        {"w.bin": b"x"},
    ),
    Mistake("verify --plan tp=2 --folder f", "f cannot be written: it is a file", "name another --folder", {"f": "x"}),
    # rehearse
    Mistake(
        "rehearse --fault flood",
        "argument --fault: invalid choice: 'flood'",
        "(choose from 'kill', 'term', 'hang', 'sleep',",
    ),
    Mistake("rehearse nothere.toml", "nothere.toml: No such file or directory", "name a run file that can be read"),
    Mistake("rehearse data.source=nowhere", "no file matches nowhere", "the nearest folder that exists is"),
    Mistake(
        "rehearse run.toml",
        "run.toml:9: the plan is for 2 × h100 (goal.cluster = 8xh100), and",
        "start it there (docs/many-machines.md), or",
        {"run.toml": RUN + "[goal]\ncluster = '8xh100'\n"},
    ),
    # bench
    Mistake(
        "bench nothere.toml",
        "'nothere.toml' is neither a run file nor a model",
        "name a .toml, or one of tiny, tiny-moe,",
    ),
    Mistake("bench --plan foo=3", "plan.foo is not a key", "did you mean plan.zero?"),
    Mistake("bench --plan ''", "argument --plan: '' names no plan", "write one, such as shard=2,zero=3"),
    Mistake("verify --plan ' ,'", "argument --plan: ' ,' names no plan", "write one, such as shard=2,zero=3"),
    Mistake("plan gpt2 --plan ''", "--plan is not a flag", "settings are words, such as plan=…"),
    Mistake("bench --steps 0", "argument --steps: '0'", "should be a whole number of at least 1"),
    Mistake("bench --plan shard=2,zero=3 --ranks 3", "3 ranks are no multiple of shard 2 = 2", "start 2, 4 or 6 ranks"),
    Mistake(
        "bench --profile nowhere.json",
        "there is no profile nowhere.json: No such file or directory",
        "measure one first: meshwright bench --probe",
    ),
    Mistake("bench --out d", "d cannot be written: Is a directory", "name another --out", {"d/": None}),
    Mistake("bench --probe --out d", "d is a folder", "name a file with --out", {"d/": None}),
    Mistake(
        "bench run.toml",
        "the plan is for 4 × h100 (goal.cluster = 8xh100), and this",
        "start it there (docs/many-machines.md), or",
        {"run.toml": RUN + "[goal]\ncluster = '8xh100'\n[plan]\nreplicate=4\n"},
    ),
    # report
    Mistake("report nowhere", "there is no folder nowhere", "give the folder of a run: `meshwright train`"),
    Mistake("report my.txt", "my.txt is a file", "give the folder of a run: `meshwright train`"),
    Mistake(
        "report e --page p.html",
        "p.html exists",
        "add --force to replace it, or name another",
        {"e/": None, "p.html": "x"},
    ),
    Mistake(
        "report d --profile nope",
        "there is no profile nope: No such file or directory",
        "measure one first: meshwright bench --probe",
        {"d/run.toml": RUN},
    ),
    Mistake("report .", ". is not a run's folder: it has no run.toml", "give the folder of a run: `meshwright train`"),
    # convert
    Mistake("convert", "the following arguments are required: source", "usage: meshwright convert"),
    Mistake("convert nowhere out", "nowhere is not a folder", "give the folder of a Hugging Face model, or of a run"),
    Mistake(
        "convert p out --merge",
        "p is an adapter as peft has it, and no whole model",
        "of a run of yours name the run",
        {"p/adapter_config.json": "{}"},
    ),
    Mistake(
        "convert e out",
        "e holds neither config.json nor arch.json",
        "give the folder of a Hugging Face model, or of a run",
        {"e/": None},
    ),
    Mistake(
        "convert w.pt out",
        "w.pt is a pickle: loading one runs its code, so that is never",
        "if you trust it, convert it elsewhere:",
        {"w.pt": b"x"},
    ),
    Mistake(
        "convert hf out --dtype int8",
        "argument --dtype: invalid choice: 'int8'",
        "(choose from 'float32', 'bfloat16', 'float16')",
        {"hf/config.json": "{}"},
    ),
    # generate and eval
    Mistake("generate", "the following arguments are required: MODEL", "usage: meshwright generate"),
    Mistake(
        "generate nowhere --prompt hi",
        "nowhere is not a folder",
        "give the folder of a Hugging Face model, or of a run",
    ),
    Mistake("generate . --prompt hi --device cuda", "there is no GPU that torch can use", "use --device cpu"),
    Mistake("eval nowhere", "nowhere is not a folder", "give the folder of a Hugging Face model, or of a run"),
    Mistake("eval . --field text", "--format and --field say how --data is read", "add --data PATH"),
    # cache and completion
    Mistake("launch arch.preset=tiny", "nothing says what is to start the ranks", "add --on slurm|torchrun|"),
    Mistake("launch --on pbs", "argument --on: 'pbs' is not known", "use one of slurm, torchrun"),
    Mistake("launch --on kubeflow", "argument --on: 'kubeflow' is", "did you mean --on kubernetes --kind trainjob?"),
    Mistake("launch --on jobset", "argument --on: 'jobset' is not", "did you mean --on kubernetes --kind jobset?"),
    Mistake("launch --on Slrum", "argument --on: 'Slrum' is not known", "did you mean --on slurm?"),
    Mistake("launch --on slurm --requeues -1", "argument --requeues: '-1'", "should be a whole number of at least 0"),
    Mistake(
        "launch batch=12 plan.replicate=3 --on mpi --ranks-per-node 2", "3 ranks do not divide into", "use --ranks-per"
    ),
    Mistake(
        "launch --on torchrun --out my.txt", "my.txt cannot be written: it is a file", "name another folder by --out"
    ),
    Mistake("launch --on skypilot", "machines of a cloud share nothing by themselves", "add --volume BUCKET:/PATH"),
    Mistake(
        "launch --on skypilot --volume b:/d --folder /d/r", "no cluster is named", "add --cluster with one of a100"
    ),
    Mistake("launch --on terraform", "no cluster is named", "add --cluster with one of a100-40g"),
    Mistake("doctor --folder my.txt", "my.txt cannot be written: it is a file", "name another --folder"),
    Mistake("train eval.prompts=5", "eval.prompts = 5 should be a string or a list, each a string", "write a string"),
    Mistake("doctor --fodler x", "--fodler is not a flag", "did you mean --folder?"),
    Mistake("launch --node-rank one --nodes 2", "--node-rank one is no number", "use --node-rank 0, 1, …"),
    Mistake("cache clera", "argument what: invalid choice: 'clera'", "(choose from 'show', 'clear')"),
    Mistake("cache clear nothing", "argument NAME: invalid choice: 'nothing'", "(choose from 'tokens', 'tokenizers'"),
    Mistake("completion tcsh", "argument shell: invalid choice: 'tcsh'", "(choose from 'bash', 'zsh', 'fish')"),
    # config
    Mistake("config", "the following arguments are required: what, RUN.toml | key=value", "usage: meshwright config"),
    Mistake("config shwo", "argument what: invalid choice: 'shwo'", "(choose from 'show', 'schema', 'explain')"),
    Mistake("data show data.source=nowhere.txt", "no file matches nowhere.txt", "the nearest folder that exists is"),
    Mistake(
        "data show data.format=chat data.source=a.jsonl",
        "data.format = chat needs the tokenizer of a model",
        "set init.from, or data.tokenizer",
        {"a.jsonl": '{"messages": []}\n'},
    ),
    Mistake("config show stepz=3", "stepz is not a key", "did you mean steps?"),
    Mistake("config explain optim.lrr", "optim.lrr is not a key", "did you mean optim.lr?"),
    Mistake("config show d", "d: Is a directory", "name a run file that can be read", {"d/": None}),
]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A user's folder with a text, on a machine without GPUs or wandb, of which 20 GiB are free."""
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(preflight, "free_host_bytes", lambda: 20 * GIB)
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == "wandb" else object())
    return tmp_path / "desk"


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_there_are_many_mistakes_of_every_verb():
    assert len(MISTAKES) >= 70
    assert set(main.VERBS) <= {mistake.words.partition(" ")[0] for mistake in MISTAKES}


@pytest.mark.parametrize("mistake", MISTAKES, ids=[f"{number} {each.words}" for number, each in enumerate(MISTAKES)])
def test_a_mistake_is_answered_with_a_sentence_and_a_remedy(mistake, desk, capsys):
    for name, content in {"my.txt": TEXT, **mistake.files}.items():
        (desk / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            (desk / name).mkdir()
        else:
            (desk / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = contents(desk)
    try:
        code = main.main(shlex.split(mistake.words))
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr().err
    lines = said.rpartition("error: ")[2].splitlines()  # argparse says how a verb is used before
    first = lines[1] if lines[0].endswith(" problems") else lines[0]
    assert mistake.says in first
    assert mistake.remedy in (said if mistake.remedy.startswith("usage:") else first)
    assert "Traceback" not in said
    assert code == mistake.code
    assert contents(desk) == before
    assert not (desk.parent / "cache").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_text_that_may_not_be_read_is_named(desk, capsys):
    (desk / "my.txt").write_text(TEXT)
    (desk / "my.txt").chmod(0)
    assert main.main(["train", "data.source=my.txt"]) == 2
    assert "my.txt may not be read by this user; change its permissions (chmod +r)" in capsys.readouterr().err
