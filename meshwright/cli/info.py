"""The verbs that inform and convert: `meshwright models`, `clusters`, `config`, `convert` and `advise`."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import env
from meshwright.cli import options as words
from meshwright.config import load, presets, schema
from meshwright.runtime.failure import Exit
from meshwright.spec.addresses import is_address
from meshwright.spec.arch import Arch
from meshwright.spec.params import active, count
from meshwright.spec.units import GIB

MOST_EXPLAINED = 3  # keys that are explained in full: more are a list

if TYPE_CHECKING:  # the verbs of this file use little of each other's, and import it when they run
    from meshwright.cli.query import PlanQuery
    from meshwright.config.explain import Explanation
    from meshwright.search.advise import Advice


def _fields(arch: Arch) -> dict[str, Any]:
    """The fields of a model; tables, which few have (LongRoPE), only where they are not empty."""
    return {name: value for name, value in msgspec.to_builtins(arch).items() if value != ()}


def models(options: argparse.Namespace) -> int:
    """The model zoo."""
    models = [(name, presets.preset(name)) for name in presets.preset_names()]
    rows = [{"name": name, "parameters": count(arch), "arch": _fields(arch)} for name, arch in models]
    lines = [f"{'name':<16}{'parameters':>18}{'active':>18}  layers × hidden, heads/kv, vocabulary"]
    for name, arch in models:
        shape = f"{arch.layers} × {arch.hidden}, {arch.heads}/{arch.kv_heads}, {arch.vocab:,}"
        lines.append(f"{name:<16}{count(arch):>18,}{active(arch):>18,}  {shape}")
    words.show(options, rows, lines)
    return 0


def clusters(options: argparse.Namespace) -> int:
    """Every card in its usual node, and every network by name."""
    from meshwright.hardware.cluster import GIGA, TERA, cards, catalogue

    known = catalogue()
    table = {"cards": cards(), "links": known.links, "networks": known.networks}
    names = f"{'card':<18}{'GiB':>7}{'GB/s':>7}{'bf16':>7}{'fp8':>7}{'GPUs':>6}"
    lines = [f"{names}  {'link, GB/s':<22}network, Gb/s per GPU"]
    for each in cards():
        gpu = each.gpu
        peaks = "".join(f"{peak / TERA:>7.0f}" if peak else f"{'–':>7}" for peak in (gpu.bf16 or gpu.fp16, gpu.fp8))
        link = f"{each.scale_up.name}, {each.scale_up.bandwidth / GIGA:g}"
        network = f"{each.network.name}, {each.network.bandwidth * 8 / GIGA:g}"
        memory = f"{gpu.memory_bytes / GIB:>7.1f}{gpu.bandwidth / GIGA:>7.0f}"
        lines.append(f"{gpu.name:<18}{memory}{peaks}{each.domain:>6}  {link:<22}{network}")
    lines += [
        "bf16 and fp8 are dense TFLOP/s (fp16 where a card has no bf16); GPUs share the link.",
        f"networks (--network): {', '.join(known.networks)}",
        "write a count and a card, like 64xh100, or a TOML file of your own: docs/clusters.md",
    ]
    words.show(options, table, lines)
    return 0


def add_config(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    verb.add_argument("what", choices=("show", "schema", "explain"))
    verb.add_argument(
        "words", nargs="*", metavar="RUN.toml | key=value | KEY", help=f"{words.OVERRIDES}; explain: keys"
    )
    verb.add_argument("--ranks", type=words.count, help="as of train")


def config(options: argparse.Namespace) -> int:
    """A resolved run with the origin of each value, the schema of run files, or what a key of it means."""
    if options.what == "explain":
        return _explain(options)
    if options.what == "schema":
        print(msgspec.json.format(msgspec.json.encode(schema.json_schema())).decode())
        return 0
    file, overrides = words.split(options.words)
    loaded = load.load(file, overrides, ranks=options.ranks, default_ranks=env.default_ranks())
    from meshwright.search import budget

    loaded, _ = budget.resolved(loaded)  # as train does
    if options.json:
        both = {"run": msgspec.to_builtins(loaded.run), "origins": loaded.origins}
        print(msgspec.json.encode(both).decode())
    else:
        print(load.write(loaded.run, loaded.origins), end="")
    return 0


def _explain(options: argparse.Namespace) -> int:
    """Keys one below the other; a table stands for all its keys, and nothing for the whole run file."""
    from meshwright.config import explain

    known = explain.keys()
    found = []
    for key in options.words or [""]:
        under = [each for name, each in known.items() if name.startswith(f"{key}.") or not key]
        found += under if under and key not in known else [explain.explain(key)]
    words.show(options, found[0] if len(found) == 1 else found, _explained(found))
    return 0


def _explained(found: "list[Explanation]") -> Iterator[str]:
    if len(found) > MOST_EXPLAINED:
        width = max(len(each.key) for each in found)
        yield from (f"{each.key:<{width}}  {each.meaning}" for each in found)
        return
    for number, each in enumerate(found):
        yield from [""] * bool(number)
        yield each.key
        affects = ", ".join(each.affects) or "nothing of what is computed"
        rows = {"means": each.meaning, "takes": each.value, "default": each.default or "none", "affects": affects}
        yield from (f"  {name:<9}{text}" for name, text in (rows | {"more": each.page}).items())


def add_convert(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    verb.add_argument("source", help="a Hugging Face folder, or a run: RUN, RUN@STEP, RUN@best")
    verb.add_argument("target", nargs="?", type=Path, help="the folder to write (default: beside the source)")
    verb.add_argument("--step", help="which saved step of a run: a number, or best (default: the last)")
    verb.add_argument("--merge", action="store_true", help="of an adapter: the whole model, the adapter merged into it")
    verb.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the written weights")


def convert(options: argparse.Namespace) -> int:
    """Weights between Hugging Face's layout and ours."""
    words.require_training()
    from meshwright.checkpoint.convert import MismatchError
    from meshwright.checkpoint.convert import convert as convert_folder
    from meshwright.checkpoint.storage import CorruptError

    source = options.source if options.step is None else f"{options.source.rstrip('/')}@{options.step}"
    try:
        say = words.say_to(options.json)
        with ExitStack() as stack:
            if is_address(source):
                from meshwright.checkpoint.remote import bring

                source = bring(source, Path(stack.enter_context(tempfile.TemporaryDirectory())), say)
            report = convert_folder(source, options.target, say, dtype=options.dtype, merge=options.merge)
    except MismatchError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        return Exit.FAILED
    except CorruptError as error:
        print(f"meshwright: {error}: convert another step of the run (--step)", file=sys.stderr)
        return Exit.CORRUPT
    if options.json:
        print(msgspec.json.encode(report).decode())
    return 0


