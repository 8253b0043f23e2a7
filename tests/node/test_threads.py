"""Thread counts and order of arrival change nothing: the same manifests and payloads give the same state everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from loopback import small_corpus

REPLAY = """
import json, random, sys
from pathlib import Path
import torch

sys.path.insert(0, sys.argv[1])
import loopback
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node import worker as worker_module
from sparseloco.node.store import StateDir
from sparseloco.node.tensor_file import read_tensors
from sparseloco.protocol.events import decode_commit

folder, peer, threads, order_seed = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
torch.set_num_threads(threads)
worker_module.corpus_of_run = loopback.small_corpus
run = RunFile.load(folder / "run.toml")
with StateDir.open(folder / f"replay-{threads}-{order_seed}") as store:
    worker = worker_module.Worker(run, peer, store, device=torch.device("cpu"))
    genesis = read_tensors(folder / "genesis.safetensors")
    worker.hold(-1, genesis)
    arrived = {path.name: path for path in folder.glob("payloads/*")}
    names = sorted(arrived)
    random.Random(order_seed).shuffle(names)
    for name in names:  # as pushes come: each stored when it arrives
        store.blobs.put(arrived[name].read_bytes())
    digests = []
    commits = sorted((decode_commit(p.read_bytes()) for p in folder.glob("chain/*.bin")), key=lambda c: c.manifest.round)
    for commit in commits[1:]:
        manifest = commit.manifest
        own = worker.train(manifest.round, 0, float("inf"), lambda: False, lambda: manifest.base)
        assert own.result.steps == run.algorithm.inner_steps
        worker.apply(manifest, [store.blobs.get(c.payload) for c in manifest.contributions])
        digests.append(worker.digest(worker.theta).hex())
print(json.dumps({"threads": torch.get_num_threads(), "digests": digests}))
"""


def replayed(folder: Path, peer: str, threads: int, order_seed: int) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    arguments = [str(Path(__file__).parent), str(folder), peer, str(threads), str(order_seed)]
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_one_thread_two_threads_and_another_order_of_arrival_give_equal_digests(swarm, tell, tmp_path):
    """Each process also trains between the outer steps, on its own thread count, as a node does."""
    from sparseloco.node.genesis import write_genesis

    async def story():
        run = swarm(founders=3, run__min_peers=3)
        nodes = await run.start(0, 1, 2)
        await run.until_round(1)
        await run.stop()
        run.check(nodes)
        folder = nodes[0].path
        write_genesis(folder / "genesis.safetensors", run.genesis, run.run.model.config)
        (folder / "payloads").mkdir()
        for path in (folder / "blobs").iterdir():
            (folder / "payloads" / path.name).write_bytes(path.read_bytes())
        return folder, run.identities[5].peer_id, nodes[0].states(), run.run

    folder, stranger, states, settings = tell(story())
    assert len(small_corpus(settings).train) > 0 and torch.get_num_threads() == 1
    results = [replayed(folder, stranger, threads, seed) for threads, seed in ((1, 1), (2, 2))]
    assert [result["threads"] for result in results] == [1, 2]
    assert results[0]["digests"] == results[1]["digests"]
    for number, digest in states.items():
        assert results[0]["digests"][number] == digest
