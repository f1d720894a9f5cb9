"""Clusters by name and by file: every figure in SI units, and nothing guessed."""

import re
from pathlib import Path

import pytest

from meshwright.hardware.cluster import cards, catalogue, cluster, cluster_of, peak_flops_per_second, recognised
from meshwright.spec.problem import InputError

GIB = 2**30
PAGE = Path(__file__).parents[3] / "docs" / "clusters.md"


@pytest.mark.parametrize(
    ("text", "card", "gpus", "domain"),
    [
        ("64xh100", "h100", 64, 8),
        ("8xa100-80g", "a100-80g", 8, 8),
        ("4xa100-40g", "a100-40g", 4, 8),
        ("72xgb200", "gb200", 72, 72),
        ("h200", "h200", 1, 8),
        ("8xmi300x", "mi300x", 8, 8),
        ("16x4xH100", "h100", 64, 4),
        ("2 × 8 × A100 SXM 80GB", "a100-80g", 16, 8),
        ("2xrtx4090", "rtx-4090", 2, 8),
        ("8x RTX 4090", "rtx-4090", 8, 8),
        ("NVIDIA GeForce RTX 5090", "rtx-5090", 1, 8),
        ("4xA100 80GB", "a100-80g", 4, 8),
        ("8xNVIDIA H100 80GB HBM3", "h100", 8, 8),
        ("RTX 6000 Ada Generation", "rtx-6000-ada", 1, 8),
        ("4xL40S", "l40s", 4, 8),
        ("8xL4", "l4", 8, 8),
        ("A10", "a10", 1, 8),
        ("8xAMD Instinct MI250X", "mi250x", 8, 8),
    ],
)
def test_a_count_and_a_card_are_a_cluster(text, card, gpus, domain):
    found = cluster(text)
    assert (found.gpu.name, found.gpus, found.domain) == (card, gpus, domain)


def test_memory_is_what_a_program_sees_not_what_the_vendor_prints():
    assert cluster("1xh200").gpu.memory_bytes == pytest.approx(139.8 * GIB)
    assert cluster("1xh100").gpu.memory_bytes < 80e9 * 1.07
    assert cluster("1xh100").gpu.memory_bytes < 80 * GIB


def test_links_are_bytes_a_second_of_one_direction_and_one_gpu():
    found = cluster("64xh100")
    assert found.scale_up.bandwidth == 450e9
    assert found.network.bandwidth == 400e9 / 8
    assert found.network.latency < 1e-4
    assert found.nodes == 8


def test_networks_reach_the_share_that_published_runs_show():
    assert cluster("64xh100", network="efa").network.efficiency == 0.49
    assert cluster("64xh100", network="ib").network.efficiency == 0.78
    assert cluster("64xh100", network="roce").network.efficiency == 0.78


def test_a_nodes_ethernet_port_is_shared_by_its_gpus():
    assert cluster("16xa100", network="10gbe").network.bandwidth == pytest.approx(10e9 / 8 / 8)
    assert cluster("16xa100").network.bandwidth == 200e9 / 8


def test_a_port_is_a_machines_not_a_racks():
    assert cluster("72xgb200", network="100gbe").network.bandwidth == pytest.approx(100e9 / 8 / 4)
    assert cluster("2x6xgb200").per_node == 6  # as somebody says it
    with pytest.raises(InputError, match="72 GPUs behind one switch are not whole machines of 5"):
        cluster_of({"gpu": "gb200", "gpus": 72, "per_node": 5})


def test_every_card_has_what_pricing_needs():
    for each in cards():
        assert each.gpu.memory_bytes > 8 * GIB
        assert 1e11 < each.gpu.bandwidth < 1e13
        assert max(each.gpu.bf16, each.gpu.fp16) >= each.gpu.fp32 / 2
        assert 0 < each.network.efficiency <= 1
        assert 0 < each.scale_up.efficiency <= 1


def test_peaks_are_dense_and_with_fp32_accumulation():
    peaks = {"l4": 121, "l40s": 362, "a10": 125, "a10g": 70, "rtx-6000-ada": 364.2, "rtx-5090": 209.5, "mi250x": 191.5}
    for name, teraflops in peaks.items():
        assert cluster(name).gpu.peak("bf16") == pytest.approx(teraflops * 1e12), name


def test_every_name_and_match_finds_its_own_card():
    for name, card in catalogue().cards.items():
        for text in (name, *card.match):
            assert cluster(f"8x{text}").gpu.name == name, text
            assert recognised(f"NVIDIA {text}", catalogue().cards) == name, text


