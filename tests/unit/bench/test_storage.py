from meshwright.bench.probe import MIB, disk_bandwidths


def test_a_disk_is_measured_and_left_as_it_was(tmp_path):
    write, read = disk_bandwidths(tmp_path / "new", 8 * MIB)
    assert 0 < write < 1e12
    assert 0 < read < 1e12
    assert not list((tmp_path / "new").iterdir())
