"""Imported once by the server that ranks are forked from: a rank then starts in a tenth of a second, not in three."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.fx.experimental.symbolic_shapes  # reached by the first backward of a sharded model

import meshwright.train.loop  # noqa: F401

torch.set_num_threads(1)
