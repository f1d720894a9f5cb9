"""A stall of five seconds is found where it was lost, though the host is ahead of the device and records come late."""

import pytest
import torch
from stalls import CLASSES, check, stalled_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SECONDS = 5.0


@pytest.mark.parametrize("place", CLASSES)
def test_a_stall_is_found_in_its_class_and_nowhere_else(folder, monkeypatch, tmp_path_factory, place):
    device, other = torch.device("cuda", 0), tmp_path_factory.mktemp("quiet")
    (other / "text.jsonl").write_bytes((folder / "text.jsonl").read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        quiet = stalled_run(other, device, "", 0.0, patch)
    check(stalled_run(folder, device, place, SECONDS, monkeypatch), place, SECONDS, quiet)
