"""Use Tigon in LLaMA-Factory. This module starts a training with a callback that patches the model:

    python -m tigon.integrations.llamafactory config.yaml --tigon_memory lean

It takes the place of `llamafactory-cli train`, also under torchrun. Written for LLaMA-Factory 0.9.5, whose
`llamafactory.train.tuner.run_exp` reads the configuration from `sys.argv` and takes callbacks.
"""

import sys

from tigon.integrations.frameworks import check_options, is_known_version, require_framework

__all__ = ["main"]

NAME = "tigon.integrations.llamafactory"
FLAG = "--tigon_memory"


def _take_memory(arguments: list[str]) -> str:
    """Remove the memory level from the command line and return it.

    Raises:
        ValueError: The flag has no value.
    """
    for position, argument in enumerate(arguments):
        name, is_joined, memory = argument.partition("=")
        if name != FLAG:
            continue
        end = position + (1 if is_joined else 2)
        if end > len(arguments):
            raise ValueError(f"{NAME}: {FLAG} needs a memory level")
        memory = memory if is_joined else arguments[position + 1]
        del arguments[position:end]
        return memory
    return "default"


def main() -> None:
    """Run the training of `sys.argv` with Tigon. With another version of LLaMA-Factory, warn and run it without Tigon.

    Raises:
        ImportError: LLaMA-Factory is not installed.
        ValueError: The memory level is unknown.
    """
    memory = _take_memory(sys.argv)
    check_options(NAME, memory, {})
    require_framework(NAME, "llamafactory", "llamafactory")
    callbacks = []
    if is_known_version("llamafactory", "0.9.5", "the callback for LLaMA-Factory"):
        from tigon.integrations.trainer import TigonCallback

        callbacks.append(TigonCallback(memory))
    from llamafactory.train.tuner import run_exp

    run_exp(callbacks=callbacks)


if __name__ == "__main__":
    main()
