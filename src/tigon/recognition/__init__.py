"""What a torch module computes, and how it gets another forward. Nothing here imports transformers.

Each `recognise_*` takes a module and returns
- a recipe: called with the module and its inputs, it computes the same with the op;
- a reason (str): the module looks like one of this kind but computes something else;
- None: the module is nothing of this kind.

What a module computes is found by running a small twin of it (`standin`); its name is a hint at most. With random
parameters, values and shapes of every size, it must reproduce the reference of an op bit for bit, training and
evaluating, and its gradients (experts and the loss, whose sums run in another order, to their last places). What a
recipe takes for granted beside tensors is looked at again in every call (`watch`).
"""
