"""A loss of your own by `tigon.linear_loss`: `python examples/custom_loss.py`.

The loss of this example exists nowhere else. Each sequence is trained on its hardest tokens only: those with the lowest
log-probabilities, of which there are a quarter of its tokens. It is a few lines of plain torch on log-probabilities.
`linear_loss` never holds the logits of the batch, and takes three products with the head, because the loss of the batch
is the mean of the losses of its sequences. `--stock` computes the same loss from all logits.
"""

import torch
from model_and_text import Meter, build_model, make_parser, token_rows
from torch import Tensor

import tigon


def hardest_tokens(log_probs: Tensor, share: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of log-probabilities [N, L], and metrics of the same sequences."""
    hardest = log_probs.topk(max(1, int(share * log_probs.shape[-1])), largest=False).values
    return -hardest.mean(), {"all tokens": -log_probs.detach().mean(), "easiest token": log_probs.detach().amax()}


def main() -> None:
    parser = make_parser("Train with a loss of your own.")
    parser.add_argument("--share", type=float, default=0.25, help="the share of the tokens that are trained")
    parser.add_argument("--stock", action="store_true", help="train without Tigon")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(arguments.model).to(device)
    if not arguments.stock:
        # The loop computes the loss by itself, from the hidden states.
        tigon.patch(model, memory=arguments.memory, loss=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    rows, meter = token_rows(arguments, model.config.vocab_size, ranks=1), Meter(device)
    model.train()
    for tokens in rows.to(device).split(arguments.batch):
        targets = tokens[:, 1:]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model.model(tokens[:, :-1]).last_hidden_state
            if arguments.stock:
                log_probs = model.lm_head(hidden).float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
                loss, metrics = hardest_tokens(log_probs, arguments.share)
            else:
                loss, metrics = tigon.linear_loss(
                    hidden, model.lm_head.weight, targets, hardest_tokens, arguments.share, group="sequence"
                )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step(loss, tokens.numel())
        print("    " + "  ".join(f"{name}: {value:.3f}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
