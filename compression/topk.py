"""Choose the k largest magnitudes of every chunk, the same ones on every device.

The one rule: the order is total, so no library's tie-breaking shows. An element's *key* is its fp32 bits with the
sign cleared; larger keys come first, equal keys by lower index. Key and index are fused into one int64 *rank word*
`key << 12 | (4095 - index)`: rank words never repeat, and their descending order is the wanted order.

NaN and Inf have the largest keys of all, so a tensor holds one exactly if its selection does (`Selection.finite`).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sparseloco.compression.layout import CHUNK

INDEX_BITS = 12
INDEX_MASK = CHUNK - 1
KEY_MASK = 0x7FFF_FFFF
PADDING_KEY = -1  # below every real key, so the void after a tensor's end is never selected
UPPER_SHIFT = 31  # index << 32 | upper half << 31 | key: one int64 sort by index carries all three
SORT_SHIFT = 32
BLOCK_CHUNKS = 64  # 1 MiB of keys: a block's work stays in a core's second-level cache

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Selection:
    """Kept elements of `rows` chunks, ascending by index within each row."""

    indices: torch.Tensor  # [rows, k] int64, position within the chunk
    magnitudes: torch.Tensor  # [rows, k] fp32, |v|
    upper_half: torch.Tensor  # [rows, k] bool, among the first ceil(k / 2) by rank

    def finite(self) -> torch.Tensor:
        """Whether the whole tensor these rows came from is finite, as a bool tensor [] on its device."""
        return torch.isfinite(self.magnitudes).all()


def select(flat: torch.Tensor, rows: int, k: int) -> Selection:
    """Select the k first-ranked elements of each of `rows` chunks of `flat` ([elements] fp32, contiguous).

    The last chunk may be short but must hold at least k elements. Fixed shapes and no host synchronisation away from
    the CPU.
    """
    ranked = _first_ranked_on_cpu(flat, rows, k) if flat.device.type == "cpu" else first_ranked(flat, rows, k)
    return _by_index(ranked)


def select_all(flat: torch.Tensor) -> Selection:
    """Select every element of `flat` ([elements] fp32, at most 4096) as one row; only the split remains to find."""
    return _by_index(first_ranked(flat, 1, flat.numel()))


def first_ranked(flat: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """Return the k largest rank words of each chunk, descending: int64 [rows, k], on any device."""
    width = CHUNK if rows > 1 else min(CHUNK, flat.numel())
    keys = torch.full((rows * width,), PADDING_KEY, dtype=torch.int64, device=flat.device)
    keys[: flat.numel()] = flat.view(torch.int32) & KEY_MASK
    reversed_index = INDEX_MASK - torch.arange(width, device=flat.device)
    words = keys.view(rows, width).bitwise_left_shift_(INDEX_BITS).bitwise_or_(reversed_index)
    return words.topk(k, dim=1).values


def _by_index(ranked: torch.Tensor) -> Selection:
    """Split rank words [rows, k], descending, into a selection ascending by index."""
    k = ranked.shape[1]
    upper = (torch.arange(k, device=ranked.device) < (k + 1) // 2).to(torch.int64) << UPPER_SHIFT
    index = INDEX_MASK - (ranked & INDEX_MASK)
    fused = _sort_rows((index << SORT_SHIFT) | upper | (ranked >> INDEX_BITS))
    return Selection(
        indices=fused >> SORT_SHIFT,
        magnitudes=(fused & KEY_MASK).to(torch.int32).view(torch.float32),
        upper_half=((fused >> UPPER_SHIFT) & 1).to(torch.bool),
    )


def _sort_rows(words: torch.Tensor) -> torch.Tensor:
    if words.device.type == "cpu":  # numpy sorts short rows about twenty times faster
        return torch.from_numpy(np.sort(words.numpy(), axis=1))
    return words.sort(dim=1).values


def _first_ranked_on_cpu(flat: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """Do what `first_ranked` does, several times faster, block by block."""
    bits = flat.detach().view(torch.int32).numpy()
    ranked = np.empty((rows, k), dtype=np.int64)
    for first_row in range(0, rows, BLOCK_CHUNKS):
        block = bits[first_row * CHUNK : (first_row + BLOCK_CHUNKS) * CHUNK]
        block_rows = -(-block.size // CHUNK)
        keys = np.full((block_rows, CHUNK), PADDING_KEY, dtype=np.int32)
        np.bitwise_and(block, KEY_MASK, out=keys.reshape(-1)[: block.size])
        ranked[first_row : first_row + block_rows] = _first_ranked_in_block(keys, k)
    return torch.from_numpy(ranked)


def _first_ranked_in_block(keys: Int32Array, k: int) -> Int64Array:
    """Return the k largest rank words per row of keys [rows, 4096], descending.

    Pruning: among 4k (at most 4096) disjoint groups, the k-th largest group maximum is a lower bound for the k-th
    largest key, so only keys at or above it need sorting, about 1.2 k of them on ordinary data. Many equal keys
    merely prune less.
    """
    rows = keys.shape[0]
    groups = min(4 * k, CHUNK)
    maxima = keys.reshape(rows, CHUNK // groups, groups).max(axis=1)
    bound = np.partition(maxima, groups - k, axis=1)[:, groups - k, None]
    candidates = np.flatnonzero(keys >= bound)  # ascending, so grouped by row
    row = candidates >> INDEX_BITS
    counts = np.bincount(row, minlength=rows)
    slot = np.arange(candidates.size) - np.repeat(np.cumsum(counts) - counts, counts)
    words = np.full((rows, int(counts.max())), np.iinfo(np.int64).min, dtype=np.int64)
    key = keys.reshape(-1)[candidates].astype(np.int64)
    words[row, slot] = (key << INDEX_BITS) | (INDEX_MASK - (candidates & INDEX_MASK))
    words.sort(axis=1)
    return words[:, : -k - 1 : -1]
