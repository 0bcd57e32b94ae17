"""Find out what a torch module computes, and give it another forward. Nothing here imports transformers.

Each `recognise_*` function takes a module and returns one of three values:

- a recipe: a callable that takes the module and its inputs, and computes with an op what the module computes;
- a reason (str): the module resembles the modules of this kind, but must keep its forward;
- None: the module is not of this kind.

Names of classes and attributes are hints at most. A recogniser builds a small stand-in of the module (`standin`), runs
it on random values and on unusual ones, in several dtypes and shapes, in training and in evaluation (`probes`), and
compares it with the reference of an op. Outputs must be equal bit for bit. Gradients, experts, mixers and losses may
differ by the order of their sums. Comparisons are recorded (`trials`), so that the report can explain a refusal.

Probes cannot show everything. Every object to which the names in the code of the forward lead counts as read, and is
compared before and after the probes (`tigon.runtime.reach`). A run with symbolic sizes shows whether the forward
decides by its input (`symbolic`, `code_facts`). A guard compares in every call whatever the forward reads besides
tensors (`guard`, `graph_guard`). While the guard holds, `replacement` lets the recipe run instead of the forward.
Layers with adapters have no guard, because their settings change in training: each call reads the attributes by which
PEFT says what a layer computes (`parts.adapters`).

| folder | its job |
|--------|---------|
| `probing` | runs stand-ins of modules on probes, and compares the results with those of candidates |
| `guards` | checks in every call that a replaced module or function is still what was recognised |
| `rewriting` | finds statements and functions of a forward that an op computes, and rewrites the source |
| `parts` | the recognisers and recipes: norms, MLPs, experts, rotary embeddings, mixers, adapters, FP8 |
| `replacement` | gives one module another forward, and takes it out again |
"""
