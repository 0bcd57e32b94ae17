"""One op, one file: maths, reference, configuration, kernels, launchers, autograd, function, module."""
