"""TMA tensor maps: the hardware descriptor, and box transfers between global and shared memory."""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .element_types import STORAGE, from_float32, to_float32
from .errors import AddressError, InvalidDescriptor
from .swizzle import GRANULE, PATTERN_BYTES, as_granules, swizzled_granules

DESCRIPTOR_BYTES = 64  # the rest of the 128-byte object is not read, and often uninitialised

_SHARED_ALIGNMENT = 128
_MAX_BOX = 256
_ADDRESS_SPACE = 1 << 64

Bytes = NDArray[np.uint8]


class ElementType(NamedTuple):
    """Element of a tensor map: its PTX-like name and size."""

    name: str
    itemsize: int


_ELEMENT_TYPES = (
    ElementType("u8", 1),
    ElementType("u16", 2),
    ElementType("u32", 4),
    ElementType("s32", 4),
    ElementType("u64", 8),
    ElementType("s64", 8),
    ElementType("f16", 2),
    ElementType("f32", 4),
    ElementType("f32", 4),  # flushes denormals
    ElementType("f64", 8),
    ElementType("bf16", 2),
    ElementType("tf32", 4),
    ElementType("tf32", 4),  # flushes denormals
)
_SWIZZLES = (0, 32, 64, 128)
_FILL_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "tf32": 0x7FFFFFFF}


class Memory(Protocol):
    """What box transfers need of global memory."""

    def view(self, addr: int, nbytes: int, write: bool = False) -> Bytes:
        """The bytes at an address, without a copy; refused where nothing is registered."""
        ...

    def touch_box(
        self, addr: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, write: bool
    ) -> None:
        """Notes a box of items as loaded or stored."""
        ...


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map; dimensions are innermost first."""

    address: int
    element: ElementType
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes per step of each dimension; the innermost is the element size."""
    box: tuple[int, ...]
    swizzle: int
    """Span in bytes: 0 (none), 32, 64 or 128."""
    oob_nan: bool = False

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @cached_property
    def box_bytes(self) -> int:
        """Shared-memory bytes of one box, which is also what a load adds to the mbarrier."""
        return math.prod(self.box) * self.element.itemsize


def decode(raw: bytes) -> TensorMap:
    """Reads a 128-byte descriptor, of which 64 bytes matter; refuses what TMA would refuse."""
    if len(raw) < DESCRIPTOR_BYTES:
        raise InvalidDescriptor(f"tensor map of {len(raw)} bytes; {DESCRIPTOR_BYTES} are needed")
    return _decode(bytes(raw[:DESCRIPTOR_BYTES]))


@lru_cache(maxsize=4096)
def _decode(raw: bytes) -> TensorMap:
    address, control, *stride_words, stride_high = struct.unpack_from("<QI4II", raw)
    rank = ((control >> 4) & 7) + 1
    type_code = (control >> 7) & 15
    if control & 15 not in (0, 2) or rank > 5 or type_code >= len(_ELEMENT_TYPES):
        raise InvalidDescriptor(
            f"not a tiled tensor map: control word {control:#x}, rank {rank}, type {type_code}"
        )
    if (control >> 11) & 3:
        raise InvalidDescriptor(f"interleaved tensor maps are not emulated: {control:#x}")
    element = _ELEMENT_TYPES[type_code]
    dims = tuple(size + 1 for size in struct.unpack_from("<5I", raw, 32)[:rank])
    element_strides = int.from_bytes(raw[52:55], "little") & 0x7FFF
    if element_strides:
        raise InvalidDescriptor(
            f"element strides other than 1 are not emulated: {element_strides:#o}"
        )
    strides = tuple(
        (word | (((stride_high >> (4 * i)) & 15) << 32)) << 4 for i, word in enumerate(stride_words)
    )
    decoded = TensorMap(
        address=address,
        element=element,
        dims=dims,
        strides=(element.itemsize, *strides[: rank - 1]),
        box=tuple(size + 1 for size in raw[55 : 55 + rank]),
        swizzle=_SWIZZLES[(control >> 13) & 3],
        oob_nan=bool((control >> 15) & 1),
    )
    _validate(decoded)
    return decoded


