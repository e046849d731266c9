"""The device by itself, through its C interface and without torch: its memory, what it holds, streams and captures."""

import subprocess
import sys

from refimpl.phantom import libraries

MIB = 2**20


def on_a_device(library, program, **environment):
    """Run a program in a process with the device: `cu` is the library, `malloc`, `free` and `left` are at hand."""
    before = f"""
import ctypes
MIB = 2**20
cu = ctypes.CDLL({str(library)!r})
def malloc(size):
    at = ctypes.c_void_p()
    error = cu.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(size))
    assert error in (0, 2), error
    return at.value
def free(at):
    return cu.cudaFree(ctypes.c_void_p(at))
def left():
    a, b = ctypes.c_size_t(), ctypes.c_size_t()
    assert cu.cudaMemGetInfo(ctypes.byref(a), ctypes.byref(b)) == 0
    return a.value
"""
    names = {f"REFIMPL_PHANTOM_{key}": str(value) for key, value in {"MEMORY": 64 * MIB, **environment}.items()}
    done = subprocess.run([sys.executable, "-c", before + program], capture_output=True, text=True, env=names)
    assert done.returncode == 0, done.stderr


def test_memory_is_counted_to_the_byte_and_given_at_the_lowest_free_place(library):
    on_a_device(library, """
assert left() == 64 * MIB
a, b, c = malloc(20 * MIB), malloc(3 * MIB + 1), malloc(10 * MIB)
assert b == a + 20 * MIB and c == b + 4 * MIB and left() == 30 * MIB, "in the driver's units of 2 MiB"
small = malloc(512)
assert small == c + 10 * MIB and left() == 30 * MIB - 4096
assert free(a) == 0 and left() == 50 * MIB - 4096
assert malloc(4 * MIB) == a and malloc(20 * MIB) > small, "16 MiB are free below, and too few"
assert malloc(26 * MIB) is None and malloc(26 * MIB - 4096) is None and malloc(24 * MIB) is not None
assert free(a + 1) == 1 and free(12345) == 1 and free(0) == 0
""")


def test_a_context_is_taken_before_anything(library):
    on_a_device(library, """
assert left() == 14 * MIB and malloc(15 * MIB) is None and malloc(14 * MIB)
""", CONTEXT=50 * MIB)


def test_devices_have_memory_of_their_own(library):
    on_a_device(library, """
first = malloc(60 * MIB)
assert cu.cudaSetDevice(7) == 0
second = malloc(60 * MIB)
assert second - first > 2**40 - 1 and cu.cudaSetDevice(8) == 101
class Pointer(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("rest", ctypes.c_char * 80)]
found = Pointer()
cu.cudaPointerGetAttributes(ctypes.byref(found), ctypes.c_void_p(second + 5))
assert (found.type, found.device) == (2, 7)
""", DEVICES=8)


def test_a_large_device_and_640_gib(library):
    for gib in (8, 640):
        on_a_device(library, f"assert left() == {gib} * 2**30 and malloc({gib} * 2**30) and left() == 0",
                    MEMORY=gib * 2**30, DEVICES=8)


def test_small_copies_move_bytes_and_large_ones_only_with_numbers(library):
    on_a_device(library, """
def there_and_back(size):
    at, ours, back = malloc(size), (ctypes.c_char * size)(*b"abc"), (ctypes.c_char * size)()
    cu.cudaMemcpy(ctypes.c_void_p(at), ours, ctypes.c_size_t(size), 1)
    cu.cudaMemcpy(back, ctypes.c_void_p(at), ctypes.c_size_t(size), 2)
    return back.raw[:3] == b"abc", at
assert there_and_back(MIB)[0] and not there_and_back(MIB + 1)[0]
cu.phantom_numbers(1)
good, at = there_and_back(4 * MIB)
assert good and cu.cudaMemset(ctypes.c_void_p(at), 0, ctypes.c_size_t(4 * MIB)) == 0
assert ctypes.string_at(at, 3) == bytes(3)
assert cu.cudaMemset(ctypes.c_void_p(at), 7, ctypes.c_size_t(4 * MIB)) == 0 and ctypes.string_at(at, 2) == bytes([7, 7])
""")


def test_virtual_memory_is_gone_once_it_is_released_and_unmapped(library):
    on_a_device(library, """
at, handle = ctypes.c_void_p(), ctypes.c_void_p()
prop = (ctypes.c_int * 8)(1, 0, 1, 0)
size = ctypes.c_size_t
assert cu.cuMemAddressReserve(ctypes.byref(at), size(2**36), size(0)) == 0 and left() == 64 * MIB
assert cu.cuMemCreate(ctypes.byref(handle), size(66 * MIB), prop) == 2
assert cu.cuMemCreate(ctypes.byref(handle), size(20 * MIB), prop) == 0 and left() == 44 * MIB
assert cu.cuMemMap(at, size(20 * MIB), size(0), handle) == 0 and cu.cuMemRelease(handle) == 0 and left() == 44 * MIB
ctypes.memset(at, 1, 20 * MIB)
assert cu.cuMemUnmap(at, size(20 * MIB)) == 0 and left() == 64 * MIB and cu.cuMemAddressFree(at) == 0
""")


def test_a_captured_stream_does_nothing_and_may_not_be_waited_for(library):
    on_a_device(library, """
stream, graph, status = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
at, ours = malloc(8), (ctypes.c_char * 8)(*b"changed")
assert cu.cudaStreamCreate(ctypes.byref(stream)) == 0 and cu.cudaStreamBeginCapture(stream) == 0
cu.cudaStreamIsCapturing(stream, ctypes.byref(status))
assert status.value == 1 and cu.cudaStreamSynchronize(stream) == 900
cu.cudaMemcpyAsync(ctypes.c_void_p(at), ours, ctypes.c_size_t(8), 1, stream)
assert cu.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0 and ctypes.string_at(at, 7) == bytes(7)
assert cu.cudaStreamSynchronize(stream) == 0 and cu.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 401
cu.cudaMemcpyAsync(ctypes.c_void_p(at), ours, ctypes.c_size_t(8), 1, stream)
assert ctypes.string_at(at, 7) == b"changed"
""")


def test_page_locked_memory_is_known_until_it_is_freed(library):
    on_a_device(library, """
at = ctypes.c_void_p()
assert cu.cudaHostAlloc(ctypes.byref(at), ctypes.c_size_t(MIB)) == 0
inside = ctypes.c_void_p(at.value + 100)
assert cu.cudaHostRegister(inside, ctypes.c_size_t(10)) == 712
assert cu.cudaFreeHost(at) == 0 and cu.cudaFreeHost(at) == 1
""")


def test_kernels_are_launched_and_nothing_is_written(library):
    on_a_device(library, """
at = malloc(64)
ctypes.memset(ctypes.c_void_p(at), 5, 64)
class Extent(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]
assert cu.cudaLaunchKernel(None, Extent(1, 1, 1), Extent(32, 1, 1), None, ctypes.c_size_t(0), None) == 0
assert ctypes.string_at(at, 64) == bytes([5]) * 64 and cu.cudaGetLastError() == 0
""")


def test_what_nobody_defines_is_an_error_unless_it_only_computes():
    for name, status in {"cublasSgemm_v2": 0, "cublasLtMatmul": 0, "ncclAllReduce": 0, "cufftExecC2C": 0,
                         "cudaIpcGetMemHandle": 801, "cuModuleLoadFatBinary": 801, "cudnnRNNForward": 3000,
                         "cusolverDnSpotrf": 7, "nvmlDeviceGetName": 3, "cuptiActivityEnable": 15}.items():
        assert libraries.answer(name) == status, name
