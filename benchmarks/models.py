"""Other families and adapters on one GPU, beside transformers and peft: `python benchmarks/models.py [--only NAME]`.

    python benchmarks/models.py --peers                             # needs transformers, and peft for rows of adapters
    python benchmarks/models.py --peers --tiny --out /tmp/tiny.json # the rows in small, on any machine: no figures
    python benchmarks/models.py --predict                           # measure nothing: write predictions again

Ours runs through `meshwright bench`, in processes of its own, `--runs` times (three), and the slowest counts. The peer
is the model that transformers makes of the config.json that `convert` would write, its layers and its loss compiled
(whole, a model of 32 layers has not made a step after a minute), with fused AdamW, clipped and updated every step; its
fastest run counts. Models are trained whole from fp32 weights under
autocast; of adapters the base is bf16 and frozen, and peft's LoRA is beside every linear layer. A family's step is also
put beside that of a Llama of the same shapes (`like`). Rows of an earlier record stay.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from gpu import RUNS, benched, prediction_of

from meshwright.config.huggingface import config_of
from meshwright.config.presets import preset
from meshwright.spec.arch import Arch
from meshwright.spec.units import GIB

WARM_UP, STEPS = 6, 12
SHAPE = (
    "vocab",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "tied",
)  # that a Llama of the same size has
SPLIT, LORA = "optim.master_weights=split", "adapter.kind=lora adapter.rank=16 adapter.alpha=32"
QLORA = f"adapter.kind=qlora adapter.rank=16 adapter.alpha=32 optim.state_dtype=int8 {SPLIT} plan.recompute=full"
BF16, FP8 = "precision=bf16,compile=true", "precision=fp8,compile=true"


class Row(NamedTuple):
    """What is measured."""

    name: str
    preset: str
    layers: int  # of the model's; 0: all
    microbatch: int
    sequence: int
    plan: str = BF16
    words: str = SPLIT
    peer: str = "transformers"  # or peft; empty: none
    like: bool = False  # beside a Llama of the same shapes
    tiny: str = "tiny"  # the model in whose place --tiny has


ROWS = (
    Row("qwen3-moe", "qwen3-30b-a3b", 12, 4, 4096, tiny="tiny-qwen3-moe"),
    Row("gpt-oss", "gpt-oss-20b", 8, 2, 4096, tiny="tiny-gpt-oss"),
    Row("deepseek-v2-lite", "deepseek-v2-lite", 8, 2, 4096, tiny="tiny-deepseek-v2"),
    Row("qwen3-8b", "qwen3-8b", 12, 2, 4096, like=True, tiny="tiny-qwen3"),
    Row("gemma3-4b", "gemma3-4b", 0, 2, 4096, like=True, tiny="tiny-gemma3"),
    Row("olmo2-7b", "olmo2-7b", 16, 2, 4096, like=True, tiny="tiny-olmo2"),
    Row("lora", "llama3.1-8b", 0, 2, 4096, words=LORA, peer="peft"),
    Row("lora-fp8", "llama3.1-8b", 0, 2, 4096, FP8, f"{LORA} adapter.base=fp8", peer=""),
    Row("qlora", "llama3.1-8b", 0, 2, 2048, words=QLORA, peer=""),
    Row("qlora-offload", "llama3.1-8b", 0, 2, 2048, words=f"{QLORA} plan.activation_offload=true", peer=""),
)
TITLES = {
    "qwen3-moe": "Qwen3-30B-A3B, 12 of 48 layers, 128 experts",
    "gpt-oss": "gpt-oss-20b, 8 of 24 layers",
    "deepseek-v2-lite": "DeepSeek-V2-Lite, 8 of 27 layers, MLA",
    "qwen3-8b": "Qwen3-8B, 12 of 36 layers",
    "gemma3-4b": "Gemma-3-4B",
    "olmo2-7b": "OLMo-2-7B, 16 of 32 layers",
    "lora": "Llama-3.1-8B, LoRA, bf16",
    "lora-fp8": "Llama-3.1-8B, LoRA, FP8 base and matmuls",
    "qlora": "Llama-3.1-8B, QLoRA, int8 states, `recompute = full`",
    "qlora-offload": "the same with `activation_offload`",
}


def arch_of(row: Row) -> Arch:
    """The model of a row, with as many of its layers as are measured."""
    arch = preset(row.preset)
    return msgspec.structs.replace(arch, layers=row.layers) if row.layers else arch


def in_small(row: Row) -> Row:
    """The same row of a tiny model, which a CPU takes."""
    plan = row.plan.replace(",compile=true", "").replace("fp8", "bf16")
    # Of QLoRA's blocks of 64 inputs every matrix of a model has whole ones.
    wide = " arch.hidden=128 arch.head_dim=32 arch.ffn=384" if "qlora" in row.name or "fp8" in row.name else ""
    return row._replace(preset=row.tiny, layers=0, microbatch=2, sequence=64, plan=plan, words=row.words + wide)


def ours(row: Row, words: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Our own step of a model."""
    more = ["--waterfall"] if options.waterfall else []
    return benched([*words, *sizes_of(row)], row.plan, options.folder, options.runs, *more)