def add_advise(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    target = "RUN.toml | MODEL | config.json | FOLDER | key=value"
    verb.add_argument(
        "words", nargs="*", metavar=target, help="plan.precision=fp32 and the like fix a field of the plan"
    )
    verb.add_argument("--cluster", metavar="8xh100", help="the machines; a file of your own works too")
    verb.add_argument("--sequence", type=words.positions, help="tokens of one sample")
    verb.add_argument("--batch", type=words.samples, help="samples in one optimizer step, over the whole job")
    verb.set_defaults(vary=None)


def advise(options: argparse.Namespace) -> int:
    """Exit 3 when nothing fits."""
    from meshwright.cli.query import put
    from meshwright.search import advise as chart

    asked = put(options)
    found = chart.advise(asked.question)
    words.show(options, record(asked, found), advice_lines(asked, found))
    return Exit.DONE if found.found is not None else Exit.DOES_NOT_FIT


def advice_lines(asked: "PlanQuery", found: "Advice") -> Iterator[str]:
    """The way through the chart, as people read it."""
    from meshwright.cli.plan_tables import plan_heading
    from meshwright.cli.query import plan_overrides
    from meshwright.search import explain

    if found.found and found.found.fit.host_question:
        yield from (found.found.fit.host_question, "")
    yield from plan_heading(asked, asked.question)
    yield ""
    for number, step in enumerate(found.steps, 1):
        yield f"{number:>2}. {step.question}"
        yield f"    {step.answer}: {step.because}"
    yield ""
    yield "Advice:" if found.leaves else "Advice: nothing to change"
    for leaf in found.leaves:
        yield f"  {leaf.name}: {leaf.text}" + ("" if leaf.available else " (not in the trainer yet)")
    yield ""
    if found.found is None:
        yield "No plan fits these machines."
        return
    yield f"The plan: {' '.join(plan_overrides(found.found.plan))}"
    yield explain.why(found.found)


def record(asked: "PlanQuery", found: "Advice") -> dict[str, Any]:
    """The same, as scripts read it."""
    from meshwright.cli.plan_tables import as_record
    from meshwright.cli.query import plan_overrides
    from meshwright.search import explain

    said = ("name", "text", "available")
    leaves = [
        {name: getattr(leaf, name) for name in said} | {"seconds": leaf.found and leaf.found.price.seconds}
        for leaf in found.leaves
    ]
    return {
        "model": asked.model,
        "cluster": asked.question.cluster.name,
        "sequence": asked.question.sequence,
        "batch": asked.question.batch,
        "assumed": asked.assumed,
        "steps": msgspec.to_builtins(found.steps),
        "leaves": leaves,
        "host_question": found.found.fit.host_question if found.found else None,
        "plan": as_record(found.found, explain.why(found.found)) if found.found else None,
        "words": plan_overrides(found.found.plan) if found.found else [],
    }
