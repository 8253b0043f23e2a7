"""One decided round as arithmetic: the state before it and its contributions give the state after it, bit for bit.

A node, a joiner that replays the log, and the offline audit all take this one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sparseloco.bootstrap.run_file import RunFile
from sparseloco.compression.codec import norm
from sparseloco.compression.layout import PayloadLayout
from sparseloco.node.contribution import ContributionHeader, open_contribution
from sparseloco.node.outer_step import ClipRule, clip_factors, outer_step
from sparseloco.protocol.manifest import Manifest


def payload_of(blob: bytes, manifest: Manifest, peer: str, layout: PayloadLayout) -> bytes:
    """The codec payload in a peer's contribution to `manifest`'s round; ContributionError if the blob is not that."""
    header = ContributionHeader(manifest.run, manifest.round, manifest.base, peer)
    return open_contribution(blob, header, layout.total_bytes)


def state_after(
    theta: Mapping[str, torch.Tensor], manifest: Manifest, blobs: Sequence[bytes], layout: PayloadLayout, run: RunFile
) -> dict[str, torch.Tensor]:
    """The outer step of a decided round on fp32 CPU tensors; `blobs` are its contributions in manifest order.

    ContributionError or PayloadError for a blob that is not a valid contribution to it.
    """
    payloads = [
        payload_of(blob, manifest, contribution.peer, layout)
        for blob, contribution in zip(blobs, manifest.contributions, strict=True)
    ]
    clip = ClipRule(run.robustness.clip_multiple) if run.robustness.clip == "median-norm" else None
    stepped = outer_step(
        [theta[spec.name] for spec in layout.specs],
        payloads,
        layout,
        rule=run.algorithm.aggregation,  # type: ignore[arg-type]
        alpha=run.algorithm.alpha_at(manifest.round),
        clip_factors=clip_factors([norm(payload, layout) for payload in payloads], clip),
    )
    return {spec.name: tensor for spec, tensor in zip(layout.specs, stepped, strict=True)}
