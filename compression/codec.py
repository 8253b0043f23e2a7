"""The payload codec `ef2-4096`: a run's tensors to one canonical byte string, and back to sparse values.

The one rule: encoding, decoding and norms give the same bits on every device, thread count and process. SparseLoCo
(arXiv 2508.15706) sends chunk-wise top-k with 2-bit codes; `layout`, `topk`, `levels` and `packing` state this codec
id's choices. Work goes tensor by tensor, so extra memory is bounded by the largest tensor plus the payload.

CPU and CUDA run the same arithmetic where the tensors are. MPS has no float64, so its tensors are worked on by the CPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sparseloco.compression import packing
from sparseloco.compression.layout import CHUNK, CODE_BITS, LEVELS_BYTES, PayloadLayout, TensorLayout
from sparseloco.compression.levels import dequantise, make_codes, two_levels
from sparseloco.compression.packing import Records
from sparseloco.compression.topk import Selection, select, select_all
from sparseloco.compression.validation import standard_bytes, tail_bytes, validate


class NonFiniteError(Exception):
    """Our own buffer holds NaN or Inf, so this round's contribution must be withheld; `tensor_name` says where."""

    def __init__(self, tensor_name: str) -> None:
        self.tensor_name = tensor_name
        super().__init__(f"tensor {tensor_name!r} holds NaN or Inf: withhold this round's contribution")


@dataclass(frozen=True)
class DecodedTensor:
    """What one payload says about one tensor; elements not listed are zero. No index repeats."""

    indices: torch.Tensor  # int64 [sent_elements], positions in the flat C-ordered tensor, ascending
    values: torch.Tensor  # fp32 [sent_elements]


@dataclass(frozen=True)
class DecodedPayload:
    """A valid payload, unpacked tensor by tensor (in layout order) on each iteration."""

    payload: bytes
    layout: PayloadLayout
    device: torch.device

    def __iter__(self) -> Iterator[DecodedTensor]:
        for tensor in self.layout.tensors:
            yield _decode_tensor(self.payload, tensor, self.device)

    def norm(self) -> float:
        """Euclidean norm of all values: squares added in float64, chunk by chunk in payload order, on the CPU."""
        return _root_of_ordered_sum(np.concatenate([_chunk_squares(self.payload, t) for t in self.layout.tensors]))

    def tensor_norms(self) -> list[float]:
        """Each tensor's Euclidean norm, in layout order, computed like `norm`."""
        return [_root_of_ordered_sum(_chunk_squares(self.payload, tensor)) for tensor in self.layout.tensors]


@dataclass(frozen=True)
class Encoded:
    """A payload this process made."""

    payload: bytes
    layout: PayloadLayout

    def decoded(self, device: torch.device | str = "cpu") -> DecodedPayload:
        """The values as every receiver will see them; the residual is computed from these."""
        return DecodedPayload(self.payload, self.layout, torch.device(device))


def encode(buffers: Sequence[torch.Tensor], layout: PayloadLayout) -> Encoded:
    """Encode fp32 error-feedback buffers, given in layout order, into a payload of exactly `layout.total_bytes`.

    Raises NonFiniteError for the first tensor with NaN or Inf, ValueError where buffers do not match the layout.
    """
    _check_buffers(buffers, layout)
    pieces: list[torch.Tensor] = []
    finite: list[torch.Tensor] = []
    for buffer, tensor in zip(buffers, layout.tensors, strict=True):
        tensor_pieces, tensor_finite = _encode_tensor(buffer.detach(), tensor)
        pieces += tensor_pieces
        finite.append(tensor_finite)
    for tensor, is_finite in zip(layout.tensors, torch.stack(finite).tolist(), strict=True):  # the one wait for a GPU
        if not is_finite:
            raise NonFiniteError(tensor.spec.name)
    return Encoded(torch.cat(pieces).cpu().numpy().tobytes(), layout)


def decode(payload: bytes, layout: PayloadLayout, device: torch.device | str = "cpu") -> DecodedPayload:
    """Validate a payload as a whole, then return it for unpacking on `device`; raises PayloadError."""
    validate(payload, layout)
    return DecodedPayload(payload, layout, torch.device(device))


def norm(payload: bytes, layout: PayloadLayout) -> float:
    """Validate a payload and return its Euclidean norm, the same bits everywhere; raises PayloadError."""
    return decode(payload, layout).norm()


def tensor_norms(payload: bytes, layout: PayloadLayout) -> list[float]:
    """Validate a payload and return its norm per tensor, the same bits everywhere; raises PayloadError."""
    return decode(payload, layout).tensor_norms()


