"""What a torch module computes, and how it gets another forward. Nothing here imports transformers.

Each `recognise_*` takes a module and returns
- a recipe: called with the module and its inputs, it computes the same with the op;
- a reason (str): the module looks like one of this kind but computes something else;
- None: the module is nothing of this kind.

What a module computes is found by running a small twin of it (`standin`), never by its name: with random parameters it
must reproduce the reference of an op bit for bit, in fp32 and bf16, training and evaluating.
"""
