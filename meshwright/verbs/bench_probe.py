"""`meshwright bench --probe`: a machine's own limits, by one process or by ranks that somebody else has launched."""

import argparse
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshwright.bench.fit import algorithm_bandwidth, bus_bandwidth
from meshwright.bench.promise import PROBE, probe_here, probe_run
from meshwright.spec.check import InputError, Problem
from meshwright.spec.profile import CollectiveFit, CollectiveTime, Profile, read_profile
from meshwright.verbs import surroundings, words

UNITS = ((2**20, "MiB"), (2**10, "KiB"), (1, "B"))
SMALL = 0.1e-3  # seconds below which microseconds read better


def probe(options: argparse.Namespace) -> int:
    """Measure this machine, write its profile and say what it does."""
    target = options.out or Path("profile.json")
    if target.is_dir():
        raise InputError([Problem(f"{target} is a folder", "name a file with --out")])
    here = surroundings.here()
    if here is None:
        profile = probe_here(options.ranks or surroundings.default_ranks(), options.quick, target)
    else:
        PROBE(here, probe_run(here.world), options.quick, target)
        if here.rank != 0:
            return 0
        profile = read_profile(target)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(profile)).decode())
    _tell(profile, target, words.say_to(options.json))
    return 0


def _tell(profile: Profile, target: Path, say: Callable[[str], None]) -> None:
    best = max(profile.products, key=lambda each: each.m * each.n * each.k / each.seconds)
    rate = 2 * best.m * best.n * best.k / best.seconds / 1e12
    threads = f", {profile.threads} thread(s) a rank" if profile.threads else ""
    say(f"{profile.device}{threads}: products up to {rate:.3g} TFLOP/s ({best.m} × {best.n} × {best.k}, {best.dtype}),")
    say(f"copies {profile.copy_bandwidth / 1e9:.0f} GB/s, a launch {profile.launch_seconds * 1e6:.1f} µs")
    if profile.host_bandwidth:
        to_host, back = profile.host_bandwidth / 1e9, profile.to_device_bandwidth / 1e9
        say(f"host link, pinned: {to_host:.1f} GB/s to the host, {back:.1f} GB/s to the device")
    written, read = profile.disk_write_bandwidth / 1e9, profile.disk_read_bandwidth / 1e9
    say(f"disk: {written:.2f} GB/s written, {read:.2f} GB/s read")
    for line in collective_lines(profile):
        say(line)
    say(f"in {target}; meshwright plan … --profile {target} prices with it")


def collective_lines(profile: Profile) -> list[str]:
    """Collectives as a table, and what was fitted to them."""
    if not profile.collectives:
        return []
    head = f"{'collective':<16}{'ranks':>6}{'size':>10}{'time':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}"
    fitted = f"{'fitted':<16}{'ranks':>6}{'latency':>22}{'GB/s':>12}{'error':>12}"
    ordered = sorted(profile.collectives, key=lambda each: (each.kind, each.bytes))
    return [head, *map(_collective, ordered), fitted, *map(_fit, profile.fits)]


def _collective(time: CollectiveTime) -> str:
    bandwidths = f"{algorithm_bandwidth(time) / 1e9:>12.3f}{bus_bandwidth(time) / 1e9:>12.3f}"
    return f"{time.kind:<16}{time.ranks:>6}{_size(time.bytes):>10}{_seconds(time.seconds):>12}{bandwidths}"


def _fit(fit: CollectiveFit) -> str:
    return f"{fit.kind:<16}{fit.ranks:>6}{_seconds(fit.latency):>22}{fit.bandwidth / 1e9:>12.3f}{fit.error:>12.1%}"


def _size(count: float) -> str:
    unit, name = next((unit, name) for unit, name in UNITS if count >= unit)
    return f"{count / unit:.4g} {name}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < SMALL else f"{seconds * 1e3:.3f} ms"
