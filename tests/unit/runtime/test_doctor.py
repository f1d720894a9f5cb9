"""What is wrong with machines, from what their ranks see."""

from ipaddress import ip_address

import msgspec
import pytest
from torch.distributed import HashStore

from meshwright.cli.doctor import TOKEN
from meshwright.cli.main import main
from meshwright.runtime.doctor import Interface, LinkFacts, NetworkAdapter, RankFacts, disk_speed, findings, look
from meshwright.runtime.links import LinkServer, call, interface_towards, interfaces, rounds
from meshwright.spec.problem import mistake
from meshwright.spec.units import GIB

FINE = RankFacts(
    host="a", node="a", torch="2.13.0", driver="570.1", gpus=("NVIDIA H100",) * 8, files=65536, shm=64 * GIB,
    folder="/shared/r", disk=2e9, address="10.0.0.1", interfaces=(Interface(name="eth0", gbit=100.0),),
    adapters=(
        NetworkAdapter(name="mlx5_0", driver="mlx5_core", state="4: ACTIVE", rate="400 Gb/sec", layer="InfiniBand"),
    ),
)  # fmt: skip


def ranks(count=4, **of_last):
    """Two machines of two ranks each; the last rank may differ."""
    many = [
        msgspec.structs.replace(FINE, rank=rank, host="ab"[rank // 2], node="ab"[rank // 2]) for rank in range(count)
    ]
    return [*many[:-1], msgspec.structs.replace(many[-1], **of_last)]


def test_fine_machines_are_fine():
    assert findings(ranks(), [LinkFacts(first="a", second="b", seconds=1e-4, bandwidth=1e10)], {}) == []


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"torch": "2.12.0"}, "rank 3 has torch = 2.12.0, the others 2.13.0"),
        ({"gpus": ("NVIDIA H100",) * 7}, "rank 3 has gpus = 7 × NVIDIA H100, the others 8 × NVIDIA H100"),
        ({"files": 1024}, "rank 3 may open 1,024 files"),
        ({"memlock": 65536}, "rank 3 may lock 65,536 bytes"),
        ({"shm": 64 << 20}, "rank 3 has 64 MiB of /dev/shm"),
        ({"sees_folder": False}, "rank 3 on b does not see the run folder of rank 0"),
        ({"disk": 5e6}, "b writes 5 MB/s to /shared/r"),
        ({"disk_error": "No space left on device"}, "b cannot write 32 MiB to /shared/r: No space left on device"),
        ({"address": ""}, "rank 3 on b cannot resolve MASTER_ADDR"),
        ({"address": "127.0.1.1"}, "MASTER_ADDR is a loopback address on b"),
    ],
)
def test_what_is_wrong_is_named_with_its_rank(odd, told):
    (found,) = findings(ranks(**odd), [], {})
    assert found.kind == "problem"
    assert told in found.text
    assert found.remedy


def test_slow_and_broken_links_and_clocks_are_named():
    links = [LinkFacts(first="a", second=name, seconds=1e-4, bandwidth=1e10) for name in "bcde"]
    slow = msgspec.structs.replace(links[3], bandwidth=2e9)
    late = msgspec.structs.replace(links[2], clock=-7.0)
    broken = LinkFacts(first="b", second="c", error="10.0.0.3:4000: connection refused")
    texts = [one.text for one in findings(ranks(), [*links[:2], late, slow, broken], {})]
    assert any("a and e: 2.00 GB/s" in text and "the median is 10.00 GB/s" in text for text in texts)
    assert any("the clock of d is -7.0 s from that of a" in text for text in texts)
    assert any("b and c cannot connect: 10.0.0.3:4000: connection refused" in text for text in texts)
    assert len(texts) == 3


def test_settings_are_suggested_with_their_reason():
    two = (Interface(name="eth0", gbit=0.0), Interface(name="eth1", gbit=100.0))
    efa = (NetworkAdapter(name="rdmap0", driver="efa", state="4: ACTIVE", rate="100", layer="Unspecified"),)
    many = [msgspec.structs.replace(one, interfaces=two, adapters=efa) for one in ranks()]
    found = findings(many, [], {})
    assert [one.kind for one in found] == ["advice", "advice"]
    assert "eth0 (rate unknown), eth1 (100 Gb/s)" in found[0].text
    assert "NCCL_SOCKET_IFNAME=eth1" in found[0].remedy
    assert "FI_PROVIDER=efa" in found[1].remedy
    told = {"NCCL_SOCKET_IFNAME": "x", "GLOO_SOCKET_IFNAME": "x", "FI_PROVIDER": "efa"}
    assert findings(many, [], told) == []
    silent = (Interface(name="eth0", gbit=0.0), Interface(name="eth1", gbit=0.0))  # as virtual ones are
    advice, *_ = findings([msgspec.structs.replace(one, interfaces=silent, adapters=()) for one in ranks()], [], {})
    assert "eth0 (rate unknown)" in advice.text
    assert "=eth0" not in advice.remedy
    gve = [
        msgspec.structs.replace(one, interfaces=(Interface(name="e", gbit=100, driver="gve"),), adapters=())
        for one in ranks()
    ]
    assert "Fast Socket" in findings(gve, [], {})[0].remedy


