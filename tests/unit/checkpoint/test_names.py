import pytest
import torch

from checkpoint.tiny import ARCHS, weights_of
from meshwright.checkpoint import model_folder
from meshwright.spec.params import params


def layouts():
    for name, arch in ARCHS.items():
        yield pytest.param(arch, model_folder.native(arch), id=f"{name} native")
        yield pytest.param(arch, model_folder.huggingface(arch), id=name)
        yield pytest.param(arch, model_folder.huggingface(arch, prefix=""), id=f"{name} bare")
    yield pytest.param(ARCHS["mixtral"], model_folder.huggingface(ARCHS["mixtral"], fused=True), id="mixtral fused")


@pytest.mark.parametrize(("arch", "layout"), list(layouts()))
def test_storing_and_restoring_returns_every_parameter(arch, layout):
    ours = weights_of(arch)
    shapes = {param.name: param.shape for param in params(arch)}
    theirs = {stored.name: model_folder.store(stored, ours.__getitem__) for stored in layout}
    assert len(theirs) == len(layout)
    for stored in layout:
        assert theirs[stored.name].shape == model_folder.stored_shape(stored, shapes)
    for name, value in ours.items():
        holding = tuple(stored for stored in layout if name in stored.made_of)
        assert torch.equal(model_folder.restore(name, holding, shapes, theirs.__getitem__), value)
