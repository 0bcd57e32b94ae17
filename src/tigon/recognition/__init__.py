"""Find out what a torch module computes, and give it another forward. Nothing here imports transformers.

Each `recognise_*` function takes a module and returns one of three values:

- a recipe: a callable that takes the module and its inputs, and computes with an op what the module computes;
- a reason (str): the module resembles the modules of this kind, but must keep its forward;
- None: the module is not of this kind.

Names of classes and attributes are hints at most. A recogniser builds a small stand-in of the module (`standin`), runs
it on random values and on unusual ones, in several dtypes and shapes, in training and in evaluation (`probes`), and
compares it with the reference of an op. Outputs must be equal bit for bit. Gradients, experts and losses may differ by
the order of their sums. Comparisons are recorded (`trials`), so that the report can explain a refusal.

Probes cannot show everything, so the code of the forward is read as well (`tigon.runtime.state`, `code_facts`,
`symbolic`). A guard compares in every call whatever the forward reads besides tensors (`guard`, `function_guard`,
`graph_guard`). While the guard holds, `replacement` lets the recipe run instead of the forward. Layers with adapters
have no guard, because their settings change in training: their forward runs on a tensor without values (`deferred`),
which shows what the call computes. A call in a state in which the forward has run before recalls this result
(`adapter_memo`).

| file | what it recognises |
|------|--------------------|
| `norms`, `norm_recipes`, `norm_probes` | RMS norms and layer norms |
| `glu`, `glu_recipe`, `glu_probes` | gated MLPs |
| `mlp`, `activations` | MLPs of two linear layers, and activations: squared ReLU and GELU |
| `experts` | experts of a mixture |
| `mixtures` | mixtures that run every expert on every token |
| `adapters`, `deferred`, `recorded_layers`, `adapter_memo` | linear layers with low-rank adapters |
| `expert_adapters` | low-rank adapters on the weights of experts |
| `rope`, `rope_function`, `rope_forms` | rotary embeddings |
| `router_losses` | the loss that balances the experts of a mixture |
| `exchanged_functions` | runs a forward with other functions in place of globals, for the two above |
| `fused_statements`, `rewriting`, `overwriting`, `source` | statements of a forward that one op computes together |
| `head_norm_statements` | norms of queries and keys, and the rotary embedding after them |
"""
