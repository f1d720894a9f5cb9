from meshwright.bench.probe import write_profile
from meshwright.cli.bench import collective_lines
from meshwright.hardware.profile import CollectiveFit, CollectiveTime, Profile, read_profile

TIMES = (
    CollectiveTime(kind="send", ranks=2, bytes=2**20, seconds=2e-3),
    CollectiveTime(kind="all_reduce", ranks=2, bytes=1024, seconds=50e-6),
)
FIT = CollectiveFit(kind="send", ranks=2, latency=40e-6, bandwidth=1.25e9, error=0.031)


def test_collectives_are_a_table_a_person_can_read():
    head, first, second, _, fitted = collective_lines(Profile(device="cpu", collectives=TIMES, fits=(FIT,)))
    assert head.split() == ["collective", "ranks", "size", "time", "algbw", "GB/s", "busbw", "GB/s"]
    assert first.split() == ["all_reduce", "2", "1", "KiB", "50.0", "µs", "0.020", "0.020"]
    assert second.split() == ["send", "2", "1", "MiB", "2.000", "ms", "0.524", "0.524"]
    assert fitted.split() == ["send", "2", "40.0", "µs", "1.250", "3.1%"]


def test_a_machine_without_collectives_has_no_table():
    assert list(collective_lines(Profile(device="cpu"))) == []


def test_a_profile_comes_back_as_it_was_written(tmp_path):
    profile = Profile(device="cpu", collectives=TIMES, fits=(FIT,), threads=1, ranks=2)
    write_profile(profile, tmp_path / "new" / "p.json")
    assert read_profile(tmp_path / "new" / "p.json") == profile
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["p.json"]
