"""`meshwright clusters`: the cards and networks that can be named."""

import argparse

import msgspec

from meshwright.spec.catalogue import catalogue
from meshwright.spec.cluster import GIB, GIGA, TERA, cards
from meshwright.verbs import words


def add(verbs: words.Verbs) -> None:
    """Say the verb's words."""
    words.verb(verbs, "clusters", clusters, "list the cards and networks that a cluster is made of")


def clusters(options: argparse.Namespace) -> int:
    """Every card in its usual node, and every network by name."""
    known = catalogue()
    if options.json:
        table = {"cards": cards(), "links": known.links, "networks": known.networks}
        print(msgspec.json.encode(table).decode())
        return 0
    print(f"{'card':<18}{'GiB':>7}{'GB/s':>7}{'bf16':>7}{'fp8':>7}{'GPUs':>6}  {'link, GB/s':<22}network, Gb/s a GPU")
    for each in cards():
        gpu = each.gpu
        peaks = "".join(f"{peak / TERA:>7.0f}" if peak else f"{'–':>7}" for peak in (gpu.bf16 or gpu.fp16, gpu.fp8))
        link = f"{each.scale_up.name}, {each.scale_up.bandwidth / GIGA:g}"
        network = f"{each.network.name}, {each.network.bandwidth * 8 / GIGA:g}"
        memory = f"{gpu.memory_bytes / GIB:>7.1f}{gpu.bandwidth / GIGA:>7.0f}"
        print(f"{gpu.name:<18}{memory}{peaks}{each.domain:>6}  {link:<22}{network}")
    print("bf16 and fp8 are dense TFLOP/s (fp16 where a card has no bf16); GPUs share the link.")
    print(f"networks (--network): {', '.join(known.networks)}")
    print("write a count and a card, like 64xh100, or a TOML file of your own: docs/clusters.md")
    return 0
