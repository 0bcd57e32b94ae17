"""Distillation of a wider teacher into a student, in a loop of plain torch: `python examples/distillation.py`.

`tigon.DistillationLoss` takes the hidden states and the heads of both models, which need not have the same width. It
never holds the logits of the batch, and takes four products: the logits of both models, and the two gradients of the
student. `--stock` computes the same loss from all logits of both models.

The head of this example is one product. Models that scale or cap their logits (Cohere, Granite, Gemma 2) need the
options `logit_scale` and `softcap` of the loss, and those of a teacher `teacher_logit_scale` and `teacher_softcap`.
"""

import torch
import transformers
from model_and_text import TINY, Meter, build_model, make_parser, token_rows
from torch import Tensor

import tigon


def build_teacher(name: str | None, student) -> transformers.PreTrainedModel:
    """Return the teacher: the named model, or a wider model with random weights. Use a trained one of your own."""
    if name is not None:
        return build_model(name)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**TINY | {"hidden_size": 384, "vocab_size": student.config.vocab_size})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def kl_of_logits(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Return the mean over tokens of the divergence of the teacher from the student, as stock code computes it."""
    log_q = (logits.float() / temperature).log_softmax(-1)
    log_p = (teacher_logits.float() / temperature).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def main() -> None:
    parser = make_parser("Distil a teacher into a student.")
    parser.add_argument("--teacher", help="name on the hub, folder or preset; default: a wider Llama, random weights")
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--stock", action="store_true", help="train without Tigon")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    student = build_model(arguments.model).to(device)
    teacher = build_teacher(arguments.teacher, student).to(device).eval().requires_grad_(False)
    # The square of the temperature keeps the size of the gradients, as Hinton et al. advise.
    weight = arguments.temperature**2
    distil = tigon.DistillationLoss(divergence="kl", temperature=arguments.temperature, soft_weight=weight)
    if not arguments.stock:
        # The loop computes the loss by itself, from the hidden states.
        tigon.patch(student, memory=arguments.memory, loss=False)
        tigon.patch(teacher, loss=False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=arguments.lr)
    rows, meter = token_rows(arguments, student.config.vocab_size, ranks=1), Meter(device)
    student.train()
    for tokens in rows.to(device).split(arguments.batch):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = student.model(tokens).last_hidden_state
            with torch.no_grad():
                teacher_hidden = teacher.model(tokens).last_hidden_state
            if arguments.stock:
                logits, teacher_logits = student.lm_head(hidden), teacher.lm_head(teacher_hidden)
                loss = weight * kl_of_logits(logits, teacher_logits, arguments.temperature)
            else:
                loss = distil(
                    hidden, student.lm_head.weight,
                    teacher_hidden=teacher_hidden, teacher_weight=teacher.lm_head.weight,
                )  # fmt: skip
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step(loss, tokens.numel())


if __name__ == "__main__":
    main()
