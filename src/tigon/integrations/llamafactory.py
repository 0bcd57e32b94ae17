"""Use Tigon in LLaMA-Factory. This module starts a training with a callback that patches the model:

    python -m tigon.integrations.llamafactory config.yaml --tigon_memory lean

It takes the place of `llamafactory-cli train`, also under torchrun. Written for LLaMA-Factory 0.9.5, whose
`llamafactory.train.tuner.run_exp` reads the configuration from `sys.argv` and takes callbacks.
"""

import sys

from tigon.integrations.frameworks import check_options, is_known_version

__all__ = ["main"]

FLAG = "--tigon_memory"


def _take_memory(arguments: list[str]) -> str:
    """Remove the memory level from the command line and return it.

    Raises:
        ValueError: The flag has no value.
    """
    if FLAG not in arguments:
        return "default"
    position = arguments.index(FLAG)
    if position + 1 == len(arguments):
        raise ValueError(f"tigon.integrations.llamafactory: {FLAG} needs a memory level")
    memory = arguments[position + 1]
    del arguments[position : position + 2]
    return memory


def main() -> None:
    """Run the training of `sys.argv` with Tigon. With another version of LLaMA-Factory, warn and run it without Tigon.

    Raises:
        ValueError: The memory level is unknown.
    """
    memory = _take_memory(sys.argv)
    check_options("tigon.integrations.llamafactory", memory, {})
    from llamafactory.train.tuner import run_exp

    callbacks = []
    if is_known_version("llamafactory", "0.9.5", "the callback for LLaMA-Factory"):
        from tigon.integrations.trainer import TigonCallback

        callbacks.append(TigonCallback(memory))  # type: ignore[arg-type]
    run_exp(callbacks=callbacks)


if __name__ == "__main__":
    main()
