"""The processes of one variant, one a GPU, as one: asked for a length, they answer together."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from measure import Job


class Worker:
    """`measure(length)` asks every rank. Ranks that failed are replaced before the next question."""

    def __init__(self, job: Job, ranks: int) -> None:
        self.job, self.ranks = job, ranks
        self.device = self.memory_bytes = None
        self.processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Worker":
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "job.json"
        self.path.write_text(self.job.to_json(), encoding="utf-8")
        return self

    def __exit__(self, *_) -> None:
        self.stop()
        self.folder.cleanup()

    def start(self) -> list[dict]:
        # Long sequences of growing length would leave memory in pieces that none of them fits in; for every variant.
        settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1"}
        settings |= {"WORLD_SIZE": str(self.ranks)}
        store = str(Path(tempfile.mkdtemp(dir=self.folder.name)) / "store")  # of these processes alone
        command = [sys.executable, str(Path(__file__).with_name("measure.py")), str(self.path), store]
        self.answers: queue.Queue = queue.Queue()
        for rank in range(self.ranks):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=os.environ | settings | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )  # fmt: skip
            self.processes.append(process)
            threading.Thread(target=self.listen, args=(process, self.answers), daemon=True).start()
        answers = self.collect()
        if answers[0]["event"] == "ready":
            self.device, self.memory_bytes = (answers[0][name] for name in ("device", "memory_bytes"))
        return answers

    @staticmethod
    def listen(process: subprocess.Popen, answers: queue.Queue) -> None:
        for line in process.stdout:
            answers.put(json.loads(line))
        answers.put({"event": "failed", "out_of_memory": False, "reason": "the process ended"})

    def collect(self) -> list[dict]:
        """An answer of each rank; or that of the first that failed, for the others wait for it."""
        answers = []
        while len(answers) < self.ranks:
            answers.append(self.answers.get())
            if answers[-1]["event"] == "failed":
                return answers[-1:]
        return answers

    def measure(self, length: int) -> dict:
        """The slowest rank's seconds, the largest peak; or why not, and whether memory was the reason."""
        answers = [] if self.processes else self.start()
        started = not answers or answers[0]["event"] != "failed"
        if started:
            for process in self.processes:
                with contextlib.suppress(BrokenPipeError):  # its last answer says why
                    process.stdin.write(f"{length}\n")
                    process.stdin.flush()
            answers = self.collect()
        first = answers[0]
        if first["event"] == "failed":
            if self.ranks > 1 or not (started and first["out_of_memory"]):
                self.stop()
            result = {"length": length, "out_of_memory": first["out_of_memory"], "reason": first["reason"]}
            why = "out of memory" if first["out_of_memory"] else first["reason"]
            print(f"  {length:>8,} tokens  {why}", flush=True)
            return result
        result = {
            "length": length,
            "seconds": [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)],
            "loss": sum(answer["loss"] for answer in answers) / len(answers),
            "peak_bytes": max(answer["peak_bytes"] for answer in answers),
            "state_bytes": max(answer["state_bytes"] for answer in answers),
        }
        result["tokens_per_second"] = (
            self.ranks * self.job.batch * length * len(result["seconds"]) / sum(result["seconds"])
        )
        speed, peak = result["tokens_per_second"], result["peak_bytes"] / 2**30
        print(f"  {length:>8,} tokens  {speed:>9,.0f} tokens/s  peak {peak:6.2f} GiB", flush=True)
        return result

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []
