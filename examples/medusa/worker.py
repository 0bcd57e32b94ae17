"""The processes of one variant, one a GPU, as one: asked for a length, they answer together."""

from pathlib import Path
from typing import Any

from measure import Job

from tigon.tools.training import child

# Long sequences of growing length would fragment the memory until none of them fits; so for every variant.
SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
MEASURE = str(Path(__file__).with_name("measure.py"))


class Worker:
    """`measure(length)` asks the group of ranks. A group that failed is replaced before the next question."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = self.memory_bytes = None
        self.worker = child.Worker(self.start)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        self.worker.close(at_rest=kind is None and self.job.ranks > 1)

    def start(self) -> child.Child:
        command = child.worker_command(self.job.ranks, [MEASURE])
        settings = SETTINGS | child.worker_environment(self.job.ranks, self.job.device)
        return child.Child(self.job, None, command, settings)

    def listen(self, event: dict[str, Any]) -> None:
        self.device, self.memory_bytes = event["device"], event["memory_bytes"]

    def measure(self, length: int) -> dict[str, Any]:
        """Return the seconds, loss and peak at `length`; or why there are none, and whether memory was the reason."""
        event = self.worker.train(str(length), self.listen)
        if event["event"] != "length":
            out_of_memory = event["event"] == "out of memory"
            reason = event["reason"][:500]
            print(f"  {length:>8,} tokens  {'out of memory' if out_of_memory else reason}", flush=True)
            return {"length": length, "out_of_memory": out_of_memory, "reason": reason}
        names = ("length", "seconds", "loss", "peak_bytes", "state_bytes")
        result = {name: event[name] for name in names}
        tokens = self.job.ranks * self.job.batch * length
        result["tokens_per_second"] = tokens * len(result["seconds"]) / sum(result["seconds"])
        speed, peak = result["tokens_per_second"], result["peak_bytes"] / 2**30
        print(f"  {length:>8,} tokens  {speed:>9,.0f} tokens/s  peak {peak:6.2f} GiB", flush=True)
        return result