def test_a_machine_is_read_from_the_kernels_files(tmp_path):
    for name, text in {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue\n",
        "sys/class/net/eth0/operstate": "up\n", "sys/class/net/eth0/speed": "100000\n",
        "sys/class/net/eth1/operstate": "down\n", "sys/class/net/lo/operstate": "unknown\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
        "sys/bus/pci/devices/0/vendor": "0x10de\n", "sys/bus/pci/devices/0/class": "0x030200\n",
        "sys/bus/pci/devices/0/current_link_speed": "32.0 GT/s PCIe\n",
        "sys/bus/pci/devices/0/current_link_width": "16\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    seen = look(["NVIDIA H100"], tmp_path)
    assert seen.driver == "570.86.15"
    assert seen.interfaces == (Interface(name="eth0", gbit=100.0),)
    assert [(one.name, one.layer) for one in seen.adapters] == [("mlx5_0", "InfiniBand")]
    assert seen.pcie == ("32.0 GT/s PCIe ×16",)


def test_every_pair_meets_once_and_nobody_twice_in_a_round():
    for count in (2, 3, 4, 7, 8):
        played = list(rounds(count))
        assert all(len({each for pair in pairs for each in pair}) == 2 * len(pairs) for pairs in played)
        assert sorted(pair for pairs in played for pair in pairs) == [
            (a, b) for a in range(count) for b in range(a + 1, count)
        ]


def test_a_link_is_measured_and_a_closed_one_is_told():
    server = LinkServer("127.0.0.1", b"secret")
    found = call(["a", "b"], (0, 1), "127.0.0.1", server.port, b"secret")
    assert found.error == ""
    assert found.seconds > 0
    assert found.bandwidth > 0
    assert abs(found.clock) < 5  # it is the same clock
    stranger = call(["a", "b"], (0, 1), "127.0.0.1", server.port, b"guessed")
    assert "closed" in stranger.error or "reset" in stranger.error or "broken pipe" in stranger.error
    server.close()
    assert "connection refused" in call(["a", "b"], (0, 1), "127.0.0.1", server.port, b"secret").error


def test_the_trial_of_a_disk_leaves_nothing(tmp_path):
    assert disk_speed(tmp_path) > 0
    assert disk_speed(tmp_path / "gone") == "No such file or directory"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["runs", "not/there/yet", "."])
def test_the_verb_leaves_nothing_and_makes_no_folder(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    main(["doctor", "--folder", folder, "--json"])
    seen = msgspec.json.decode(capsys.readouterr().out)["ranks"][0]
    assert seen["folder"] == str(tmp_path / folder)
    assert seen["disk"] > 0
    assert not list(tmp_path.iterdir())


def test_no_secret_is_left_when_a_rank_is_not_heard(tmp_path, monkeypatch):
    def nobody(*_):
        assert (tmp_path / TOKEN).exists()
        raise mistake("rank 1 said nothing within 30 s", "see why it did not start")

    monkeypatch.setattr("meshwright.train.world.open_store", lambda place: HashStore())
    monkeypatch.setattr("meshwright.cli.doctor.StoreTalk.hear", nobody)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--folder", str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir())


def test_the_jobs_sockets_listen_where_rank_0_is_reached():
    assert interface_towards("127.0.0.1", 29500, is_whole=True) == "lo"
    assert interface_towards("127.0.0.1", 29500, is_whole=False) == ""  # others would not find this machine there
    assert interface_towards("no.such.host.invalid", 29500, is_whole=True) == ""
    known = interfaces()
    assert known["127.0.0.1"] == "lo"
    for address, name in known.items():
        if not ip_address(address).is_loopback and not ip_address(address).is_link_local:
            assert interface_towards(address, 29500, is_whole=False) == name