def words_of(row: Row) -> list[str]:
    """The model of a row, as a user would write it."""
    return [row.preset, *([f"arch.layers={row.layers}"] if row.layers else [])]


def sizes_of(row: Row) -> list[str]:
    """What is said beside a model, whichever it is."""
    return [f"batch={row.microbatch}", f"sequence={row.sequence}", *row.words.split()]


def predict_again(file: Path) -> None:
    """Give what is ours in a record today's prediction."""
    records = json.loads(file.read_text())
    for record in records:
        row = Row(**record["row"])
        for key, words in (("ours", words_of(row)), ("like", as_llama(arch_of(row)))):
            if record[key]:
                record[key] |= prediction_of([*words, *sizes_of(row)], row.plan, record[key])
        print(line(row, record))
    file.write_text(json.dumps(records, indent=1) + "\n")


def as_llama(arch: Arch) -> list[str]:
    """A Llama of the same shapes, as a user would write it."""
    values = {name: getattr(arch, name) for name in (*SHAPE, "context")}
    return ["tiny", *(f"arch.{name}={str(value).lower()}" for name, value in values.items())]


def peer(row: Row, times: int) -> dict[str, Any]:
    """The peer's step, in a process of its own."""
    command = [sys.executable, __file__, "--peer", json.dumps(row._asdict()), "--runs", str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]}


def measure_peer(row: Row, times: int) -> dict[str, Any]:
    """The median step in seconds, of the fastest of some runs, and the peak of allocated memory."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    import torch
    from torch import nn

    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, vocab = transformers_model(row, device)
    core = model.get_base_model() if row.peer == "peft" else model
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if device.type == "cuda":
        for layer in core.model.layers:
            layer.compile()
        core.loss_function = torch.compile(core.loss_function)
    optimizer = torch.optim.AdamW(trained, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, vocab, (row.microbatch, row.sequence), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP):
        step()
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    runs = [median_of(step, finish) for _ in range(times)]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    count = sum(weight.numel() for weight in trained)
    versions = {name: version(name) for name in ("torch", "transformers", *(["peft"] if row.peer == "peft" else []))}
    found = {"step_seconds": min(runs), "runs": runs, "peak_allocated_bytes": peak, "trained": count}
    return found | {"versions": versions}


def median_of(step: Callable[[], None], finish: Callable[[], None]) -> float:
    """Seconds of a step."""
    seconds = []
    for _ in range(STEPS):
        finish()
        began = time.perf_counter()
        step()
        finish()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def transformers_model(row: Row, device: Any) -> tuple[Any, int]:
    """The model as transformers has it, with peft's adapter where the row has one; and its vocabulary."""
    import torch
    import transformers

    arch = arch_of(row)
    stated = config_of(arch)
    config = transformers.AutoConfig.for_model(stated.pop("model_type"), **stated)
    config.use_cache = False
    dtype = torch.bfloat16 if row.peer == "peft" else torch.float32
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if row.peer == "peft":
        import peft

        adapter = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapter)
    return model, arch.vocab


def keep(records: dict[str, Any], file: Path) -> None:
    """Write what was measured so far, in the order of the table."""
    file.write_text(json.dumps([records[each.name] for each in ROWS if each.name in records], indent=1) + "\n")


