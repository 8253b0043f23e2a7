"""From a run file to what the protocol and the codec take: one place where their words meet."""

from __future__ import annotations

from sparseloco.bootstrap.run_file import RunFile
from sparseloco.compression.layout import CodecSpec
from sparseloco.protocol.manifest import MembershipRules
from sparseloco.protocol.rules import Rules


def codec_of(run: RunFile) -> CodecSpec:
    """The codec of the run's payloads."""
    return CodecSpec(codec_id=run.algorithm.codec, chunk=run.algorithm.chunk, k=run.algorithm.top_k)


def rules_of(run: RunFile) -> Rules:
    """The machine's rules; RunFileError if the run file has no genesis yet."""
    settings = run.round
    return Rules(
        run=run.run_id,
        genesis_state=run.require_genesis(),
        membership=MembershipRules(
            min_peers=run.run.min_peers,
            group_size=run.limits.group_size,
            joiners_per_round=run.limits.joiners_per_round,
            budget_cap_ms=int(settings.budget_seconds * 1000),
            budget_floor_ms=int(settings.min_budget_seconds * 1000),
            straggler_factor=settings.straggler_factor,
        ),
        heartbeat_seconds=settings.heartbeat_seconds,
        detection_seconds=settings.detection_seconds,
        formation_seconds=settings.formation_seconds,
        exchange_seconds=settings.exchange_seconds,
        vote_seconds=settings.vote_seconds,
        settle_seconds=max(3.0, 2 * settings.heartbeat_seconds),
        check_resends=run.limits.check_resends,
        max_rollback_rounds=run.limits.max_rollback_rounds,
        founders=tuple(run.run.founders),
        admitted=frozenset(run.admission.peers) if run.admission.mode == "list" else None,
    )
