"""A stand-in for `sparseloco-node join` and `bootstrap`: writes the files of the contract as a plan tells it to.

Called as `python scripted_node.py PLAN VERB [flags of the verb]`. The plan is JSON: {"node-0": {key: value}}, keys below;
what a node does when it is started again is the plan under its key "again", or the same plan if there is none.
It imports nothing heavy, so a swarm of them starts in a tenth of a second.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

GIVE_UP_SECONDS = 30


class Node:
    def __init__(self, state_dir: Path, plan: dict) -> None:
        state_dir.mkdir(parents=True, exist_ok=True)
        events = state_dir / "events.jsonl"
        lives = events.read_text().count('"event": "joined"') if events.exists() else 0
        for _ in range(lives):
            plan = plan.get("again", plan)
        self.state_dir, self.plan = state_dir, plan
        self.resumed = False
        signal.signal(signal.SIGCONT, self.on_resume)
        self.events = (state_dir / "events.jsonl").open("a", buffering=1)

    def on_resume(self, *_: object) -> None:
        self.resumed = True

    def write(self, event: str, round_number: int, **fields: object) -> None:
        self.events.write(json.dumps({"time": time.time(), "event": event, "round": round_number, **fields}) + "\n")

    def digest(self, round_number: int) -> str:
        return self.plan.get("digests", {}).get(str(round_number), f"{round_number + 1:064x}")

    def run(self, rounds: int) -> int:
        plan = self.plan
        first = plan.get("enters_at", 0)
        self.write("joined", first, peer_id="me", session="00" * 16, group=4)
        if first:
            self.write("caught_up", first - 1, state_digest=self.digest(first - 1))
        else:
            self.write("evaluated", -1, loss=5.5, windows=64)
        for number in range(first, rounds):
            if plan.get("has_child_in") == number:  # a daemon that does not notice its parent's end
                daemon = [sys.executable, "-c", "import signal; signal.pause()"]
                child = subprocess.Popen(daemon, start_new_session=True, stdout=subprocess.DEVNULL)
                (self.state_dir / "child.pid").write_text(str(child.pid))
            self.start(number)
            while plan.get("hangs_in") == number:
                signal.pause()
                self.start(number)  # a resume ended the wait: what a next round amounts to
            if plan.get("waits_for_resume_in") == number:
                self.wait_until(lambda: self.resumed)
            if plan.get("dies_in") == number:
                print("ran out of something", file=sys.stderr)
                return 6
            self.wait_for_others(number)
            if number not in plan.get("skips", []):
                self.commit(number)
        (self.state_dir / "digest.txt").write_text(plan.get("files", self.digest(rounds - 1)))
        self.write("left", rounds - 1, why="done", rounds=rounds, bytes_sent=1000, bytes_received=2000,
                   payload_bytes_sent=84, peak_rss_bytes=10**8, steps=30 * rounds, contributions_committed=rounds,
                   contributions_returned=0)  # fmt: skip
        return 0

    def start(self, number: int) -> None:
        self.write("round_started", number, group=4, budget_seconds=1, member=True, base=self.digest(number - 1))

    def commit(self, number: int) -> None:
        chain = self.state_dir / "chain"
        chain.mkdir(exist_ok=True)
        (chain / f"{number:08}.bin").write_bytes(bytes(40))
        self.write("trained", number, steps=30, tokens=3000, loss=5.0 - number, seconds=0.5)
        self.write("announced", number, payload="ab" * 32, bytes=84)
        self.write("closed", number, attempt=0, contributors=2)
        self.write("checked", number, valid=2, dead=[], ready=[])
        self.write("committed", number, state_digest=self.digest(number), manifest="cd" * 32, contributors=["me"],
                   attempt=0, group_size=4)  # fmt: skip
        self.write("evaluated", number, loss=5.0 - number, windows=64)

    def wait_for_others(self, number: int) -> None:
        """Before a round of the plan, until the named file exists: what a round with another node amounts to."""
        if self.plan.get("waits_in") == number:
            path = self.state_dir.parent / self.plan["waits_for"]
            self.wait_until(path.exists)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)


def main() -> int:
    plan_path, verb, flags = sys.argv[1], sys.argv[2], sys.argv[3:]
    state_dir = Path(flags[flags.index("--state-dir") + 1])
    plan = json.loads(Path(plan_path).read_text()).get(state_dir.name, {})
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    if verb == "bootstrap":
        if plan.get("fails"):
            print("the port is taken", file=sys.stderr)
            return 4
        state_dir.mkdir(parents=True, exist_ok=True)
        beside = state_dir / "node.json.partial"
        beside.write_text(json.dumps({"addresses": ["/ip4/127.0.0.1/tcp/1/p2p/Qm"], "pid": os.getpid()}))
        beside.rename(state_dir / "node.json")
        signal.pause()
    rounds = int(flags[flags.index("--rounds") + 1]) if "--rounds" in flags else 10**6
    return Node(state_dir, plan).run(rounds)


if __name__ == "__main__":
    sys.exit(main())
