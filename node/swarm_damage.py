"""Flip a byte in a stopped node's files, as a bad disk would."""

from __future__ import annotations

import random
from pathlib import Path

from sparseloco.bootstrap.errors import StateError

# What a node reads at its next start. Its own error feedback (own/) is left alone here: nobody else holds a copy of it, so
# damage to it cannot be healed, only told.
DAMAGEABLE = ("chain/*.bin", "checkpoints/*/*", "blobs/*", "votes.log", "session")


def flip_a_byte(state_dir: Path, rng: random.Random) -> Path:
    """Change one byte of one file that the node's state depends on, and return the file; StateError if there is none.

    The kind of file is drawn first, so that the many blobs do not crowd out the one vote log.
    """
    kinds = [sorted(path for path in state_dir.glob(pattern) if path.is_file() and path.stat().st_size) for pattern in DAMAGEABLE]
    kinds = [files for files in kinds if files]
    if not kinds:
        raise StateError(f"{state_dir}: holds no file that could be damaged; give --corrupt a later round")
    path = rng.choice(rng.choice(kinds))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return path