@pytest.mark.parametrize(
    ("text", "near"), [("64xh101", "h100"), ("8xa100-60g", "a100-80g"), ("4xmi300", "mi300x"), ("8xgb20", "gb200")]
)
def test_an_unknown_card_is_refused_with_the_nearest_name(text, near):
    with pytest.raises(InputError, match=f"did you mean {near}"):
        cluster(text)


def test_an_unknown_network_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match="did you mean 10gbe"):
        cluster("8xh100", network="10gb")


@pytest.mark.parametrize("text", ["", "0xh100", "0x8xh100", "8x0xh100"])
def test_a_cluster_without_gpus_is_refused(text):
    with pytest.raises(InputError):
        cluster(text)


def test_the_file_of_the_page_is_a_cluster(tmp_path):
    file = tmp_path / "attic.toml"
    file.write_text(re.search(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])
    assert len(file.read_text().splitlines()) <= 12
    found = cluster(str(file))
    assert (found.name, found.gpus, found.domain, found.gpu.name) == ("attic", 4, 4, "rtx-5080")
    assert found.gpu.peak("bf16") == 112.6e12
    assert found.gpu.peak("fp8") == 0
    assert found.network.bandwidth == pytest.approx(25e9 / 8 / 4)
    assert cluster(f"8x{file}").gpus == 8


def test_a_cluster_may_be_a_table_of_a_larger_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('steps = 3\n[cluster]\ngpu = "h100"\ngpus = 4\nmemory_gib = 40\n')
    assert cluster(str(file)).gpu.memory_bytes == 40 * GIB
    assert cluster_of({"gpu": "h100", "gpus": 4}).gpus == 4


def test_every_mistake_of_a_file_is_told_at_once(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text('gpu = "mine"\ngpsu = 4\ndomain = "x"\n[cards.mine]\nmemory_gb = 80\nbandwidth = -1\n')
    with pytest.raises(InputError) as caught:
        cluster(str(file))
    told = str(caught.value)
    assert "cluster.gpsu is not a key" in told
    assert "cluster.domain" in told
    assert "cards.mine.memory_gb" in told
    assert "cards.mine.memory_gib is missing" in told
    assert "cards.mine.bandwidth = -1 must be above 0" in told


def test_unknown_links_of_a_file_are_told_together():
    with pytest.raises(InputError) as caught:
        cluster_of({"gpu": "h100", "scale_up": "nvlink9", "host": "pcie9", "network": "pigeon"})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("content", [b"gpu = ", b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, content):
    file = tmp_path / "broken.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        cluster(str(file))
    assert len(caught.value.problems) == 1


def test_a_driver_s_name_is_recognised_by_its_words():
    names = {
        "NVIDIA A100-SXM4-40GB": "a100-40g",
        "NVIDIA A100 80GB PCIe": "a100-pcie-80g",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA GB200": "gb200",
        "NVIDIA B200": "b200",
        "DGX A100": "a100-80g",
        "H100 SXM5 80GB": "h100",
        "GB200 NVL72": "gb200",
        "H100-80GB": "h100",
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "Tesla V100-SXM2-32GB": "v100-32g",
    }
    assert {name: recognised(name, catalogue().cards) for name in names} == names
    assert recognised("NVIDIA A1000", catalogue().cards) is None


def test_a_rate_that_is_not_known_is_none():
    assert peak_flops_per_second("NVIDIA H200", "bf16") == 989e12
    assert peak_flops_per_second("NVIDIA A100-SXM4-80GB", "fp8") is None


@pytest.mark.parametrize("key", ["memory_gib", "network_gbit", "host_gib", "disk_gib", "host_bandwidth"])
@pytest.mark.parametrize("value", ["-1.5", "nan", "inf"])
def test_what_no_machine_has_is_refused(tmp_path, key, value):
    file = tmp_path / "mine.toml"
    file.write_text(f'gpu = "h100"\n{key} = {value}\n')
    with pytest.raises(InputError, match=rf"cluster.{key} = {value} must be (finite|at least 0)"):
        cluster(str(file))
    file.write_text(
        f'gpu = "mine"\n[cards.mine]\nmemory_gib = 80\nbandwidth = 1000\n{key} = {value}\n'.replace(
            "memory_gib = 80\n", "" if key == "memory_gib" else "memory_gib = 80\n"
        )
    )
    with pytest.raises(InputError, match=rf"cards.mine.{key} = {value} must be"):
        cluster(str(file))


def test_there_is_a_largest_cluster():
    assert cluster("1000000xh100").gpus == 10**6
    with pytest.raises(InputError, match="use at most 1000000"):
        cluster("99999999999xh100")
