"""What the tests on one GPU share: a corpus, and a world of one rank over NCCL."""

import pytest
import torch.distributed as dist
from trials import corpus_file


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield tmp_path
    dist.destroy_process_group()
