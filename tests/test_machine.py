import pytest
import torch

import co2
from co2.machine import choose_device, choose_workers


@pytest.mark.parametrize(("name", "message"), [("tpu9", "no device"), ("meta", "not supported")])
def test_a_device_that_is_not_there(name, message):
    with pytest.raises(co2.UserError, match=message):
        choose_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(co2.UserError, match="--device cpu"):
        choose_device("cuda")
    assert choose_device("auto") == torch.device("cpu")


def test_workers_as_asked_or_as_the_machine_has():
    assert choose_workers(0) == 0
    assert choose_workers(5) == 5
    assert 0 <= choose_workers(-1) <= 16
