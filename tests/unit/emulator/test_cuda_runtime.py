"""The emulated CUDA runtime, called as compiled host code calls it."""

import ctypes

import pytest

from hopperflash.emulator.cuda_runtime import (
    CudaRuntime,
    DeviceFacts,
    KernelSignature,
    _LaunchAttribute,
    _LaunchConfig,
)
from hopperflash.emulator.errors import EmulationError

H100 = DeviceFacts.of_target("sm_90a")


@pytest.fixture
def runtime():
    return CudaRuntime({"k": KernelSignature((4, 8), 1024, (64, 1, 1))}, H100)


def handle_of(runtime: CudaRuntime, name: bytes = b"k") -> int | None:
    out = ctypes.c_void_p()
    runtime.callbacks["_cudaLibraryGetKernel"](
        ctypes.addressof(out), 1, ctypes.cast(ctypes.c_char_p(name), ctypes.c_void_p)
    )
    return out.value


def launch_with(runtime: CudaRuntime, grid=(2, 1, 1), block=(64, 1, 1), shared=0, cluster=None):
    """Launches kernel `k` on (7, 2**40) and returns the error code."""
    first, second = ctypes.c_int32(7), ctypes.c_int64(1 << 40)
    arguments = (ctypes.c_void_p * 2)(ctypes.addressof(first), ctypes.addressof(second))
    attributes = (_LaunchAttribute * 2)()
    attributes[0].id, attributes[0].value[0] = 6, 1
    if cluster:
        attributes[1].id = 4
        ctypes.memmove(attributes[1].value, (ctypes.c_uint32 * 3)(*cluster), 12)
    config = _LaunchConfig(
        (ctypes.c_uint32 * 3)(*grid),
        (ctypes.c_uint32 * 3)(*block),
        shared,
        None,
        ctypes.addressof(attributes),
        2 if cluster else 1,
    )
    return runtime.callbacks["_cudaLaunchKernelEx"](
        ctypes.addressof(config), handle_of(runtime), ctypes.addressof(arguments)
    )


def test_a_launch_is_captured_with_its_parameter_values(runtime):
    captured = []
    runtime.on_launch = captured.append
    assert launch_with(runtime, grid=(4, 2, 3), shared=4096, cluster=(2, 1, 1)) == 0
    assert runtime.take_error() is None
    (launch,) = captured
    assert (launch.kernel_name, launch.grid, launch.block) == ("k", (4, 2, 3), (64, 1, 1))
    assert (launch.cluster, launch.shared_bytes) == ((2, 1, 1), 4096)
    assert launch.parameters == ((7).to_bytes(4, "little"), (1 << 40).to_bytes(8, "little"))
    assert launch.programmatic and not launch.cooperative


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (0, 1, 1)}, r"grid \(0, 1, 1\)"),
        ({"block": (128, 1, 1)}, r"reqntid \(64, 1, 1\)"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, r"cluster \(2, 1, 1\)"),
        ({"shared": H100.max_shared_bytes}, "bytes of shared memory"),
    ],
)
def test_launches_a_device_would_refuse(runtime, change, message):
    runtime.on_launch = lambda launch: pytest.fail("launched")
    assert launch_with(runtime, **change) != 0
    with pytest.raises(EmulationError, match=message):
        raise runtime.take_error()
    assert runtime.take_error() is None


def test_the_first_error_stays_until_it_is_taken(runtime):
    def fail(launch):
        raise ZeroDivisionError

    runtime.on_launch = fail
    assert launch_with(runtime) != 0
    out = ctypes.c_int32(5)
    assert runtime.callbacks["_cudaGetDevice"](ctypes.addressof(out)) != 0
    assert isinstance(runtime.take_error(), ZeroDivisionError)
    assert runtime.callbacks["_cudaGetDevice"](ctypes.addressof(out)) == 0
    assert out.value == 0


def test_unknown_kernels_and_symbols_are_named(runtime):
    assert handle_of(runtime, b"other") is None
    assert "no kernel other" in str(runtime.take_error())
    assert runtime.refuse("_cudaMemset")() != 0
    assert "cudaMemset" in str(runtime.take_error())


def test_device_attributes(runtime):
    out = ctypes.c_int32()
    ask = runtime.callbacks["_cudaDeviceGetAttribute"]
    assert (ask(ctypes.addressof(out), 97, 0), out.value) == (0, 232448)
    assert (ask(ctypes.addressof(out), 75, 0), out.value) == (0, 9)
    assert ask(ctypes.addressof(out), 9999, 0) != 0
    assert "9999" in str(runtime.take_error())
    assert DeviceFacts.of_target("sm_80").max_shared_bytes == 166912
