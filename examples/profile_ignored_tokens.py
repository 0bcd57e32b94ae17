"""Where the wait for the number of valid tokens goes: `python examples/profile_ignored_tokens.py` (one GPU, 60 GiB).

Trains four layers of Llama-3-8B with 75 % of the labels ignored, three ways: the valid rows asked for when the labels
are known (what `tigon.patch` does), asked for in the loss, and not at all. Prints the time of a step, how long the
device had nothing to run, and how long the host stood in cudaEventSynchronize.
"""

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

import tigon
from tigon.hf import head
from tigon.ops.head import chunks

STEPS, BATCH, LENGTH = 4, 2, 4096


def report(name: str, step) -> None:
    """One line on `STEPS` steps."""
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
    waited = sum(e.cpu_time_total for e in profiler.key_averages() if "EventSynchronize" in e.key)
    per_step = 1e-3 / STEPS  # from us in all to ms a step
    total = (end - on_device[0].start) * per_step
    print(f"{name:22s} step {total:6.2f} ms   device idle {idle * per_step:5.2f}   host waits {waited * per_step:5.2f}")


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
    chunks.find_rows = lambda *_: None
    report("all tokens computed", step)


if __name__ == "__main__":
    main()