def _check_buffers(buffers: Sequence[torch.Tensor], layout: PayloadLayout) -> None:
    if len(buffers) != len(layout.tensors):
        raise ValueError(f"{len(buffers)} buffers for {len(layout.tensors)} tensors: pass one per tensor, in order")
    for buffer, spec in zip(buffers, layout.specs, strict=True):
        if tuple(buffer.shape) != spec.shape or buffer.dtype != torch.float32:
            raise ValueError(
                f"buffer for {spec.name!r} is {buffer.dtype} {tuple(buffer.shape)} instead of torch.float32 "
                f"{spec.shape}: pass fp32 buffers in layout order"
            )
    if len({buffer.device for buffer in buffers}) != 1:
        raise ValueError("buffers lie on several devices; encoding needs one: move them together")


def _encode_tensor(buffer: torch.Tensor, tensor: TensorLayout) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return a tensor's bytes (uint8 pieces in payload order) and whether it is finite (bool [])."""
    flat = buffer.to(_working_device(buffer.device)).contiguous().view(-1)
    sparse_elements = tensor.spec.elements - tensor.tail_elements
    pieces: list[torch.Tensor] = []
    finite = torch.ones((), dtype=torch.bool, device=flat.device)
    if tensor.standard_records:
        selection = select(flat[:sparse_elements], tensor.standard_records, tensor.codec.k)
        records = _quantise(selection, flat)
        pieces.append(packing.pack_standard(records, tensor.codec).view(-1))
        finite &= selection.finite()
    if tensor.tail_elements:
        tail = flat[sparse_elements:]
        selection = select_all(tail)
        pieces.append(packing.pack_tiny(_quantise(selection, tail)))
        finite &= selection.finite()
    return pieces, finite


def _quantise(selection: Selection, flat: torch.Tensor) -> Records:
    """Turn selected elements of `flat` into record contents."""
    levels = two_levels(selection.magnitudes, selection.upper_half)
    sign_bits = flat.view(torch.int32)[_flat_positions(selection.indices)] < 0
    return Records(selection.indices, make_codes(sign_bits, selection.upper_half, levels), levels)


def _decode_tensor(payload: bytes, tensor: TensorLayout, device: torch.device) -> DecodedTensor:
    working = _working_device(device)
    indices: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    if tensor.standard_records:
        records = packing.unpack_standard(standard_bytes(payload, tensor).to(working), tensor.codec)
        indices.append(_flat_positions(records.indices).view(-1))
        values.append(dequantise(records.codes, records.levels).view(-1))
    if tensor.tail_elements:
        records = packing.unpack_tiny(tail_bytes(payload, tensor).to(working), tensor.tail_elements)
        indices.append(records.indices[0] + (tensor.spec.elements - tensor.tail_elements))
        values.append(dequantise(records.codes, records.levels)[0])
    return DecodedTensor(torch.cat(indices).to(device), torch.cat(values).to(device))


def _flat_positions(indices: torch.Tensor) -> torch.Tensor:
    """Turn positions within chunks, int64 [rows, m], into positions within the flat tensor."""
    return indices + CHUNK * torch.arange(indices.shape[0], device=indices.device)[:, None]


def _working_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device


def _chunk_squares(payload: bytes, tensor: TensorLayout) -> npt.NDArray[np.float64]:
    """Return n_lo lo^2 + n_hi hi^2 for every chunk of a tensor: float64 [chunks], in chunk order."""
    squares: list[torch.Tensor] = []
    if tensor.standard_records:
        fields = packing.split_fields(standard_bytes(payload, tensor), tensor.codec)
        codes = packing.unpack_bits(fields.codes, CODE_BITS)
        squares.append(_squares(codes, packing.unpack_levels(fields.levels)))
    if tensor.tail_elements:
        record = tail_bytes(payload, tensor)
        codes, _ = packing.unpack_tiny_codes(record, tensor.tail_elements)
        squares.append(_squares(codes, packing.unpack_levels(record[-LEVELS_BYTES:])))
    in_chunk_order: npt.NDArray[np.float64] = torch.cat(squares).numpy()
    return in_chunk_order


def _squares(codes: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    lo, hi = (levels << 16).view(torch.float32).to(torch.float64).unbind(dim=1)
    n_hi = (codes >> 1).sum(dim=1)
    n_lo = codes.shape[1] - n_hi
    return n_lo * (lo * lo) + n_hi * (hi * hi)  # both products are exact, so only this sum rounds


def _root_of_ordered_sum(squares: npt.NDArray[np.float64]) -> float:
    """Add strictly from first to last (np.sum would add pairwise) and take the correctly rounded square root."""
    return float(np.sqrt(np.add.accumulate(squares)[-1]))
