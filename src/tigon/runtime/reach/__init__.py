"""Find the Python state that a forward may read, and why a comparison of this state would not be enough.

A recipe may replace a forward only if the forward is a function of its inputs, its tensors, and of settings that can be
compared in every call. Three observations decide this:

- **Reads** are found by name. `explore` starts at the forward and takes the names that its code uses (`co_names`). They
  lead to globals, methods and helper functions, whose code uses more names. On every object that is reached, such as a
  config, every attribute with one of these names counts as read. This finds more places than a call reads, and never
  fewer. torch and the parts of the standard library that only compute are trusted, and their code is not read.
- **Writes** are observed. `Reach.preserved` compares the reached containers, objects, classes and globals before and
  after the probes, and restores them. Assignments to attributes and globals are also listed from the code, because a
  probe may not run them, except those of constructors, which usually write to their own object.
- **Decisions** on an input are observed in a run with symbolic sizes (`tigon.recognition.probing.symbolic`).

A forward is refused if it reaches state that cannot be compared, such as a generator of random numbers, if it reads a
mode of torch, an address, the device of a tensor, or a tensor that is no parameter or buffer, if it computes the names
of attributes, and if it could hide a decision by catching errors. Two changes are not noticed: `register` of an
abstract base class, and `cache_clear` of a cached function.
"""
