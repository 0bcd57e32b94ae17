"""GRPO with a rule as reward, in a loop of plain torch: `python examples/grpo.py`.

The model writes a few completions of each prompt, a rule rewards each of them, and GRPO makes those more likely that
are better than the others of their prompt. The rule of this example is the share of tokens that are larger than the
token before them, so that a tiny model without any training learns something within seconds: to count upwards.

`tigon.GRPOLoss` takes the hidden states and the weight of the head, and never holds the logits. Each batch of
completions trains for `--updates` steps. The log-probabilities of the policy that wrote them come from
`tigon.linear_log_probs`. `--stock` computes the same from the logits of the whole batch.

Models that scale or cap their logits (Cohere, Granite, Gemma 2) need the options `logit_scale` and `softcap` of
`tigon.GRPOLoss`.
"""

import argparse

import torch
from model_and_text import Meter, build_model
from torch import Tensor

import tigon


def reward(completions: Tensor) -> Tensor:
    """Return the rewards [N] of completions [N, L]. Replace this by a rule of your own: an answer, a format, a test."""
    return (completions.diff(dim=-1) > 0).float().mean(-1)


def advantages_of(rewards: Tensor, group: int) -> Tensor:
    """Return how many standard deviations each reward [N] is above the mean of its prompt's `group` completions."""
    groups = rewards.view(-1, group)
    spread = groups.std(-1, keepdim=True) + 1e-4
    return ((groups - groups.mean(-1, keepdim=True)) / spread).flatten()


@torch.no_grad()
def complete(model, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Return completions [N, length] of prompts [N, P]: samples from the model, token by token."""
    tokens, cache = prompts, None
    for _ in range(length):
        outputs = model(tokens if cache is None else tokens[:, -1:], past_key_values=cache, use_cache=True)
        cache, probabilities = outputs.past_key_values, outputs.logits[:, -1].float().softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(probabilities, 1, generator=generator)), -1)
    return tokens[:, prompts.shape[1] :]


def log_probs_of_logits(model, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities of the targets as stock code computes them, with the logits of all tokens."""
    return model.lm_head(hidden).float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train by GRPO with a rule as reward.")
    parser.add_argument("--model", help="name on the hub, folder, or preset of Tigon; default: a tiny Llama")
    parser.add_argument("--memory", default="default", help="a level of tigon.patch")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--updates", type=int, default=2, help="steps with the completions of one step")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--length", type=int, default=16, help="tokens of a completion")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--stock", action="store_true", help="train without Tigon")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(arguments.model).to(device)
    if not arguments.stock:
        # The loop computes the loss by itself, from the hidden states.
        tigon.patch(model, memory=arguments.memory, loss=False)
    grpo = tigon.GRPOLoss(loss_type="dapo", epsilon_high=0.28)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.0)
    generator, meter = torch.Generator(device).manual_seed(0), Meter(device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    for _ in range(arguments.steps):
        model.eval()
        prompts = torch.randint(model.config.vocab_size, (arguments.prompts, 4), generator=generator, device=device)
        prompts = prompts.repeat_interleave(arguments.group, 0)
        with autocast:
            completions = complete(model, prompts, arguments.length, generator)
        rewards = reward(completions)
        advantages = advantages_of(rewards, arguments.group)
        tokens = torch.cat((prompts, completions), -1)
        # The tokens of the prompts are not trained.
        targets = tokens[:, 1:].clone()
        targets[:, : prompts.shape[1] - 1] = -100
        mask, old_log_probs = targets != -100, None
        model.train()
        for _ in range(arguments.updates):
            with autocast:
                hidden = model.model(tokens[:, :-1]).last_hidden_state
                head = model.lm_head.weight
                if arguments.stock:
                    log_probs = log_probs_of_logits(model, hidden, targets.where(mask, 0))
                    current_log_probs = log_probs.detach()
                    options = {"loss_type": "dapo", "epsilon_high": 0.28}
                    loss, metrics = tigon.losses.grpo_loss(log_probs, advantages, mask, old_log_probs, **options)
                else:
                    if old_log_probs is None and arguments.updates > 1:
                        with torch.no_grad():
                            current_log_probs = tigon.linear_log_probs(hidden, head, targets)
                    loss, metrics = grpo(hidden, head, targets, advantages, old_log_probs)
            if old_log_probs is None and arguments.updates > 1:
                old_log_probs = current_log_probs
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        meter.step(loss, arguments.updates * tokens.numel())
        print(f"    mean reward: {rewards.mean():.3f}  clipped: {metrics['clip_ratio/region_mean']:.3f}")


if __name__ == "__main__":
    main()