def line(row: Row, found: dict[str, Any]) -> str:
    """A row of the table."""
    mine, theirs, like = found["ours"], found["peer"], found["like"]
    if failed := next((each["error"] for each in (mine, theirs, like) if each.get("error")), None):
        return f"{row.name:<18}failed: {failed.strip().splitlines()[-1][:200]}"
    seconds, tokens = mine["step_seconds"], row.microbatch * row.sequence
    text = f"{row.name:<18}{seconds * 1e3:>9.1f}{tokens / seconds:>10,.0f}{mine['mfu'] or 0:>8.1%}"
    text += (
        f"{mine['peak_allocated_bytes'] / GIB:>7.1f}{mine['predicted_bytes'] / mine['peak_allocated_bytes'] - 1:>+8.1%}"
    )
    text += f"{theirs['step_seconds'] / seconds:>9.2f}" if theirs else f"{'':>9}"
    return text + (f"{seconds / like['step_seconds']:>9.3f}" if like else "")


def table(records: list[dict[str, Any]]) -> str:
    """The records as the page of measurements shows them."""
    head = "| model, batch | step | tokens/s | MFU | peak GiB | ledger | ÷ Llama | peer | speed | memory |"
    lines = [head, "|---|--:|--:|--:|--:|--:|--:|---|--:|--:|"]
    for record in records:
        row, mine, theirs = Row(**record["row"]), record["ours"], record["peer"]
        seconds, peak = mine["step_seconds"], mine["peak_allocated_bytes"]
        cells = [f"{TITLES[row.name]}, {row.microbatch} × {row.sequence}", f"{seconds * 1e3:.1f} ms"]
        cells.append(f"{row.microbatch * row.sequence / seconds:,.0f}")
        cells.append(f"{mine['mfu']:.1%}".replace("%", " %") + (" of FP8's peak" if "fp8" in row.plan else ""))
        cells += [f"{peak / GIB:.1f}", f"{mine['predicted_bytes'] / peak - 1:+.1%}".replace("%", " %")]
        cells.append(f"{seconds / record['like']['step_seconds']:.3f}" if record["like"] else "")
        if theirs:
            held = theirs["peak_allocated_bytes"]
            cells.append(f"{row.peer} {theirs['step_seconds'] * 1e3:.1f} ms, {held / GIB:.1f} GiB")
            cells += [f"{theirs['step_seconds'] / seconds:.2f} ×", f"{peak / held:.2f} ×"]
        else:
            cells += ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, write the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--peer", default="", help=argparse.SUPPRESS)
    parser.add_argument("--predict", action="store_true", help="measure nothing: write the predictions of --out again")
    parser.add_argument("--tiny", action="store_true", help="the rows in small: whether everything runs")
    parser.add_argument("--only", action="append", metavar="NAME", choices=[row.name for row in ROWS])
    parser.add_argument("--alone", action="store_true", help="no Llama of the same shapes beside it")
    parser.add_argument(
        "--runs", type=int, default=RUNS, metavar="N", help="of ours in processes of their own, and of a peer"
    )
    parser.add_argument("--waterfall", action="store_true", help="take our steps apart too")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="so few of each model: no figures")
    parser.add_argument("--out", type=Path, default=Path("results/models.json"))
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    if options.predict:
        predict_again(options.out)
        return
    if options.peer:
        print(json.dumps(measure_peer(Row(**json.loads(options.peer)), options.runs)))
        return
    before = json.loads(options.out.read_text()) if options.out.exists() else []
    records = {record["row"]["name"]: record for record in before}
    print("row                 step ms  tokens/s     MFU    GiB  ledger   peer ×  Llama ×")
    for row in (each for each in ROWS if not options.only or each.name in options.only):
        row = in_small(row) if options.tiny else row
        row = row._replace(layers=options.layers) if options.layers else row
        found = {"row": row._asdict(), "ours": ours(row, words_of(row), options), "peer": {}, "like": {}}
        records[row.name] = found
        keep(records, options.out)  # before a peer that may take longer than there is time for
        if row.like and not options.alone:
            found["like"] = ours(row, as_llama(arch_of(row)), options)
            keep(records, options.out)
        if options.peers and row.peer:
            found["peer"] = peer(row, options.runs)
            keep(records, options.out)
        print(line(row, found), flush=True)
        for bar in (found["ours"].get("waterfall") or {}).get("shares", []):
            print(f"    {bar['name']:<24}{bar['seconds'] * 1e3:>10.1f} ms{bar['share']:>8.1%}")


if __name__ == "__main__":
    main()
