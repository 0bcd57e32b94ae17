"""Find the Python state that a forward reads and writes, and compare it later.

To find out what a module computes, recognition (`tigon.recognition`) runs a small stand-in of the module on some
inputs, which are called probes. A recipe, which computes the same with an op, may then replace the forward, but only if
that forward is a function of its inputs, of its tensors, and of settings that can be compared in every call. For
example,

    class MLP(nn.Module):
        def forward(self, x):
            return self.down(ACTIVATIONS[self.config.name](self.gate(x)) * self.up(x)) * self.scale

reads the attributes `config` and `scale` of the module, `name` of the config, the global `ACTIVATIONS`, one entry of
this dict, and the code of the function in that entry. `explore(module)` returns all of these places, and the reasons
why they would not be enough: an assignment to an attribute, a random number generator, a condition on the input.

Two changes are not noticed. `register` of an abstract base class changes the result of `isinstance`. `cache_clear` lets
a cached function return another value if its cache was filled before the search, in another state. With the argument
`executed`, `explore` refuses caches.

| file           | its job |
|----------------|---|
| `instructions` | follows the stack through the bytecode: which instructions compute a value, which call receives it |
| `known_names`  | lists names of functions and packages that write, that depend on hidden state, or that only compute |
| `decisions`    | finds the conditions that depend on an argument |
| `bytecode`     | collects the names that one function uses, its writes and its conditions |
| `places`       | describes one place, and builds the expression that compares all places |
| `objects`      | answers questions about one object or class, such as which names it defines |
| `record`       | holds the results of one search |
| `functions`, `classes`, `modules` | search what a function, an object with attributes, or a torch module reaches |
| `containers`   | searches what a container, a tensor, a Python module or an object of torch reaches |
| `reach`        | contains `explore`, which starts the search and repeats it until no new name appears |

Each file imports only files above it.
"""
