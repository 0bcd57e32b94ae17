"""Profile how long the host waits for the number of valid tokens: `python examples/profile_ignored_tokens.py`.

The script trains four layers of Llama-3-8B with 75 % of the labels ignored, on one GPU with 60 GiB. It compares three
cases: the valid rows are counted as soon as the labels are known (as `tigon.patch` does), they are counted in the loss,
or they are not counted and all tokens are computed. It prints the time of a step, the time without work on the device,
and the time that the host spends in cudaEventSynchronize.
"""

from collections.abc import Callable

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

import tigon
from tigon.hf import head
from tigon.ops.head import computed_rows

STEPS, BATCH, LENGTH = 4, 2, 4096


def report(name: str, step: Callable[[int], None]) -> None:
    """Profile `STEPS` steps and print a line."""
    for i in range(STEPS):
        step(i)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for i in range(STEPS):
            step(i)
        torch.cuda.synchronize()
    on_device = [e.time_range for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    on_device.sort(key=lambda span: span.start)
    idle, end = 0.0, on_device[0].end
    for span in on_device:
        idle += max(0.0, span.start - end)
        end = max(end, span.end)
    host_wait = sum(e.cpu_time_total for e in profiler.key_averages() if "EventSynchronize" in e.key)
    # The profiler has microseconds of all steps; the line has milliseconds of one step.
    per_step = 1e-3 / STEPS
    total = (end - on_device[0].start) * per_step
    print(
        f"{name:22s} step {total:6.2f} ms   device idle {idle * per_step:5.2f}   host waits {host_wait * per_step:5.2f}"
    )


def main() -> None:
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    tigon.patch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ids = [torch.randint(config.vocab_size, (BATCH, LENGTH)).pin_memory() for _ in range(STEPS)]

    def step(i: int) -> None:
        labels = ids[i].clone()
        labels[:, : LENGTH * 3 // 4] = -100
        inputs, labels = (t.to("cuda", non_blocking=True) for t in (ids[i], labels.pin_memory()))
        model(input_ids=inputs, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    report("with the labels", step)
    head.find_rows = lambda *_: None
    report("in the loss", step)
    computed_rows.find_rows = lambda *_: None
    report("all tokens computed", step)


if __name__ == "__main__":
    main()
