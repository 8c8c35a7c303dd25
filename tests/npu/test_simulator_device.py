"""The simulated devices: which a process sees, one beside another, streams and events, pinned memory."""

from __future__ import annotations

import npusim
import numpy as np
import pytest
import torch
import torch_npu
from npusim.build import library_dir

from tests.npu.processes import output_of, output_of_fresh, run_python


def test_torch_alone_brings_the_device() -> None:
    """A plain `import torch` in a fresh process is enough, as in a Ray worker."""
    code = "import torch; print(torch.ones(2, device='npu').sum().item(), torch.npu.device_count())"
    assert output_of_fresh(code) == "2.0 2"


def test_the_real_torch_npu_answers() -> None:
    assert torch_npu.__version__.startswith("2.13.0")
    assert torch.npu.is_available() and torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.npu.get_device_name(0) == "Ascend910B2"


def device_count(listed: str) -> tuple[int, int, str]:
    """Return code, count and message of the fake runtime alone, without the seconds that torch takes to start."""
    code = """
        import ctypes
        runtime, count = ctypes.CDLL("libascendcl.so"), ctypes.c_uint32(99)
        runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
        code = runtime.aclrtGetDeviceCount(ctypes.byref(count))
        print(code, count.value, runtime.aclGetRecentErrMsg().decode())
    """
    library = str(library_dir() / "libascendcl.so")
    settings = {"FAKE_NPU_COUNT": "4", "ASCEND_RT_VISIBLE_DEVICES": listed}
    done = run_python(code.replace('"libascendcl.so"', repr(library)), **settings)
    returned, count, *message = done.stdout.split(maxsplit=2)
    return int(returned), int(count), " ".join(message)


@pytest.mark.parametrize(("listed", "count"), [("2", 1), ("3,1", 2), ("0,1,2,3", 4), ("", 0)])
def test_visible_devices(listed: str, count: int) -> None:
    assert device_count(listed)[:2] == (0, count)


@pytest.mark.parametrize("listed", ["4", "1,1", "0,x", "-1"])
def test_visible_devices_that_do_not_exist(listed: str) -> None:
    code, _, message = device_count(listed)
    assert code == 107001
    assert f"ASCEND_RT_VISIBLE_DEVICES={listed}" in message and "is not one of the devices 0..3" in message


def test_a_process_numbers_the_devices_that_it_sees_from_0() -> None:
    code = "import torch; x = torch.ones(1, device='npu:1'); print(torch.npu.device_count(), x.device)"
    assert output_of(code, FAKE_NPU_COUNT="4", ASCEND_RT_VISIBLE_DEVICES="3,1") == "2 npu:1"
    wrong = run_python(code, FAKE_NPU_COUNT="4", ASCEND_RT_VISIBLE_DEVICES="7")
    assert wrong.returncode != 0 and "'7' is not one of the devices 0..3" in wrong.stderr


def test_two_devices_in_one_process() -> None:
    first, second = torch.ones(4, device="npu:0"), torch.full((4,), 2.0, device="npu:1")
    assert (first.device.index, second.device.index) == (0, 1)
    assert (first.to("npu:1") + second).tolist() == [3.0] * 4
    with torch.npu.device(1):
        assert torch.zeros(1, device="npu").device.index == 1
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        first + second
    with pytest.raises(RuntimeError, match=r"this process sees 2 device\(s\)"):
        torch.npu.set_device(2)


def test_host_and_device_do_not_mix() -> None:
    on_device = torch.ones(3, device="npu")
    with pytest.raises(RuntimeError, match="npu:0 and cpu"):
        on_device + torch.ones(3)
    assert (on_device + torch.tensor(1.0)).tolist() == [2.0] * 3  # a host scalar is a number
    with pytest.raises(TypeError, match="can't convert npu"):
        np.asarray(on_device)


def test_streams_and_events() -> None:
    x, stream, event = torch.ones(3, device="npu"), torch.npu.Stream(), torch.npu.Event(enable_timing=True)
    start = torch.npu.Event(enable_timing=True)
    start.record()
    with torch.npu.stream(stream):
        y = x * 2
        event.record()
    torch.npu.current_stream().wait_event(event)
    y.record_stream(torch.npu.current_stream())
    torch.npu.synchronize()
    assert event.query() and start.elapsed_time(event) >= 0 and y.tolist() == [2.0] * 3


def test_pinned_memory_and_copies() -> None:
    pinned = torch.arange(4.0).pin_memory()
    back = torch.empty(4, pin_memory=True)
    assert pinned.is_pinned() and back.is_pinned() and not torch.ones(2).is_pinned()
    on_device = pinned.to("npu", non_blocking=True)
    back.copy_(on_device * 2, non_blocking=True)
    torch.npu.synchronize()
    assert back.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_autograd_and_training_equal_the_cpu() -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
        )
        inputs, targets = torch.randn(32, 8), torch.randint(0, 4, (32,))
        model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses("npu") == pytest.approx(losses("cpu"), rel=1e-6)


@pytest.mark.parametrize(
    "shapes", [((3,), (3,)), ((3,), (3, 2)), ((2, 3), (3,)), ((4, 2, 3), (3, 2)), ((2, 3), (4, 3, 2))]
)
def test_gradients_of_matmul(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """torch_npu has a kernel of its own for them, which no CPU kernel can stand for."""
    ours, theirs = (
        [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes] for _ in range(2)
    )
    ours = [tensor.to("npu").requires_grad_() for tensor in ours]
    theirs = [tensor.requires_grad_() for tensor in theirs]
    torch.matmul(*ours).square().sum().backward()
    torch.matmul(*theirs).square().sum().backward()
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), wanted.grad)


def test_calls_are_counted() -> None:
    x, gamma = torch.ones(2, 8, device="npu"), torch.ones(8, device="npu")
    npusim.reset_calls()
    torch_npu.npu_rms_norm(x, gamma)
    (x @ x.T).relu()
    counted = npusim.calls()
    assert counted["npu_rms_norm"] == 1 and counted["aten::matmul"] == 1 and counted["aten::relu"] == 1
    assert counted["npu_swiglu"] == 0
