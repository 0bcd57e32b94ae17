"""DPO in a loop of plain torch: `python examples/dpo.py`. A model learns to prefer right sums to wrong ones.

`tigon.DPOLoss` takes the hidden states and the weight of the head, and the same of the reference model. It never holds
the logits: the loss of both models takes four products with a head, and the memory of one pair. `--stock` computes the
same loss from the logits of the whole batch.

Models that scale or cap their logits (Cohere, Granite, Gemma 2) need the options `logit_scale` and `softcap` of
`tigon.DPOLoss`.
"""

import argparse
import copy

import torch
from model_and_text import Meter, build_model
from torch import Tensor

import tigon

# The tokens 0 to 9 are digits.
PLUS, EQUALS, END = 10, 11, 12
PROMPT, ANSWER = 6, 4


def sums(pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the tokens [2 P, S] of sums such as 41+27=068., and a mask [2 P, S] that is True in the answers.

    The P right sums come before the P wrong ones.
    """
    digits = lambda x, places: torch.stack([x // 10**i % 10 for i in reversed(range(places))], -1)
    a, b = (torch.randint(100, (pairs,), generator=generator) for _ in range(2))
    wrong = (a + b + torch.randint(1, 100, (pairs,), generator=generator)) % 200
    column = lambda token: torch.full((pairs, 1), token)
    rows = [
        torch.cat((digits(a, 2), column(PLUS), digits(b, 2), column(EQUALS), digits(answer, 3), column(END)), -1)
        for answer in (a + b, wrong)
    ]
    tokens = torch.cat(rows)
    return tokens, (torch.arange(PROMPT + ANSWER) >= PROMPT).expand_as(tokens)


def hidden_states(model, tokens: Tensor) -> Tensor:
    """Return the hidden states [N, S - 1, H] from which the head predicts all tokens but the first."""
    return model.model(tokens[:, :-1]).last_hidden_state


def log_probs_of_logits(model, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities of the targets as stock code computes them, with the logits of all tokens."""
    return model.lm_head(hidden).float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train by DPO in a loop of plain torch.")
    parser.add_argument("--model", help="name on the hub, folder, or preset of Tigon; default: a tiny Llama")
    parser.add_argument("--memory", default="default", help="a level of tigon.patch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="pairs of a step")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--stock", action="store_true", help="train without Tigon")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(arguments.model).to(device)
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    dpo = tigon.DPOLoss(beta=arguments.beta)
    if not arguments.stock:
        # The loop computes the loss by itself, from the hidden states.
        tigon.patch(model, memory=arguments.memory, loss=False)
        tigon.patch(reference, loss=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    generator, meter = torch.Generator().manual_seed(0), Meter(device)
    model.train()
    for _ in range(arguments.steps):
        tokens, is_answer = (x.to(device) for x in sums(arguments.batch, generator))
        targets, mask = tokens[:, 1:], is_answer[:, 1:]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = hidden_states(model, tokens)
            with torch.no_grad():
                ref_hidden = hidden_states(reference, tokens)
            if arguments.stock:
                log_probs = log_probs_of_logits(model, hidden, targets)
                ref_log_probs = log_probs_of_logits(reference, ref_hidden, targets)
                loss, metrics = tigon.losses.dpo_loss(log_probs, mask, ref_log_probs, beta=arguments.beta)
            else:
                loss, metrics = dpo(
                    hidden, model.lm_head.weight, targets, ref_hidden, reference.lm_head.weight, mask=mask
                )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step(loss, tokens.numel())
        print(
            f"    right sums preferred: {metrics['rewards/accuracies']:.2f}  margin: {metrics['rewards/margins']:.3f}"
        )


if __name__ == "__main__":
    main()