def _validate(m: TensorMap) -> None:
    inner_bytes = m.box[0] * m.element.itemsize
    if m.address % 16 or m.address == 0:
        raise InvalidDescriptor(f"global address {m.address:#x} is not a multiple of 16")
    if max(m.box) > _MAX_BOX:
        raise InvalidDescriptor(f"box {m.box} is larger than {_MAX_BOX} in a dimension")
    if inner_bytes % 16:
        raise InvalidDescriptor(f"box rows of {inner_bytes} bytes are not a multiple of 16")
    if m.swizzle and inner_bytes > m.swizzle:
        raise InvalidDescriptor(
            f"box rows of {inner_bytes} bytes exceed the swizzle of {m.swizzle}"
        )


class _Overlap(NamedTuple):
    """Elements of a box that lie inside the tensor."""

    region: NDArray[Any]
    """In global memory, outermost dimension first."""
    window: tuple[slice, ...]
    """Where they sit in the box, outermost dimension first."""

    @property
    def nbytes(self) -> int:
        return self.region.size * self.region.itemsize


def _overlaps(
    m: TensorMap, coords: Sequence[int], memory: Memory, write: bool = False
) -> list[_Overlap]:
    """The part of a box inside the tensor: one piece, or more where memory has gaps in it.

    What counts are the addresses of the elements, modulo 2**64, and not where the map begins and
    ends: ragged tensors have extents far beyond their memory and strides that wrap around.
    """
    if len(coords) != m.rank:
        raise InvalidDescriptor(f"{len(coords)} coordinates for a tensor map of rank {m.rank}")
    address = m.address
    window: list[slice] = []
    for axis, coord in enumerate(coords):
        begin = -coord if coord < 0 else 0
        end = min(m.dims[axis] - coord, m.box[axis])
        if end <= begin:
            return []
        address += (coord + begin) * m.strides[axis]
        window.append(slice(begin, end))
    return _pieces(m, memory, write, address, tuple(window[::-1]))


def _pieces(
    m: TensorMap, memory: Memory, write: bool, address: int, window: tuple[slice, ...]
) -> list[_Overlap]:
    address %= _ADDRESS_SPACE
    steps = m.strides[::-1]
    shape, strides, last = [], [], 0
    for part, step in zip(window, steps, strict=True):
        extent = part.stop - part.start
        shape.append(extent)
        strides.append(step if extent > 1 else 0)
        last += (extent - 1) * step
    try:
        data = memory.view(address, last + m.element.itemsize, write)
    except AddressError:
        axis = next((i for i, extent in enumerate(shape[:-1]) if extent > 1), None)
        if axis is None:
            raise
        pieces: list[_Overlap] = []
        for i in range(shape[axis]):
            at = window[axis].start + i
            row = (*window[:axis], slice(at, at + 1), *window[axis + 1 :])
            pieces += _pieces(m, memory, write, address + i * steps[axis], row)
        return pieces
    region: NDArray[Any] = np.ndarray(
        shape, dtype=STORAGE[m.element.itemsize], buffer=data, strides=strides
    )
    memory.touch_box(address, shape, strides, m.element.itemsize, write)
    return [_Overlap(region, window)]


def _as_box(m: TensorMap, packed: Bytes) -> NDArray[Any]:
    box: NDArray[Any] = packed.view(STORAGE[m.element.itemsize]).reshape(m.box[::-1])
    return box


def load_box(m: TensorMap, coords: Sequence[int], memory: Memory) -> tuple[Bytes, int]:
    """Reads a box, packed innermost first, and the number of its bytes that lie in the tensor.

    Elements outside are zero, or NaN where the map asks for that.
    """
    overlaps = _overlaps(m, coords, memory)
    if overlaps and overlaps[0].region.shape == m.box[::-1]:
        return overlaps[0].region.copy(order="C").reshape(-1).view(np.uint8), m.box_bytes
    fill = _FILL_NAN.get(m.element.name, 0) if m.oob_nan else 0
    box: NDArray[Any] = np.full(m.box[::-1], fill, dtype=STORAGE[m.element.itemsize])
    for overlap in overlaps:
        box[overlap.window] = overlap.region
    return box.reshape(-1).view(np.uint8), sum(overlap.nbytes for overlap in overlaps)


