"""Find out what a torch module computes, and give it another forward. Nothing here imports transformers.

Each `recognise_*` function takes a module and returns one of three values:

- a recipe: a callable that takes the module and its inputs, and computes with an op what the module computes;
- a reason (str): the module resembles the modules of this kind, but must keep its forward;
- None: the module is not of this kind.

Names of classes and attributes are hints at most. A recogniser runs a small stand-in of the module on random and on
unusual values, in several dtypes, shapes and modes, and compares it with the reference of an op. Outputs must be equal
bit for bit; gradients, experts, mixers and losses may differ by the order of their sums. Everything to which the names
in the code lead counts as read (`tigon.runtime.reach`), and a run with symbolic sizes shows whether the forward decides
by its input. In every call, a guard compares what the forward reads besides tensors. Layers with adapters have no
guard, because their settings change in training (`parts.adapters`).

| folder | its job |
|--------|---------|
| `probing` | runs stand-ins of modules on probes, and compares the results with those of candidates |
| `guards` | checks in every call that a replaced module or function is still what was recognised |
| `rewriting` | finds statements and functions of a forward that an op computes, and rewrites the source |
| `parts` | the recognisers and recipes: norms, MLPs, experts, rotary embeddings, mixers, adapters, FP8 |
| `replacement` | gives one module another forward, and takes it out again |
"""
