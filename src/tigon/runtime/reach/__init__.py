"""Find the Python state that a forward may read, and why a comparison of this state would not be enough.

To find out what a module computes, recognition (`tigon.recognition`) runs a small stand-in of the module on some
inputs, which are called probes. A recipe may then replace the forward, but only if that forward is a function of its
inputs, of its tensors, and of settings that can be compared in every call. Three observations decide this:

- **Reads** are found by name. `explore` starts at the forward and takes the names that its code uses (`co_names`). They
  lead to globals, methods and helper functions, whose code uses more names. On every object that is reached, such as a
  config, every attribute with one of these names counts as read. This finds more places than a call reads, and never
  fewer. torch and the parts of the standard library that only compute are trusted, and their code is not read. In

      def forward(self, x):
          return self.down(ACTIVATIONS[self.config.name](self.gate(x)) * self.up(x)) * self.scale

  these are the attributes `config` and `scale` of the module, `name` of the config, the global `ACTIVATIONS`, one entry
  of this dict, and the code of the function in that entry. A guard compares all of them in every call.
- **Writes** are observed. `Reach.preserved` compares the reached containers, objects, classes, tensors and globals
  before and after the probes, and restores them. `run_forward` of recognition compares the stand-in, the inputs and the
  random state. Assignments to attributes and globals are also listed from the code, because a probe may not run them,
  except the assignments of constructors, which usually write to their own object.
- **Decisions** on an input are observed in a run with symbolic sizes (`tigon.recognition.probing.symbolic`): a
  comparison of a size leaves a guard, and a comparison of values raises an error. The probes cover the dtype, the
  number of dimensions, and whether gradients are needed.

Some state cannot be compared, such as a generator of random numbers or an iterator. A forward that reaches such state
is refused, and so is one that reads a mode of torch, the address of an object, the memory or the device of a tensor, or
a tensor that is no parameter or buffer of the module. Code that computes the names of attributes is
refused, and code outside of transformers also if it looks up attributes that may be missing. Code that catches errors,
or that tells symbolic sizes from numbers, is refused too, because it could hide a decision.

| file          | its job |
|---------------|---|
| `code`        | lists the names, the writes and the kinds of instructions of one function |
| `known_names` | lists names of functions and packages that write, that depend on hidden state, or that only compute |
| `places`      | describes one place, compares all places in one expression, and undoes what a probe changes in them |
| `objects`     | answers questions about one object or class, such as which names it defines |
| `functions`, `holders` | visit functions, and objects with attributes: modules, classes, configs |
| `explore`     | walks over everything that is reachable, until no new name appears |

Two changes are not noticed. `register` of an abstract base class changes the result of `isinstance`. `cache_clear` lets
a cached function return another value if its cache was filled in another state.
"""
