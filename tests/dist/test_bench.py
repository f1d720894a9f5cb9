"""`meshwright bench` as a user runs it: the probe, its predictions, and ranks that somebody else has launched."""

import json
import socket
import subprocess

import forked
import pytest
from commands import environment, meshwright

from meshwright.hardware.profile import read_profile

KINDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"}
SMALL = ("tiny", "sequence=32", "batch=4", "arch.layers=2", "--steps", "2")


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probed")
    done = meshwright("bench", "--probe", "--quick", "--ranks", "2", "--json", "--out", "p.json", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.slow
def test_two_ranks_measure_what_lies_between_them(probed):
    folder, done = probed
    profile = read_profile(folder / "p.json")
    assert json.loads(done.stdout)["device"] == "cpu"
    assert {each.kind for each in profile.collectives} == KINDS
    assert {each.kind for each in profile.fits} == KINDS
    assert all(each.seconds > 0 for each in profile.collectives)
    assert (profile.ranks, profile.threads) == (2, 1)
    assert min(profile.disk_write_bandwidth, profile.disk_read_bandwidth, profile.memory_bytes) > 0
    large = max((each for each in profile.collectives if each.kind == "all_reduce"), key=lambda each: each.bytes)
    small = min((each for each in profile.collectives if each.kind == "all_reduce"), key=lambda each: each.bytes)
    assert large.seconds > small.seconds
    assert "busbw" in done.stderr


@pytest.mark.slow
def test_one_rank_says_why_it_has_no_collectives(tmp_path):
    done = meshwright("bench", "--probe", "--quick", "--ranks", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "collectives are left out: one rank has nobody to send to" in done.stderr
    assert read_profile(tmp_path / "profile.json").collectives == ()


@pytest.mark.slow
def test_a_step_stands_beside_what_the_profile_predicts(probed):
    folder, _ = probed
    words = ("bench", *SMALL, "--plan", "replicate=1", "--plan", "shard=2,zero=3", "--profile", "p.json", "--json")
    done = meshwright(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout):
        assert row["predicted_seconds"] > 0
        assert row["predicted_from"] == "the profile given"
        assert row["mfu_of"] == "the fastest matmul measured"
        assert row["counted_flops_ratio"] == 1.0
        assert 0 < row["peak_allocated_bytes"] < 2**30, "what the process grew by, not torch itself"
    assert "peak GiB: how much a rank's process grew" in done.stderr


def launched(*words: str, folder) -> list[subprocess.CompletedProcess[str]]:
    """Two ranks as torchrun starts them on two nodes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [forked.Program(words, folder, environment(folder, RANK=str(rank), **place)) for rank in range(2)]
    said = [rank.communicate() for rank in ranks]
    pairs = zip(ranks, said, strict=True)
    return [subprocess.CompletedProcess(words, rank.returncode or 0, *texts) for rank, texts in pairs]


@pytest.mark.slow
def test_launched_ranks_measure_one_plan_together(probed):
    folder, _ = probed
    words = ("bench", *SMALL, "--plan", "shard=2,zero=2", "--profile", "p.json", "--json")
    first, second = launched(*words, folder=folder)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    row = json.loads(first.stdout)
    assert (row["ranks"], row["error"], second.stdout) == (2, "", "")
    assert row["predicted_seconds"] > 0


def test_launched_ranks_refuse_a_plan_of_another_world(tmp_path):
    done = meshwright(
        "bench", *SMALL, "--sweep", folder=tmp_path,
        RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555",
    )  # fmt: skip
    assert done.returncode == 2
    assert "torchrun started 2 ranks, which can measure one plan of as many; give one --plan" in done.stderr


@pytest.mark.slow
def test_launched_ranks_probe_the_way_between_nodes(tmp_path):
    first, second = launched("bench", "--probe", "--quick", "--out", "p.json", folder=tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    profile = read_profile(tmp_path / "p.json")
    assert {each.domains for each in profile.collectives} == {2}
    assert second.stdout == ""


@pytest.mark.slow
def test_steps_that_warm_up_can_be_fewer(probed):
    folder, _ = probed
    one, usual = (
        meshwright("bench", *SMALL, *more, "--profile", "p.json", "--json", folder=folder)
        for more in (("--warm-up", "1"), ())
    )
    losses = [json.loads(done.stdout)["loss"] for done in (one, usual)]
    assert losses[0] > losses[1]  # of the third step and of the seventh