def store_box(m: TensorMap, coords: Sequence[int], packed: Bytes, memory: Memory) -> int:
    """Writes the part of a packed box that lies in the tensor; returns its bytes."""
    overlaps = _overlaps(m, coords, memory, write=True)
    for overlap in overlaps:
        overlap.region[...] = _as_box(m, packed)[overlap.window]
    return sum(overlap.nbytes for overlap in overlaps)


def reduce_box(m: TensorMap, coords: Sequence[int], packed: Bytes, memory: Memory, op: str) -> int:
    """Combines a packed box into the tensor (`add`, `min`, `and`, ...); returns its bytes."""
    overlaps = _overlaps(m, coords, memory, write=True)
    for overlap in overlaps:
        update = _as_box(m, packed)[overlap.window]
        overlap.region[...] = combine(overlap.region, update, m.element.name, op)
    return sum(overlap.nbytes for overlap in overlaps)


# Element types that a bulk reduction takes, as the PTX ISA lists them.
_INTEGERS = {"u32", "s32", "u64"}
_HALVES = {"f16", "bf16"}
_REDUCIBLE = {
    "add": _INTEGERS | _HALVES | {"f32", "f64", "s64"},
    "min": _INTEGERS | _HALVES | {"s64"},
    "max": _INTEGERS | _HALVES | {"s64"},
    "inc": {"u32"},
    "dec": {"u32"},
}


def combine(old: NDArray[Any], new: NDArray[Any], element: str, op: str) -> NDArray[Any]:
    """`op` of raw elements, as a bulk reduction does it: 16-bit floats round once."""
    if op in _BITWISE and old.itemsize >= 4:
        return _BITWISE[op](old, new)  # type: ignore[no-any-return]
    if element not in _REDUCIBLE.get(op, ()):
        raise InvalidDescriptor(f"reduction {op} on {element} does not exist")
    function = _ARITHMETIC[op]
    if element in ("f16", "bf16", "f32"):
        wide = function(_float(old, element), _float(new, element))
        return from_float32(wide, element)
    typed = np.dtype(f"{'f' if element == 'f64' else element[0].replace('s', 'i')}{old.itemsize}")
    with np.errstate(over="ignore"):
        result: NDArray[Any] = function(_contiguous(old).view(typed), _contiguous(new).view(typed))
    return result.view(old.dtype)


_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "inc": lambda old, top: np.where(old >= top, 0, old + 1).astype(old.dtype),
    "dec": lambda old, top: np.where((old == 0) | (old > top), top, old - 1).astype(old.dtype),
}


def _contiguous(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values)


def _float(values: NDArray[Any], element: str) -> NDArray[np.float32]:
    return to_float32(_contiguous(values), element)


def scatter_to_shared(m: TensorMap, packed: Bytes, shared: Bytes, address: int, base: int) -> None:
    """Places a packed box at a shared-window address, swizzled; `base` is the address of byte 0."""
    target = _box_window(m, shared, address, base)
    if m.swizzle == 0:
        target[...] = as_granules(packed)
    else:
        target[swizzled_granules(address % PATTERN_BYTES, packed.size // GRANULE, m.swizzle)] = (
            as_granules(packed)
        )


def gather_from_shared(m: TensorMap, shared: Bytes, address: int, base: int) -> Bytes:
    """The packed box at a shared-window address: the inverse of `scatter_to_shared`."""
    source = _box_window(m, shared, address, base)
    packed: Bytes
    if m.swizzle == 0:
        packed = source.view(np.uint8).copy()
        return packed
    granules = swizzled_granules(address % PATTERN_BYTES, m.box_bytes // GRANULE, m.swizzle)
    packed = source[granules].view(np.uint8)
    return packed


def _box_window(m: TensorMap, shared: Bytes, address: int, base: int) -> NDArray[np.complex128]:
    start, size = address - base, m.box_bytes
    if m.swizzle:
        # The swizzle permutes whole 128-byte rows.
        size = -(-size // _SHARED_ALIGNMENT) * _SHARED_ALIGNMENT
    if address % _SHARED_ALIGNMENT or start < 0 or start + m.box_bytes > shared.size:
        raise InvalidDescriptor(
            f"box of {m.box_bytes} bytes at shared address {address:#x}: it must be 128-byte "
            f"aligned and inside the {shared.size} bytes from {base:#x}"
        )
    return as_granules(shared[start : start + size])
